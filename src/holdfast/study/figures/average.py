"""Average accuracy over time: the paper's Figure 2 (a)."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from holdfast.study.figures.axes import Series, accuracy_axis, mean_series, plot_series, seeds_shown, task_axis
from holdfast.study.figures.drawing import Drawing, Kind
from holdfast.study.figures.style import INK, WIDTH, MethodStyle
from holdfast.study.figures.subject import Subject
from holdfast.study.tables import Row

LINE_HEIGHT = 0.165
"""Of the names beside the lines, in inches."""


def draw(key: str, subject: Subject) -> Drawing | None:
    comparison, styles = subject.comparison, subject.styles
    averages = [(row, _average(row)) for row in comparison.rows]
    known = [(row, series) for row, series in averages if series is not None and len(series.time) > 1]
    if not known:
        return None
    height = max(2.9, LINE_HEIGHT * len(known))
    figure = Figure((WIDTH, height + 0.6))
    axes, alpha = figure.add_subplot(), min(0.16, 0.8 / len(known))
    for number, (row, series) in enumerate(known):
        style = styles[row.name]
        plot_series(axes, style, series, number / len(known), every=0.13)
        if len(row.records) > 1:
            axes.fill_between(series.time, series.low, series.high, color=style.color, alpha=alpha, linewidth=0)
    accuracy_axis(axes)
    task_axis(axes, comparison.tasks, 3.4)
    axes.set_xlabel("task being learned")
    axes.set_ylabel("average accuracy on the tasks seen so far")
    ends = [(styles[row.name], float(series.mean[-1])) for row, series in known]
    _label_ends(axes, sorted(ends, key=lambda end: -end[1]), LINE_HEIGHT / height)
    counts = [len(row.records) for row, _ in known]
    band = "; bands span the lowest to the highest seed" if max(counts) > 1 else ""
    return Drawing(
        key,
        "Average accuracy over time",
        f"Average accuracy on the tasks seen so far, on {comparison.evaluate_on} images, as the tasks are learned one "
        f"after another. Lines show {seeds_shown(counts)}{band}. Methods are listed from the highest final value to "
        "the lowest.",
        figure,
    )


KIND = Kind("average", draw)


def _average(row: Row) -> Series | None:
    return mean_series([[(point.time, point.average) for point in record.timeline] for record in row.records])


def _label_ends(axes: Axes, ends: Sequence[tuple[MethodStyle, float]], gap: float) -> None:
    """Write labels beside the ends of lines, the highest first, each with a sample of its line."""
    low, high = axes.get_ylim()
    heights = [(end - low) / (high - low) for _, end in ends]
    for (style, _), end, height in zip(ends, heights, spread(heights, gap), strict=True):
        fixed: dict[str, Any] = {"transform": axes.transAxes, "clip_on": False}
        axes.plot([1.005, 1.03], [end, height], color=INK, alpha=0.5, linewidth=0.6, **fixed)
        axes.plot([1.035, 1.085, 1.135], [height] * 3, **style.line, markevery=[1], **fixed)
        axes.text(1.155, height, style.label, fontsize=8.5, va="center_baseline", transform=axes.transAxes)


def spread(heights: Sequence[float], gap: float) -> list[float]:
    """Move descending heights apart by at least `gap`, within 0 and 1 if there is room.

    >>> [round(height, 2) for height in spread([0.5, 0.5, 0.1], 0.2)]
    [0.6, 0.4, 0.1]
    """
    centered = [(down + up) / 2 for down, up in zip(_lowered(heights, gap), _raised(heights, gap), strict=True)]
    raised = _raised([max(height, 0.0) for height in centered], gap)
    return _lowered([min(height, 1.0) for height in raised], gap)


def _lowered(heights: Sequence[float], gap: float) -> list[float]:
    """Lower each height to at least `gap` below its predecessor."""
    lowered: list[float] = []
    for height in heights:
        lowered.append(min(height, lowered[-1] - gap) if lowered else height)
    return lowered


def _raised(heights: Sequence[float], gap: float) -> list[float]:
    """Raise each height to at least `gap` above its successor."""
    return [-height for height in _lowered([-height for height in reversed(heights)], gap)][::-1]
