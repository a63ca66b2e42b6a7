"""A study in the terminal: progress while it runs, and tables."""

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from holdfast.errors import printable
from holdfast.methods.building import defaults_of, summary_of
from holdfast.study import paper
from holdfast.study.store import Entry, LeftOut, Run
from holdfast.study.tables import Comparison, Estimate, Row, names, percent

if TYPE_CHECKING:
    from holdfast.runs.training import Progress as Where
    from holdfast.study.sweep import Sweep


class Bars:
    """Progress bars: one for each run in progress, one for all runs, and a line for each ended run.

    They appear when the first run starts, after errors and downloads of the preparation.
    """

    def __init__(self, console: Console, runs: int) -> None:
        self.console, self.runs, self.ended_so_far = console, runs, 0
        self.bars: dict[str, TaskID] = {}
        self.shares: dict[str, float] = {}
        self.began_at: float | None = None
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[accuracy]}"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=console,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.began_at is None:
            return
        for bar in self.bars.values():
            self.progress.remove_task(bar)
        self.progress.stop()
        took = timedelta(seconds=round(time.monotonic() - self.began_at))
        self.console.print(f"{self.ended_so_far} of {self.runs} runs in {took}", highlight=False)

    def _begin(self) -> None:
        self.began_at = time.monotonic()
        self.progress.start()
        self.all = self.progress.add_task(f"[bold]{self.runs} runs", total=self.runs, accuracy="")

    def started(self, run: Run) -> None:
        if self.began_at is None:
            self._begin()
        if run.id not in self.bars:
            self.bars[run.id] = self.progress.add_task(_text(run.label), total=1.0, accuracy="")

    def progressed(self, run: Run, progress: "Where") -> None:
        share = (progress.task + progress.step / progress.steps) / progress.tasks
        accuracy = "" if progress.accuracy is None else f"{percent(progress.accuracy, 1)}%"
        self.progress.update(self.bars[run.id], completed=share, accuracy=accuracy)
        self.shares[run.id] = share
        self._update_all()

    def ended(self, run: Run, entry: Entry | None, reason: str) -> None:
        self.ended_so_far += 1
        self.shares.pop(run.id, None)
        if run.id in self.bars:
            self.progress.remove_task(self.bars.pop(run.id))
        self._update_all()
        self.console.print(f"{_text(run.label)}: {_text(_outcome(entry, reason))}", highlight=False)

    def elsewhere(self, runs: int) -> None:
        claimed = f" ({runs} by another process)" if runs else ""
        self.progress.update(self.all, description=f"[bold]{self.runs} runs[/]{claimed}")

    def _update_all(self) -> None:
        self.progress.update(self.all, completed=self.ended_so_far + sum(self.shares.values()))


def _outcome(entry: Entry | None, reason: str) -> str:
    if entry is None or entry.record is None:
        return reason
    if entry.summary is None:
        return f"failed {entry.record.reason}"
    return f"{percent(entry.summary['final'] or 0, 1)}% in {sum(entry.record.seconds.values()):.0f} s"


def _text(text: str) -> str:
    """Text as it is, without markup and control characters."""
    return escape(printable(text))


# ---- methods ----


def methods(chosen: Iterable[str]) -> str:
    """Each method with what it does, and its settings with their defaults.

    >>> print(methods(["lwf+npc", "finetune"]).splitlines()[-1])
    finetune: The bare optimizer, with the interface of a method.
    """
    lines = []
    for name in chosen:
        settings = " ".join(f"{setting}={_default(value)}" for setting, value in defaults_of(name).items())
        lines += [f"{name}: {summary_of(name)}", *([f"    {settings}"] if settings else [])]
    return "\n".join(lines)


def _default(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool | None) else str(value)


# ---- tables ----


def _table(title: str | None = None) -> Table:
    """A table narrow enough for a terminal of 80 columns."""
    return Table(
        title=None if title is None else _text(title),
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )


def results(comparison: Comparison, width: int = 80) -> Table:
    """The final accuracy on each task and the metrics, best method first, in a table that fits the width.

    If the names of the tasks take too much space, they are numbered, and the caption lists them. If the numbers take
    too much space too, the tasks are left out, and the caption says so.
    """
    numbers = [str(number) for number in range(1, len(comparison.tasks) + 1)]
    listed = "\n".join(f"task {number}: {name}" for number, name in zip(numbers, comparison.tasks, strict=True))
    tables = (
        _results(comparison, comparison.tasks, ""),
        _results(comparison, numbers, listed),
        _results(comparison, [], "no room for the accuracies on each task: they are on the page and in table.csv"),
    )
    wide = Console(width=10_000)
    return next((table for table in tables if wide.measure(table).minimum <= width), tables[-1])


def _results(comparison: Comparison, tasks: Sequence[str], remark: str) -> Table:
    table = _table(f"Accuracy in % at the end: {comparison.title}")
    table.add_column("method", overflow="fold")
    for name in (*tasks, "average", "when learned", "forgetting"):
        table.add_column(_text(name), justify="right", no_wrap=True, min_width=cell_len(printable(name)))
    for row in comparison.rows:
        table.add_row(_text(row.name), *_cells(row, len(tasks)))
    several = max((len(row.records) for row in comparison.rows), default=0)
    seeds = "mean over seeds (standard error)" if several > 1 else "one seed: no standard errors"
    table.caption = _text(seeds) + "".join(f"\n{_text(line)}" for line in remark.splitlines())
    return table


def _cells(row: Row, tasks: int) -> list[str]:
    if not row.records:
        return ["failed", *[""] * (tasks + 2)]
    metrics = [row.metric(name) for name in ("final", "learned", "forgetting")]
    return [*(percent(each.mean, 1) for each in row.tasks[:tasks]), *(_cell(each, 1) for each in metrics)]


def _cell(value: Estimate | None, digits: int) -> str:
    return "" if value is None else value.percent(digits)


def beside_the_paper(comparison: Comparison, digits: int = 2) -> Table:
    """Table 1: the results of this study, each above the paper's. A star marks a significant difference."""
    table = _table(f"Table 1: {comparison.title}")
    table.add_column("method")
    for name in (*(f"task {number + 1}" for number in range(len(comparison.tasks))), "average"):
        table.add_column(name, justify="right")
    for row in comparison.rows:
        if not row.records:
            table.add_row(_text(row.name), "failed")
            continue
        pairs = paper.beside(comparison.stream, row)
        if not pairs:
            ours = [*row.tasks, row.metric("final")]
            table.add_row(_text(row.name), *(_cell(each, digits) for each in ours), end_section=True)
            continue
        table.add_row(_text(row.name), *("*" * pair.differ + pair.ours.percent(digits) for pair in pairs))
        theirs = [pair.theirs.percent(digits) for pair in pairs]
        table.add_row("  paper", *theirs, style="dim", end_section=True)
    table.caption = "mean (standard error); * differs from the paper by more than two standard errors of the difference"
    return table


def search(sweep: "Sweep") -> Table:
    """The values of a search, and the best of them."""
    table = _table()
    table.add_column(_text(sweep.over), justify="right")
    table.add_column("average", justify="right")
    table.add_column("")
    for tried in sweep.curve:
        found = "failed" if tried.final is None else tried.final.percent()
        table.add_row(f"{tried.value:g}", found, "best" if tried.value == sweep.best else "")
    return table


def runs(entries: Iterable[Entry], left_out: Iterable[LeftOut] = ()) -> str:
    """Every run of a study and its state: a line for each, and one with the number of runs in each state."""
    entries = list(entries)
    named = names(entries)
    lines = [_line(entry, named[entry.run.id]) for entry in entries]
    lines += [(each.folder.name, "", "", each.state, "") for each in left_out]
    states = Counter(state for *_, state, _ in lines)
    counts = ", ".join(f"{number} {state}" for state, number in states.items()) or "no runs"
    return f"{columns([('run', 'method', 'seed', 'state', 'average, %'), *lines])}\n\n{counts}"


def _line(entry: Entry, name: str) -> tuple[str, ...]:
    final = "" if entry.summary is None else percent(entry.summary["final"] or 0)
    return entry.run.id, name, str(entry.run.plan.seed), entry.state, final


def columns(lines: Sequence[Sequence[str]]) -> str:
    """Text in columns.

    >>> print(columns([("run", "seed"), ("digits-npc", "0")]))
    run         seed
    digits-npc  0
    """
    cells = [[printable(cell) for cell in line] for line in lines]
    widths = [max(map(cell_len, column)) for column in zip(*cells, strict=True)]
    padded = (
        "  ".join(cell + " " * (width - cell_len(cell)) for cell, width in zip(line, widths, strict=True))
        for line in cells
    )
    return "\n".join(line.rstrip() for line in padded)
