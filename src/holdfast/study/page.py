"""The page of a study: one self-contained HTML file.

This module decides the contents. `page.html.jinja`, `page.css` and `page.js` beside it decide the looks.
"""

import base64
import hashlib
import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from holdfast import atomic
from holdfast.errors import warn
from holdfast.methods import BOUNDS
from holdfast.runs.plan import default_plan
from holdfast.runs.record import Record
from holdfast.study import exports, figures, paper, studyfile, sweep
from holdfast.study.defaults import defaults_for
from holdfast.study.figures import Drawing
from holdfast.study.options import options
from holdfast.study.store import Entry, Run, State, Study, StudyError, default_name
from holdfast.study.tables import Comparison, Row, compare, percent
from holdfast.version import __version__

Fact = tuple[str, str]
"""A name and a value, as the page shows them."""


def write(study: Study) -> Path:
    """Write the page of a study, its figures and its tables.

    Runs that cannot be read are left out with a warning, and then no figure is removed. If no run can be read, that is
    an error, and nothing is written.

    Returns:
        The path of the page, `index.html`.
    """
    entries, left_out = study.scan()
    for each in left_out:
        warn(str(each))
    if left_out and not entries:
        raise StudyError(f"no run of {study.folder} can be read; its page is left as it is")
    found, figure_folder = compare(entries), study.inside(study.folder / "figures")
    sweeps = sweep.read(study.folder)
    exports.write(study.folder, entries, found)  # before the figures, which need the memory
    comparisons = [(comparison, figures.draw(comparison)) for comparison in found]
    searches = figures.draw_searches(sweeps)
    drawn = [drawing for _, drawings in comparisons for drawing in drawings]
    figures.save([*drawn, *searches], figure_folder, remove_stale=not left_out)
    path = study.folder / "index.html"
    atomic.write(path, _page(study.folder.resolve().name, entries, comparisons, searches).encode(errors="replace"))
    return path


def render(study_name: str, entries: Sequence[Entry]) -> str:
    """The page as text."""
    return _page(study_name, entries, [(comparison, figures.draw(comparison)) for comparison in compare(entries)], [])


def _page(
    name: str,
    entries: Sequence[Entry],
    comparisons: list[tuple[Comparison, list[Drawing]]],
    searches: Sequence[Drawing],
) -> str:
    environment = Environment(
        loader=PackageLoader("holdfast.study", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"percent": percent, "memory": _memory, "decimal": _decimal, "svg": _svg}
    script = _asset("page.js")
    common = _common(entries)
    return environment.get_template("page.html.jinja").render(
        name=name,
        summary=summarize(entries),
        comparisons=comparisons,
        searches=searches,
        best=best,
        beside=beside,
        bounds=BOUNDS,
        common=common,
        several_streams=len({entry.run.stream for entry in entries}) > 1,
        groups=_groups(entries, common),
        version=__version__,
        style=_asset("page.css"),
        script=script,
        script_hash=_hash(script),
    )


def _asset(name: str) -> Markup:
    return Markup((resources.files("holdfast.study") / name).read_text(encoding="utf-8"))


def _hash(script: str) -> str:
    """The name of the only script that the Content-Security-Policy permits."""
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}"


# ---- in a sentence ----


def summarize(entries: Sequence[Entry]) -> str:
    """The contents of the study and its progress, in one sentence."""
    if not entries:
        return "There are no runs in this study yet."
    streams = list(dict.fromkeys(entry.run.stream for entry in entries))
    methods = {entry.run.name for entry in entries}
    seeds = {str(entry.run.plan.seed) for entry in entries}
    where = f"{len(streams)} streams" if len(streams) > 4 else _and(streams)
    done = f"{_count(len(methods), 'method')} on {where} with {_count(len(seeds), 'seed')}"
    return f"{done}: {_count(len(entries), 'run')}, {_how_far(entries)}."


def _how_far(entries: Sequence[Entry]) -> str:
    states = [entry.state for entry in entries]
    finished, failed = states.count("finished"), states.count("failed")
    counts = {"finished": finished, "failed": failed, "unfinished": len(states) - finished - failed}
    if len(states) in counts.values():
        (state,) = (state for state, count in counts.items() if count)
        return f"all {state}" if len(states) > 1 else state
    return _and([f"{count} {state}" for state, count in counts.items() if count])


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _and(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


# ---- the table ----


def beside(comparison: Comparison) -> list[tuple[Row, list[paper.Pair]]]:
    """The rows that the paper has too, with its results."""
    rows = [(row, paper.beside(comparison.stream, row)) for row in comparison.rows]
    return [(row, pairs) for row, pairs in rows if pairs and comparison.evaluate_on == "test"]


def best(comparison: Comparison) -> list[Row]:
    """The rows with the highest average, bounds excluded, if at least two rows compete."""
    found = [
        (final.mean, row)
        for row in comparison.rows
        if (final := row.metric("final")) is not None and row.entries[0].run.plan.method not in BOUNDS
    ]
    if len(found) < 2:
        return []
    highest = max(mean for mean, _ in found)
    return [row for mean, row in found if mean == highest]


# ---- the runs ----


class Line(NamedTuple):
    """A run in the list of its group."""

    entry: Entry
    state: State
    facts: list[Fact]
    """The facts that its group does not share."""
    failure: str | None


class Group(NamedTuple):
    """Runs that differ only in their seeds."""

    run: Run
    how_far: str
    facts: list[Fact]
    """The facts that they share, except those of the whole study."""
    lines: list[Line]
    command: str


def _groups(entries: Iterable[Entry], common: Sequence[Fact]) -> list[Group]:
    alike: dict[str, list[Entry]] = {}
    for entry in entries:
        run = entry.run
        plan = run.plan.as_dict() | {"seed": None}
        alike.setdefault(json.dumps([run.stream, run.tasks, run.name, plan], sort_keys=True), []).append(entry)
    found = [_group(sorted(group, key=_by_seed), common) for group in alike.values()]
    return sorted(found, key=lambda group: (_natural(group.run.stream), _natural(group.run.name)))


def _natural(name: str) -> list[str | float]:
    """A sort key in which numbers within names count by their size.

    >>> sorted(["ewc 10", "ewc 2", "ewc 0.5", "EWC 1e-05"], key=_natural)
    ['EWC 1e-05', 'ewc 0.5', 'ewc 2', 'ewc 10']
    """
    parts = re.split(r"(\d+(?:\.\d+)?(?:e[-+]?\d+)?)", name.casefold())
    return [float(part) if number % 2 else part for number, part in enumerate(parts)]


def _by_seed(entry: Entry) -> int:
    return entry.run.plan.seed


def _group(entries: list[Entry], common: Sequence[Fact]) -> Group:
    run = entries[0].run
    records = [entry.record for entry in entries if entry.record is not None]
    ended = [_found(record) for record in records]
    shared = [*_planned(run), *(_shared(ended) if ended else _facts(run.plan.settings))]
    known = {*common, *shared}
    lines = [_line(entry, known) for entry in entries]
    seeds = [entry.run.plan.seed for entry in entries]
    own = [fact for fact in shared if fact not in common]
    device = "cpu" if records and all(str(record.device).endswith("CPU") for record in records) else None
    return Group(run, _how_far(entries), own, lines, command(run, seeds, device))


def _line(entry: Entry, known: set[Fact]) -> Line:
    record = entry.record
    if record is None:
        return Line(entry, entry.state, [], None)
    return Line(entry, entry.state, [fact for fact in _found(record) if fact not in known], record.reason)


def _common(entries: Sequence[Entry]) -> list[Fact]:
    """The facts that all runs share, and the conditions that all ended runs share."""
    planned = [_planned(entry.run) for entry in entries]
    conditions = [_conditions(entry.record) for entry in entries if entry.record is not None]
    return [*_shared(planned), *_shared(conditions)]


def _planned(run: Run) -> list[Fact]:
    """The stream and the plan of a run, without the seed and the settings of the method."""
    fields = {name: value for name, value in run.plan.as_dict().items() if name not in ("seed", "settings")}
    return _facts({"stream": run.stream, "tasks": "all" if run.tasks is None else run.tasks} | fields)


def _found(record: Record) -> list[Fact]:
    """The settings, including defaults, and the conditions of an ended run."""
    return [*_facts(record.settings), *_conditions(record)]


def _conditions(record: Record) -> list[Fact]:
    return _facts({"device": record.device} | record.versions)


def _facts(values: Mapping[str, Any]) -> list[Fact]:
    return [(str(name), _text(value)) for name, value in values.items()]


def _shared(several: Sequence[list[Fact]]) -> list[Fact]:
    if not several:
        return []
    first, *others = several
    everywhere = set(first).intersection(*others)
    return [fact for fact in first if fact in everywhere]


# ---- commands ----


def command(run: Run, seeds: Sequence[int], device: str | None = None) -> str:
    """The shell command for a run with these seeds. `DIR` stands for the folder of a study.

    Options at the defaults of the stream are omitted.

    >>> from holdfast.runs.plan import Plan
    >>> plan = Plan("npc", {"rate": 0.001}, **(defaults_for("digits") | {"epochs": 20}))
    >>> command(Run.of("digits", plan, name="mine"), [0, 1])
    'holdfast run digits npc --seeds 2 --epochs 20 --set rate=0.001 --name mine --out DIR'
    """
    plan = run.plan
    words = ["holdfast", "run", run.stream, plan.method]
    if run.tasks is not None:
        words += ["--tasks", str(run.tasks)]
    words += _seeds(seeds)
    defaults = default_plan() | defaults_for(run.stream)
    for name, option in options().items():
        if (value := getattr(plan, name)) != defaults[name]:
            words += option.words(value)
    for name, value in plan.settings.items():
        words += ["--set", f"{name}={_setting(value)}"]
    if run.name != default_name(plan.method, plan.settings):
        words += ["--name", run.name]
    if device is not None:
        words += ["--device", device]
    return shlex.join([*words, "--out", "DIR"])


def _seeds(seeds: Sequence[int]) -> list[str]:
    if set(seeds) == set(range(len(seeds))):
        return ["--seeds", str(len(seeds))]
    return [word for seed in seeds for word in ("--seed", str(seed))]


def _setting(value: Any) -> str:
    """A value as the command line parses it: quoted if it is text that would be parsed as another value.

    >>> _setting("proximal"), _setting("3"), _setting(1e-5), _setting(True)
    ('proximal', '"3"', '1e-05', 'true')
    """
    if isinstance(value, str):
        return value if value and studyfile.value(value.strip()) == value else json.dumps(value, ensure_ascii=False)
    return str(value).lower() if isinstance(value, bool) else str(value)


# ---- formats ----


def _text(value: Any) -> str:
    """A short text of a value, with all its digits.

    >>> _text(20.0), _text(1e-05), _text(True), _text(None), _text("mlp"), _text([1, 2])
    ('20', '1e-05', 'yes', 'none', 'mlp', '[1, 2]')
    """
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    return str(value).removesuffix(".0") if isinstance(value, float) else str(value)


def _decimal(value: Any) -> str:
    """A number with thousands separators or two decimals.

    >>> _decimal(0.0312), _decimal(1.8686), _decimal(12989.17), _decimal("?")
    ('0.03', '1.87', '12,989', '?')
    """
    if not isinstance(value, int | float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.2f}"


def _memory(size: Any) -> str:
    """A number of bytes in B, KiB, MiB or GiB.

    >>> _memory(0), _memory(1536), _memory(409190400), _memory(3 * 2**30), _memory(None)
    ('0 B', '1.5 KiB', '390 MiB', '3.0 GiB', 'unknown')
    """
    if not isinstance(size, int | float) or size < 0:
        return "unknown"
    if size < 2**10:
        return f"{size:.0f} B"
    if size < 2**20:
        return f"{size / 2**10:.1f} KiB"
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def _svg(drawing: Drawing) -> Markup:
    return Markup(figures.svg(drawing))
