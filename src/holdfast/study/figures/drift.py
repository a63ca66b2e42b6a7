"""Drift of activations while the second task is learned: the paper's Figure 3, absolute and relative."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, NullFormatter

from holdfast.study.figures.axes import Array, legend, percent_axis, seeds_shown
from holdfast.study.figures.drawing import Drawing, Kind
from holdfast.study.figures.neurons import GROUPS, MEASURES, Distribution
from holdfast.study.figures.style import INK, PALETTE, WIDTH
from holdfast.study.figures.subject import Subject

GROUP_STYLES: dict[str, dict[str, Any]] = {
    "all": {"facecolor": (INK, 0.22), "edgecolor": (INK, 0.0), "fill": True, "linewidth": 0},
    "most": {"edgecolor": PALETTE[4], "fill": False, "linewidth": 1.6},
    "least": {"edgecolor": PALETTE[1], "fill": False, "linewidth": 1.4, "linestyle": (0, (2.5, 1.2))},
}


def draw(key: str, subject: Subject) -> Drawing | None:
    by_method = {name: [run.drift for run in runs if run.drift] for name, runs in subject.probed.items()}
    rows = [(subject.styles[name].label, seeds) for name, seeds in by_method.items() if seeds]
    if not rows:
        return None
    figure = Figure((WIDTH, 0.75 + 1.85 * len(rows)))
    grid = figure.subplots(len(rows), len(MEASURES), sharex="col", sharey=True, squeeze=False)
    for column, (measure, label) in enumerate(MEASURES.items()):
        distributions = [[drift[measure] for drift in seeds] for _, seeds in rows]
        edges = common_edges([first for first, *_ in distributions])
        for axes, (method, _), seeds in zip(grid[:, column], rows, distributions, strict=True):
            _histograms(axes, method, seeds, edges)
        grid[-1, column].set_xlabel(label)
    figure.supylabel("share of the group's values", fontsize=9)
    legend(figure, [Patch(**GROUP_STYLES[group]) for group in GROUPS], list(GROUPS.values()), len(GROUPS))
    return Drawing(
        key,
        "Activation drift after the second task",
        "Drift of the activations before the head while the second task is learned, on a fixed set of images of the "
        "first task: absolute (left) and relative to each neuron's standard deviation before the second task (right). "
        "Histograms show each group's values in the first seed; the last bin includes all larger values. Numbers show "
        f"{seeds_shown([len(seeds) for _, seeds in rows])}; 'none' means that in at least one seed no neuron of the "
        "group varied before the second task. Triangles mark the means within the panel.",
        figure,
    )


KIND = Kind("drift", draw)


def _histograms(axes: Axes, method: str, seeds: Sequence[Distribution], edges: Array) -> None:
    """Draw one measure of one method: overlaid histograms of the groups, and their means."""
    summaries = []
    axes.set_yscale("log")
    for group in GROUPS:
        style, heights = GROUP_STYLES[group], shares(seeds[0], group, edges)
        if heights is not None:
            axes.stairs(heights, edges, label=group, **style)
        mean = complete_mean([seed.means[group] for seed in seeds])
        summaries.append(f"{group} none" if mean is None else f"{group} {mean:.3g}")
        if mean is not None and mean <= edges[-1]:
            color = style["edgecolor"] if group != "all" else INK
            axes.plot(mean, 1.03, "v", color=color, transform=axes.get_xaxis_transform(), clip_on=False)
    axes.set_title(f"{method}\nmean: {', '.join(summaries)}", pad=9)
    axes.set_xlim(0, edges[-1])
    axes.set_ylim(1e-4, 1)
    axes.yaxis.set_major_locator(LogLocator(10, numticks=6))
    percent_axis(axes.yaxis)
    axes.yaxis.set_minor_formatter(NullFormatter())


def complete_mean(values: Sequence[float | None]) -> float | None:
    """Return the mean of values, or None if one is missing.

    >>> complete_mean([1.0, 2.0]), complete_mean([1.0, None])
    (1.5, None)
    """
    known = [value for value in values if value is not None]
    return fmean(known) if len(known) == len(values) else None


def common_edges(distributions: Sequence[Distribution]) -> Array:
    """Return bin edges for several histograms: no finer than any of them, up to the lowest of their tops.

    >>> wide, narrow = np.array([3, 1, 0, 0]), np.array([1, 1, 1, 1])
    >>> common_edges([Distribution({}, 2.0, {"all": wide}), Distribution({}, 1.0, {"all": narrow})])
    array([0. , 0.5, 1. ])
    """
    tops = [distribution.top for distribution in distributions]
    bins = max(1, int(len(distributions[0].counts["all"]) * min(tops) / max(tops) + 1e-9))
    return np.linspace(0, min(tops), bins + 1)


def shares(distribution: Distribution, group: str, edges: Array) -> Array | None:
    """Rebin a group's histogram, with all larger values in the last bin. Return None for an empty group.

    >>> shares(Distribution({}, 2.0, {"all": np.array([2, 1, 1, 0])}), "all", np.array([0, 0.5, 1.5])).tolist()
    [0.5, 0.5]
    """
    counts = distribution.counts[group]
    if not counts.sum():
        return None
    own_edges = np.linspace(0, distribution.top, len(counts) + 1)
    below = np.interp(edges, own_edges, np.concatenate([[0], counts.cumsum() / counts.sum()]))
    below[-1] = 1
    heights: Array = np.diff(below)
    return heights
