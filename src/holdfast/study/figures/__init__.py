"""The figures of a study: PDF and PNG files, and SVG for the page. No torch required.

Each kind of figure is a module that declares its `KIND`. The registry below decides the order on the page, the names
of files, and the removal of stale files: a new kind is one module and one line here.
"""

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from holdfast import atomic
from holdfast.study.figures import average, balance, capacity, drift, importance, search, tasks
from holdfast.study.figures.drawing import FORMATS, Drawing, Kind, files, svg
from holdfast.study.figures.style import STYLES, fix_layout, styled
from holdfast.study.figures.subject import Subject
from holdfast.study.sweep import Sweep
from holdfast.study.tables import Comparison

__all__ = ["COMPARISON_KINDS", "SEARCH_KINDS", "Drawing", "Kind", "draw", "draw_searches", "own_files", "save", "svg"]

T = TypeVar("T")

COMPARISON_KINDS: tuple[Kind[Subject], ...] = (
    average.KIND,
    tasks.KIND,
    balance.KIND,
    drift.KIND,
    importance.KIND,
    capacity.KIND,
)
"""Kinds of figures of a comparison, in the order of the page."""

SEARCH_KINDS: tuple[Kind[Sequence[Sweep]], ...] = (search.KIND,)
"""Kinds of figures of searches with the same stream and length, in the order of the page."""


def draw(comparison: Comparison) -> list[Drawing]:
    """Draw the figures of a comparison, in the order of the registry. Figures without data are omitted.

    A figure shows as many methods as there are distinct styles: the best ones.
    """
    shown = replace(comparison, rows=comparison.rows[:STYLES])
    drawings = _draw(COMPARISON_KINDS, Subject(shown), _file_name(comparison))
    if len(comparison.rows) <= STYLES:
        return drawings
    limit = f" Only the {STYLES} best of {len(comparison.rows)} methods are shown."
    return [replace(drawing, caption=drawing.caption + limit) for drawing in drawings]


def draw_searches(sweeps: Iterable[Sweep]) -> list[Drawing]:
    """Draw the figures of searches, those on the same stream and of the same length together."""
    groups: dict[tuple[Any, ...], list[Sweep]] = {}
    for sweep in sweeps:
        groups.setdefault((sweep.common.stream, *sweep.length), []).append(sweep)
    return [
        drawing
        for number, ((stream, *_), group) in enumerate(groups.items(), start=1)
        for drawing in _draw(SEARCH_KINDS, group, f"{_slug(stream)}-{number}-validation")
    ]


def _draw(kinds: Iterable[Kind[T]], subject: T, file_name: str) -> list[Drawing]:
    with styled():
        drawn = [kind.draw(f"{kind.name}-{file_name}", subject) for kind in kinds]
        drawings = [drawing for drawing in drawn if drawing is not None]
        for drawing in drawings:
            fix_layout(drawing.figure)
    return drawings


# ---- files ----


def save(drawings: Iterable[Drawing], folder: Path, *, remove_stale: bool = True) -> list[Path]:
    """Write drawings as PDF and PNG to a folder, and return the paths. Stale figures in the folder are removed."""
    paths = []
    for drawing in drawings:
        for name, content in files(drawing).items():
            paths.append(folder / name)
            atomic.write(paths[-1], content)
    own = own_files()
    for path in set(folder.glob("*")) - set(paths):
        if remove_stale and own.fullmatch(path.name):
            path.unlink()
    return paths


def own_files() -> re.Pattern[str]:
    """Return the pattern of the names of figure files."""
    names = [*(kind.name for kind in COMPARISON_KINDS), *(kind.name for kind in SEARCH_KINDS)]
    kinds, endings = ("|".join(map(re.escape, words)) for words in (names, FORMATS))
    return re.compile(rf"({kinds})-.*\d-(test|validation)(-[0-9a-f]{{8}})?\.({endings})")


def _file_name(comparison: Comparison) -> str:
    """Name the files of a comparison. A digest distinguishes streams whose names give the same slug."""
    stream = _slug(comparison.stream)
    parts = [stream, str(len(comparison.tasks)), re.sub(r"[^a-z0-9]+", "-", comparison.evaluate_on.lower())]
    if stream != comparison.stream:
        parts.append(hashlib.sha256(repr((comparison.stream, comparison.tasks)).encode()).hexdigest()[:8])
    return "-".join(parts)


def _slug(stream: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", stream.lower()).strip("-")[-40:]
