"""The style of all figures: colors, fonts, and a distinct style for each method.

Methods can be told apart without color, and colors work on a light and on a dark page.
"""

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import matplotlib.style
from matplotlib.figure import Figure

WIDTH = 6.4
"""Width of all figures in inches: the width of a page's text, and legible when shrunk to a phone's screen."""
INK = "#17191d"
"""Color of text and axes, used for nothing else. SVG figures replace it with the page's text color."""
PALETTE = (
    *("#2e96de", "#e8620a", "#128a55", "#b736a7", "#6a45f0", "#cf1240", "#6b6f7a"),
    *("#8c8a3a", "#00889c", "#a0583a", "#d96c9f"),
)
"""Colors with a contrast of at least 3:1 to white and to a dark page; the first seven are safe for color blindness."""
DASHES = ((), (5, 1.6), (1.3, 1.3), (6, 1.5, 1.3, 1.5))
MARKERS = "os^DvPX*<>ph"
STYLES = math.lcm(len(PALETTE), len(DASHES), len(MARKERS))
"""The number of distinct styles."""

RC: dict[str, Any] = {
    "figure.dpi": 72,  # one pixel is one point during layout
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
"""Matplotlib parameters."""


@contextmanager
def styled() -> Iterator[None]:
    """Apply `RC` over matplotlib's defaults, whatever the user has set."""
    with matplotlib.style.context(["default", RC]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # browsers have more fonts
        yield


def fix_layout(figure: Figure) -> None:
    """Lay out a figure once. Matplotlib repeats the layout on each save, with slightly different results."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")


class MethodStyle(NamedTuple):
    """The label, color, dashes and marker of a method."""

    label: str
    color: str
    dashes: tuple[float, ...]
    marker: str

    @property
    def line(self) -> dict[str, Any]:
        """Keyword arguments of `Axes.plot`."""
        return {"color": self.color, "linestyle": (0, self.dashes) if self.dashes else "-", "marker": self.marker}


def method_style(number: int, name: str) -> MethodStyle:
    """Return the style of the method in row `number` of a comparison."""
    return MethodStyle(
        shorten(name),
        PALETTE[number % len(PALETTE)],
        DASHES[number % len(DASHES)],
        MARKERS[number % len(MARKERS)],
    )


def shorten(name: str, length: int = 34) -> str:
    """Cut the middle out of a long name: names of similar methods differ at the end.

    >>> shorten("npc rate=0.001 beta=0.7 gain=1.0", 20)
    'npc rate=0.0…ain=1.0'
    """
    printable = "".join(letter if letter.isprintable() else " " for letter in name)
    if len(printable) <= length:
        return printable
    tail = (length - 1) * 2 // 5
    return f"{printable[: length - 1 - tail]}…{printable[len(printable) - tail :]}"
