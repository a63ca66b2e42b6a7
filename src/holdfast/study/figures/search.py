"""Searches for settings: the final average accuracy of each value, one panel per search."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from holdfast.study.figures.axes import accuracy_axis, panel_grid, seeds_shown
from holdfast.study.figures.drawing import Drawing, Kind
from holdfast.study.figures.style import PALETTE, shorten
from holdfast.study.sweep import Sweep

RANGE = 0.25
"""Accuracies more than this below the best are cut off: they would flatten the rest of the curve."""


def draw(key: str, sweeps: Sequence[Sweep]) -> Drawing:
    """Draw searches on the same stream and of the same length."""
    figure, panels = panel_grid(len(sweeps), min(3, len(sweeps)), row_height=1.5, extra_height=0.3, sharex=False)
    means = [mean for sweep in sweeps for mean in sweep.means]
    low = max(min(means), max(means) - RANGE) - 0.02 if means else 0.0
    mixed = len({sweep.seeds for sweep in sweeps}) > 1
    for axes, sweep in zip(panels, sweeps, strict=True):
        _curve(axes, sweep, low)
        seeds = f", {sweep.seeds} seeds" if mixed and sweep.seeds > 1 else ""
        axes.set_title(shorten(f"{sweep.common.name}: {sweep.over}", 28 - len(seeds)) + seeds)
    panels[0].margins(y=0.08)
    panels[0].set_ylim(bottom=low)
    for axes in panels:
        accuracy_axis(axes)
    figure.supylabel("average accuracy", fontsize=9)
    _, epochs, _ = sweeps[0].length
    return Drawing(
        key,
        f"Searches on {shorten(sweeps[0].common.stream)}",
        "Final average accuracy on validation images for each value of a setting. A filled dot marks the best value, "
        "a triangle a value below the panel, a cross a value with a failed run. Each task was learned for "
        f"{epochs:g} epochs. Dots show {seeds_shown([sweep.seeds for sweep in sweeps])}.",
        figure,
    )


KIND = Kind("search", draw)


def _curve(axes: Axes, sweep: Sweep, low: float) -> None:
    finished = [(tried.value, tried.final) for tried in sweep.curve if tried.final is not None]
    values, means = [value for value, _ in finished], [final.mean for _, final in finished]
    errors = [final.error or 0.0 for _, final in finished]
    axes.errorbar(values, means, errors, color=PALETTE[0], linewidth=1, marker="o", markerfacecolor="white")
    below = [value for value, mean in zip(values, means, strict=True) if mean < low]
    failed = [tried.value for tried in sweep.curve if tried.final is None]
    for marked, marker, color in ((below, "v", PALETTE[0]), (failed, "x", PALETTE[5])):
        axes.plot(marked, [0.04] * len(marked), marker, color=color, transform=axes.get_xaxis_transform())
    if finished:
        axes.plot(sweep.best, max(means), color=PALETTE[0], marker="o", zorder=3)
    _value_axis(axes, [tried.value for tried in sweep.curve])


def _value_axis(axes: Axes, values: Sequence[float]) -> None:
    """Use a logarithmic axis for a wide range of values, and label every one of a few values."""
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
