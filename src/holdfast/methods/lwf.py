"""Learning without Forgetting (Li and Hoiem, 2016)."""

import copy
import weakref
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div
from torch.optim import Optimizer

from holdfast.importance import precise
from holdfast.methods.memory import BY_MODEL, PLAIN
from holdfast.methods.method import Commit, Method
from holdfast.methods.settings import NonNegative, Positive
from holdfast.samples import Batch, device_of, logits_of, output_nodes, select
from holdfast.taps import CallTap

Head: TypeAlias = list[int] | None
"""The outputs of one head; None for all outputs of the model."""


def distillation(new: Tensor, old: Tensor, temperature: float, attended: Tensor | None = None) -> Tensor:
    """T^2 KL(softmax(old / T) || softmax(new / T)), the mean over samples, or over tokens that are no padding.

    >>> distillation(torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 2.0]]), temperature=2.0)
    tensor(0.)
    """
    log_new, log_old = (_log_softmax(x, temperature, -1) for x in (new, old))
    if new.dim() == 2:
        return temperature**2 * kl_div(log_new, log_old, reduction="batchmean", log_target=True)
    return temperature**2 * _mean(kl_div(log_new, log_old, reduction="none", log_target=True).sum(-1), attended)


def distillation_of_heads(
    new: Tensor, old: Tensor, heads: Sequence[Head], temperature: float, attended: Tensor | None = None
) -> Tensor:
    """The sum of `distillation` over heads of equal size, computed at once, with the heads along the last axis."""
    if len(heads) == 1:
        return distillation(select(new, heads[0]), select(old, heads[0]), temperature, attended)
    nodes = [node for nth in zip(*(head or [] for head in heads), strict=True) for node in nth]
    stacked = (select(x, nodes).reshape(*x.shape[:-1], -1, len(heads)) for x in (new, old))
    log_new, log_old = (_log_softmax(x, temperature, -2) for x in stacked)
    terms = kl_div(log_new, log_old, reduction="none", log_target=True).sum((-2, -1))
    return temperature**2 * _mean(terms, attended)


def _log_softmax(outputs: Tensor, temperature: float, axis: int) -> Tensor:
    return (outputs.to(precise(outputs.dtype)) / temperature).log_softmax(axis)


def _mean(terms: Tensor, attended: Tensor | None) -> Tensor:
    """The mean over samples, or over tokens that are no padding."""
    if attended is None or terms.dim() == 1:
        return terms.mean()
    weights = attended.to(terms)
    return (weights * terms).sum() / weights.sum().clamp(min=1)


def _by_size(heads: Iterable[Head]) -> list[list[Head]]:
    """Groups of heads with equally many outputs. A head of None is all outputs of the model."""
    groups: dict[int | None, list[Head]] = {}
    for head in heads:
        groups.setdefault(None if head is None else len(head), []).append(head)
    return list(groups.values())


class LwF(Method):
    """Keeps the outputs of earlier heads on the current inputs close to those of the model before the task, f_old.

        penalty = weight sum over earlier heads h of T^2 KL(softmax(f_old_h / T) || softmax(f_h / T))

    Source: Li, Hoiem, "Learning without Forgetting", ECCV 2016. The paper's cross entropy has the same gradient without
    the factor T^2, which keeps the size of the gradient nearly independent of T (Hinton, Vinyals, Dean, "Distilling the
    Knowledge in a Neural Network", 2015).

    Args:
        model: the model in training. It returns `[samples, outputs]` or `[samples, tokens, outputs]` and does not
            change its inputs in place.
        optimizer: an optimizer of its parameters.
        weight: the weight of the old outputs in the loss, lambda_o in the paper.
        temperature: T, which softens the outputs so that unlikely classes count too.

    >>> model = nn.Linear(4, 4)
    >>> optimizer = LwF(model, torch.optim.SGD(model.parameters(), lr=0.1))
    >>> x, y = torch.randn(16, 4), torch.randint(2, (16,))
    >>> for active in ([0, 1], [2, 3]):
    ...     loss = nn.functional.cross_entropy(model(x)[:, active], y) + optimizer.penalty()
    ...     optimizer.zero_grad(); loss.backward(); optimizer.step()
    ...     optimizer.consolidate([(x, y)], active)  # the task is finished; its data are not needed
    """

    remembers: ClassVar = {"_heads": PLAIN, "_teacher": BY_MODEL}
    searched: ClassVar = "weight"
    reads_forward: ClassVar = True

    weight: float
    temperature: float

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, *, weight: NonNegative = 1.0, temperature: Positive = 2.0
    ) -> None:
        super().__init__(model, optimizer)
        self._set(weight=weight, temperature=temperature)
        self._old: nn.Module | None = None
        self._heads: list[Head] = []
        self._tap = CallTap(self.model)
        weakref.finalize(self, self._tap.close).atexit = False

    def _consolidate(self, batches: Iterable[Any], active: Sequence[int] | None) -> Commit:
        return partial(self._remember, output_nodes(active), self._copy())

    def _remember(self, nodes: list[int] | None, old: nn.Module) -> None:
        self._old = old
        if nodes not in self._heads:  # tasks that share a head share its old outputs
            self._heads.append(nodes)

    def _copy(self) -> nn.Module:
        modules = self.model.modules()
        computed = [v for m in modules for v in vars(m).values() if isinstance(v, Tensor) and not v.is_leaf]
        return copy.deepcopy(self.model, {id(v): v.detach() for v in computed}).eval().requires_grad_(False)

    @property
    def _adds_penalty(self) -> bool:
        return self._old is not None

    def _penalty(self) -> Tensor:
        call = self._tap.take()
        total = super()._penalty()
        if self._old is None:
            return total
        if call is None:
            raise ValueError("penalty() needs a forward before it: loss = criterion(model(x), y) + optimizer.penalty()")
        if device_of(self._old) != device_of(self.model):
            self._old.to(device_of(self.model))
        with torch.no_grad():
            old = logits_of(self._old(*call.args, **call.kwargs))
        new = logits_of(call.output)
        if new.dim() not in (2, 3):
            raise ValueError(
                "LwF needs a model that returns [samples, outputs] or [samples, tokens, outputs], got "
                f"{tuple(new.shape)}"
            )
        attended = Batch(call.args, call.kwargs, labels=None).attended
        for heads in _by_size(self._heads):
            total = total + distillation_of_heads(new, old, heads, self.temperature, attended)
        return self.weight * total

    def _update(self) -> None:
        super()._update()
        if not self._adds_penalty:
            self._tap.take()  # free the memory

    def _close(self) -> None:
        self._tap.close()

    @property
    def _teacher(self) -> dict[str, Tensor] | None:
        """The state_dict of the model before the task."""
        return None if self._old is None else self._old.state_dict()

    @_teacher.setter
    def _teacher(self, state: Mapping[str, Tensor] | None) -> None:
        self._old = None
        if state:
            self._old = self._copy()
            self._old.load_state_dict(state, strict=False)  # the model may have grown
