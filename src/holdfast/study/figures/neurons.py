"""Probed neurons of finished runs, read from the files `neurons.json`."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypedDict

import msgspec
import numpy as np

from holdfast.errors import warn
from holdfast.runs.plan import Plan
from holdfast.study.figures.axes import Array
from holdfast.study.store import Entry, StudyError, parsing
from holdfast.study.tables import Row

GROUPS = {"all": "all neurons", "most": "the most important tenth", "least": "the least important tenth"}
"""Groups of neurons, with their labels."""
MEASURES = {"absolute": "activation drift", "relative": "drift / standard deviation"}
"""Measures of drift, with their labels."""


class _StoredMark(TypedDict):
    task: int
    step: int
    layers: dict[str, list[float]]


class _StoredDistribution(TypedDict):
    means: dict[str, float | None]
    top: float
    counts: dict[str, list[float]]


class _StoredDrift(TypedDict):
    importance: list[float] | None
    absolute: _StoredDistribution
    relative: _StoredDistribution


class _StoredNeurons(TypedDict):
    """The schema of `neurons.json`."""

    importance: list[_StoredMark]
    drift: _StoredDrift | None


class Distribution(NamedTuple):
    """The distribution of one measure of drift, by group of neurons."""

    means: dict[str, float | None]
    """None for an empty group."""
    top: float
    """Upper edge of the last bin; the first bin starts at 0."""
    counts: dict[str, Array]
    """Counts in bins of equal width."""


class Probed(NamedTuple):
    """A finished run with probed neurons."""

    plan: Plan
    settings: Mapping[str, Any]
    """All settings of the method, including defaults."""
    times: list[float]
    """Boundaries of the probed intervals, in tasks; starts at 0."""
    importance: dict[str, Array]
    """Importance `[neuron, interval]` by layer; empty for methods without importance."""
    drift: dict[str, Distribution]
    """Drift of the activations by measure; empty for methods without importance."""


def probed_runs(row: Row) -> list[Probed]:
    """Read the runs of a row that have probed neurons. Damaged files are skipped with a warning."""
    runs = []
    for entry in row.entries:
        try:
            run = _read(entry)
        except StudyError as error:
            warn(f"neurons skipped: {error}")
        else:
            runs += [run] if run is not None else []
    return runs


def _read(entry: Entry) -> Probed | None:
    record = entry.record
    if record is None or entry.summary is None or entry.neurons is None:
        return None
    with parsing(entry.folder / "neurons.json", "a record of neurons"):
        stored = msgspec.convert(entry.neurons, _StoredNeurons)
        marks, drift = stored["importance"], stored["drift"]
        times = [0.0, *(_time(mark, record.steps) for mark in marks)]
        if any(later <= earlier for earlier, later in pairwise(times)):
            raise ValueError("its times do not increase")
        layers = list(marks[0]["layers"]) if marks else []
        importance = {name: _matrix([mark["layers"][name] for mark in marks]).T for name in layers}
        distributions = {}
        if drift is not None and drift["importance"] is not None:
            distributions = {"absolute": _distribution(drift["absolute"]), "relative": _distribution(drift["relative"])}
    return Probed(entry.run.plan, record.settings, times, importance, distributions)


def _time(mark: _StoredMark, steps: Sequence[int]) -> float:
    task, step = mark["task"], mark["step"]
    if not 0 <= task < len(steps) or not 0 < step <= steps[task]:
        raise ValueError(f"there is no step {step} in task {task}")
    return task + step / steps[task]


def _matrix(rows: Sequence[Sequence[float]]) -> Array:
    if not rows[0] or len(set(map(len, rows))) > 1:
        raise ValueError("the number of neurons of a layer varies")
    return np.array(rows, dtype=np.float64)


def _distribution(data: _StoredDistribution) -> Distribution:
    means = {group: data["means"][group] for group in GROUPS}
    counts = {group: data["counts"][group] for group in GROUPS}
    if not 0 < data["top"] < math.inf:
        raise ValueError(f"top is {data['top']}, not positive and finite")
    if not all(math.isfinite(mean) for mean in means.values() if mean is not None):
        raise ValueError(f"means is {means}")
    bins = {len(each) for each in counts.values()}
    if len(bins) > 1 or 0 in bins or not all(0 <= count < 2**53 for each in counts.values() for count in each):
        raise ValueError("counts are not histograms with the same bins")
    return Distribution(means, data["top"], {group: np.array(each, np.float64) for group, each in counts.items()})
