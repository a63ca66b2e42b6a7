"""Drawings and kinds of drawings, and their output as PDF, PNG and SVG."""

from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from typing import Any, Generic, TypeVar
from xml.etree import ElementTree

import matplotlib
from matplotlib.figure import Figure

from holdfast.study.figures.style import INK, styled

T = TypeVar("T")

FORMATS: dict[str, dict[str, None]] = {"pdf": {"CreationDate": None}, "png": {"Software": None}}
"""The file formats, each with the metadata to omit so that files are reproducible."""


@dataclass(frozen=True)
class Drawing:
    """A figure with its title and caption.

    Args:
        key: base name of its files, unique within a study: lowercase letters, digits and hyphens.
        title: a few words.
        caption: one to five sentences.
        figure: the matplotlib figure.
    """

    key: str
    title: str
    caption: str
    figure: Figure


@dataclass(frozen=True)
class Kind(Generic[T]):
    """A kind of figure.

    Args:
        name: first part of the names of its files: lowercase letters.
        draw: takes a drawing's key and its subject, and returns the drawing, or None if the subject lacks the data.
    """

    name: str
    draw: Callable[[str, T], Drawing | None]


def files(drawing: Drawing) -> dict[str, bytes]:
    """Render a drawing for print and return the contents of its files by name. Equal drawings give equal bytes."""
    return {
        f"{drawing.key}.{ending}": _render(drawing.figure, format=ending, facecolor="white", metadata=metadata)
        for ending, metadata in FORMATS.items()
    }


def svg(drawing: Drawing) -> str:
    """Render a drawing as an SVG element for an HTML page: transparent, with the page's text color and width."""
    root = ElementTree.fromstring(_render(drawing.figure, format="svg", facecolor="none", metadata={"Date": None}))
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag.endswith(("}metadata", "}style")):  # a style element would apply to the whole page
                parent.remove(child)
    for element in root.iter():
        element.tag = _local(element.tag)
        values = {_local(name): _adapt(_local(name), value, drawing.key) for name, value in element.attrib.items()}
        element.attrib.clear()
        element.attrib.update(values)
    for name in ("width", "height", "version"):
        root.attrib.pop(name, None)
    root.attrib |= {"xmlns": "http://www.w3.org/2000/svg", "role": "img", "aria-label": drawing.title}
    root.attrib |= {"stroke-linejoin": "round", "stroke-linecap": "butt"}
    return ElementTree.tostring(root, encoding="unicode")


def _local(name: str) -> str:
    """Strip the XML namespace."""
    return name.rpartition("}")[2]


def _adapt(name: str, value: str, key: str) -> str:
    """Adapt an SVG attribute to a page with several figures: unique ids, and the page's text color."""
    if name == "id":
        return f"{key}-{value}"
    if name == "href" and value.startswith("#"):
        return f"#{key}-{value[1:]}"
    return value.replace("url(#", f"url(#{key}-").replace(INK, "currentColor")


def _render(figure: Figure, **options: Any) -> bytes:
    content = BytesIO()
    with styled(), matplotlib.rc_context({"svg.hashsalt": "holdfast"}):
        figure.savefig(content, dpi=200, **options)
    return content.getvalue()
