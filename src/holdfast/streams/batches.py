"""Batches of a stream's images, shuffled, cropped, mirrored and normalized on the device in batched kernels.

The random numbers of a pass over a task's images are drawn on the host, at its start, from the run's own generator.
A pass is therefore the same on every device and can be resumed in the middle, and no step waits for the host.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample

from holdfast.compiling import compiled
from holdfast.streams.tasks import Stream, Task

LabeledBatch = tuple[Tensor, Tensor]
"""Inputs [sample, channel, height, width] and labels [sample]."""


class DeviceImages:
    """A stream's images on a device, or on the host if they do not fit. Batches are the same either way.

    Args:
        stream: the stream.
        device: the device of the batches.
        resident: whether all images are copied to the device. By default they are if they fit.
        compile: whether to compile the preparation of batches into few kernels.
    """

    def __init__(
        self,
        stream: Stream,
        device: torch.device,
        *,
        resident: bool | None = None,
        compile: bool = False,  # noqa: A002
    ) -> None:
        self.stream = stream
        self.device = device
        self.resident = _fits(stream.pixels, device) if resident is None else resident
        self.pixels = stream.pixels.to(device) if self.resident else stream.pixels
        self.labels = stream.labels.to(device)
        shape = (1, -1, 1, 1)
        self.mean, self.std = (255 * value.view(shape).to(device) for value in (stream.mean, stream.std))
        self.fill = (self.mean if stream.frame.fill == "mean" else 0 * self.mean).round().to(torch.uint8)
        self.prepare = compiled(prepare) if compile else prepare
        self._permutations: dict[int, Tensor] = {}
        self._copying = None
        if not self.resident and device.type == "cuda":
            self._copying = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def take(self, indices: Tensor) -> Tensor:
        """Start copying images from the host to the device, beside its other work. Call `await_taken` before use."""
        taken = self.pixels[indices]
        if self._copying is None:
            return taken
        with torch.cuda.stream(self._copying):
            return taken.pin_memory().to(self.device, non_blocking=True)

    def bring(self, whole: "Pass") -> "Pass":
        """Move a pass to the device of the images."""
        return whole.to(self.device) if self.resident else whole

    def permutation_of(self, task: Task) -> Tensor | None:
        """The task's permutation of pixels, on the device. Cached: copying would synchronize."""
        if task.permutation is None:
            return None
        key = id(task.permutation)
        if key not in self._permutations:
            self._permutations[key] = task.permutation.to(self.device)
        return self._permutations[key]

    def await_taken(self, taken: Tensor) -> None:
        """Make the device wait until images have arrived."""
        if self._copying is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_stream(self._copying)
            taken.record_stream(current)


def _fits(pixels: Tensor, device: torch.device) -> bool:
    return device.type != "cuda" or pixels.nbytes < torch.cuda.mem_get_info(device)[0] // 4


@dataclass(frozen=True)
class Pass:
    """One pass over images: their order, and for each the corner of its crop and whether it is mirrored."""

    indices: Tensor
    top: Tensor
    left: Tensor
    mirrored: Tensor

    def __getitem__(self, part: slice) -> "Pass":
        return Pass(self.indices[part], self.top[part], self.left[part], self.mirrored[part])

    def to(self, device: torch.device) -> "Pass":
        return Pass(*(each.to(device) for each in self.tensors))

    def clone(self) -> "Pass":
        return Pass(*(each.clone() for each in self.tensors))

    def copy_(self, other: "Pass") -> None:
        """Copy another pass over the same number of images, in place."""
        torch._foreach_copy_(list(self.tensors), list(other.tensors))

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.indices, self.top, self.left, self.mirrored


def random_pass(stream: Stream, indices: Tensor, generator: torch.Generator) -> Pass:
    """A pass in random order, with random crops and mirroring."""
    frame, count = stream.frame, len(indices)
    extents = [side + 2 * frame.padding - frame.size + 1 for side in stream.pixels.shape[2:]]
    order = torch.randperm(count, generator=generator)
    top, left = (torch.randint(extent, (count,), generator=generator) for extent in extents)
    mirrored = torch.rand(count, generator=generator) < (0.5 if frame.mirror else 0)
    return Pass(indices[order], top, left, mirrored)


def plain_pass(stream: Stream, indices: Tensor) -> Pass:
    """A pass in the given order, with centered crops and no mirroring."""
    frame, count = stream.frame, len(indices)
    top, left = ((side + 2 * frame.padding - frame.size) // 2 for side in stream.pixels.shape[2:])
    return Pass(indices, torch.full((count,), top), torch.full((count,), left), torch.zeros(count, dtype=torch.bool))


@torch.no_grad()
def make_batch(
    images: DeviceImages,
    task: Task,
    part: Pass,
    taken: Tensor | None = None,
    *,
    compile: bool = True,  # noqa: A002
) -> LabeledBatch:
    """Make the batch of one part of a pass.

    Args:
        images: the images.
        task: the task, whose permutation or rotation is applied.
        part: the part of the pass.
        taken: the part's images from `DeviceImages.take`, if they are not resident.
        compile: False bypasses compiled code, for batches of varying sizes.
    """
    on_device, pixels, labels = part.to(images.device), images.pixels, images.labels
    if not images.resident:
        pixels = images.take(part.indices) if taken is None else taken
        images.await_taken(pixels)
        labels = labels[on_device.indices]
        on_device = replace(on_device, indices=torch.arange(len(pixels), device=pixels.device))
    colors, frame = (images.fill, images.mean, images.std), images.stream.frame
    function = images.prepare if compile else prepare
    x, y = function(pixels, labels, on_device.tensors, images.permutation_of(task), colors, frame.size, frame.padding)
    return rotate(x, task.angle) if task.angle else x, y


def prepare(
    pixels: Tensor,
    labels: Tensor,
    part: tuple[Tensor, Tensor, Tensor, Tensor],
    permutation: Tensor | None,
    colors: tuple[Tensor, Tensor, Tensor],
    size: int,
    padding: int,
) -> LabeledBatch:
    """Crop, mirror, normalize and permute images.

    Args:
        pixels: all images.
        labels: all labels.
        part: the tensors of a pass.
        permutation: the order of the pixels; None for the original order.
        colors: the color of the border, the mean and the standard deviation.
        size: the side of the crop.
        padding: the width of the border.
    """
    indices, top, left, mirrored = part
    fill, mean, std = colors
    x = (crop(pixels[indices], top, left, mirrored, fill, size, padding).float() - mean) / std
    if permutation is not None:
        x = x.flatten(2)[:, :, permutation].view_as(x)
    return x, labels[indices]


def crop(pixels: Tensor, top: Tensor, left: Tensor, mirrored: Tensor, fill: Tensor, size: int, padding: int) -> Tensor:
    """Crop a square from each image, mirrored where `mirrored` is set.

    The images are surrounded by a border of width `padding` and color `fill`; `top` and `left` count from its corner.
    """
    samples, channels, height, width = pixels.shape
    along = torch.arange(-padding, size - padding, device=pixels.device)
    rows, columns = top[:, None] + along, left[:, None] + torch.where(mirrored[:, None], along.flip(0), along)
    near_rows, near_columns = rows.clamp(0, height - 1), columns.clamp(0, width - 1)
    near = (near_rows[:, :, None] * width + near_columns[:, None]).flatten(1)[:, None].expand(-1, channels, -1)
    cropped = pixels.flatten(2).gather(2, near).view(samples, channels, size, size)
    inside = (rows == near_rows)[:, :, None] & (columns == near_columns)[:, None]
    return torch.where(inside[:, None], cropped, fill)


@cache
def _rotation(angle: float, device: torch.device) -> Tensor:
    """The matrix of a rotation, on the device. Cached: copying would synchronize."""
    cos, sin = math.cos(math.radians(angle)), math.sin(math.radians(angle))
    return torch.tensor([[cos, -sin, 0.0], [sin, cos, 0.0]], device=device)


def rotate(x: Tensor, angle: float) -> Tensor:
    """Rotate images counterclockwise by an angle in degrees. The border is extended outward."""
    grid = affine_grid(_rotation(angle, x.device).expand(len(x), 2, 3), list(x.shape), align_corners=False)
    return grid_sample(x, grid, padding_mode="border", align_corners=False)


class Batches:
    """Batches of some of a task's images, centered and not mirrored, in a fixed order.

    Iterate them as often as needed. With `seed` they are shuffled, so that the first few are a fair sample.
    """

    def __init__(
        self, images: DeviceImages, task: Task, indices: Tensor, size: int, *, seed: int | None = None
    ) -> None:
        if seed is not None:
            indices = indices[torch.randperm(len(indices), generator=torch.Generator().manual_seed(seed))]
        self.images, self.task, self.size = images, task, size
        self.whole = plain_pass(images.stream, indices)

    def __len__(self) -> int:
        return -(-len(self.whole.indices) // self.size)

    def __iter__(self) -> Iterator[LabeledBatch]:
        whole = self.images.bring(self.whole)
        for start in range(0, len(whole.indices), self.size):
            yield make_batch(self.images, self.task, whole[slice(start, start + self.size)], compile=False)


class Shuffled:
    """Endless batches for training, pass after pass. A saved state resumes them in the middle of a pass.

    A pass drops its last samples if they do not fill a batch. The next pass draws a new order.
    """

    def __init__(self, images: DeviceImages, task: Task, size: int, generator: torch.Generator) -> None:
        self.images, self.task, self.generator = images, task, generator
        self.size = min(size, len(task.train))
        self.position = 0
        self.began = generator.get_state()
        self._pass: Pass | None = None
        self._prefetched: Tensor | None = None

    def __iter__(self) -> Iterator[LabeledBatch]:
        return self

    def __next__(self) -> LabeledBatch:
        part = self.draw()
        assert self._pass is not None
        batch = make_batch(self.images, self.task, part, self._prefetched)
        following = self._pass.indices[self.position : self.position + self.size]
        prefetch = not self.images.resident and len(following) == self.size
        self._prefetched = self.images.take(following) if prefetch else None
        return batch

    def draw(self) -> Pass:
        """Draw the next part of the pass, or the first part of a new one."""
        if self._pass is None or self.position + self.size > len(self.task.train):
            self._begin()
        assert self._pass is not None
        part = self._pass[slice(self.position, self.position + self.size)]
        self.position += self.size
        return part

    def _begin(self) -> None:
        self._prefetched, self.position = None, 0
        self.began = self.generator.get_state()
        self._pass = self.images.bring(random_pass(self.images.stream, self.task.train, self.generator))

    def state_dict(self) -> dict[str, Tensor | int]:
        """The position in the pass, and the state of the generator at its start."""
        return {"position": self.position, "began": self.began, "drawn": int(self._pass is not None)}

    def load_state_dict(self, state: dict[str, Tensor | int]) -> None:
        assert isinstance(state["began"], Tensor)
        self.generator.set_state(state["began"])
        self.position, self._pass = 0, None
        if state["drawn"]:
            self._begin()
            self.position = int(state["position"])


class Rehearsal:
    """Endless batches of a task as in training. Every iteration starts over and yields the same batches."""

    def __init__(self, images: DeviceImages, task: Task, size: int, *, seed: int) -> None:
        self.images, self.task, self.size, self.seed = images, task, size, seed

    def __iter__(self) -> Iterator[LabeledBatch]:
        return Shuffled(self.images, self.task, self.size, torch.Generator().manual_seed(self.seed))
