"""The figures of a comparison: files for a paper, and SVG for a page that may be light or dark.

A method looks the same in all figures of a comparison, and can be told from the others without colour. Names are shown
as they are, whatever is in them. Nothing here needs torch.
"""

import hashlib
import math
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple
from xml.etree import ElementTree

import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter
from numpy.typing import NDArray

from holdfast import atomic
from holdfast.record import Record
from holdfast.study.records import Entry, StudyError
from holdfast.study.sweep import Sweep
from holdfast.study.tables import Comparison, Row

Array = NDArray[np.float64]

WIDTH = 6.4
"""Of all figures, in inches: as wide as a page's text, and legible when a phone shrinks it."""
INK = "#17191d"
"""Of all that is text or axis. It is used for nothing else, and is the page's own colour in SVG."""
PALETTE = (
    *("#2e96de", "#e8620a", "#128a55", "#b736a7", "#6a45f0", "#cf1240", "#6b6f7a"),
    *("#8c8a3a", "#00889c", "#a0583a", "#d96c9f"),
)
"""All at least three to one against white and against a dark page; the first seven apart for all colour vision."""
DASHES = ((), (5, 1.6), (1.3, 1.3), (6, 1.5, 1.3, 1.5))
MARKERS = "os^DvPX*<>ph"
"""Their number and those of `PALETTE` and `DASHES` let no look come twice among the first 132."""
GROUPS = {"all": "all neurons", "most": "the most important tenth", "least": "the least important tenth"}
MEASURES = {"absolute": "change of activation", "relative": "change / the neuron's own spread"}
OURS = re.compile(
    r"(average|tasks|balance|activations|importance|search)-.*\d-(test|validation)(-[0-9a-f]{8})?\.(pdf|png)"
)
"""The names of the files that are written here."""
UNCONTROLLED = 1e6
"""The threshold from which NPC holds nothing back: importance, which has a mean of 1, does not come near it."""

SHOWN_BELOW_THE_BEST = 0.25
"""Of the accuracies in a search; what is lower still does not matter, and would make the rest flat."""

STYLE: dict[str, Any] = {
    "figure.dpi": 72,  # a pixel is a point while figures are made
    "font.size": 9,
    "axes.labelsize": 9,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.titlepad": 5,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "legend.handlelength": 3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "axes.axisbelow": True,
    "axes.facecolor": "none",
    "figure.constrained_layout.use": True,
    "grid.alpha": 0.2,
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.5,
    "lines.markersize": 4.5,
    "text.parse_math": False,
    "pdf.fonttype": 42,
    "svg.fonttype": "none",
    **dict.fromkeys(
        [
            "text.color",
            "axes.edgecolor",
            "axes.labelcolor",
            "xtick.color",
            "ytick.color",
            "grid.color",
            "patch.edgecolor",
        ],
        INK,
    ),
}


@dataclass(frozen=True)
class Drawing:
    """A figure, and what is said about it.

    Args:
        key: the name of its files, unique within a study: small letters, digits and hyphens.
        title: a few words.
        caption: what one sees.
        figure: to be saved.
    """

    key: str
    title: str
    caption: str
    figure: Figure


def draw(comparison: Comparison) -> list[Drawing]:
    """All figures that the runs of a comparison have the data for, in the order in which they are read."""
    looks = {row.name: look(number, row.name) for number, row in enumerate(comparison.rows)}
    watched = {row.name: _watched(row) for row in comparison.rows}
    with _styled():
        found = [part(comparison, looks) for part in (_averages, _tasks, _balance)]
        found += [part(comparison, looks, watched) for part in (_changes, _importance)]
        drawings = [drawing for drawing in found if drawing is not None]
        for drawing in drawings:
            _settle(drawing.figure)
    return drawings


def draw_searches(sweeps: Sequence[Sweep]) -> list[Drawing]:
    """What every value gave in searches for settings: a figure for all those on one stream and of one length."""
    alike: dict[tuple[Any, ...], list[Sweep]] = {}
    for sweep in sweeps:
        alike.setdefault((sweep.common.stream, *sweep.length), []).append(sweep)
    with _styled():
        drawings = [_searches(number, group) for number, group in enumerate(alike.values(), start=1)]
        for drawing in drawings:
            _settle(drawing.figure)
    return drawings


def save(drawings: Iterable[Drawing], folder: Path) -> list[Path]:
    """Write each figure as PDF and PNG, and say where. The same figure makes the same files, byte for byte.

    Figures of ours that are in the folder and are not among these are removed: they show what is no longer so.
    """
    plain: dict[str, dict[str, None]] = {"pdf": {"CreationDate": None}, "png": {"Software": None}}
    paths = []
    for drawing in drawings:
        for ending, metadata in plain.items():
            paths.append(folder / f"{drawing.key}.{ending}")
            atomic.write(paths[-1], _rendered(drawing.figure, format=ending, facecolor="white", metadata=metadata))
    for path in set(folder.glob("*")) - set(paths):
        if OURS.fullmatch(path.name):
            path.unlink()
    return paths


def svg(drawing: Drawing) -> str:
    """The figure as an SVG element for an HTML page: transparent, and in the ink and at the width of the page."""
    root = ElementTree.fromstring(_rendered(drawing.figure, format="svg", facecolor="none", metadata={"Date": None}))
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag.endswith(("}metadata", "}style")):  # the style would reach all of the page
                parent.remove(child)
    for element in root.iter():
        element.tag = _local(element.tag)
        values = {_local(name): _adopted(_local(name), value, drawing.key) for name, value in element.attrib.items()}
        element.attrib.clear()
        element.attrib.update(values)
    for name in ("width", "height", "version"):
        root.attrib.pop(name, None)
    root.attrib |= {"xmlns": "http://www.w3.org/2000/svg", "role": "img", "aria-label": drawing.title}
    root.attrib |= {"stroke-linejoin": "round", "stroke-linecap": "butt"}
    return ElementTree.tostring(root, encoding="unicode")


def _local(name: str) -> str:
    return name.rpartition("}")[2]


def _adopted(name: str, value: str, key: str) -> str:
    """An attribute of an SVG element on a page with others: ids that are its own, and the page's ink."""
    if name == "id":
        return f"{key}-{value}"
    if name == "href" and value.startswith("#"):
        return f"#{key}-{value[1:]}"
    return value.replace("url(#", f"url(#{key}-").replace(INK, "currentColor")


@contextmanager
def _styled() -> Iterator[None]:
    """Matplotlib as the figures need it, whatever the user has set."""
    with matplotlib.style.context(["default", STYLE]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # a page has more fonts than we
        yield


def _settle(figure: Figure) -> None:
    """Lay out a figure for good. Matplotlib would do so each time it is saved, and not always come to the same."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")


def _rendered(figure: Figure, **options: Any) -> bytes:
    content = BytesIO()
    with _styled(), matplotlib.rc_context({"svg.hashsalt": "holdfast"}):
        figure.savefig(content, dpi=200, **options)
    return content.getvalue()


# ---- names and looks ----


class Look(NamedTuple):
    """How a method is drawn."""

    name: str
    colour: str
    dashes: tuple[float, ...]
    marker: str

    @property
    def line(self) -> dict[str, Any]:
        return {"color": self.colour, "linestyle": (0, self.dashes) if self.dashes else "-", "marker": self.marker}


def look(number: int, name: str) -> Look:
    """How the method that comes as `number` in a comparison is drawn."""
    return Look(
        shortened(name),
        PALETTE[number % len(PALETTE)],
        DASHES[number % len(DASHES)],
        MARKERS[number % len(MARKERS)],
    )


def shortened(name: str, length: int = 26) -> str:
    """A name with its middle left out if it is long: names of similar methods differ at their ends.

    >>> shortened("npc rate=0.001 beta=0.7 gain=1.0", 20)
    'npc rate=0.0…ain=1.0'
    """
    shown = "".join(letter if letter.isprintable() else " " for letter in name)
    if len(shown) <= length:
        return shown
    tail = (length - 1) * 2 // 5
    return f"{shown[: length - 1 - tail]}…{shown[len(shown) - tail :]}"


def _key(kind: str, comparison: Comparison) -> str:
    """The name of a figure's files. What a stream's name loses in it, a digest makes up for."""
    stream = _slug(comparison.stream)
    parts = [kind, stream, str(len(comparison.tasks)), re.sub(r"[^a-z0-9]+", "-", comparison.judged_on.lower())]
    if stream != comparison.stream:
        parts.append(hashlib.sha256(repr((comparison.stream, comparison.tasks)).encode()).hexdigest()[:8])
    return "-".join(parts)


def _slug(stream: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", stream.lower()).strip("-")[-40:]


def _means(numbers: Sequence[int]) -> str:
    """What is shown of methods with so many seeds, in words.

    >>> _means([3, 3]), _means([1, 3]), _means([1])
    ('means over 3 seeds', 'means over 1 to 3 seeds', 'of one seed')
    """
    low, high = min(numbers), max(numbers)
    if high == 1:
        return "of one seed"
    return f"means over {high} seeds" if low == high else f"means over {low} to {high} seeds"


def _percent(value: float, _position: int | None = None) -> str:
    return f"{round(100 * value, 6):g}%"


# ---- over time ----


class Series(NamedTuple):
    """A value over time, in tasks: the mean over seeds, and the lowest and the highest of them."""

    time: Array
    mean: Array
    low: Array
    high: Array


def series(lines: Sequence[Sequence[tuple[float, float]]]) -> Series | None:
    """The mean of lines, one per seed, wherever one of them has a point and all of them run.

    >>> series([[(0, 0.0), (2, 1.0)], [(0, 0.5), (1, 1.0), (2, 1.0)]]).mean.tolist()
    [0.25, 0.75, 1.0]
    """
    if not lines or not all(lines):
        return None
    points = [np.array(line, dtype=np.float64).T for line in lines]
    start, end = max(time[0] for time, _ in points), min(time[-1] for time, _ in points)
    times = np.unique(np.concatenate([time for time, _ in points]).round(9))
    times = times[(times >= round(start, 9)) & (times <= round(end, 9))]
    values = np.stack([np.interp(times, time, value) for time, value in points])
    return Series(times, values.mean(axis=0), values.min(axis=0), values.max(axis=0))


def _average_of(row: Row) -> Series | None:
    return series([[(point.time, point.average) for point in record.timeline] for record in row.records])


def _accuracy_of(row: Row, task: int) -> Series | None:
    return series(
        [
            [(point.time, point.accuracy[task]) for point in record.timeline if point.task >= task]
            for record in row.records
        ]
    )


def _averages(comparison: Comparison, looks: Mapping[str, Look]) -> Drawing | None:
    """Figure 2 (a) of the paper."""
    averages = [(row, _average_of(row)) for row in comparison.rows]
    known = [(row, found) for row, found in averages if found is not None and len(found.time) > 1]
    if not known:
        return None
    height = max(2.9, 0.165 * len(known))
    figure = Figure((WIDTH, height + 0.6))
    axes, faint = figure.add_subplot(), min(0.16, 0.8 / len(known))
    for number, (row, found) in enumerate(known):
        style = looks[row.name]
        _line(axes, style, found, number / len(known), every=0.13)
        if len(row.records) > 1:
            axes.fill_between(found.time, found.low, found.high, color=style.colour, alpha=faint, linewidth=0)
    _accuracy_axis(axes)
    _task_axis(axes, comparison.tasks, 3.4)
    axes.set_xlabel("task being learnt")
    axes.set_ylabel("average accuracy on the tasks seen so far")
    ends = [(looks[row.name], float(found.mean[-1])) for row, found in known]
    _name_ends(axes, sorted(ends, key=lambda end: -end[1]), 0.165 / height)
    counts = [len(row.records) for row, _ in known]
    band = "; bands reach from the lowest to the highest seed" if max(counts) > 1 else ""
    return Drawing(
        _key("average", comparison),
        "Average accuracy over time",
        f"The average accuracy on the tasks seen so far, on {comparison.judged_on} images, while one task after "
        f"another is learnt. Lines are {_means(counts)}{band}. Names stand in the order in which the lines end.",
        figure,
    )


def _tasks(comparison: Comparison, looks: Mapping[str, Look]) -> Drawing | None:
    """Figure 2 (b) of the paper."""
    rows, tasks = [row for row in comparison.rows if row.records], len(comparison.tasks)
    if not rows or tasks < 2:
        return None
    columns = 1 if tasks <= 6 else 2 if tasks <= 20 else 3
    figure, panels = _panels(comparison, tasks, columns, each=1.05, more=0.5 + 0.06 * len(rows))
    for task, axes in enumerate(panels):
        axes.axvspan(task, task + 1, color=INK, alpha=0.07, linewidth=0)
        axes.set_title(f"Task {task + 1}: {shortened(comparison.tasks[task], 42 // columns)}")
        for number, row in enumerate(rows):
            found = _accuracy_of(row, task)
            if found is not None:
                _line(axes, looks[row.name], found, number / len(rows), every=0.13 * columns)
    for axes in panels:
        _accuracy_axis(axes)
    figure.supylabel("accuracy on the task", fontsize=9)
    _legend(figure, [looks[row.name] for row in rows])
    return Drawing(
        _key("tasks", comparison),
        "Accuracy on each task",
        f"The accuracy on each task, on {comparison.judged_on} images, from the moment it begins to be learnt; the "
        f"panel is shaded while it is. Lines are {_means([len(row.records) for row in rows])}.",
        figure,
    )


def _panels(comparison: Comparison, count: int, columns: int, *, each: float, more: float) -> tuple[Figure, list[Axes]]:
    """A figure of panels over time, each of them `each` inches high; the lowest of each column names the tasks."""
    figure, panels = _grid(count, columns, each=each, more=more, sharex=True)
    for number, axes in enumerate(panels):
        _task_axis(axes, comparison.tasks, 5.6 / columns)
        axes.tick_params(axis="x", which="both", labelbottom=number + columns >= count)
    figure.supxlabel("task being learnt", fontsize=9)
    return figure, panels


def _grid(count: int, columns: int, *, each: float, more: float, sharex: bool) -> tuple[Figure, list[Axes]]:
    """A figure of panels with one axis of accuracy, in rows that are `each` inches high."""
    height = math.ceil(count / columns)
    figure = Figure((WIDTH, each * height + more))
    grid: list[Axes] = figure.subplots(height, columns, sharex=sharex, sharey=True, squeeze=False).flatten().tolist()
    for axes in grid[count:]:
        axes.remove()
    return figure, grid[:count]


def _line(axes: Axes, style: Look, found: Series, phase: float, every: float) -> None:
    """Draw a line with a marker now and then; `phase` keeps them off those of lines that lie on it."""
    marked = (every * phase, every) if len(found.time) > 1 else None
    axes.plot(found.time, found.mean, **style.line, markevery=marked, label=style.name, zorder=3 - phase, clip_on=False)


def _accuracy_axis(axes: Axes) -> None:
    low, high = axes.get_ylim()
    axes.set_ylim(max(low, -0.02), min(high, 1.015))
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(_percent))
    axes.grid(axis="y")


def _task_axis(axes: Axes, tasks: Sequence[str], inches: float) -> None:
    """Boundaries at whole numbers and names between them, or numbers where names have no room."""
    letters = int(inches / len(tasks) / 0.085)
    if letters >= 10 or all(len(task) <= letters for task in tasks):
        names = [shortened(task, letters) for task in tasks]
    else:
        step = math.ceil(len(tasks) / (inches / 0.22))
        names = [str(task + 1) if task % step == 0 else "" for task in range(len(tasks))]
    axes.set_xlim(0, len(tasks))
    axes.set_xticks(range(len(tasks) + 1), [""] * (len(tasks) + 1))
    axes.set_xticks(np.arange(len(tasks)) + 0.5, names, minor=True)
    axes.tick_params(axis="x", which="minor", length=0)
    axes.grid(axis="x", which="major", alpha=0.35 if letters > 1 else 0.12, linestyle=(0, (1, 2)), linewidth=0.8)


def _name_ends(axes: Axes, ends: Sequence[tuple[Look, float]], gap: float) -> None:
    """Write names beside the ends of lines, the highest first, each with a piece of its line."""
    low, high = axes.get_ylim()
    wanted = [(end - low) / (high - low) for _, end in ends]
    for (style, _), end, place in zip(ends, wanted, spread(wanted, gap), strict=True):
        fixed: dict[str, Any] = {"transform": axes.transAxes, "clip_on": False}
        axes.plot([1.005, 1.03], [end, place], color=INK, alpha=0.5, linewidth=0.6, **fixed)
        axes.plot([1.035, 1.085, 1.135], [place] * 3, **style.line, markevery=[1], **fixed)
        axes.text(1.155, place, style.name, fontsize=8.5, va="center_baseline", transform=axes.transAxes)


def spread(wanted: Sequence[float], gap: float) -> list[float]:
    """Places between 0 and 1 near the wanted ones, which fall, and at least `gap` apart if there is room.

    >>> [round(place, 2) for place in spread([0.5, 0.5, 0.1], 0.2)]
    [0.6, 0.4, 0.1]
    """
    middle = [(down + up) / 2 for down, up in zip(_falling(wanted, gap), _rising(wanted, gap), strict=True)]
    raised = _rising([max(place, 0.0) for place in middle], gap)
    return _falling([min(place, 1.0) for place in raised], gap)


def _falling(wanted: Sequence[float], gap: float) -> list[float]:
    """Each place lowered until it is `gap` below the one before."""
    places: list[float] = []
    for place in wanted:
        places.append(min(place, places[-1] - gap) if places else place)
    return places


def _rising(wanted: Sequence[float], gap: float) -> list[float]:
    """Each place raised until it is `gap` above the one after."""
    return [-place for place in _falling([-place for place in reversed(wanted)], gap)][::-1]


def _legend(figure: Figure, looks: Sequence[Look]) -> Legend:
    longest = max(len(style.name) for style in looks)
    columns = min(4, max(1, int(WIDTH / (0.62 + 0.064 * longest))))
    handles = [Line2D([], [], **style.line) for style in looks]
    return _legend_of(figure, handles, [style.name for style in looks], columns)


def _legend_of(figure: Figure, handles: Sequence[Line2D | Patch], names: Sequence[str], columns: int) -> Legend:
    """A legend above the panels. Names are put in afterwards: matplotlib leaves out those that begin with `_`."""
    legend = figure.legend(handles, ["-"] * len(handles), loc="outside upper center", ncols=columns)
    for text, name in zip(legend.get_texts(), names, strict=True):
        text.set_text(name)
    return legend


# ---- forgetting against plasticity ----


def _balance(comparison: Comparison, looks: Mapping[str, Look]) -> Drawing | None:
    """How much is forgotten against how well tasks are learnt."""
    found = [(row, row.metric("learnt"), row.metric("forgetting")) for row in comparison.rows]
    known = [(row, learnt, lost) for row, learnt, lost in found if learnt is not None and lost is not None]
    if not known:
        return None
    figure = Figure((WIDTH, 4.4))
    axes = figure.add_subplot()
    for row, learnt, lost in reversed(known):
        style = looks[row.name]
        bars: dict[str, Any] = {"xerr": learnt.error, "yerr": lost.error, "elinewidth": 1, "capsize": 2}
        bars["ecolor"] = (style.colour, 0.6)
        dot: dict[str, Any] = {"fmt": style.marker, "color": style.colour, "markersize": 7, "label": style.name}
        axes.errorbar(learnt.mean, lost.mean, **bars, **dot)
    axes.xaxis.set_major_formatter(FuncFormatter(_percent))
    axes.yaxis.set_major_formatter(FuncFormatter(_percent))
    axes.margins(0.12)
    axes.grid()
    axes.set_xlabel("accuracy on a task right after learning it  (more is better →)")
    axes.set_ylabel("(← less is better)  forgetting")
    _name_dots(axes, [Dot(looks[row.name].name, *learnt[:2], *lost[:2]) for row, learnt, lost in known])
    counts = [len(row.records) for row, *_ in known]
    errors = "; bars are standard errors" if max(counts) > 1 else ""
    return Drawing(
        _key("balance", comparison),
        "Forgetting against plasticity",
        "How much is forgotten of the tasks that came before, against how well tasks are learnt when they come: the "
        f"lower right corner is best. Dots are {_means(counts)}{errors}.",
        figure,
    )


class Dot(NamedTuple):
    """A method's place in a plane, with its standard errors."""

    name: str
    x: float
    across: float | None
    y: float
    up: float | None

    def boxes(self, axes: Axes) -> list[Array]:
        """What its mark and its bars cover, in points: left, bottom, right and top of each."""
        place, across, up = np.array([self.x, self.y]), np.array([self.across or 0, 0]), np.array([0, self.up or 0])
        parts = (0 * across, np.array([5, 5])), (across, np.array([1, 2])), (up, np.array([2, 1]))
        ends = [(axes.transData.transform([place - bar, place + bar]), margin) for bar, margin in parts]
        return [np.concatenate([low - margin, high + margin]) for (low, high), margin in ends]


def _name_dots(axes: Axes, dots: Sequence[Dot]) -> None:
    """Write names beside dots, where they cover as little as can be."""
    figure = axes.get_figure(root=True)
    assert isinstance(figure, Figure)
    _settle(figure)  # only now is it known where dots come to lie
    points: Array = axes.transData.transform([(dot.x, dot.y) for dot in dots])
    taken = [_name_corner(axes, points), *(box for dot in dots for box in dot.boxes(axes))]
    for dot, point in zip(dots, points, strict=True):
        note = axes.annotate(dot.name, (dot.x, dot.y), (0, 0), textcoords="offset points", fontsize=8.5)
        note.set(ha="center", va="center")
        extent = note.get_window_extent()
        size = np.array([extent.width + 2, extent.height])
        middle = _free(point, size, np.stack(taken), np.array(axes.get_window_extent().extents))
        low, high = middle - size / 2, middle + size / 2
        taken.append(np.concatenate([low, high]))
        note.set_position(tuple(middle - point))
        near = np.clip(point, low, high) - point
        if np.hypot(*near) > 9:
            lead = {"arrowstyle": "-", "color": INK, "alpha": 0.6, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 4}
            axes.annotate("", (dot.x, dot.y), tuple(near), textcoords="offset points", arrowprops=lead)


def _free(point: Array, size: Array, taken: Array, frame: Array) -> Array:
    """The best middle for a name near a point: the nearer the better, and the less it covers, the better."""

    def cost(distance: float, way: Array) -> float:
        middle = point + way * (size / 2 + distance)
        low, high = middle - size / 2, middle + size / 2
        covered = _overlaps(low, high, taken).sum() + size.prod() - _overlaps(low, high, frame)
        lead = np.linspace(point, np.clip(point, low, high), 12)[3:, None]
        crossed = ((lead > taken[:, :2]) & (lead < taken[:, 2:])).all(axis=2).any() and distance > 9
        return float(4 * covered / size.prod() + distance / 60 + 0.8 * crossed + 0.03 * (way[0] < 0.9))

    ways = [np.array([np.cos(angle), np.sin(angle)]) for angle in np.arange(16) * np.pi / 8]
    places = [(distance, way) for distance in (7, 10, 14, 20, 28, 38, 50, 65, 85) for way in ways]
    distance, way = min(places, key=lambda place: cost(*place))
    middle: Array = point + way * (size / 2 + distance)
    return middle


def _overlaps(low: Array, high: Array, boxes: Array) -> Array:
    """The areas that a box shares with others."""
    sides = np.minimum(high, boxes[..., 2:]) - np.maximum(low, boxes[..., :2])
    areas: Array = np.maximum(sides, 0).prod(axis=-1)
    return areas


def _name_corner(axes: Axes, points: Array) -> Array:
    """Say which way is better, in the corner that is farthest from all dots, and what room that takes."""
    inside = axes.transAxes.inverted().transform(points)
    corners = [np.array(corner) for corner in ((0.06, 0.9), (0.84, 0.9), (0.06, 0.12))]
    x, y = max(corners, key=lambda corner: float(np.abs(inside - corner).max(axis=1).min()))
    arrow = {"arrowstyle": "-|>", "color": INK, "linewidth": 1.2, "mutation_scale": 12, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", (x + 0.05, y - 0.07), (x - 0.03, y + 0.04), xycoords="axes fraction", arrowprops=arrow)
    axes.text(x + 0.02, y + 0.02, "better", transform=axes.transAxes, style="italic")
    room: Array = axes.transAxes.transform([(x - 0.05, y - 0.09), (x + 0.13, y + 0.09)]).flatten()
    return room


# ---- searches for settings ----


def _searches(number: int, sweeps: Sequence[Sweep]) -> Drawing:
    common = sweeps[0].common
    figure, panels = _grid(len(sweeps), min(3, len(sweeps)), each=1.5, more=0.3, sharex=False)
    means = [mean for sweep in sweeps for mean in sweep.means]
    low = max(min(means), max(means) - SHOWN_BELOW_THE_BEST) - 0.02 if means else 0.0
    mixed = len({sweep.seeds for sweep in sweeps}) > 1
    for axes, sweep in zip(panels, sweeps, strict=True):
        _curve(axes, sweep, low)
        seeds = f", {sweep.seeds} seeds" if mixed and sweep.seeds > 1 else ""
        axes.set_title(shortened(f"{sweep.common.name}: {sweep.over}", 28 - len(seeds)) + seeds)
    panels[0].margins(y=0.08)
    panels[0].set_ylim(bottom=low)
    for axes in panels:
        _accuracy_axis(axes)
    figure.supylabel("average accuracy", fontsize=9)
    return Drawing(
        f"search-{_slug(common.stream)}-{number}-validation",
        f"Searches on {shortened(common.stream)}",
        "The average accuracy at the end, on validation images, for each value of a setting. The best is filled; a "
        "triangle lies below the panel; a cross is a value whose run failed. Each task was learnt for "
        f"{common.plan['epochs']:g} epochs. Dots are {_means([sweep.seeds for sweep in sweeps])}.",
        figure,
    )


def _curve(axes: Axes, sweep: Sweep, low: float) -> None:
    ended = [(tried.value, tried.final) for tried in sweep.curve if tried.final is not None]
    values, means = [value for value, _ in ended], [final.mean for _, final in ended]
    errors = [final.error or 0.0 for _, final in ended]
    axes.errorbar(values, means, errors, color=PALETTE[0], linewidth=1, marker="o", markerfacecolor="white")
    below = [value for value, mean in zip(values, means, strict=True) if mean < low]
    failed = [tried.value for tried in sweep.curve if tried.final is None]
    for places, marker, colour in ((below, "v", PALETTE[0]), (failed, "x", PALETTE[5])):
        height = [0.04] * len(places)
        axes.plot(places, height, marker, color=colour, transform=axes.get_xaxis_transform())
    if ended:
        axes.plot(sweep.best, max(means), color=PALETTE[0], marker="o", zorder=3)
    _value_axis(axes, [tried.value for tried in sweep.curve])


def _value_axis(axes: Axes, values: Sequence[float]) -> None:
    """Over decades where values span some, and otherwise as they are; a few values are all named."""
    wide = values[0] > 0 and values[-1] >= 5 * values[0]
    if wide:
        axes.set_xscale("log")
        axes.xaxis.set_minor_formatter(NullFormatter())
    if len(values) <= 5:
        axes.set_xticks(values)
        axes.minorticks_off()
    else:
        axes.xaxis.set_major_locator(LogLocator(numticks=5) if wide else MaxNLocator(4))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


# ---- neurons ----


class Watched(NamedTuple):
    """A run that came to its end and whose neurons were watched."""

    entry: Entry
    record: Record
    times: list[float]
    """When the importance of the neurons was noted, in tasks; from 0 on."""
    layers: dict[str, Array]
    """How important the neurons of each layer were then, `[neuron, time]`; no layers if the method does not know."""
    change: dict[str, Any] | None
    """How activations changed, if the neurons have an importance."""


def _watched(row: Row) -> list[Watched]:
    """The runs of a row that have neurons to show; those whose file is damaged are left out with a warning."""
    found = []
    for entry in row.entries:
        try:
            watched = _neurons(entry)
        except StudyError as error:
            warnings.warn(f"neurons left out: {error}", stacklevel=2)
        else:
            found += [watched] if watched is not None else []
    return found


def _neurons(entry: Entry) -> Watched | None:
    record = entry.record
    if record is None or record.summary is None or entry.neurons is None:
        return None
    try:
        marks, change = entry.neurons["importance"], entry.neurons["change"]
        times = [0.0, *(mark["task"] + mark["step"] / record.steps[mark["task"]] for mark in marks)]
        names = list(marks[0]["layers"]) if marks else []
        layers = {name: np.array([mark["layers"][name] for mark in marks], dtype=np.float64).T for name in names}
        if change is not None and change["importance"] is None:
            change = None
        for part in (change[measure] for measure in MEASURES if change is not None):
            _ = common_edges([part]), [(part["means"][group], part["counts"][group]) for group in GROUPS]
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise StudyError(f"{entry.folder / 'neurons.json'} is no record of neurons ({error!r})") from None
    return Watched(entry, record, times, layers, change)


def _changes(comparison: Comparison, looks: Mapping[str, Look], watched: Mapping[str, list[Watched]]) -> Drawing | None:
    """Figure 3 of the paper, as it is and relative to the spread of each neuron."""
    known = {name: [run.change for run in runs if run.change is not None] for name, runs in watched.items()}
    rows = [(looks[name], changes) for name, changes in known.items() if changes]
    if not rows:
        return None
    figure = Figure((WIDTH, 0.75 + 1.85 * len(rows)))
    grid = figure.subplots(len(rows), len(MEASURES), sharex="col", sharey=True, squeeze=False)
    for column, (measure, words) in enumerate(MEASURES.items()):
        parts = [[change[measure] for change in changes] for _, changes in rows]
        edges = common_edges([first for first, *_ in parts])
        for axes, (style, _), seeds in zip(grid[:, column], rows, parts, strict=True):
            _histograms(axes, style.name, seeds, edges)
        grid[-1, column].set_xlabel(words)
    figure.supylabel("share of the group's values", fontsize=9)
    handles = [Patch(**_group_look(group)) for group in GROUPS]
    _legend_of(figure, handles, list(GROUPS.values()), len(GROUPS))
    return Drawing(
        _key("activations", comparison),
        "Change of activation after the second task",
        "How far the activations of the neurons before the head moved while the second task was learnt, on the same "
        "images of the first task: as they are (left) and relative to each neuron's spread before (right). Bars are "
        "shares of each group's values, of the first seed, and the last has all that is larger. Numbers are "
        f"{_means([len(changes) for _, changes in rows])}, none if in any seed nothing in the group varied before; "
        "triangles show those that the panel reaches.",
        figure,
    )


def _group_look(group: str) -> dict[str, Any]:
    return {
        "all": {"facecolor": (INK, 0.22), "edgecolor": (INK, 0.0), "fill": True, "linewidth": 0},
        "most": {"edgecolor": PALETTE[4], "fill": False, "linewidth": 1.6},
        "least": {"edgecolor": PALETTE[1], "fill": False, "linewidth": 1.4, "linestyle": (0, (2.5, 1.2))},
    }[group]


def _histograms(axes: Axes, name: str, seeds: Sequence[Mapping[str, Any]], edges: Array) -> None:
    """The groups of neurons over each other, one measure of one method, and their means."""
    said = []
    axes.set_yscale("log")
    for group in GROUPS:
        style, found = _group_look(group), shares(seeds[0], group, edges)
        if found is not None:
            axes.stairs(found, edges, label=group, **style)
        mean = mean_of_all([seed["means"][group] for seed in seeds])
        said.append(f"{group} none" if mean is None else f"{group} {mean:.3g}")
        if mean is not None and mean <= edges[-1]:
            colour = style["edgecolor"] if group != "all" else INK
            axes.plot(mean, 1.03, "v", color=colour, transform=axes.get_xaxis_transform(), clip_on=False)
    axes.set_title(f"{name}\nmean: {', '.join(said)}", pad=9)
    axes.set_xlim(0, edges[-1])
    axes.set_ylim(1e-4, 1)
    axes.yaxis.set_major_locator(LogLocator(10, numticks=6))
    axes.yaxis.set_major_formatter(FuncFormatter(_percent))
    axes.yaxis.set_minor_formatter(NullFormatter())


def mean_of_all(values: Sequence[float | None]) -> float | None:
    """The mean of values, none of which may be missing.

    >>> mean_of_all([1.0, 2.0]), mean_of_all([1.0, None])
    (1.5, None)
    """
    known = [value for value in values if value is not None]
    return fmean(known) if len(known) == len(values) else None


def common_edges(distributions: Sequence[Mapping[str, Any]]) -> Array:
    """Edges of bins for all of several histograms: no finer than theirs, and no farther than any of them reaches.

    >>> common_edges([{"top": 2.0, "counts": {"all": [3, 1, 0, 0]}}, {"top": 1.0, "counts": {"all": [1, 1, 1, 1]}}])
    array([0. , 0.5, 1. ])
    """
    tops = [distribution["top"] for distribution in distributions]
    bins = max(1, int(len(distributions[0]["counts"]["all"]) * min(tops) / max(tops) + 1e-9))
    return np.linspace(0, min(tops), bins + 1)


def shares(distribution: Mapping[str, Any], group: str, edges: Array) -> Array | None:
    """A group's histogram in bins with other edges, the last with all that is larger; None if the group is empty.

    >>> shares({"top": 2.0, "counts": {"all": [2, 1, 1, 0]}}, "all", np.array([0, 0.5, 1.5])).tolist()
    [0.5, 0.5]
    """
    counts = np.array(distribution["counts"][group], dtype=np.float64)
    if not counts.sum():
        return None
    own = np.linspace(0, distribution["top"], len(counts) + 1)
    below = np.interp(edges, own, np.concatenate([[0], counts.cumsum() / counts.sum()]))
    below[-1] = 1
    found: Array = np.diff(below)
    return found


def _controlled(entry: Entry) -> bool:
    return bool(entry.run.plan["settings"].get("beta", 0.0) < UNCONTROLLED)


def _importance(
    comparison: Comparison, looks: Mapping[str, Look], watched: Mapping[str, list[Watched]]
) -> Drawing | None:
    """How important the neurons of one run are over time, and which are frozen."""
    runs = [
        (looks[name], run)
        for name, several in watched.items()
        for run in several
        if run.layers and run.record.settings.get("beta") and _controlled(run.entry)
    ]
    if not runs:
        return None
    style, run = runs[0]
    beta = float(run.record.settings["beta"])
    columns = 1 if len(run.layers) <= 4 else 2
    figure, panels = _panels(comparison, len(run.layers), columns, each=1.25, more=1.0)
    for (name, importance), axes in zip(run.layers.items(), panels, strict=True):
        values = importance / beta
        frozen = int((values[:, -1] >= 1).sum())
        axes.set_title(f"{shortened(name, 40 // columns)}: {frozen} of {len(values)} frozen")
        _map(axes, run.times, values, len(comparison.tasks))
    figure.supylabel("neurons, in order of freezing", fontsize=9)
    _bar(figure, panels, beta)
    return Drawing(
        _key("importance", comparison),
        f"Importance of the neurons: {style.name}",
        "How important each neuron is while one task after another is learnt, relative to the threshold "
        f"{beta:g} from which it is frozen. One run, seed {run.record.plan['seed']}: in each layer the neurons that "
        "freeze first lie lowest, and the number is that of those frozen in the end.",
        figure,
    )


def freezing_order(values: Array) -> NDArray[np.intp]:
    """Neurons `[neuron, time]` in the order in which they reach 1; those that never do after them, by importance.

    >>> freezing_order(np.array([[0.2, 0.4], [0.3, 1.0], [1.0, 0.9], [0.2, 0.8]])).tolist()
    [2, 1, 3, 0]
    """
    frozen = values >= 1
    first = np.where(frozen.any(axis=1), frozen.argmax(axis=1), values.shape[1])
    order: NDArray[np.intp] = np.lexsort((-values[:, -1], first))
    return order


def _colours() -> LinearSegmentedColormap:
    """From 0 to twice the threshold, with a leap in hue and in lightness where neurons freeze."""
    steps = [(0.0, "#f4f7fb"), (0.5, "#8fbfe8"), (0.5, "#d4521a"), (1.0, "#6d1a12")]
    return LinearSegmentedColormap.from_list("importance", steps)


def _map(axes: Axes, times: Sequence[float], values: Array, tasks: int) -> None:
    """One layer `[neuron, time]`; what was found at a time stands for the time before it."""
    heights, ordered = np.linspace(0, 1, len(values) + 1), values[freezing_order(values)]
    axes.pcolormesh(times, heights, ordered, cmap=_colours(), norm=Normalize(0, 2), rasterized=True)
    width = 1.2 if tasks <= 12 else 0.6
    for boundary in range(1, tasks):  # light and dark: seen on all colours, whatever the page's ink is
        axes.axvline(boundary, color="#ffffff", linewidth=width)
        axes.axvline(boundary, color="#3b4048", linewidth=width, linestyle=(0, (1, 1.5)))
    axes.grid(visible=False)
    axes.set_yticks([0, 0.5, 1])
    axes.yaxis.set_major_formatter(FuncFormatter(_percent))


def _bar(figure: Figure, axes: Sequence[Axes], beta: float) -> None:
    """The colours, and where neurons freeze."""
    thin = 0.2 / (figure.get_figheight() - 1)
    colours = ScalarMappable(Normalize(0, 2), _colours())
    bar = figure.colorbar(colours, ax=list(axes), location="top", extend="max", aspect=30, fraction=thin)
    bar.set_ticks([0, 0.5, 1, 1.5, 2], labels=["0", "0.5", "1", "1.5", "2"])
    bar.ax.axvline(1, color=INK, linewidth=2)
    for place, word, colour in ((0.5, "plastic", "#1d3a57"), (1.5, "frozen", "#ffffff")):
        bar.ax.text(place, 0.46, word, color=colour, va="center", ha="center", fontsize=8.5)
    bar.set_label(f"importance / threshold ({beta:g})")
