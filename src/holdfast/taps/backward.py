"""Taps of backward passes and optimizer steps."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from holdfast.taps.hooks import Taps, tensors_in


class ForwardTap:
    """Count the training forwards of a model, and keep the numbers of those that took part in a backward.

    Compiled forwards are not counted.

    >>> model = nn.Linear(4, 2)
    >>> tap = ForwardTap(model)
    >>> first, second = model(torch.ones(3, 4)), model(torch.ones(3, 4))
    >>> first.sum().backward()
    >>> tap.last, tap.take()
    (2, {1})
    """

    def __init__(self, model: nn.Module) -> None:
        self.last = 0
        self._used: set[int] = set()
        self._taps = Taps()
        self._taps.on_output(model, self._count)

    def take(self) -> set[int]:
        """Return and forget the numbers of the forwards that took part in a backward."""
        used, self._used = self._used, set()
        return used

    def close(self) -> None:
        self._taps.close()

    def _count(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self.last += 1
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(partial(self._use, self.last))

    def _use(self, number: int, gradients: Any) -> None:
        self._used.add(number)


class ScaleTap:
    """Tell by which factor gradients were scaled after the backward, as by clipping their norm.

    >>> weight = nn.Parameter(torch.tensor([3.0, 4.0]))
    >>> tap = ScaleTap([weight])
    >>> weight.square().sum().backward()
    >>> _ = nn.utils.clip_grad_norm_([weight], 5.0)
    >>> tap.scale([weight])
    tensor(0.5000, dtype=torch.float64)
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._norms: dict[Tensor, Tensor] = {}
        self._handles: list[RemovableHandle] = [
            p.register_post_accumulate_grad_hook(self._keep)  # type: ignore[no-untyped-call]
            for p in parameters
        ]

    def scale(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """The norm of the present gradients, relative to their norm after the backward."""
        moving = [p for p in parameters if p in self._norms and p.grad is not None]
        if not moving:
            return torch.ones(())
        now = torch.stack([_norm(p.grad) for p in moving if p.grad is not None]).square().sum()
        before = torch.stack([self._norms[p].to(now.device) for p in moving]).square().sum()
        return torch.where(before > 0, now / before, 1).sqrt()

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _keep(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self._norms[parameter] = _norm(parameter.grad)


def tapped(tensor: Tensor, tap: Callable[[Tensor], None]) -> Tensor:
    """Return an alias of a tensor; `tap` is called with the gradient of everything that is computed from it."""
    alias = tensor.view_as(tensor)
    alias.register_hook(tap)  # type: ignore[no-untyped-call]
    return alias


def before_step(optimizer: Optimizer, tap: Callable[[], None]) -> RemovableHandle:
    """Call `tap` before every step of an optimizer."""
    return optimizer.register_step_pre_hook(lambda *_: tap())


def _norm(gradient: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(gradient.detach().to_dense(), dtype=torch.float64)
    return norm
