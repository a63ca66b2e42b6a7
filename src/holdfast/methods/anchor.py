"""The pull toward old values that EWC, MAS, SI and SSL share.

For any number of finished tasks k with importances W_k and final values theta_k,

    sum_k W_k (theta - theta_k)^2  =  A (theta - M)^2 + constant,   A = sum_k W_k,   M = sum_k W_k theta_k / A,

so two tensors per parameter, the importance A and the anchor M, hold all of it.
"""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from holdfast.importance import precise
from holdfast.methods.method import Method, check_shapes, number, several_processes, whole
from holdfast.persample import Batch, device_of, output_nodes, samples_of

Form = Literal["proximal", "loss"]


def remember(importance: Tensor, anchor: Tensor, newest: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """The importance and the anchor with one more task: its importance `newest`, and the `value` it ended with.

    >>> remember(torch.tensor([1.0, 0.0]), torch.tensor([2.0, 5.0]), torch.tensor([3.0, 0.0]), torch.tensor([4.0, 4.0]))
    (tensor([4., 0.]), tensor([3.5000, 5.0000]))
    """
    total = importance + newest
    weight = torch.where(total > 0, newest / total, 0)
    return total, torch.lerp(anchor, value, weight)


def pull_(
    values: Sequence[Tensor], importance: Sequence[Tensor], anchor: Sequence[Tensor], stiffness: float | Tensor
) -> None:
    """In place, the proximal step of A (theta - M)^2: theta <- (theta + s A M) / (1 + s A), stiffness s = 2 lr lambda.

    It lies between theta and M for every s >= 0, so it cannot diverge.

    >>> theta = torch.tensor([1.0, 1.0, 1.0])
    >>> pull_([theta], [torch.tensor([0.0, 1.0, 1e38])], [torch.zeros(3)], stiffness=3.0)
    >>> theta
    tensor([1.0000, 0.2500, 0.0000])
    """
    if torch.compiler.is_compiling():  # where what happens to a tensor becomes one kernel, and lists of them stay lists
        for value, weight, to in zip(values, importance, anchor, strict=True):
            share = (weight * stiffness).reciprocal().add(1).reciprocal()
            value.copy_(torch.lerp(value.to(to.dtype), to, share))
        return
    shares = list(torch._foreach_mul(list(importance), stiffness))  # s A / (1 + s A) of the way, also if s A is
    torch._foreach_reciprocal_(shares)  # infinite: 1 / (1 + 1 / (s A))
    torch._foreach_add_(shares, 1)
    torch._foreach_reciprocal_(shares)
    exact = [value.to(to.dtype) for value, to in zip(values, anchor, strict=True)]
    torch._foreach_lerp_(exact, list(anchor), shares)
    for value, moved in zip(values, exact, strict=True):
        if moved is not value:  # of lower precision than its anchor
            value.copy_(moved)


class Anchored(Method):
    """Holds each parameter to its old values, as strongly as it was important. Subclasses say how important it was."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, *, strength: float, penalty: Form) -> None:
        super().__init__(model, optimizer)
        self.strength = number("strength", strength)
        if penalty not in get_args(Form):
            raise ValueError(f'penalty must be "proximal" or "loss", got {penalty!r}')
        self.form: Form = penalty
        self.tasks = 0
        self._importance: dict[str, Tensor] = {}
        self._anchor: dict[str, Tensor] = {}
        self._named: tuple[int, dict[nn.Parameter, str]] = 0, {}

    @property
    def _names(self) -> dict[nn.Parameter, str]:
        """The names of the parameters that are trained, looked up again when there are more of them."""
        count = sum(len(group["params"]) for group in self.param_groups)
        if count != self._named[0]:
            trained = self._trained()
            self._named = count, {p: name for name, p in self.model.named_parameters() if p in trained}
        return self._named[1]

    @property
    def importance(self) -> dict[str, Tensor]:
        """How important each parameter is to the tasks so far, by name."""
        return dict(self._importance)

    @property
    def anchor(self) -> dict[str, Tensor]:
        """The values toward which the parameters are pulled, by name."""
        return dict(self._anchor)

    # ---- the end of a task ----

    @torch.no_grad()
    def consolidate(self, batches: Iterable[Any], active: Iterable[int] | None = None) -> None:
        newest = self._measure(batches, output_nodes(active))
        for name, importance in newest.items():
            check_finite(name, importance)
        for parameter, name in self._names.items():
            if name in newest:
                value = parameter.to(precise(parameter.dtype), copy=True)
                old = self._memory_of(parameter, name) or (torch.zeros_like(value), value)
                self._importance[name], self._anchor[name] = remember(*old, newest[name], value)
        self.tasks += 1

    def _measure(self, batches: Iterable[Any], active: list[int] | None) -> dict[str, Tensor]:
        """The importance of each parameter to the finished task, by name."""
        raise NotImplementedError

    def _parameters(self) -> dict[str, nn.Parameter]:
        return {name: parameter for parameter, name in self._names.items()}

    def _mean(self, sums: Mapping[str, Tensor], count: int) -> dict[str, Tensor]:
        """Sums over samples, of all processes together, as means."""
        if not sums:
            return {}
        wrapper = None if self._wrapper is None else self._wrapper()
        if wrapper is not None:
            device = next(iter(sums.values())).device
            counted = torch.tensor(count, dtype=torch.float64, device=device)
            for values in (*sums.values(), counted):
                dist.all_reduce(values, group=wrapper.process_group)
            count = int(counted)
        elif several_processes():
            warnings.warn(
                "several processes are running, but the model was not given inside a DistributedDataParallel, so each "
                f"process consolidates alone; if they train one model, give {type(self).__name__} that wrapper",
                stacklevel=5,
            )
        if count == 0:
            raise ValueError("consolidate() was given no samples: it needs the batches of the task that is finished")
        return {name: values / count for name, values in sums.items()}

    # ---- the pull ----

    def _update(self) -> None:
        self.wrapped.step()
        self._pull()

    def _pull(self) -> None:
        if self.form == "loss" or self.tasks == 0:
            return
        names = self._names
        for group in self.param_groups:
            moved = [p for p in group["params"] if p.grad is not None]
            held = [(p, *memory) for p in moved if (memory := self._memory_of(p, names.get(p)))]
            if held:
                values, importance, anchor = zip(*held, strict=True)
                lr = group["lr"].reshape(()) if isinstance(group["lr"], Tensor) else group["lr"]
                self._fused(pull_, values)(values, importance, anchor, 2 * self.strength * lr)

    def _memory_of(self, parameter: nn.Parameter, name: str | None) -> tuple[Tensor, Tensor] | None:
        """The importance and the anchor of a parameter, on its device."""
        if name is None or name not in self._anchor:
            return None
        for memory in (self._importance, self._anchor):
            if memory[name].shape != parameter.shape:
                raise ValueError(
                    f"{name!r} had shape {tuple(memory[name].shape)} when it was consolidated and has "
                    f"{tuple(parameter.shape)} now: add new outputs as a new parameter"
                )
            memory[name] = memory[name].to(parameter.device)
        return self._importance[name], self._anchor[name]

    # ---- the textbook's form ----

    @property
    def repeatable(self) -> bool:
        return self.form == "proximal"

    @property
    def _acts_through_loss(self) -> bool:
        return self.form == "loss" and self.tasks > 0

    def _penalty(self) -> Tensor:
        """The sum over all finished tasks in the loss, up to a constant: strength * sum of A (theta - M)^2."""
        total = super()._penalty()
        if self.form == "loss":
            for parameter, name in self._names.items():
                if memory := self._memory_of(parameter, name):
                    importance, anchor = memory
                    total = total + self.strength * (importance * (parameter - anchor).square()).sum()
            if not total.isfinite():
                raise FloatingPointError(self._diverged())
        return total

    def _diverged(self) -> str:
        names = self._names
        stiffest = max(
            (2 * self.strength * float(group["lr"]) * float(memory[0].max()), names[p])
            for group in self.param_groups
            for p in group["params"]
            if (memory := self._memory_of(p, names.get(p)))
        )
        if stiffest[0] < 2:
            return "the parameters are not finite, and the pull is not to blame: look at the loss and the inputs"
        return (
            f"{type(self).__name__} has diverged with its penalty in the loss: 2 * lr * strength * importance is "
            f"{stiffest[0]:.3g} in {stiffest[1]!r}, and above 2 every step overshoots; use "
            'penalty="proximal", which is stable at any strength, or a smaller strength or learning rate'
        )

    # ---- state ----

    def _memory(self) -> dict[str, Any]:
        copies = [{name: value.clone() for name, value in each.items()} for each in (self._importance, self._anchor)]
        settings = {"strength": self.strength, "penalty": self.form, "tasks": self.tasks}
        return {**settings, "importance": copies[0], "anchor": copies[1]}

    def _check_memory(self, memory: dict[str, Any]) -> None:
        ours = {name: p for p, name in self._names.items() if name in memory["anchor"]}
        check_shapes(memory["anchor"], ours)

    def _remember(self, memory: dict[str, Any]) -> None:
        self.strength, self.form, self.tasks = memory["strength"], memory["penalty"], memory["tasks"]
        self._importance = self._restored(memory["importance"])
        self._anchor = self._restored(memory["anchor"])

    def _restored(self, memory: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: memory[name].to(p.device, precise(p.dtype), copy=True)
            for p, name in self._names.items()
            if name in memory
        }


class Sampled(Anchored):
    """Measures importance on samples of the finished task: the first `samples` of its batches, or all of them."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, *, strength: float, samples: int | None, penalty: Form
    ) -> None:
        super().__init__(model, optimizer, strength=strength, penalty=penalty)
        self.samples = whole("samples", samples)

    def _samples(self, batches: Iterable[Any]) -> Iterator[Batch]:
        return samples_of(batches, self.samples, device_of(self.model))

    def _memory(self) -> dict[str, Any]:
        return {**super()._memory(), "samples": self.samples}

    def _remember(self, memory: dict[str, Any]) -> None:
        super()._remember(memory)
        self.samples = memory["samples"]


def check_finite(name: str, importance: Tensor) -> None:
    if not importance.isfinite().all():
        raise FloatingPointError(
            f"the importance of {name!r} is not finite, so nothing was consolidated: look at the loss and the "
            "parameters, which may have diverged"
        )
