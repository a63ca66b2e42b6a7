"""The paper's search for a setting: decades first, then finer around the best, on validation images alone."""

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from holdfast.study.files import check_settings
from holdfast.study.records import Entry, Run, StudyError, default_name, read_json, write_json
from holdfast.study.tables import Estimate, estimate

if TYPE_CHECKING:
    from holdfast.training import Plan

DECADES = tuple(10.0**power for power in range(-3, 4))
FINER = (0.2, 0.5, 2.0, 5.0)
"""Around the best decade, times this."""

OVER = {"npc": "beta", "cpc": "beta", "lwf": "weight", "ewc": "strength", "mas": "strength"}
OVER |= {"si": "strength", "ssl": "strength", "finetune": "lr", "joint": "lr", "separate": "lr"}
"""What is searched for, by method, if nothing else is said."""

Execute = Callable[[Sequence[Run]], list[Entry]]


@dataclass(frozen=True)
class Tried:
    """A value and what it gave: the average accuracy at the end, None if a run with it failed."""

    value: float
    final: Estimate | None

    def as_dict(self) -> dict[str, Any]:
        return {"value": self.value, "final": None if self.final is None else self.final._asdict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        final = data["final"]
        return cls(_finite(data["value"]), None if final is None else _estimate(**final))


@dataclass(frozen=True)
class Sweep:
    """What a search found."""

    common: Run
    """What all its runs have in common; it has none of the values, and is not run."""
    over: str
    seeds: int
    """Runs of each value."""
    curve: list[Tried]
    """All values, the smallest first."""

    @property
    def best(self) -> float:
        return best(self.curve)

    @property
    def means(self) -> list[float]:
        """What the values gave whose runs came to their end."""
        return [tried.final.mean for tried in self.curve if tried.final is not None]

    @property
    def length(self) -> tuple[int | None, float, float]:
        """Tasks, epochs and width: only searches that agree in them can be compared."""
        plan = self.common.plan
        return self.common.tasks, plan["epochs"], plan["width"]

    @property
    def at_the_edge(self) -> bool:
        """Whether the best value is the smallest or the largest that was tried, so that a better one may lie beyond."""
        return self.best in (self.curve[0].value, self.curve[-1].value)

    def as_dict(self) -> dict[str, Any]:
        return {
            "stream": self.common.stream,
            "tasks": self.common.tasks,
            "plan": dict(self.common.plan),
            "over": self.over,
            "seeds": self.seeds,
            "best": self.best,
            "curve": [tried.as_dict() for tried in self.curve],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        plan = data["plan"] | {name: _finite(data["plan"][name]) for name in ("epochs", "width")}
        name = default_name(plan["method"], plan["settings"])
        common = Run(data["stream"], plan, data["tasks"], name, id="")
        curve = sorted((Tried.from_dict(tried) for tried in data["curve"]), key=lambda tried: tried.value)
        if not curve:
            raise ValueError("it has no values")
        return cls(common, data["over"], data["seeds"], curve)

    def path(self, folder: Path) -> Path:
        return folder / "sweeps" / f"{self.common.id}-{self.over}-{self.seeds}.json"

    def with_those_before(self, folder: Path) -> "Sweep":
        """With the values that an earlier search for the same tried, if it was saved in `folder`."""
        if not self.path(folder).exists():
            return self
        now = {tried.value for tried in self.curve}
        try:
            before = Sweep.from_dict(read_json(self.path(folder)))
        except UNREADABLE as error:
            warnings.warn(f"{self.path(folder)} is no search, and is written anew ({error})", stacklevel=2)
            return self
        curve = sorted([*self.curve, *(t for t in before.curve if t.value not in now)], key=lambda tried: tried.value)
        return replace(self, curve=curve)

    def save(self, folder: Path) -> Path:
        write_json(self.path(folder), self.as_dict())
        return self.path(folder)


UNREADABLE = (StudyError, LookupError, TypeError, ValueError, AttributeError)


def _estimate(mean: float, error: float | None, runs: int) -> Estimate:
    return Estimate(_finite(mean), None if error is None else _finite(error), int(runs))


def _finite(value: float) -> float:
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is no number")
    return float(value)


def read(folder: Path) -> list[Sweep]:
    """The searches that were saved in a study's folder; what is none is left out with a warning."""
    found = []
    for path in sorted((folder / "sweeps").glob("*.json")):
        try:
            found.append(Sweep.from_dict(read_json(path)))
        except UNREADABLE as error:
            warnings.warn(f"{path} is no search, and is left out ({error})", stacklevel=2)
    return found


def chosen(folder: Path, stream: str, methods: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The settings that gave the most in the searches on a stream that were saved in a folder, by method.

    Of a method's searches only those with the most seeds count, and of these the one with the highest mean.
    """
    found = [sweep for sweep in read(folder) if sweep.common.stream == stream and sweep.means]
    if not found:
        raise StudyError(f"{folder} has no search on {stream}: holdfast sweep {stream} ewc --out {folder} makes one")
    settings = {}
    for method in methods:
        tried = [sweep for sweep in found if sweep.common.plan["method"] == method]
        if len(lengths := {sweep.length for sweep in tried}) > 1:
            said = sorted(f"{tasks or 'all'} tasks of {epochs:g} epochs at width {w:g}" for tasks, epochs, w in lengths)
            raise StudyError(
                f"the searches for {method} in {folder} cannot be compared: they are of {' and of '.join(said)}; "
                "give those of each length a folder of their own, by --out"
            )
        if tried:
            first = max(tried, key=lambda sweep: (sweep.seeds, max(sweep.means)))
            settings[method] = {**first.common.plan["settings"], first.over: first.best}
    return settings


def best(curve: Iterable[Tried]) -> float:
    """The value with the highest mean; the smaller one if several have it."""
    finished = [(-tried.final.mean, tried.value) for tried in curve if tried.final is not None]
    if not finished:
        raise StudyError("no value gave a run that came to its end: try a smaller learning rate")
    return min(finished)[1]


def search(
    stream: str,
    plan: "Plan",
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
        stream: to learn.
        plan: how, but for the setting; always judged on validation images, and only at the ends of tasks.
        over: a setting of the method, or "lr".
        seeds: runs of each value.
        execute: does runs and returns what came out, as `holdfast.study.running.run_all` does.
        tasks: of the stream.
        values: the coarse ones.
        finer: factors; none for a coarse search alone.
    """
    plan = replace(plan, judged_on="validation", curve=1)

    def attempt(values: Iterable[float]) -> list[Tried]:
        found = {value: [_run(stream, plan, over, value, seed, tasks) for seed in range(seeds)] for value in values}
        ended = {entry.run.id: entry for entry in execute([run for runs in found.values() for run in runs])}
        return [_tried(value, [ended[run.id] for run in runs]) for value, runs in found.items()]

    coarse = attempt(values)
    around = sorted({float(f"{best(coarse) * factor:.3g}") for factor in finer} - set(values))
    curve = sorted(coarse + attempt(value for value in around if acceptable(plan, over, value)), key=lambda t: t.value)
    return Sweep(Run.of(stream, plan, tasks), over, seeds, curve)


def acceptable(plan: "Plan", over: str, value: float) -> bool:
    """Whether the method takes this value: a rate, for instance, is at most 1."""
    try:
        made = _with(plan, over, value)
        check_settings(made.method, made.settings)
    except (StudyError, ValueError):
        return False
    return True


def _with(plan: "Plan", over: str, value: float) -> "Plan":
    if over == "lr":
        return replace(plan, lr=value)
    return replace(plan, settings={**plan.settings, over: value})


def _run(stream: str, plan: "Plan", over: str, value: float, seed: int, tasks: int | None) -> Run:
    return Run.of(stream, replace(_with(plan, over, value), seed=seed), tasks, f"{plan.method} {over}={value:g}")


def _tried(value: float, entries: Sequence[Entry]) -> Tried:
    summaries = [entry.record.summary for entry in entries if entry.record is not None]
    finals = [s["final"] for s in summaries if s is not None and s["final"] is not None]
    complete = len(finals) == len(entries) and all(math.isfinite(final) for final in finals)
    return Tried(value, estimate(finals) if complete else None)
