"""Synaptic intelligence (Zenke et al., 2017)."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from holdfast.importance import precise
from holdfast.methods.anchor import Anchored, Form, check_finite
from holdfast.methods.method import number


def path_importance(importance: Tensor, path: Tensor, moved: Tensor, xi: float) -> Tensor:
    """The importance after a task along whose path the loss fell by `path`, parameter by parameter.

    >>> path_importance(torch.tensor([1.0, 1.0]), torch.tensor([3.0, -9.0]), torch.tensor([1.0, 1.0]), xi=0.5)
    tensor([3., 0.])
    """
    return torch.relu(importance + path / (moved.square() + xi))


def exact_copies(values: Sequence[Tensor]) -> list[Tensor]:
    kept = [torch.empty_like(value, dtype=precise(value.dtype)) for value in values]
    torch._foreach_copy_(kept, list(values))
    return kept


def walk_(path: Sequence[Tensor], slopes: Sequence[Tensor], before: Sequence[Tensor], after: Sequence[Tensor]) -> None:
    """In place, by how much more the loss has fallen along the path: by minus the slope times the change.

    >>> path = torch.tensor([1.0, 1.0])
    >>> walk_([path], [torch.tensor([2.0, 2.0])], [torch.tensor([3.0, 3.0])], [torch.tensor([3.0, 2.5])])
    >>> path
    tensor([1., 2.])
    """
    exact = [value.to(old.dtype) for value, old in zip(after, before, strict=True)]
    torch._foreach_addcmul_(list(path), list(slopes), torch._foreach_sub(list(before), exact))


class SI(Anchored):
    """Pulls each parameter to its last task's value, as strongly as its changes have lowered the loss.

    Args:
        model: the model in training.
        optimizer: an optimizer of its parameters.
        strength: how strong the pull is, c in the literature.
        xi: keeps the importance of parameters that hardly moved finite.
        penalty: "proximal", stable at any strength, or "loss" for the textbook's term in the loss.

    >>> model = nn.Linear(4, 2)
    >>> optimizer = SI(model, torch.optim.SGD(model.parameters(), lr=0.1))
    >>> model(torch.randn(16, 4)).square().mean().backward(); optimizer.step()
    >>> optimizer.consolidate([])  # the task is finished; its data are not needed
    >>> {name: tuple(values.shape) for name, values in optimizer.importance.items()}
    {'weight': (2, 4), 'bias': (2,)}
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        strength: float = 0.1,
        xi: float = 1e-3,
        penalty: Form = "proximal",
    ) -> None:
        super().__init__(model, optimizer, strength=strength, penalty=penalty)
        self.xi = number("xi", xi, above=0)
        self._path: dict[str, Tensor] = {}

    def _update(self) -> None:
        moving = {name: p for p, name in self._names.items() if p.grad is not None}
        if not moving:
            super()._update()
            return
        values = [p.detach() for p in moving.values()]
        before = self._fused(exact_copies, values)(values)
        for name, value in zip(moving, before, strict=True):
            if name in self._path:
                self._path[name] = self._path[name].to(value.device)
            else:
                self._path[name], self._importance[name] = torch.zeros_like(value), torch.zeros_like(value)
                self._anchor[name] = value
        slopes = self._bare_gradients()
        super()._update()
        path = [self._path[name] for name in moving]
        after = [p.detach() for p in moving.values()]
        self._fused(walk_, after)(path, [slopes[name] for name in moving], before, after)

    def _bare_gradients(self) -> dict[str, Tensor]:
        """The gradients of the loss without the pull, and of a loss that falls also where an optimizer maximizes."""
        slopes, names = {}, self._names
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None or (memory := self._memory_of(p, names.get(p))) is None:
                    continue
                importance, anchor = memory
                slope = p.grad.to_dense().to(anchor.dtype, copy=bool(group.get("nesterov")))  # which SGD adds to it
                slope = -slope if group.get("maximize") else slope
                if self.form == "loss":
                    slope = slope - 2 * self.strength * importance * (p - anchor)
                slopes[names[p]] = slope
        return slopes

    @torch.no_grad()
    def consolidate(self, batches: Iterable[Any], active: Iterable[int] | None = None) -> None:
        if not self._path:
            raise ValueError("consolidate() came before any step(): SI measures importance while a task is learnt")
        newest = {}
        for parameter, name in self._names.items():
            if name in self._path and (memory := self._memory_of(parameter, name)):
                value = parameter.to(precise(parameter.dtype), copy=True)
                newest[name] = path_importance(memory[0], self._path[name], value - memory[1], self.xi), value
                check_finite(name, newest[name][0])
        for name, (importance, value) in newest.items():
            self._importance[name], self._anchor[name] = importance, value
            self._path[name] = torch.zeros_like(value)
        self.tasks += 1

    def _memory(self) -> dict[str, Any]:
        return {**super()._memory(), "xi": self.xi, "path": {name: path.clone() for name, path in self._path.items()}}

    def _remember(self, memory: dict[str, Any]) -> None:
        super()._remember(memory)
        self.xi, self._path = memory["xi"], self._restored(memory["path"])
