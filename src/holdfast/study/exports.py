"""The numbers of a study as files for other programs: CSV and JSON lines."""

import csv
import dataclasses
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast import atomic
from holdfast.runs.metrics import Summary
from holdfast.study.store import Entry
from holdfast.study.tables import Comparison, Estimate, Row, compare

METRICS = tuple(item.name for item in dataclasses.fields(Summary))
"""The names of the metrics of an accuracy matrix."""

TABLE = ("stream", "tasks", "evaluate_on", "method", "quantity", "task", "mean", "standard_error", "runs")
"""The columns of `table.csv`."""


_OF_RECORD = ("device", "versions", "seconds", "images_per_second", "peak_bytes", "memory", "failure")


def write(folder: Path, entries: Sequence[Entry], comparisons: Iterable[Comparison] | None = None) -> list[Path]:
    """Write `runs.csv`, `runs.jsonl` and `table.csv` to `folder`. Comparisons are made of the entries by default."""

    def save(name: str, content: str) -> Path:
        atomic.write(folder / name, content.encode(errors="replace"))
        return folder / name

    return [
        save("runs.csv", _csv([flat(run_line(entry)) for entry in entries])),
        save("runs.jsonl", "".join(f"{json.dumps(run_line(entry))}\n" for entry in entries)),
        save("table.csv", _csv(table_lines(compare(entries) if comparisons is None else comparisons), TABLE)),
    ]


def run_line(entry: Entry) -> dict[str, Any]:
    """A run as plain data. The outcome of a run that has not ended is None."""
    run, record = entry.run, entry.record
    plan = run.plan.as_dict()
    seed, settings = plan.pop("seed"), plan.pop("settings")
    line = {
        "run": run.id,
        "name": run.name,
        "stream": run.stream,
        "tasks": run.tasks,
        "state": entry.state,
        "seed": seed,
        "plan": plan,
        "settings": settings,
    }
    if record is None:
        return line | dict.fromkeys(("summary", "accuracy", *_OF_RECORD))
    return line | {
        "settings": record.settings,
        "summary": entry.summary,
        "accuracy": record.matrix[-1] if record.matrix else None,
        **{name: getattr(record, name) for name in _OF_RECORD},
    }


def flat(line: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested values: inner names are joined by dots, list items are numbered from 1.

    >>> flat({"seed": 0, "plan": {"lr": 0.1}, "accuracy": [0.9, 0.8]})
    {'seed': 0, 'plan.lr': 0.1, 'accuracy.1': 0.9, 'accuracy.2': 0.8}
    """
    found: dict[str, Any] = {}
    for name, value in line.items():
        inner = {str(number): each for number, each in enumerate(value, 1)} if isinstance(value, list) else value
        found |= flat(inner, f"{prefix}{name}.") if isinstance(inner, Mapping) else {f"{prefix}{name}": inner}
    return found


def table_lines(comparisons: Iterable[Comparison]) -> list[dict[str, Any]]:
    """One line for each number of each row of each comparison. Metrics that no run has are omitted."""
    return [
        {
            "stream": comparison.stream,
            "tasks": len(comparison.tasks),
            "evaluate_on": comparison.evaluate_on,
            "method": row.name,
            "quantity": quantity,
            "task": task,
            "mean": found.mean,
            "standard_error": found.error,
            "runs": found.runs,
        }
        for comparison in comparisons
        for row in comparison.rows
        for quantity, task, found in _numbers(comparison, row)
    ]


def _numbers(comparison: Comparison, row: Row) -> Iterator[tuple[str, str | None, Estimate]]:
    for task, found in zip(comparison.tasks, row.tasks, strict=False):
        yield "accuracy", task, found
    for name in METRICS:
        metric = row.metric(name)
        if metric is not None:
            yield name, None, metric


def _csv(lines: Sequence[Mapping[str, Any]], columns: Iterable[str] = ()) -> str:
    text = io.StringIO()
    names = dict.fromkeys([*columns, *(name for line in lines for name in line)])
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([cell(name) for name in names])
    writer.writerows([cell(line.get(name)) for name in names] for line in lines)
    return text.getvalue()


def cell(value: Any) -> Any:
    """A value of a CSV file. Text that a spreadsheet would evaluate as a formula is preceded by an apostrophe.

    >>> cell("=1+1"), cell("-2.5"), cell(-2.5), cell("npc")
    ("'=1+1", '-2.5', -2.5, 'npc')
    """
    if not isinstance(value, str):
        return value
    text = value.replace("\r", " ")  # which the csv module does not quote
    if not text.startswith(("=", "+", "-", "@", "\t")):
        return text
    try:
        float(text)
    except ValueError:
        return f"'{text}"
    return text
