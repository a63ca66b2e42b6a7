"""The record of a run: plain data, readable without torch."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from holdfast.runs import metrics

PHASES = ("training", "consolidation", "evaluation")
"""The timed phases of a run."""


class Point(NamedTuple):
    """The accuracies on the tasks seen so far, at one step of a run."""

    task: int
    """The current task, counted from 0."""
    step: int
    time: float
    """The time in tasks: 1.5 is the middle of the second task."""
    accuracy: list[float]

    @property
    def average(self) -> float:
        return sum(self.accuracy) / len(self.accuracy)


@dataclass
class Record:
    """The outcome of a run. Accuracies lie between 0 and 1; the matrix is `[after task i, on task j]`."""

    stream: str
    tasks: list[str]
    plan: dict[str, Any]
    settings: dict[str, Any]
    """All settings of the method, including defaults."""
    device: str
    versions: dict[str, str]
    steps: list[int] = field(default_factory=list)
    """The number of steps of each task."""
    untrained: list[float] = field(default_factory=list)
    matrix: list[list[float]] = field(default_factory=list)
    curves: list[dict[str, Any]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    images: int = 0
    peak_bytes: int = 0
    memory: dict[str, int] | None = None
    """The bytes kept by the method after the last finished task, by name; None if unknown, as in older records."""
    capacity: list[dict[str, float]] = field(default_factory=list)
    """The share of each layer taken after each task, by layer, if the method measures it."""
    failure: dict[str, Any] | None = None
    neurons: dict[str, Any] | None = None
    """Importance and drift of neurons, if the plan records them: see `holdfast.runs.probe`."""

    @property
    def summary(self) -> dict[str, float | None] | None:
        """The metrics of the matrix, if the run is complete."""
        if self.failure is not None or len(self.matrix) < len(self.tasks):
            return None
        return metrics.summarize(self.matrix, self.untrained).as_dict()

    @property
    def images_per_second(self) -> float:
        return self.images / self.seconds["training"] if self.seconds["training"] else 0.0

    @property
    def timeline(self) -> list[Point]:
        """The points of the curves and the ends of tasks, in order."""
        inner = [(point["task"], point["step"], point["accuracy"]) for point in self.curves]
        ends = [(task, self.steps[task], row[: task + 1]) for task, row in enumerate(self.matrix)]
        points = {(task, step): accuracy for task, step, accuracy in (*inner, *ends)}
        return [Point(task, step, task + step / self.steps[task], points[task, step]) for task, step in sorted(points)]

    def as_dict(self) -> dict[str, Any]:
        """The record as plain data, for JSON."""
        return {**dataclasses.asdict(self), "summary": self.summary, "images_per_second": self.images_per_second}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of `as_dict`."""
        known = {item.name for item in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in data.items() if name in known})
