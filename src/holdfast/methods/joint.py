"""Joint training: all tasks seen so far in every step, the common upper bound."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from holdfast.methods.memory import Kind
from holdfast.methods.method import Method, Needs
from holdfast.samples import Batch, aligned, device_of, output_nodes, read, select

Criterion = Callable[[Tensor, Tensor], Tensor]


@dataclass
class _Task:
    """Endless batches of a finished task."""

    batches: Iterable[Any]
    active: list[int] | None
    drawn: int = 0  # in the current pass
    source: Iterator[Any] = field(default_factory=lambda: iter(()))

    def draw(self) -> Any:
        batch = next(self.source, None)
        if batch is None:
            self.start_at(0)
            batch = next(self.source, None)
        if batch is None:
            raise ValueError("a finished task has no more batches: joint training reads them in many passes")
        self.drawn += 1
        return batch

    def start_at(self, drawn: int) -> None:
        self.source, self.drawn = islice(self.batches, drawn, None), drawn


class _Drawn(Kind):
    """Positions in the batches of finished tasks. A state_dict does not hold the batches themselves."""

    def check(self, method: Method, attribute: str, value: Any) -> None:
        present = len(getattr(method, attribute))
        if len(value) != present:
            raise ValueError(
                f"this state_dict was saved after {len(value)} finished tasks, without their data, but there are "
                f"{present} here: call consolidate() with the batches of each, then load it"
            )


class Joint(Method):
    """Steps along the mean gradient of the current task and of all finished ones, whose batches it keeps.

        g = (g_current + sum over finished tasks k of g_k) / (number of tasks)

    `penalty` is the loss of the finished tasks on the next batch of each. Joint training needs all old data: it is an
    upper bound for the other methods, not a rival. `memory` does not count these data.

    Args:
        model: the model in training.
        optimizer: an optimizer of its parameters.
        criterion: the loss of a task, from its active outputs and its labels. Tokens count like samples.
    """

    needs: ClassVar = Needs(data=True, old_data=True)
    remembers: ClassVar = {"_drawn": _Drawn()}
    alone: ClassVar = True

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, *, criterion: Criterion = nn.functional.cross_entropy
    ) -> None:
        super().__init__(model, optimizer)
        self.criterion = criterion
        self._tasks: list[_Task] = []

    def _consolidate(self, batches: Iterable[Any], active: Sequence[int] | None) -> None:
        """Keep the batches of the finished task. They must allow many passes: a list, a DataLoader."""
        if iter(batches) is batches:
            raise TypeError("joint training reads the batches in many passes: give a list or a DataLoader")
        self._tasks.append(_Task(batches, output_nodes(active)))

    @property
    def _recordable(self) -> bool:
        return not self._tasks  # their batches come from the host

    @property
    def _adds_penalty(self) -> bool:
        return bool(self._tasks)

    def _penalty(self) -> Tensor:
        total = super()._penalty()
        for task in self._tasks:
            total = total + self._loss(read(task.draw(), device_of(self.model)), task.active)
        return total

    def _loss(self, batch: Batch, active: list[int] | None) -> Tensor:
        labels = batch.labels
        if labels is None:
            raise ValueError("joint training needs (inputs, labels) batches, or dicts with labels")
        outputs = batch.outputs(self.model)
        selected = select(outputs, active)
        if selected.dim() == 3 and labels.dim() == 2:  # tokens count like samples
            selected, labels = selected.flatten(0, 1), aligned(outputs, labels).flatten()
        return self.criterion(selected, labels)

    def _update(self) -> None:
        moving = [p for p in self._trained() if p.grad is not None]
        sums = [p.grad for p in moving if p.grad is not None]
        self._step_along(torch._foreach_div(sums, len(self._tasks) + 1), moving)  # from the sum over tasks to the mean

    @property
    def _drawn(self) -> list[int]:
        """The number of batches drawn from each finished task in its current pass."""
        return [task.drawn for task in self._tasks]

    @_drawn.setter
    def _drawn(self, drawn: list[int]) -> None:
        for task, count in zip(self._tasks, drawn, strict=True):
            task.start_at(count)
