"""Streams: the images of a source as one task after another."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Literal

import torch
from torch import Tensor

from holdfast.streams.sources import Source


@dataclass(frozen=True)
class Frame:
    """How an image becomes an input: padded, cropped to a square, perhaps mirrored; centred and as it is at test."""

    size: int
    padding: int = 0
    mirror: bool = False
    fill: Literal["black", "mean"] = "black"
    """What the padding is: black, or the mean colour, which is no signal to a network with normalised inputs."""


@dataclass(frozen=True)
class Task:
    """A part of a stream's images, the output nodes that tell its classes apart, and what is done to every image.

    `train`, `validation` and `test` are places in the stream's images. Labels count within the task.
    """

    name: str
    active: tuple[int, ...]
    train: Tensor
    validation: Tensor
    test: Tensor
    permutation: Tensor | None = None
    angle: float = 0.0


@dataclass(frozen=True)
class Stream:
    """All images of all tasks, the training and the test images together, with their labels within the task."""

    name: str
    pixels: Tensor
    labels: Tensor
    tasks: tuple[Task, ...]
    frame: Frame
    outputs: int
    mean: Tensor
    std: Tensor
    epoch: int
    """Training images of the whole source: the length of an epoch as the paper counts it."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of one input: channels, height, width."""
        return self.pixels.shape[1], self.frame.size, self.frame.size

    @property
    def fingerprint(self) -> str:
        """Tells streams apart that have the same name: by their tasks, labels and images."""
        found = hashlib.sha256(repr(self.frame).encode())
        for task in self.tasks:
            found.update(repr((task.active, task.angle)).encode())
            for places in (task.train, task.validation, task.test, task.permutation):
                found.update(b"-" if places is None else places.numpy().tobytes())
        for values in (self.labels, self.pixels):
            found.update(values.contiguous().numpy().tobytes())
        return found.hexdigest()[:16]

    def first(self, tasks: int) -> "Stream":
        """The stream of the first tasks only."""
        if not 1 <= tasks <= len(self.tasks):
            raise ValueError(f"{self.name} has {len(self.tasks)} tasks, so the first {tasks} cannot be taken")
        return replace(self, tasks=self.tasks[:tasks])


def split(
    source: Source,
    frame: Frame,
    *,
    per_task: int,
    tasks: int | None = None,
    order: Sequence[int] | int | None = None,
    validation: float = 0.1,
    seed: int = 0,
) -> Stream:
    """One task after another of `per_task` classes each. The model has one output for every class of the source.

    Args:
        source: the images.
        frame: how they become inputs.
        per_task: how many classes a task has.
        tasks: how many tasks to make; as many as there are classes for if not given.
        order: the classes in the order in which they come, or the seed of a random order; as they are if not given.
        validation: the share of each class's training images that is set aside for choosing settings.
        seed: of the choice of the validation images.
    """
    classes = len(source.classes)
    chosen = _ordered(classes, order)
    count = len(chosen) // max(per_task, 1) if tasks is None else tasks
    if per_task < 2 or count < 1 or count * per_task > len(chosen):
        raise ValueError(
            f"{source.name} has {len(chosen)} classes, which do not make {count} tasks of {per_task}; a task needs two"
        )
    made = []
    within = torch.full((classes,), -1)
    for number in range(count):
        active = chosen[number * per_task : (number + 1) * per_task]
        within[active] = torch.arange(per_task)
        name = ", ".join(source.classes[c] for c in active)
        made.append(_task(name, source, active, validation, seed))
    return _stream(f"{source.name} in {count} x {per_task}", source, within, made, frame)


def permuted(source: Source, frame: Frame, *, tasks: int, validation: float = 0.1, seed: int = 0) -> Stream:
    """All classes in every task, with the pixels of all images in another order in each; as they are in the first."""
    every = tuple(range(len(source.classes)))
    generator = torch.Generator().manual_seed(seed)
    base = _task("as they are", source, every, validation, seed)
    if tasks < 1:
        raise ValueError(f"a stream needs at least one task, got {tasks}")
    orders = [torch.randperm(frame.size**2, generator=generator) for _ in range(tasks - 1)]
    made = [base, *(replace(base, name=f"permutation {i}", permutation=order) for i, order in enumerate(orders, 1))]
    return _stream(f"{source.name} permuted", source, torch.arange(len(every)), made, frame)


def rotated(source: Source, frame: Frame, *, angles: Sequence[float], validation: float = 0.1, seed: int = 0) -> Stream:
    """All classes in every task, with all images turned by another angle in each, in degrees to the left."""
    every = tuple(range(len(source.classes)))
    base = _task("", source, every, validation, seed)
    made = [replace(base, name=f"{angle:g} degrees", angle=float(angle)) for angle in angles]
    return _stream(f"{source.name} rotated", source, torch.arange(len(every)), made, frame)


def _ordered(classes: int, order: Sequence[int] | int | None) -> list[int]:
    if order is None:
        return list(range(classes))
    if isinstance(order, Integral):
        return torch.randperm(classes, generator=torch.Generator().manual_seed(int(order))).tolist()
    assert isinstance(order, Sequence)
    chosen = [int(c) for c in order]
    if len(set(chosen)) < len(chosen) or not set(chosen) <= set(range(classes)):
        raise ValueError(f"order must name classes from 0 to {classes - 1}, each once; got {chosen}")
    return chosen


def _task(name: str, source: Source, classes: Sequence[int], validation: float, seed: int) -> Task:
    if not 0 <= validation < 1:
        raise ValueError(f"validation is a share of the training images, at least 0 and below 1; got {validation}")
    train, aside = [], []
    for c in classes:
        places = (source.train.labels == c).nonzero().flatten()
        test = (source.test.labels == c).sum()
        if len(places) < 2 or test == 0:
            raise ValueError(
                f"class {source.classes[c]!r} of {source.name} has too few images: {len(places)} and {test}"
            )
        generator = torch.Generator().manual_seed(seed * 1_000_003 + c)  # each class's own, whatever task it is in
        places = places[torch.randperm(len(places), generator=generator)]
        held = min(round(validation * len(places)), len(places) - 1)
        aside.append(places[:held])
        train.append(places[held:])
    tested = torch.isin(source.test.labels, torch.tensor(list(classes))).nonzero().flatten()
    parts = torch.cat(train).sort().values, torch.cat(aside).sort().values, tested + len(source.train.labels)
    return Task(name, tuple(classes), *parts)


def _stream(name: str, source: Source, within: Tensor, tasks: Sequence[Task], frame: Frame) -> Stream:
    """`within` says of each class how it is labelled within its task."""
    if not tasks:
        raise ValueError("a stream needs at least one task")
    pixels = torch.cat([source.train.pixels, source.test.pixels])
    side = min(pixels.shape[2:]) + 2 * frame.padding
    if frame.size > side:
        raise ValueError(f"a frame of {frame.size} does not fit into images of {side}, padding included")
    first = pixels[tasks[0].train].float() / 255  # later tasks are not known yet
    mean, std = first.mean((0, 2, 3)), first.std((0, 2, 3)).clamp(min=1e-3)
    labels = within[torch.cat([source.train.labels, source.test.labels])]
    return Stream(name, pixels, labels, tuple(tasks), frame, len(within), mean, std, len(source.train.labels))
