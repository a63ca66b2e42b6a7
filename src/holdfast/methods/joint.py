"""Joint training: all tasks seen so far in every step, the usual upper bound."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from holdfast.methods.method import Method
from holdfast.persample import device_of, output_nodes, read, select

Criterion = Callable[[Tensor, Tensor], Tensor]


@dataclass
class _Task:
    """The batches of a finished task, again and again."""

    batches: Iterable[Any]
    active: list[int] | None
    drawn: int = 0  # of the present round
    source: Iterator[Any] = field(default_factory=lambda: iter(()))

    def draw(self) -> Any:
        batch = next(self.source, None)
        if batch is None:
            self.start_at(0)
            batch = next(self.source, None)
        if batch is None:
            raise ValueError("a finished task has no batches left: joint training needs them for as long as it goes on")
        self.drawn += 1
        return batch

    def start_at(self, drawn: int) -> None:
        self.source, self.drawn = islice(self.batches, drawn, None), drawn


class Joint(Method):
    """Steps along the mean gradient of the current task and of all finished ones, whose batches it keeps.

    `penalty` is the loss of the finished tasks, on the next batch of each. It is an upper bound for the other methods,
    not one of them: it needs all the old data.

    Args:
        model: the model in training.
        optimizer: an optimizer of its parameters.
        criterion: the loss of a task, from its active outputs and its labels.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, *, criterion: Criterion = nn.functional.cross_entropy
    ) -> None:
        super().__init__(model, optimizer)
        self.criterion = criterion
        self._tasks: list[_Task] = []

    def consolidate(self, batches: Iterable[Any], active: Iterable[int] | None = None) -> None:
        """Keep the finished task's batches, which must be iterable again and again: a list, a DataLoader."""
        if iter(batches) is batches:
            raise TypeError("joint training goes through the batches many times: give a list or a DataLoader")
        self._tasks.append(_Task(batches, output_nodes(active)))

    @property
    def repeatable(self) -> bool:
        return not self._tasks  # whose batches come from wherever the user keeps them

    @property
    def _acts_through_loss(self) -> bool:
        return bool(self._tasks)

    def _penalty(self) -> Tensor:
        total = super()._penalty()
        for task in self._tasks:
            batch = read(task.draw(), device_of(self.model))
            if batch.labels is None:
                raise ValueError("joint training needs (inputs, labels) batches")
            total = total + self.criterion(select(batch.outputs(self.model), task.active), batch.labels)
        return total

    def _update(self) -> None:
        gradients = [p.grad for p in self._trained() if p.grad is not None]
        torch._foreach_div_(gradients, len(self._tasks) + 1)  # from the tasks' sum to their mean
        super()._update()

    def _memory(self) -> dict[str, Any]:
        return {"drawn": [task.drawn for task in self._tasks]}

    def _check_memory(self, memory: dict[str, Any]) -> None:
        if len(memory["drawn"]) != len(self._tasks):
            raise ValueError(
                f"this state_dict was made after {len(memory['drawn'])} finished tasks, whose data it does not hold, "
                f"and there are {len(self._tasks)} here: call consolidate() with the batches of each, then load it"
            )

    def _remember(self, memory: dict[str, Any]) -> None:
        for task, drawn in zip(self._tasks, memory["drawn"], strict=True):
            task.start_at(drawn)
