"""The pull toward old values that EWC, MAS, SI and SSL share.

For finished tasks k with importances W_k and final values theta_k,

    sum_k W_k (theta - theta_k)^2  =  A (theta - M)^2 + constant,   A = sum_k W_k,   M = sum_k W_k theta_k / A,

so two tensors per parameter, the importance A and the anchor M, suffice for any number of tasks.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from holdfast.errors import warn
from holdfast.importance import precise
from holdfast.methods.memory import BY_PARAMETER, PLAIN, rename
from holdfast.methods.method import Commit, Method, Needs
from holdfast.methods.settings import Count, NonNegative
from holdfast.samples import Batch, device_of, output_nodes, samples_of

Form = Literal["proximal", "loss"]


def remember(importance: Tensor, anchor: Tensor, newest: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """The importance and the anchor after one more task with importance `newest` and final `value`.

    >>> remember(torch.tensor([1.0, 0.0]), torch.tensor([2.0, 5.0]), torch.tensor([3.0, 0.0]), torch.tensor([4.0, 4.0]))
    (tensor([4., 0.]), tensor([3.5000, 5.0000]))
    """
    total = importance + newest
    weight = torch.where(total > 0, newest / total, 0)
    return total, torch.lerp(anchor, value, weight)


def pull_(
    values: Sequence[Tensor], importance: Sequence[Tensor], anchor: Sequence[Tensor], stiffness: float | Tensor
) -> None:
    """The proximal step of A (theta - M)^2, in place: theta <- (theta + s A M) / (1 + s A), stiffness s = 2 lr lambda.

    The result lies between theta and M for every s >= 0, so the step cannot diverge.

    >>> theta = torch.tensor([1.0, 1.0, 1.0])
    >>> pull_([theta], [torch.tensor([0.0, 1.0, 1e38])], [torch.zeros(3)], stiffness=3.0)
    >>> theta
    tensor([1.0000, 0.2500, 0.0000])
    """
    if torch.compiler.is_compiling():  # one kernel per tensor; operations on lists would not fuse
        for value, weight, target in zip(values, importance, anchor, strict=True):
            share = (weight * stiffness).reciprocal().add(1).reciprocal()
            value.copy_(torch.lerp(value.to(target.dtype), target, share))
        return
    # The share of the way to M is s A / (1 + s A), computed as 1 / (1 + 1 / (s A)): correct even if s A is infinite.
    shares = list(torch._foreach_mul(list(importance), stiffness))
    torch._foreach_reciprocal_(shares)
    torch._foreach_add_(shares, 1)
    torch._foreach_reciprocal_(shares)
    exact = [value.to(target.dtype) for value, target in zip(values, anchor, strict=True)]
    torch._foreach_lerp_(exact, list(anchor), shares)
    for value, moved in zip(values, exact, strict=True):
        if moved is not value:  # the parameter has lower precision than its anchor
            value.copy_(moved)


class Anchored(Method):
    """Pulls each parameter toward its anchor, in proportion to its importance. Subclasses measure the importance.

    In "proximal" form, every step of the wrapped optimizer is followed by the proximal step of the pull (`pull_`). In
    "loss" form, the pull is a penalty in the loss.
    """

    remembers: ClassVar = {"tasks": PLAIN, "_importance": BY_PARAMETER.at_least(0), "_anchor": BY_PARAMETER}
    searched: ClassVar = "strength"
    alters_step: ClassVar = True

    strength: float
    form: Form

    def __init__(self, model: nn.Module, optimizer: Optimizer, *, strength: NonNegative, form: Form) -> None:
        super().__init__(model, optimizer)
        self._set(strength=strength, form=form)
        self.tasks = 0
        self._importance: dict[str, Tensor] = {}
        self._anchor: dict[str, Tensor] = {}
        self._names = self._names_now()
        """The names of the trained parameters, under which their memory is kept."""

    def _names_now(self) -> dict[nn.Parameter, str]:
        trained = self._trained()
        return {parameter: name for name, parameter in self.model.named_parameters() if parameter in trained}

    def _adapt(self, new: Sequence[nn.Parameter]) -> None:
        """Follow parameters to their new names, as inside an adapter, and warn of those that were replaced."""
        before, self._names = self._names, self._names_now()
        rename(self, {old: self._names[p] for p, old in before.items() if p in self._names})
        known = set(before.values())
        replaced = [name for p, name in self._names.items() if p not in before and name in known & self._anchor.keys()]
        if replaced:
            name = type(self).__name__
            warn(
                f"these parameters were replaced: {', '.join(replaced)}; {name} pulls them to "
                f"the values of their predecessors after earlier tasks; to let them learn freely, build a new {name}"
            )

    @property
    def importance(self) -> dict[str, Tensor]:
        """The importance of each parameter for the tasks so far, by name."""
        return dict(self._importance)

    @property
    def anchor(self) -> dict[str, Tensor]:
        """The values toward which the parameters are pulled, by name."""
        return dict(self._anchor)

    # ---- the end of a task ----

    @torch.no_grad()
    def _consolidate(self, batches: Iterable[Any], active: Sequence[int] | None) -> Commit:
        self._notice_parameters(always=True)
        newest = self._measure(batches, output_nodes(active))
        for name, importance in newest.items():
            check_finite(name, importance)
        found = {}
        for parameter, name in self._names.items():
            if name in newest:
                value = parameter.to(precise(parameter.dtype), copy=True)
                old = self._memory_of(parameter, name) or (torch.zeros_like(value), value)
                found[name] = remember(*old, newest[name], value)
        return partial(self._remember, found)

    def _remember(self, found: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Keep the importance and the anchor of each parameter, by name."""
        for name, (importance, anchor) in found.items():
            self._importance[name], self._anchor[name] = importance, anchor
        self.tasks += 1

    def _measure(self, batches: Iterable[Any], active: list[int] | None) -> dict[str, Tensor]:
        """The importance of each parameter for the finished task, by name."""
        raise NotImplementedError

    def _parameters(self) -> dict[str, nn.Parameter]:
        return {name: parameter for parameter, name in self._names.items()}

    def _mean(self, sums: Mapping[str, Tensor], count: int) -> dict[str, Tensor]:
        """Divide sums over samples by their number, over all processes."""
        if not sums:
            return {}
        counted = torch.tensor(count, dtype=torch.float64, device=next(iter(sums.values())).device)
        if self._sum_over_processes([*sums.values(), counted]):
            count = int(counted)
        check_samples(count)
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
                self._compiled(pull_, values)(values, importance, anchor, 2 * self.strength * lr)

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

    # ---- the pull as a penalty in the loss ----

    @property
    def _recordable(self) -> bool:
        return self.form == "proximal"

    @property
    def _adds_penalty(self) -> bool:
        return self.form == "loss" and self.tasks > 0

    def _penalty(self) -> Tensor:
        """The pulls of all finished tasks, up to a constant: strength * sum of A (theta - M)^2."""
        total = super()._penalty()
        if self.form == "loss":
            for parameter, name in self._names.items():
                if memory := self._memory_of(parameter, name):
                    importance, anchor = memory
                    change = self._in_penalty(parameter, name) - anchor
                    total = total + self.strength * (importance * change.square()).sum()
            if not total.isfinite():
                raise FloatingPointError(self._divergence())
        return total

    def _in_penalty(self, parameter: nn.Parameter, name: str) -> Tensor:
        """The parameter as it enters the penalty."""
        return parameter

    def _divergence(self) -> str:
        """The error message for a penalty that is not finite."""
        names = self._names
        stiffest = max(
            (2 * self.strength * float(group["lr"]) * float(memory[0].max()), names[p])
            for group in self.param_groups
            for p in group["params"]
            if (memory := self._memory_of(p, names.get(p)))
        )
        if stiffest[0] < 2:
            return "the parameters are not finite, and the pull is not the cause: check the loss and the inputs"
        return (
            f"{type(self).__name__} has diverged with its penalty in the loss: 2 * lr * strength * importance is "
            f"{stiffest[0]:.3g} in {stiffest[1]!r}, and above 2 every step overshoots; use "
            'form="proximal", which is stable at any strength, or a smaller strength or learning rate'
        )


class Sampled(Anchored):
    """Measures importance on samples of the finished task: the first `samples` of its batches, or all of them."""

    needs: ClassVar = Needs(data=True)

    samples: int | None

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, *, strength: NonNegative, samples: Count, form: Form
    ) -> None:
        super().__init__(model, optimizer, strength=strength, form=form)
        self._set(samples=samples)

    def _samples(self, batches: Iterable[Any]) -> Iterator[Batch]:
        return samples_of(batches, self.samples, device_of(self.model))


def check_samples(count: float) -> None:
    """Raise a ValueError if there were no samples to measure on."""
    if count == 0:
        raise ValueError("consolidate() was given no samples: it needs the batches of the finished task")


def check_finite(name: str, importance: Tensor) -> None:
    """Raise a FloatingPointError if an importance is not finite."""
    if not importance.isfinite().all():
        raise FloatingPointError(
            f"the importance of {name!r} is not finite, so nothing was consolidated: check whether the loss or the "
            "parameters have diverged"
        )
