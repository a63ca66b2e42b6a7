"""The record of a run: plain data, readable without torch."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self, TypeAlias, TypedDict

from holdfast.runs import metrics

Value: TypeAlias = bool | int | float | str | None
Setting: TypeAlias = Value | list[Value]
"""A value of a setting, as plain data."""

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


class Mark(TypedDict):
    """A point of the curves as it is stored: its accuracies are those on the tasks 0 to `task`."""

    task: int
    step: int
    accuracy: list[float]


class Failure(TypedDict, total=False):
    """The point at which a run failed, and the reason."""

    task: int
    step: int
    why: str


@dataclass
class Record:
    """The outcome of a run. Accuracies lie between 0 and 1; the matrix is `[after task i, on task j]`.

    The types of the fields are the schema of `record.json`, and `check` is what they cannot express.
    """

    stream: str
    tasks: list[str]
    plan: dict[str, Setting | dict[str, Setting]]
    settings: dict[str, Setting]
    """All settings of the method, including defaults."""
    device: str
    versions: dict[str, str]
    steps: list[int] = field(default_factory=list)
    """The number of steps of each task."""
    untrained: list[float] = field(default_factory=list)
    matrix: list[list[float]] = field(default_factory=list)
    curves: list[Mark] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    images: int = 0
    peak_bytes: int = 0
    memory: dict[str, int] | None = None
    """The bytes kept by the method after the last finished task, by name; None if unknown, as in older records."""
    capacity: list[dict[str, float]] = field(default_factory=list)
    """The share of each layer taken after each task, by layer, if the method measures it."""
    failure: Failure | None = None
    neurons: dict[str, Any] | None = None
    """Importance and drift of neurons, if the plan records them: see `holdfast.runs.probe`."""

    @property
    def summary(self) -> dict[str, float | None] | None:
        """The metrics of the matrix, if the run is complete."""
        if self.failure is not None or len(self.matrix) < len(self.tasks):
            return None
        return metrics.summarize(self.matrix, self.untrained).as_dict()

    @property
    def reason(self) -> str | None:
        """Where and why the run failed, if it did."""
        if self.failure is None:
            return None
        where = (
            f"in task {self.failure['task'] + 1}, step {self.failure.get('step')}: " if "task" in self.failure else ""
        )
        return f"{where}{self.failure.get('why', 'reason unknown')}"

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

    def check(self) -> None:
        """Raise a ValueError unless the fields of an ended run fit together."""
        tasks = len(self.tasks)
        if len(self.steps) != tasks or not all(0 < steps < 2**63 for steps in self.steps):
            raise ValueError(f"there are {tasks} tasks, and steps is {self.steps}")
        if self.failure is None and not len(self.matrix) == tasks > 0:
            raise ValueError(f"the matrix has {len(self.matrix)} rows for {tasks} tasks, but there is no failure")
        rows = [*self.matrix, self.untrained] if self.matrix or self.untrained else []
        if len(self.matrix) > tasks or any(len(row) != tasks for row in rows):
            raise ValueError(f"there are {tasks} tasks, and {[*map(len, rows)]} accuracies")
        for mark in self.curves:
            if not 0 <= mark["task"] < tasks or not 0 <= mark["step"] <= self.steps[mark["task"]]:
                raise ValueError(f"a curve has a point at task {mark['task']}, step {mark['step']}")
            if len(mark["accuracy"]) != mark["task"] + 1:
                raise ValueError(f"a curve has {len(mark['accuracy'])} accuracies in task {mark['task']}")
            rows.append(mark["accuracy"])
        if not all(0 <= accuracy <= 1 for row in rows for accuracy in row):
            raise ValueError("accuracies lie between 0 and 1")
        if "training" not in self.seconds or not all(0 <= each < math.inf for each in self.seconds.values()):
            raise ValueError(f"seconds is {self.seconds}")
        if not all(math.isfinite(share) for layers in self.capacity for share in layers.values()):
            raise ValueError("capacity is not finite")

    def as_dict(self) -> dict[str, Any]:
        """The record as plain data, for JSON."""
        return {**dataclasses.asdict(self), "summary": self.summary, "images_per_second": self.images_per_second}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of `as_dict`."""
        known = {item.name for item in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in data.items() if name in known})
