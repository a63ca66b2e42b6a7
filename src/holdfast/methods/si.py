"""Synaptic Intelligence (Zenke et al., 2017)."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from holdfast.importance import precise
from holdfast.methods.anchor import Anchored, Form, check_finite
from holdfast.methods.memory import BY_PARAMETER
from holdfast.methods.method import Commit
from holdfast.methods.settings import NonNegative, Positive
from holdfast.taps import ScaleTap, tapped


def path_importance(importance: Tensor, path: Tensor, moved: Tensor, xi: float) -> Tensor:
    """The importance after a task: relu(Omega + omega / (moved^2 + xi)).

    >>> path_importance(torch.tensor([1.0, 1.0]), torch.tensor([3.0, -9.0]), torch.tensor([1.0, 1.0]), xi=0.5)
    tensor([3., 0.])
    """
    return torch.relu(importance + path / (moved.square() + xi))


def exact_copies(values: Sequence[Tensor]) -> list[Tensor]:
    """Copies in at least float32, the type of sums."""
    kept = [torch.empty_like(value, dtype=precise(value.dtype)) for value in values]
    torch._foreach_copy_(kept, list(values))
    return kept


def walk_(
    path: Sequence[Tensor], gradients: Sequence[Tensor], before: Sequence[Tensor], after: Sequence[Tensor]
) -> None:
    """Add to the path integral, in place: omega <- omega - g (after - before).

    >>> path = torch.tensor([1.0, 1.0])
    >>> walk_([path], [torch.tensor([2.0, 2.0])], [torch.tensor([3.0, 3.0])], [torch.tensor([3.0, 2.5])])
    >>> path
    tensor([1., 2.])
    """
    exact = [value.to(old.dtype) for value, old in zip(after, before, strict=True)]
    torch._foreach_addcmul_(list(path), list(gradients), torch._foreach_sub(list(before), exact))


class SI(Anchored):
    """Pulls each parameter to its value after the last task, in proportion to its share in the decrease of the loss.

    At every step, with g the gradient of the task's loss, and at the end of a task:

        omega <- omega - g (theta_after - theta_before)
        Omega <- relu(Omega + omega / ((theta - theta_start)^2 + xi));   omega <- 0
        penalty = strength Omega (theta - theta_end)^2

    Source: Zenke, Poole, Ganguli, "Continual Learning Through Synaptic Intelligence", ICML 2017.

    In a stack, g includes the gradients of the penalties of the other parts, such as those of LwF and SSL.

    Args:
        model: the model in training.
        optimizer: an optimizer of its parameters.
        strength: the strength of the pull, c in the paper.
        xi: damping, which bounds the importance of parameters that hardly moved.
        form: "proximal", stable at any strength, or "loss" for the paper's penalty in the loss.

    >>> model = nn.Linear(4, 2)
    >>> optimizer = SI(model, torch.optim.SGD(model.parameters(), lr=0.1))
    >>> model(torch.randn(16, 4)).square().mean().backward(); optimizer.step()
    >>> optimizer.consolidate([])  # the task is finished; its data are not needed
    >>> {name: tuple(values.shape) for name, values in optimizer.importance.items()}
    {'weight': (2, 4), 'bias': (2,)}
    """

    remembers: ClassVar = {**Anchored.remembers, "_path": BY_PARAMETER}
    measures_step: ClassVar = True

    xi: float

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        strength: NonNegative = 0.1,
        xi: Positive = 1e-3,
        form: Form = "proximal",
    ) -> None:
        super().__init__(model, optimizer, strength=strength, form=form)
        self._set(xi=xi)
        self._path: dict[str, Tensor] = {}
        self._of_penalty: dict[str, Tensor] = {}
        """The gradients of the penalty since the last `zero_grad`, if it is in the loss."""
        self._scale: ScaleTap | None = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self._of_penalty.clear()

    def _in_penalty(self, parameter: nn.Parameter, name: str) -> Tensor:
        if self._scale is None:
            self._scale = ScaleTap(self._names)
        return tapped(parameter, partial(self._add_of_penalty, name)) if parameter.requires_grad else parameter

    def _add_of_penalty(self, name: str, gradient: Tensor) -> None:
        self._of_penalty[name] = self._of_penalty[name] + gradient if name in self._of_penalty else gradient

    def _update(self) -> None:
        moving = {name: p for p, name in self._names.items() if p.grad is not None}
        if not moving:
            super()._update()
            return
        values = [p.detach() for p in moving.values()]
        before = self._compiled(exact_copies, values)(values)
        for name, value in zip(moving, before, strict=True):
            if name in self._path:
                self._path[name] = self._path[name].to(value.device)
            else:
                self._path[name], self._importance[name] = torch.zeros_like(value), torch.zeros_like(value)
                self._anchor[name] = value
        gradients = self._loss_gradients()
        super()._update()
        path = [self._path[name] for name in moving]
        after = [p.detach() for p in moving.values()]
        self._compiled(walk_, after)(path, [gradients[name] for name in moving], before, after)

    def _loss_gradients(self) -> dict[str, Tensor]:
        """The gradients of the task's loss: without the pull, and negated if the optimizer maximizes."""
        gradients, names = {}, self._names
        clipped = self._clipped()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None or (memory := self._memory_of(p, names.get(p))) is None:
                    continue
                _, anchor = memory
                changed = bool(group.get("nesterov"))  # in place, by the step
                gradient = p.grad.to_dense().to(anchor.dtype, copy=changed)
                if names[p] in self._of_penalty:
                    gradient = gradient - clipped.to(gradient) * self._of_penalty[names[p]].to(gradient)
                gradients[names[p]] = -gradient if group.get("maximize") else gradient
        self._of_penalty.clear()
        return gradients

    def _clipped(self) -> Tensor:
        """The factor by which gradients were clipped or unscaled; 1 if averaged over processes, which changes them."""
        if self._scale is None or not self._of_penalty or self._wrapper is not None:
            return torch.ones(())
        return self._scale.scale(self._names)

    def _close(self) -> None:
        super()._close()
        if self._scale is not None:
            self._scale.close()

    @torch.no_grad()
    def _consolidate(self, batches: Iterable[Any], active: Sequence[int] | None) -> Commit:
        self._notice_parameters(always=True)
        if not self._path:
            raise ValueError("consolidate() came before any step(): SI measures importance during training")
        newest = {}
        for parameter, name in self._names.items():
            if name in self._path and (memory := self._memory_of(parameter, name)):
                value = parameter.to(precise(parameter.dtype), copy=True)
                newest[name] = path_importance(memory[0], self._path[name], value - memory[1], self.xi), value
                check_finite(name, newest[name][0])
        return partial(self._remember, newest)

    def _remember(self, found: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        super()._remember(found)
        for name, (_, value) in found.items():
            self._path[name] = torch.zeros_like(value)
