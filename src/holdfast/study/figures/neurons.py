"""Probed neurons of finished runs, read from the files `neurons.json`."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from holdfast.errors import warn
from holdfast.runs.record import Record
from holdfast.study.figures.axes import Array
from holdfast.study.store import Entry, StudyError
from holdfast.study.tables import Row

GROUPS = {"all": "all neurons", "most": "the most important tenth", "least": "the least important tenth"}
"""Groups of neurons, with their labels."""
MEASURES = {"absolute": "activation drift", "relative": "drift / standard deviation"}
"""Measures of drift, with their labels."""


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

    record: Record
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
    if record is None or record.summary is None or entry.neurons is None:
        return None
    try:
        marks, drift = entry.neurons["importance"], entry.neurons["drift"]
        times = [0.0, *(mark["task"] + mark["step"] / record.steps[mark["task"]] for mark in marks)]
        layers = list(marks[0]["layers"]) if marks else []
        importance = {name: np.array([mark["layers"][name] for mark in marks], dtype=np.float64).T for name in layers}
        known = drift is not None and drift["importance"] is not None
        distributions = {measure: _distribution(drift[measure]) for measure in MEASURES} if known else {}
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise StudyError(f"{entry.folder / 'neurons.json'} is not a record of neurons ({error!r})") from None
    return Probed(record, times, importance, distributions)


def _distribution(data: Mapping[str, Any]) -> Distribution:
    if not data["top"] > 0:
        raise ValueError(f"top is {data['top']!r}, not positive")
    means = {group: None if data["means"][group] is None else float(data["means"][group]) for group in GROUPS}
    counts = {group: np.array(data["counts"][group], dtype=np.float64) for group in GROUPS}
    return Distribution(means, data["top"], counts)
