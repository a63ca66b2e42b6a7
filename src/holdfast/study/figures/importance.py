"""Importance of the neurons of one run over time, relative to the threshold of freezing."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from numpy.typing import NDArray

from holdfast.study.figures.axes import Array, percent_axis, time_panels
from holdfast.study.figures.drawing import Drawing, Kind
from holdfast.study.figures.style import INK, shorten
from holdfast.study.figures.subject import Subject

UNCONTROLLED = 1e6
"""Thresholds from here on freeze no neuron: importance has a mean of 1."""


def draw(key: str, subject: Subject) -> Drawing | None:
    candidates = [
        (subject.styles[name].label, run, beta)
        for name, runs in subject.probed.items()
        for run in runs
        if run.importance and 0 < (beta := threshold(run.settings) or 0) < UNCONTROLLED
    ]
    if not candidates:
        return None
    method, run, beta = candidates[0]
    tasks = subject.comparison.tasks
    columns = 1 if len(run.importance) <= 4 else 2
    figure, panels = time_panels(tasks, len(run.importance), columns, row_height=1.25, extra_height=1.0)
    for (layer, importance), axes in zip(run.importance.items(), panels, strict=True):
        values = importance / beta
        frozen = int((values[:, -1] >= 1).sum())
        axes.set_title(f"{shorten(layer, 40 // columns)}: {frozen} of {len(values)} frozen")
        _map(axes, run.times, values, len(tasks))
    figure.supylabel("neurons, in order of freezing", fontsize=9)
    _color_bar(figure, panels, beta)
    return Drawing(
        key,
        f"Neuron importance: {method}",
        "Importance of each neuron as the tasks are learned one after another, relative to the threshold "
        f"{beta:g} at which a neuron freezes. One run, seed {run.plan.seed}. In each layer, neurons are "
        "ordered from bottom to top by the time at which they freeze. Counts are of neurons frozen at the end.",
        figure,
    )


KIND = Kind("importance", draw)


def threshold(settings: Mapping[str, Any]) -> float | None:
    """The importance at which neurons freeze: the setting `beta` of NPC or DPC, alone or in a combination.

    >>> threshold({"beta": 0.5}), threshold({"lwf.weight": 0.1, "npc.beta": 0.7}), threshold({"strength": 1.0})
    (0.5, 0.7, None)
    """
    betas = [value for name, value in settings.items() if name == "beta" or name.endswith(".beta")]
    return float(betas[0]) if len(betas) == 1 and isinstance(betas[0], int | float) else None


def freezing_order(values: Array) -> NDArray[np.intp]:
    """Sort neurons `[neuron, time]` by the time at which they reach 1; the others follow by final importance.

    >>> freezing_order(np.array([[0.2, 0.4], [0.3, 1.0], [1.0, 0.9], [0.2, 0.8]])).tolist()
    [2, 1, 3, 0]
    """
    frozen = values >= 1
    first = np.where(frozen.any(axis=1), frozen.argmax(axis=1), values.shape[1])
    order: NDArray[np.intp] = np.lexsort((-values[:, -1], first))
    return order


def _colors() -> LinearSegmentedColormap:
    """Return colors from 0 to twice the threshold, with a jump in hue and lightness at the threshold."""
    steps = [(0.0, "#f4f7fb"), (0.5, "#8fbfe8"), (0.5, "#d4521a"), (1.0, "#6d1a12")]
    return LinearSegmentedColormap.from_list("importance", steps)


def _map(axes: Axes, times: Sequence[float], values: Array, tasks: int) -> None:
    """Draw one layer `[neuron, time]`. A value fills the interval that ends at its time."""
    heights, ordered = np.linspace(0, 1, len(values) + 1), values[freezing_order(values)]
    axes.pcolormesh(times, heights, ordered, cmap=_colors(), norm=Normalize(0, 2), rasterized=True)
    width = 1.2 if tasks <= 12 else 0.6
    for boundary in range(1, tasks):  # light and dark, to be visible on all colors
        axes.axvline(boundary, color="#ffffff", linewidth=width)
        axes.axvline(boundary, color="#3b4048", linewidth=width, linestyle=(0, (1, 1.5)))
    axes.grid(visible=False)
    axes.set_yticks([0, 0.5, 1])
    percent_axis(axes.yaxis)


def _color_bar(figure: Figure, axes: Sequence[Axes], beta: float) -> None:
    """Add a bar of the colors, marked at the threshold."""
    thickness = 0.2 / (figure.get_figheight() - 1)
    colors = ScalarMappable(Normalize(0, 2), _colors())
    bar = figure.colorbar(colors, ax=list(axes), location="top", extend="max", aspect=30, fraction=thickness)
    bar.set_ticks([0, 0.5, 1, 1.5, 2], labels=["0", "0.5", "1", "1.5", "2"])
    bar.ax.axvline(1, color=INK, linewidth=2)
    for x, word, color in ((0.5, "plastic", "#1d3a57"), (1.5, "frozen", "#ffffff")):
        bar.ax.text(x, 0.46, word, color=color, va="center", ha="center", fontsize=8.5)
    bar.set_label(f"importance / threshold ({beta:g})")
