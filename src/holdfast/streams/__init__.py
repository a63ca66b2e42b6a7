"""Streams of tasks: sources of images, tasks made of them, and their batches."""

from collections.abc import Callable
from pathlib import Path

from holdfast.streams.sources import Source, load
from holdfast.streams.tasks import Frame, Stream, permuted, rotated, split


def _digits(source: Source) -> Stream:
    return split(source, Frame(8), per_task=2)


def _imnist(source: Source) -> Stream:
    return split(source, Frame(32, padding=4), per_task=2)


def _icifar100(source: Source) -> Stream:
    return split(source, Frame(32, padding=4, mirror=True, fill="mean"), per_task=10)


def _pmnist(source: Source) -> Stream:
    return permuted(source, Frame(32, padding=2), tasks=10)


def _rmnist(source: Source) -> Stream:
    return rotated(source, Frame(32, padding=2), angles=range(0, 180, 18))


STREAMS: dict[str, tuple[str, Callable[[Source], Stream]]] = {
    "digits": ("digits", _digits),
    "imnist": ("mnist", _imnist),
    "icifar100": ("cifar100", _icifar100),
    "pmnist": ("mnist", _pmnist),
    "rmnist": ("mnist", _rmnist),
}
"""The streams by name: what they are made of, and how."""


def build_stream(name: str, data: Path | None = None, *, tasks: int | None = None) -> Stream:
    """A stream by name, or of `folder:PATH` in tasks of two classes; only its first `tasks` if given."""
    if name.startswith("folder:"):
        stream = split(source := load(name, data), Frame(source.train.pixels.shape[2]), per_task=2)
    elif name in STREAMS:
        origin, make = STREAMS[name]
        stream = make(load(origin, data))
    else:
        raise ValueError(f"there is no stream {name!r}; there are {', '.join(STREAMS)} and folder:PATH")
    return stream.first(tasks) if tasks is not None else stream
