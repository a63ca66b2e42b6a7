"""Streams: the images of a source as a sequence of tasks."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Literal

import torch
from torch import Tensor

from holdfast.streams.sources import Source


@dataclass(frozen=True)
class Frame:
    """The preparation of images: padding, a random square crop, optional mirroring. Tests use the central crop."""

    size: int
    padding: int = 0
    mirror: bool = False
    fill: Literal["black", "mean"] = "black"
    """The color of the padding: black, or the mean color, which normalizes to zero."""


@dataclass(frozen=True)
class Task:
    """A part of a stream's images, the output nodes of its classes, and the transform of its images.

    `train`, `validation` and `test` are indices into the stream's images. Labels count from 0 within the task.
    """

    name: str
    active: tuple[int, ...]
    train: Tensor = field(repr=False)
    validation: Tensor = field(repr=False)
    test: Tensor = field(repr=False)
    permutation: Tensor | None = field(default=None, repr=False)
    angle: float = 0.0


@dataclass(frozen=True)
class Stream:
    """All tasks, and one tensor of all their training and test images, with labels that count within each task."""

    name: str
    pixels: Tensor
    labels: Tensor
    tasks: tuple[Task, ...]
    frame: Frame
    outputs: int
    mean: Tensor
    std: Tensor
    epoch: int
    """The number of training images of the whole source, the paper's length of an epoch."""

    def __repr__(self) -> str:
        size = "x".join(map(str, self.shape))
        return (
            f"Stream({self.name}: {len(self.tasks)} tasks, {self.outputs} outputs, {len(self.pixels)} images, {size})"
        )

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of an input: channels, height, width."""
        return self.pixels.shape[1], self.frame.size, self.frame.size

    @property
    def fingerprint(self) -> str:
        """A hash of the tasks, labels and images."""
        digest = hashlib.sha256(repr(self.frame).encode())
        for task in self.tasks:
            digest.update(repr((task.active, task.angle)).encode())
            for indices in (task.train, task.validation, task.test, task.permutation):
                digest.update(b"-" if indices is None else indices.numpy().tobytes())
        for values in (self.labels, self.pixels):
            digest.update(values.contiguous().numpy().tobytes())
        return digest.hexdigest()[:16]

    def first(self, tasks: int) -> "Stream":
        """The stream of the first tasks."""
        if not 1 <= tasks <= len(self.tasks):
            raise ValueError(f"{self.name} has {len(self.tasks)} tasks, not {tasks}: choose 1 to {len(self.tasks)}")
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
    """Split the classes into tasks of `per_task` classes. The model has one output per class of the source.

    If the classes cannot be divided so, the last task has fewer, or one more: a task of one class has nothing to learn.

    Args:
        source: the images.
        frame: their preparation.
        per_task: the number of classes per task.
        tasks: the number of tasks. By default the classes are used up.
        order: the order of the classes, or the seed of a random one. By default the classes come in order of label.
        validation: the share of each class's training images held out for choosing settings.
        seed: the seed for drawing the validation images.
    """
    classes = len(source.classes)
    chosen = _ordered(classes, order)
    groups = _divided(chosen, per_task) if 2 <= per_task <= len(chosen) else []
    count = len(groups) if tasks is None else tasks
    if not 1 <= count <= len(groups):
        raise ValueError(
            f"{source.name} has {len(chosen)} classes, too few for {count} tasks of {per_task}: a stream needs at "
            "least one task of at least two classes"
        )
    made = []
    within = torch.full((classes,), -1)
    for active in groups[:count]:
        within[active] = torch.arange(len(active))
        name = ", ".join(source.classes[c] for c in active)
        made.append(_task(name, source, active, validation, seed))
    last = len(made[-1].active)
    uneven = "" if last == per_task else f", the last of {last}"
    return _stream(f"{source.name} in {count} x {per_task}{uneven}", source, within, made, frame)


def permuted(source: Source, frame: Frame, *, tasks: int, validation: float = 0.1, seed: int = 0) -> Stream:
    """Tasks of all classes, each with its own permutation of the pixels. The first task keeps the original order."""
    every = tuple(range(len(source.classes)))
    generator = torch.Generator().manual_seed(seed)
    base = _task("no permutation", source, every, validation, seed)
    if tasks < 1:
        raise ValueError(f"a stream needs at least one task, got {tasks}")
    permutations = [torch.randperm(frame.size**2, generator=generator) for _ in range(tasks - 1)]
    made = [
        base,
        *(replace(base, name=f"permutation {i}", permutation=order) for i, order in enumerate(permutations, 1)),
    ]
    return _stream(f"{source.name} permuted", source, torch.arange(len(every)), made, frame)


def rotated(source: Source, frame: Frame, *, angles: Sequence[float], validation: float = 0.1, seed: int = 0) -> Stream:
    """Tasks of all classes, each with its own rotation, in degrees counterclockwise."""
    every = tuple(range(len(source.classes)))
    base = _task("", source, every, validation, seed)
    made = [replace(base, name=f"{angle:g} degrees", angle=float(angle)) for angle in angles]
    return _stream(f"{source.name} rotated", source, torch.arange(len(every)), made, frame)


def _divided(classes: list[int], per_task: int) -> list[list[int]]:
    """Divide classes into groups. The rest is a smaller group, or joins the last one if it is a single class.

    >>> _divided([0, 1, 2, 3, 4], 2), _divided([0, 1, 2, 3, 4], 3)
    ([[0, 1], [2, 3, 4]], [[0, 1, 2], [3, 4]])
    """
    groups = [classes[start : start + per_task] for start in range(0, len(classes), per_task)]
    return groups if len(groups[-1]) > 1 else [*groups[:-2], groups[-2] + groups[-1]]


def _ordered(classes: int, order: Sequence[int] | int | None) -> list[int]:
    if order is None:
        return list(range(classes))
    if isinstance(order, Integral):
        return torch.randperm(classes, generator=torch.Generator().manual_seed(int(order))).tolist()
    assert isinstance(order, Sequence)
    chosen = [int(c) for c in order]
    if len(set(chosen)) < len(chosen) or not set(chosen) <= set(range(classes)):
        raise ValueError(f"order must list classes from 0 to {classes - 1}, each at most once; got {chosen}")
    return chosen


def _task(name: str, source: Source, classes: Sequence[int], validation: float, seed: int) -> Task:
    if not 0 <= validation < 1:
        raise ValueError(f"validation must be a share of the training images, at least 0 and below 1; got {validation}")
    train, held_out = [], []
    for c in classes:
        indices = (source.train.labels == c).nonzero().flatten()
        test = (source.test.labels == c).sum()
        if len(indices) < 2 or test == 0:
            raise ValueError(
                f"class {source.classes[c]!r} of {source.name} has {len(indices)} training and {test} test images: it "
                "needs at least two training images and one test image"
            )
        generator = torch.Generator().manual_seed(seed * 1_000_003 + c)  # per class, independent of its task
        indices = indices[torch.randperm(len(indices), generator=generator)]
        count = min(round(validation * len(indices)), len(indices) - 1)
        held_out.append(indices[:count])
        train.append(indices[count:])
    test_indices = torch.isin(source.test.labels, torch.tensor(list(classes))).nonzero().flatten()
    parts = torch.cat(train).sort().values, torch.cat(held_out).sort().values, test_indices + len(source.train.labels)
    return Task(name, tuple(classes), *parts)


def _stream(name: str, source: Source, within: Tensor, tasks: Sequence[Task], frame: Frame) -> Stream:
    """Build a stream; `within` maps each class to its label within its task."""
    if not tasks:
        raise ValueError("a stream needs at least one task")
    pixels = torch.cat([source.train.pixels, source.test.pixels])
    side = min(pixels.shape[2:]) + 2 * frame.padding
    if frame.size > side:
        raise ValueError(f"a frame of {frame.size} does not fit into images of {side} with padding: reduce its size")
    first = pixels[tasks[0].train].float() / 255  # later tasks are unknown in advance
    mean, std = first.mean((0, 2, 3)), first.std((0, 2, 3)).clamp(min=1e-3)
    labels = within[torch.cat([source.train.labels, source.test.labels])]
    return Stream(name, pixels, labels, tuple(tasks), frame, len(within), mean, std, len(source.train.labels))
