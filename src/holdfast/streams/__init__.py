"""Streams of tasks: sources of images, their tasks and batches."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from holdfast.errors import alternatives
from holdfast.streams.published import expand_home
from holdfast.streams.sources import DataError, Source, folder_options, load, whole_option
from holdfast.streams.tasks import Frame, Stream, permuted, rotated, split

ICIFAR100_FRAME = Frame(32, padding=4, mirror=True, fill="mean")


def _digits(source: Source, tasks: int | None) -> Stream:
    return split(source, Frame(8), per_task=2, tasks=tasks)


def _imnist(source: Source, tasks: int | None) -> Stream:
    return split(source, Frame(32, padding=4), per_task=2, tasks=tasks)


def _icifar100(source: Source, tasks: int | None) -> Stream:
    return split(source, ICIFAR100_FRAME, per_task=10, tasks=tasks)


def _pmnist(source: Source, tasks: int | None) -> Stream:
    return permuted(source, Frame(32, padding=2), tasks=10 if tasks is None else tasks)


def _rmnist(source: Source, tasks: int | None) -> Stream:
    return rotated(source, Frame(32, padding=2), angles=range(0, 180, 18)[:tasks])


def _folder(source: Source, tasks: int | None) -> Stream:
    """The stream of a folder, with the options in its name."""
    _, given = folder_options(source.name)
    per_task = whole_option(source.name, given, "per_task", 2)
    order = _class_order(source, given["order"]) if "order" in given else None
    return split(source, Frame(source.train.pixels.shape[2]), per_task=per_task, tasks=tasks, order=order)


def _class_order(source: Source, text: str) -> list[int] | int:
    """The indices of classes given by name, or the seed of a random order."""
    if text.isdecimal():
        return int(text)
    for name in (names := text.split(",")):
        if name not in source.classes:
            known = alternatives(name, source.classes)
            raise DataError(f"the order in {source.name!r} has no class {name!r}; available: {known}")
    if left_out := [name for name in source.classes if name not in names]:
        raise DataError(f"the order in {source.name!r} leaves out the class {left_out[0]!r}; add it")
    return [source.classes.index(name) for name in names]


STREAMS: dict[str, tuple[str, Callable[[Source, int | None], Stream]]] = {
    "digits": ("digits", _digits),
    "imnist": ("mnist", _imnist),
    "icifar100": ("cifar100", _icifar100),
    "pmnist": ("mnist", _pmnist),
    "rmnist": ("mnist", _rmnist),
}
"""By stream name: the source and the function that builds the stream."""


def build_stream(name: str, data: Path | None = None, *, tasks: int | None = None) -> Stream:
    """Build a stream by name, or from a folder of images as "folder:PATH", in tasks of two classes.

    Args:
        name: a name in `STREAMS`, or "folder:PATH", with options as in "folder:PATH?per_task=5&order=0": the number of
            classes per task, and the order of the classes, by name, as in "order=cat,dog,bird", or the seed of a random
            order.
        data: the folder to search first for data sets.
        tasks: the number of tasks. By default all that the stream has.
    """
    if name not in STREAMS and not name.startswith("folder:"):
        raise unknown_stream(name)
    origin, make = STREAMS.get(name, (name, _folder))
    return make(load(origin, data), tasks)


def unknown_stream(name: Any) -> ValueError:
    """The error about a name that is not that of a stream. A folder must be named as one.

    >>> print(unknown_stream("digit"))
    unknown stream 'digit'; available: digits, imnist, icifar100, pmnist, rmnist, folder:PATH: did you mean digits?
    """
    if isinstance(name, str) and name and expand_home(name).is_dir():
        return ValueError(f"unknown stream {name!r}; for the images in this folder, write folder:{name}")
    return ValueError(f"unknown stream {name!r}; available: {alternatives(str(name), [*STREAMS, 'folder:PATH'])}")
