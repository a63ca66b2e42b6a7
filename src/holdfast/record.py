"""What came out of a run, as plain data that needs nothing but Python to be read."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from holdfast import metrics


class Point(NamedTuple):
    """The accuracies on the tasks seen so far, at some moment of a run."""

    task: int
    """The task that is being learnt, counted from 0."""
    step: int
    time: float
    """In tasks: 1.5 is the middle of the second."""
    accuracy: list[float]

    @property
    def average(self) -> float:
        return sum(self.accuracy) / len(self.accuracy)


@dataclass
class Record:
    """What came out of a run. Accuracies are between 0 and 1; the matrix is `[after task i, on task j]`."""

    stream: str
    tasks: list[str]
    plan: dict[str, Any]
    settings: dict[str, Any]
    """All settings of the method, the defaults among them."""
    device: str
    versions: dict[str, str]
    steps: list[int] = field(default_factory=list)
    """Of each task."""
    untrained: list[float] = field(default_factory=list)
    matrix: list[list[float]] = field(default_factory=list)
    curves: list[dict[str, Any]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: {"training": 0.0, "consolidating": 0.0, "judging": 0.0})
    images: int = 0
    peak_bytes: int = 0
    failure: dict[str, Any] | None = None
    neurons: dict[str, Any] | None = None
    """What the neurons did, if the plan asked for it: see `holdfast.watching`."""

    @property
    def summary(self) -> dict[str, float | None] | None:
        """What is read off the matrix, if the run came to its end."""
        if self.failure is not None or len(self.matrix) < len(self.tasks):
            return None
        return metrics.summarise(self.matrix, self.untrained).as_dict()

    @property
    def images_per_second(self) -> float:
        return self.images / self.seconds["training"] if self.seconds["training"] else 0.0

    @property
    def timeline(self) -> list[Point]:
        """The points of the curves and the ends of tasks, one after another."""
        inner = [(point["task"], point["step"], point["accuracy"]) for point in self.curves]
        ends = [(task, self.steps[task], row[: task + 1]) for task, row in enumerate(self.matrix)]
        points = {(task, step): accuracy for task, step, accuracy in (*inner, *ends)}
        return [Point(task, step, task + step / self.steps[task], points[task, step]) for task, step in sorted(points)]

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain data, for JSON."""
        return {**dataclasses.asdict(self), "summary": self.summary, "images_per_second": self.images_per_second}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The record that `as_dict` was made from."""
        known = {item.name for item in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in data.items() if name in known})
