"""Series over time, and the axes, panels and legends that several kinds of figures share."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import NDArray

from holdfast.study.figures.style import WIDTH, MethodStyle, shorten
from holdfast.study.tables import percent

Array = NDArray[np.float64]

# ---- series ----


class Series(NamedTuple):
    """A value over time, in tasks: the mean over seeds, the lowest seed and the highest seed."""

    time: Array
    mean: Array
    low: Array
    high: Array


def mean_series(lines: Sequence[Sequence[tuple[float, float]]]) -> Series | None:
    """Average lines of `(time, value)` points, one line per seed, over the times that all lines cover.

    >>> mean_series([[(0, 0.0), (2, 1.0)], [(0, 0.5), (1, 1.0), (2, 1.0)]]).mean.tolist()
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


def plot_series(axes: Axes, style: MethodStyle, series: Series, phase: float, every: float) -> None:
    """Plot a mean with a marker every `every` of the width. `phase` keeps the markers of coinciding lines apart."""
    marked = (every * phase, every) if len(series.time) > 1 else None
    options: dict[str, Any] = {"label": style.label, "zorder": 3 - phase, "clip_on": False}
    axes.plot(series.time, series.mean, **style.line, **options, markevery=marked)


def seeds_shown(counts: Sequence[int]) -> str:
    """Describe averages over these numbers of seeds, one number per method.

    >>> seeds_shown([3, 3]), seeds_shown([1, 3]), seeds_shown([1])
    ('means over 3 seeds', 'means over 1 to 3 seeds', 'one seed')
    """
    low, high = min(counts), max(counts)
    if high == 1:
        return "one seed"
    return f"means over {high} seeds" if low == high else f"means over {low} to {high} seeds"


# ---- axes ----


def percent_axis(axis: Axis) -> None:
    """Label an axis of shares in percent."""
    axis.set_major_formatter(FuncFormatter(lambda share, _: f"{percent(share, None)}%"))


def accuracy_axis(axes: Axes) -> None:
    """Make the vertical axis one of accuracy, within 0 and 100%."""
    low, high = axes.get_ylim()
    axes.set_ylim(max(low, -0.02), min(high, 1.015))
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    percent_axis(axes.yaxis)
    axes.grid(axis="y")


def task_axis(axes: Axes, tasks: Sequence[str], inches: float) -> None:
    """Make the horizontal axis one of tasks: boundaries at integers, names between them, or numbers to save space."""
    letters = int(inches / len(tasks) / 0.085)
    if letters >= 10 or all(len(task) <= letters for task in tasks):
        names = [shorten(task, letters) for task in tasks]
    else:
        step = math.ceil(len(tasks) / (inches / 0.22))
        names = [str(task + 1) if task % step == 0 else "" for task in range(len(tasks))]
    axes.set_xlim(0, len(tasks))
    axes.set_xticks(range(len(tasks) + 1), [""] * (len(tasks) + 1))
    axes.set_xticks(np.arange(len(tasks)) + 0.5, names, minor=True)
    axes.tick_params(axis="x", which="minor", length=0)
    axes.grid(axis="x", which="major", alpha=0.35 if letters > 1 else 0.12, linestyle=(0, (1, 2)), linewidth=0.8)


# ---- panels ----


def panel_grid(
    count: int, columns: int, *, row_height: float, extra_height: float, sharex: bool
) -> tuple[Figure, list[Axes]]:
    """Make a figure of `count` panels with a shared vertical axis. Heights are in inches."""
    rows = math.ceil(count / columns)
    figure = Figure((WIDTH, row_height * rows + extra_height))
    panels: list[Axes] = figure.subplots(rows, columns, sharex=sharex, sharey=True, squeeze=False).flatten().tolist()
    for axes in panels[count:]:
        axes.remove()
    return figure, panels[:count]


def time_panels(
    tasks: Sequence[str], count: int, columns: int, *, row_height: float, extra_height: float
) -> tuple[Figure, list[Axes]]:
    """Make a figure of `count` panels over time. The lowest panel of each column names the tasks."""
    figure, panels = panel_grid(count, columns, row_height=row_height, extra_height=extra_height, sharex=True)
    for number, axes in enumerate(panels):
        task_axis(axes, tasks, 5.6 / columns)
        axes.tick_params(axis="x", which="both", labelbottom=number + columns >= count)
    figure.supxlabel("task being learned", fontsize=9)
    return figure, panels


# ---- legends ----


def method_legend(figure: Figure, styles: Sequence[MethodStyle]) -> Legend:
    """Add a legend of methods above the panels."""
    longest = max(len(style.label) for style in styles)
    columns = min(4, max(1, int(WIDTH / (0.62 + 0.064 * longest))))
    handles = [Line2D([], [], **style.line) for style in styles]
    return legend(figure, handles, [style.label for style in styles], columns)


def legend(figure: Figure, handles: Sequence[Line2D | Patch], labels: Sequence[str], columns: int) -> Legend:
    """Add a legend above the panels. Labels are set afterwards: matplotlib omits those that begin with `_`."""
    made = figure.legend(handles, ["-"] * len(handles), loc="outside upper center", ncols=columns)
    for text, label in zip(made.get_texts(), labels, strict=True):
        text.set_text(label)
    return made
