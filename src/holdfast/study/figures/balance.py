"""Forgetting versus plasticity, one dot per method."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from holdfast.study.figures.axes import Array, percent_axis, seeds_shown
from holdfast.study.figures.drawing import Drawing, Kind
from holdfast.study.figures.style import INK, WIDTH, MethodStyle, fix_layout
from holdfast.study.figures.subject import Subject
from holdfast.study.tables import Estimate

DISTANCES = (7, 10, 14, 20, 28, 38, 50, 65, 85)
"""Candidate distances of a label from its dot, in points."""


def draw(key: str, subject: Subject) -> Drawing | None:
    metrics = [(row, row.metric("learned"), row.metric("forgetting")) for row in subject.comparison.rows]
    known = [(row, x, y) for row, x, y in metrics if x is not None and y is not None]
    if not known:
        return None
    dots = [Dot(subject.styles[row.name], x, y) for row, x, y in known]
    figure = Figure((WIDTH, 4.4))
    axes = figure.add_subplot()
    for dot in reversed(dots):
        dot.plot(axes)
    percent_axis(axes.xaxis)
    percent_axis(axes.yaxis)
    axes.margins(0.12)
    axes.grid()
    axes.set_xlabel("accuracy on a task right after learning it  (higher is better →)")
    axes.set_ylabel("(← lower is better)  forgetting")
    _label_dots(axes, dots)
    counts = [len(row.records) for row, *_ in known]
    errors = "; bars are standard errors" if max(counts) > 1 else ""
    return Drawing(
        key,
        "Forgetting versus plasticity",
        "Forgetting of earlier tasks versus accuracy on each task right after learning it. The lower right corner is "
        f"best. Dots show {seeds_shown(counts)}{errors}.",
        figure,
    )


KIND = Kind("balance", draw)


class Dot(NamedTuple):
    """A method in the plane of two metrics."""

    style: MethodStyle
    x: Estimate
    y: Estimate

    @property
    def position(self) -> tuple[float, float]:
        return self.x.mean, self.y.mean

    def plot(self, axes: Axes) -> None:
        style = self.style
        marker: dict[str, Any] = {"fmt": style.marker, "color": style.color, "markersize": 7, "label": style.label}
        bars: dict[str, Any] = {"elinewidth": 1, "capsize": 2, "ecolor": (style.color, 0.6)}
        axes.errorbar(self.x.mean, self.y.mean, self.y.error, self.x.error, **marker, **bars)

    def boxes(self, axes: Axes) -> list[Array]:
        """Return the boxes of the marker and the error bars, in points: left, bottom, right, top."""
        across, up = np.array([self.x.error or 0, 0]), np.array([0, self.y.error or 0])
        parts = (0 * across, np.array([5, 5])), (across, np.array([1, 2])), (up, np.array([2, 1]))
        center = np.array(self.position)
        ends = [(axes.transData.transform([center - bar, center + bar]), margin) for bar, margin in parts]
        return [np.concatenate([low - margin, high + margin]) for (low, high), margin in ends]


def _label_dots(axes: Axes, dots: Sequence[Dot]) -> None:
    """Write labels beside dots with as little overlap as possible."""
    figure = axes.get_figure(root=True)
    assert isinstance(figure, Figure)
    fix_layout(figure)  # determines the positions of the dots on the page
    points: Array = axes.transData.transform([dot.position for dot in dots])
    occupied = [_label_corner(axes, points), *(box for dot in dots for box in dot.boxes(axes))]
    for dot, point in zip(dots, points, strict=True):
        label = axes.annotate(dot.style.label, dot.position, (0, 0), textcoords="offset points", fontsize=8.5)
        label.set(ha="center", va="center")
        extent = label.get_window_extent()
        size = np.array([extent.width + 2, extent.height])
        center = _label_center(point, size, np.stack(occupied), np.array(axes.get_window_extent().extents))
        low, high = center - size / 2, center + size / 2
        occupied.append(np.concatenate([low, high]))
        label.set_position(tuple(center - point))
        nearest = np.clip(point, low, high) - point
        if np.hypot(*nearest) > 9:
            leader = {"arrowstyle": "-", "color": INK, "alpha": 0.6, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 4}
            axes.annotate("", dot.position, tuple(nearest), textcoords="offset points", arrowprops=leader)


def _label_center(point: Array, size: Array, occupied: Array, frame: Array) -> Array:
    """Find the best center for a label: close to its point, within the frame, and with little overlap."""

    def cost(distance: float, direction: Array) -> float:
        center = point + direction * (size / 2 + distance)
        low, high = center - size / 2, center + size / 2
        covered = _overlaps(low, high, occupied).sum() + size.prod() - _overlaps(low, high, frame)
        leader = np.linspace(point, np.clip(point, low, high), 12)[3:, None]
        crossed = ((leader > occupied[:, :2]) & (leader < occupied[:, 2:])).all(axis=2).any() and distance > 9
        return float(4 * covered / size.prod() + distance / 60 + 0.8 * crossed + 0.03 * (direction[0] < 0.9))

    directions = [np.array([np.cos(angle), np.sin(angle)]) for angle in np.arange(16) * np.pi / 8]
    candidates = [(distance, direction) for distance in DISTANCES for direction in directions]
    distance, direction = min(candidates, key=lambda candidate: cost(*candidate))
    center: Array = point + direction * (size / 2 + distance)
    return center


def _overlaps(low: Array, high: Array, boxes: Array) -> Array:
    """Return the areas that a box shares with others."""
    sides = np.minimum(high, boxes[..., 2:]) - np.maximum(low, boxes[..., :2])
    areas: Array = np.maximum(sides, 0).prod(axis=-1)
    return areas


def _label_corner(axes: Axes, points: Array) -> Array:
    """Draw an arrow labeled "better" in the corner farthest from all dots, and return its box."""
    inside = axes.transAxes.inverted().transform(points)
    corners = [np.array(corner) for corner in ((0.06, 0.9), (0.84, 0.9), (0.06, 0.12))]
    x, y = max(corners, key=lambda corner: float(np.abs(inside - corner).max(axis=1).min()))
    arrow = {"arrowstyle": "-|>", "color": INK, "linewidth": 1.2, "mutation_scale": 12, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", (x + 0.05, y - 0.07), (x - 0.03, y + 0.04), xycoords="axes fraction", arrowprops=arrow)
    axes.text(x + 0.02, y + 0.02, "better", transform=axes.transAxes, style="italic")
    box: Array = axes.transAxes.transform([(x - 0.05, y - 0.09), (x + 0.13, y + 0.09)]).flatten()
    return box
