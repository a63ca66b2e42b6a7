"""The paper's search for a setting: decades first, then finer around the best, on validation images only."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, TypedDict

import msgspec

from holdfast.errors import warn
from holdfast.runs.plan import Plan
from holdfast.study.store import (
    DamagedError,
    Entry,
    Run,
    Study,
    StudyError,
    default_name,
    files_in,
    parsing,
    read_json,
    write_json,
)
from holdfast.study.studyfile import check_settings
from holdfast.study.tables import Estimate, estimate

DECADES = tuple(10.0**power for power in range(-3, 4))
FINER = (0.2, 0.5, 2.0, 5.0)
"""Factors of the best decade, for the finer search."""

Execute = Callable[[Sequence[Run]], list[Entry]]


class _StoredEstimate(TypedDict):
    mean: float
    error: float | None
    runs: int


class _StoredValue(TypedDict):
    value: float
    final: _StoredEstimate | None


class _StoredSweep(TypedDict):
    """The schema of the file of a search."""

    stream: str
    tasks: int | None
    plan: dict[str, Any]
    over: str
    seeds: int
    curve: list[_StoredValue]


@dataclass(frozen=True)
class Tried:
    """A value and its final average accuracy, which is None if a run failed."""

    value: float
    final: Estimate | None

    def as_dict(self) -> dict[str, Any]:
        return {"value": self.value, "final": None if self.final is None else self.final._asdict()}

    @classmethod
    def from_dict(cls, data: _StoredValue) -> Self:
        final = data["final"]
        if not math.isfinite(data["value"]):
            raise ValueError(f"{data['value']} is not a value")
        if final is not None and not (0 <= final["mean"] <= 1 and 0 <= (final["error"] or 0) <= 1):
            raise ValueError(f"{final} is not an accuracy")
        return cls(data["value"], None if final is None else Estimate(**final))


@dataclass(frozen=True)
class Sweep:
    """The outcome of a search."""

    common: Run
    """The stream, the tasks and the plan of all its runs, without the searched setting. It is not run itself."""
    over: str
    seeds: int
    """The number of runs of each value."""
    curve: list[Tried]
    """All values in ascending order."""

    @property
    def best(self) -> float:
        return best(self.curve)

    @property
    def means(self) -> list[float]:
        """The mean accuracies of the values without a failed run."""
        return [tried.final.mean for tried in self.curve if tried.final is not None]

    @property
    def length(self) -> tuple[int | None, float, float]:
        """Tasks, epochs and width. Only searches of equal length can be compared."""
        return self.common.tasks, self.common.plan.epochs, self.common.plan.width

    @property
    def at_the_edge(self) -> bool:
        """Whether the best value is the smallest or the largest, so that a better one may lie beyond."""
        return self.best in (self.curve[0].value, self.curve[-1].value)

    def as_dict(self) -> dict[str, Any]:
        return {
            "stream": self.common.stream,
            "tasks": self.common.tasks,
            "plan": self.common.plan.as_dict(),
            "over": self.over,
            "seeds": self.seeds,
            "best": self.best,
            "curve": [tried.as_dict() for tried in self.curve],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        stored = msgspec.convert(data, _StoredSweep)
        plan = Plan(**stored["plan"])
        common = Run(stored["stream"], plan, stored["tasks"], default_name(plan.method, plan.settings), id="")
        curve = sorted((Tried.from_dict(tried) for tried in stored["curve"]), key=lambda tried: tried.value)
        if not curve:
            raise ValueError("it has no values")
        return cls(common, stored["over"], stored["seeds"], curve)

    def path(self, folder: Path) -> Path:
        return folder / "sweeps" / f"{self.common.id}-{self.over}-{self.seeds}.json"

    def with_earlier(self, folder: Path) -> "Sweep":
        """The search with the values of an earlier search for the same setting, if `folder` has one."""
        if not self.path(folder).exists():
            return self
        now = {tried.value for tried in self.curve}
        try:
            before = _read(self.path(folder))
        except DamagedError as error:
            warn(f"{error}; it is overwritten")
            return self
        curve = sorted([*self.curve, *(t for t in before.curve if t.value not in now)], key=lambda tried: tried.value)
        return replace(self, curve=curve)

    def save(self, folder: Path) -> Path:
        Study(folder).inside(self.path(folder).parent)
        write_json(self.path(folder), self.as_dict())
        return self.path(folder)


def read(folder: Path) -> list[Sweep]:
    """Read the searches in the folder of a study. Files that cannot be read are left out with a warning."""
    found = []
    for path in files_in(folder / "sweeps"):
        if path.suffix == ".json":
            try:
                found.append(_read(path))
            except StudyError as error:
                warn(f"{error}; it is left out")
    return found


def _read(path: Path) -> Sweep:
    data = read_json(path)
    with parsing(path, "a search"):
        return Sweep.from_dict(data)


def chosen(folder: Path, stream: str, methods: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The best settings of the searches on a stream in a folder, by method.

    Only a method's searches with the most seeds count, and of these the one with the highest mean.
    """
    found = [sweep for sweep in read(folder) if sweep.common.stream == stream and sweep.means]
    if not found:
        raise StudyError(f"{folder} has no search on {stream}: holdfast sweep {stream} ewc --out {folder} makes one")
    settings = {}
    for method in methods:
        tried = [sweep for sweep in found if sweep.common.plan.method == method]
        if len(lengths := {sweep.length for sweep in tried}) > 1:
            texts = sorted(f"{tasks or 'all'} tasks, {epochs:g} epochs, width {w:g}" for tasks, epochs, w in lengths)
            raise StudyError(
                f"the searches for {method} in {folder} cannot be compared, because they differ in length: "
                f"{'; '.join(texts)}; give the searches of each length a folder of their own with --out"
            )
        if tried:
            first = max(tried, key=lambda sweep: (sweep.seeds, max(sweep.means)))
            settings[method] = {**first.common.plan.settings, first.over: first.best}
    return settings


def best(curve: Iterable[Tried]) -> float:
    """The value with the highest mean; the smallest of them in a tie."""
    finished = [(-tried.final.mean, tried.value) for tried in curve if tried.final is not None]
    if not finished:
        raise StudyError("every value had a failed run: try a smaller learning rate")
    return min(finished)[1]


def search(
    stream: str,
    plan: Plan,
    over: str,
    seeds: int,
    execute: Execute,
    *,
    tasks: int | None = None,
    values: Sequence[float] = DECADES,
    finer: Sequence[float] = FINER,
) -> Sweep:
    """Try `values` of the setting `over`, then the best of them times each of `finer`.

    Args:
        stream: the stream.
        plan: the plan, without the searched setting. Runs are evaluated on validation images, at the ends of tasks.
        over: a setting of the method, or "lr".
        seeds: the number of runs of each value.
        execute: executes runs and returns them with their records, as `holdfast.study.schedule.run_all` does.
        tasks: the number of tasks; None for all.
        values: the values of the coarse search.
        finer: the factors of the finer search; empty for a coarse search alone.
    """
    plan = replace(plan, evaluate_on="validation", curve=1)

    def attempt(values: Iterable[float]) -> list[Tried]:
        runs = {value: [_run(stream, plan, over, value, seed, tasks) for seed in range(seeds)] for value in values}
        entries = {entry.run.id: entry for entry in execute([run for each in runs.values() for run in each])}
        return [_tried(value, [entries[run.id] for run in each]) for value, each in runs.items()]

    coarse = attempt(values)
    around = sorted({float(f"{best(coarse) * factor:.3g}") for factor in finer} - set(values))
    curve = sorted(coarse + attempt(value for value in around if acceptable(plan, over, value)), key=lambda t: t.value)
    return Sweep(Run.of(stream, plan, tasks), over, seeds, curve)


def acceptable(plan: Plan, over: str, value: float) -> bool:
    """Whether the method accepts the value. A rate, for example, is at most 1."""
    try:
        made = _with(plan, over, value)
        check_settings(made.method, made.settings)
    except (StudyError, ValueError):
        return False
    return True


def _with(plan: Plan, over: str, value: float) -> Plan:
    if over == "lr":
        return replace(plan, lr=value)
    return replace(plan, settings={**plan.settings, over: value})


def _run(stream: str, plan: Plan, over: str, value: float, seed: int, tasks: int | None) -> Run:
    return Run.of(stream, replace(_with(plan, over, value), seed=seed), tasks, f"{plan.method} {over}={value:g}")


def _tried(value: float, entries: Sequence[Entry]) -> Tried:
    summaries = [entry.summary for entry in entries]
    finals = [s["final"] for s in summaries if s is not None and s["final"] is not None]
    complete = len(finals) == len(entries) and all(math.isfinite(final) for final in finals)
    return Tried(value, estimate(finals) if complete else None)
