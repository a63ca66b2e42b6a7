"""Learning without forgetting (Li and Hoiem, 2016)."""

import copy
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from holdfast.hooks import Hook, inside_transform
from holdfast.importance import precise
from holdfast.methods.method import Method, check_shapes, number
from holdfast.persample import device_of, output_nodes, select


def distillation(new: Tensor, old: Tensor, temperature: float) -> Tensor:
    """T^2 KL(softmax(old / T) || softmax(new / T)), the mean over samples.

    >>> distillation(torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 2.0]]), temperature=2.0)
    tensor(0.)
    """
    log_old, log_new = ((x.to(precise(x.dtype)) / temperature).log_softmax(1) for x in (old, new))
    return temperature**2 * nn.functional.kl_div(log_new, log_old, reduction="batchmean", log_target=True)


class _Ear(Hook):
    """Keeps what the model was last given, and what it answered, in a forward that is to be learnt from."""

    def __init__(self) -> None:
        self.heard: tuple[tuple[Any, ...], dict[str, Any], Tensor] | None = None

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if torch.is_grad_enabled() and not inside_transform():
            self.heard = args, kwargs, output


class LwF(Method):
    """Keeps the answers of the earlier tasks' heads, on the current images, close to those from before the task.

    Args:
        model: the model in training. It returns `[samples, outputs]` and does not change its inputs in place.
        optimizer: an optimizer of its parameters.
        weight: the weight of the old answers in the loss.
        temperature: softens the answers, so that the unlikely ones count too.

    >>> model = nn.Linear(4, 4)
    >>> optimizer = LwF(model, torch.optim.SGD(model.parameters(), lr=0.1))
    >>> x, y = torch.randn(16, 4), torch.randint(2, (16,))
    >>> for active in ([0, 1], [2, 3]):
    ...     loss = nn.functional.cross_entropy(model(x)[:, active], y) + optimizer.penalty()
    ...     optimizer.zero_grad(); loss.backward(); optimizer.step()
    ...     optimizer.consolidate([(x, y)], active)  # the task is finished; its data are not needed
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, *, weight: float = 1.0, temperature: float = 2.0
    ) -> None:
        super().__init__(model, optimizer)
        self.weight = number("weight", weight)
        self.temperature = number("temperature", temperature, above=0)
        self._teacher: nn.Module | None = None
        self._heads: list[list[int] | None] = []
        self._ear = _Ear()
        self._handle = self.model.register_forward_hook(self._ear, with_kwargs=True)
        weakref.finalize(self, self._handle.remove).atexit = False

    def consolidate(self, batches: Iterable[Any], active: Iterable[int] | None = None) -> None:
        nodes = output_nodes(active)
        self._teacher = self._copy()
        if nodes not in self._heads:  # tasks that share a head share its old answers
            self._heads.append(nodes)

    def _copy(self) -> nn.Module:
        modules = self.model.modules()
        computed = [v for m in modules for v in vars(m).values() if isinstance(v, Tensor) and not v.is_leaf]
        return copy.deepcopy(self.model, {id(v): v.detach() for v in computed}).eval().requires_grad_(False)

    @property
    def _acts_through_loss(self) -> bool:
        return self._teacher is not None

    def _penalty(self) -> Tensor:
        heard, self._ear.heard = self._ear.heard, None
        total = super()._penalty()
        if self._teacher is None:
            return total
        if heard is None:
            raise ValueError("penalty() needs a forward before it: loss = criterion(model(x), y) + optimizer.penalty()")
        inputs, keywords, new = heard
        if device_of(self._teacher) != device_of(self.model):
            self._teacher.to(device_of(self.model))
        with torch.no_grad():
            old = self._teacher(*inputs, **keywords)
        if isinstance(new, Tensor) and new.dim() != 2:
            raise ValueError(f"LwF needs a model that returns [samples, outputs], this one returns {tuple(new.shape)}")
        for head in self._heads:
            total = total + distillation(select(new, head), select(old, head), self.temperature)
        return self.weight * total

    def _update(self) -> None:
        super()._update()
        if not self._acts_through_loss:
            self._ear.heard = None  # which no one has asked for, and is not to be kept for longer

    def close(self) -> None:
        self._handle.remove()
        self._ear.heard = None
        super().close()

    def _memory(self) -> dict[str, Any]:
        teacher = None if self._teacher is None else copy.deepcopy(self._teacher.state_dict())
        return {"weight": self.weight, "temperature": self.temperature, "heads": list(self._heads), "teacher": teacher}

    def _check_memory(self, memory: dict[str, Any]) -> None:
        if memory["teacher"] is not None:  # whose heads may be fewer than the model's are now
            ours = {name: value for name, value in self.model.state_dict().items() if name in memory["teacher"]}
            check_shapes(memory["teacher"], ours)

    def _remember(self, memory: dict[str, Any]) -> None:
        self.weight, self.temperature, self._heads = memory["weight"], memory["temperature"], list(memory["heads"])
        self._teacher = None
        if memory["teacher"] is not None:
            self._teacher = self._copy()
            self._teacher.load_state_dict(memory["teacher"], strict=False)
