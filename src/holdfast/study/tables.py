"""Tables of runs: means and standard errors over seeds, by method."""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, stdev
from typing import Any, NamedTuple

from holdfast.runs.record import Record
from holdfast.study.store import Entry, alike


def percent(share: float, digits: int | None = 2) -> str:
    """Format a share as a percentage, without the sign. With `digits=None`, trailing zeros are dropped.

    >>> percent(0.7187), percent(0.7187, 1), percent(0.125, None)
    ('71.87', '71.9', '12.5')
    """
    return f"{round(100 * share, 6):g}" if digits is None else f"{100 * share:.{digits}f}"


class Estimate(NamedTuple):
    """A mean over runs and its standard error, which is None for a single run."""

    mean: float
    error: float | None
    runs: int

    def percent(self, digits: int = 2) -> str:
        """Format as in the paper: the mean in percent, followed by its standard error in parentheses.

        >>> Estimate(0.7187, 0.0065, 3).percent()
        '71.87(0.65)'
        >>> Estimate(0.7187, None, 1).percent()
        '71.87'
        """
        error = "" if self.error is None else f"({percent(self.error, digits)})"
        return f"{percent(self.mean, digits)}{error}"


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of values and its standard error.

    >>> estimate([0.5, 0.7])
    Estimate(mean=0.6, error=0.1, runs=2)
    """
    error = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return Estimate(fmean(values), None if error is None else round(error, 12), len(values))


@dataclass(frozen=True)
class Row:
    """All runs of one method with the same settings and different seeds."""

    name: str
    entries: list[Entry]

    @cached_property
    def records(self) -> list[Record]:
        """The records of the complete runs."""
        return [entry.record for entry in self.entries if entry.record is not None and entry.summary is not None]

    @cached_property
    def tasks(self) -> list[Estimate]:
        """The accuracy on each task after the last one."""
        return [estimate(values) for values in zip(*(record.matrix[-1] for record in self.records), strict=True)]

    def metric(self, name: str) -> Estimate | None:
        """Estimate a metric of `holdfast.runs.metrics.Summary` over the runs that have it."""
        found = [entry.summary[name] for entry in self.entries if entry.summary is not None]
        values = [value for value in found if value is not None]
        return estimate(values) if values else None


@dataclass(frozen=True)
class Comparison:
    """Methods run on the same tasks and evaluated on the same images."""

    stream: str
    tasks: tuple[str, ...]
    evaluate_on: str
    rows: list[Row]

    @property
    def title(self) -> str:
        tasks = "1 task" if len(self.tasks) == 1 else f"{len(self.tasks)} tasks"
        return f"{self.stream}, {tasks}, {self.evaluate_on} images"


def compare(entries: Iterable[Entry]) -> list[Comparison]:
    """Group the ended runs into comparisons, the best method first."""
    groups: dict[tuple[str, tuple[str, ...], str], list[Entry]] = {}
    for entry in entries:
        if entry.record is not None:
            key = (entry.run.stream, tuple(entry.record.tasks), entry.run.plan.evaluate_on)
            groups.setdefault(key, []).append(entry)
    return [Comparison(*key, sorted(_rows(group), key=_rank)) for key, group in groups.items()]


def names(entries: Iterable[Entry]) -> dict[str, str]:
    """The name of each run by its id, as in a comparison of all runs on its stream, ended or not."""
    groups: dict[tuple[Any, ...], list[Entry]] = {}
    for entry in entries:
        groups.setdefault((entry.run.stream, entry.run.tasks, entry.run.plan.evaluate_on), []).append(entry)
    return {entry.run.id: name for group in groups.values() for name, several in _named(group) for entry in several}


def _rows(entries: Iterable[Entry]) -> list[Row]:
    return [Row(name, _once(several)) for name, several in _named(entries)]


def _named(entries: Iterable[Entry]) -> list[tuple[str, list[Entry]]]:
    """Group runs that differ only in their seeds. If a name stands for several plans, their differences are added."""
    by_plan: dict[tuple[str, str], list[Entry]] = {}
    for entry in entries:
        by_plan.setdefault((entry.run.name, json.dumps(_settings(entry), sort_keys=True)), []).append(entry)
    by_name: dict[str, list[list[Entry]]] = {}
    for (name, _), seeds in by_plan.items():
        by_name.setdefault(name, []).append(seeds)
    return [
        (name if len(several) == 1 else f"{name} ({_differences(seeds, several)})", seeds)
        for name, several in by_name.items()
        for seeds in several
    ]


def _once(entries: Iterable[Entry]) -> list[Entry]:
    """One entry per seed. A run can be stored twice: as all tasks of a stream, and as its first five."""
    return list({entry.run.plan.seed: entry for entry in entries}.values())


def _settings(entry: Entry) -> dict[str, Any]:
    """Every choice that decides the outcome of a run, except its seed."""
    plan = entry.run.plan.as_dict()
    settings = plan.pop("settings")
    del plan["seed"]
    together: dict[str, Any] = alike(plan | settings)
    return together


def _differences(seeds: list[Entry], several: list[list[Entry]]) -> str:
    mine, all_of_them = _settings(seeds[0]), [_settings(each[0]) for each in several]
    keys = dict.fromkeys(key for settings in all_of_them for key in settings)
    differ = [key for key in keys if any(settings.get(key) != mine.get(key) for settings in all_of_them)]
    return ", ".join(f"{key}={_short(mine.get(key, 'default'))}" for key in differ)


def _short(value: Any) -> str:
    """A value without the zero behind a whole number."""
    return str(value).removesuffix(".0") if isinstance(value, float) else str(value)


def _rank(row: Row) -> tuple[float, str]:
    final = row.metric("final")
    return (-final.mean if final is not None else 1.0, row.name)
