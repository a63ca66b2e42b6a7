"""Batches of a stream's images: shuffled, cropped, mirrored and normalised on the device, in batched kernels.

Everything random about a pass over a task's images is drawn at its start, on the host, from the run's own generator.
So a pass is the same on every device, it can be taken up again in its middle, and no step waits for the host.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample

from holdfast.fast import compiled
from holdfast.streams.tasks import Stream, Task

Batch = tuple[Tensor, Tensor]


class Images:
    """A stream's images on a device, or on the host if they are too many for it; batches are the same either way.

    Args:
        stream: whose images they are.
        device: where batches are wanted.
        resident: whether all images are there; if not given, whether they fit.
        fuse: whether the making of a batch is compiled, so that it is few kernels.
    """

    def __init__(
        self, stream: Stream, device: torch.device, *, resident: bool | None = None, fuse: bool = False
    ) -> None:
        self.stream = stream
        self.device = device
        self.resident = _fits(stream.pixels, device) if resident is None else resident
        self.pixels = stream.pixels.to(device) if self.resident else stream.pixels
        self.labels = stream.labels.to(device)
        shape = (1, -1, 1, 1)
        self.mean, self.std = (255 * value.view(shape).to(device) for value in (stream.mean, stream.std))
        self.fill = (self.mean if stream.frame.fill == "mean" else 0 * self.mean).round().to(torch.uint8)
        self.prepare = compiled(prepared) if fuse else prepared
        self._orders: dict[int, Tensor] = {}
        self._side = None if self.resident or device.type != "cuda" else torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def take(self, places: Tensor) -> Tensor:
        """The images at `places`, both on the host. They come to the device beside what it is doing; `await_taken`
        before they are used.
        """
        taken = self.pixels[places]
        if self._side is None:
            return taken
        with torch.cuda.stream(self._side):
            return taken.pin_memory().to(self.device, non_blocking=True)

    def bring(self, whole: "Pass") -> "Pass":
        """A pass to where its images are taken from."""
        return whole.to(self.device) if self.resident else whole

    def order_of(self, task: Task) -> Tensor | None:
        """The order of the task's pixels, on the device, where it stays: to bring it there is to wait."""
        if task.permutation is None:
            return None
        key = id(task.permutation)
        if key not in self._orders:
            self._orders[key] = task.permutation.to(self.device)
        return self._orders[key]

    def await_taken(self, taken: Tensor) -> None:
        if self._side is not None:
            present = torch.cuda.current_stream(self.device)
            present.wait_stream(self._side)
            taken.record_stream(present)


def _fits(pixels: Tensor, device: torch.device) -> bool:
    return device.type != "cuda" or pixels.nbytes < torch.cuda.mem_get_info(device)[0] // 4


@dataclass(frozen=True)
class Pass:
    """One pass over some images: their order, and for each where it is cropped and if it is mirrored."""

    places: Tensor
    top: Tensor
    left: Tensor
    mirrored: Tensor

    def __getitem__(self, part: slice) -> "Pass":
        return Pass(self.places[part], self.top[part], self.left[part], self.mirrored[part])

    def to(self, device: torch.device) -> "Pass":
        return Pass(*(each.to(device) for each in self.tensors))

    def clone(self) -> "Pass":
        return Pass(*(each.clone() for each in self.tensors))

    def copy_(self, other: "Pass") -> None:
        """Become, in place, another pass over as many images."""
        torch._foreach_copy_(list(self.tensors), list(other.tensors))

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.places, self.top, self.left, self.mirrored


def random_pass(stream: Stream, places: Tensor, generator: torch.Generator) -> Pass:
    """All of `places` in random order, cropped and mirrored at random."""
    frame, count = stream.frame, len(places)
    room = [side + 2 * frame.padding - frame.size + 1 for side in stream.pixels.shape[2:]]
    order = torch.randperm(count, generator=generator)
    top, left = (torch.randint(extent, (count,), generator=generator) for extent in room)
    mirrored = torch.rand(count, generator=generator) < (0.5 if frame.mirror else 0)
    return Pass(places[order], top, left, mirrored)


def plain_pass(stream: Stream, places: Tensor) -> Pass:
    """All of `places` in order, centred and as they are."""
    frame, count = stream.frame, len(places)
    top, left = ((side + 2 * frame.padding - frame.size) // 2 for side in stream.pixels.shape[2:])
    return Pass(places, torch.full((count,), top), torch.full((count,), left), torch.zeros(count, dtype=torch.bool))


@torch.no_grad()
def batch(images: Images, task: Task, part: Pass, taken: Tensor | None = None, *, fuse: bool = True) -> Batch:
    """Normalised inputs of a model, [sample, channel, height, width], and labels.

    `taken` are the part's images, if they are not resident and at hand. Without `fuse` nothing is compiled, as is best
    for batches of many sizes.
    """
    here, pixels, labels = part.to(images.device), images.pixels, images.labels
    if not images.resident:
        pixels = images.take(part.places) if taken is None else taken
        images.await_taken(pixels)
        labels = labels[here.places]
        here = replace(here, places=torch.arange(len(pixels), device=pixels.device))
    colours, frame = (images.fill, images.mean, images.std), images.stream.frame
    prepare = images.prepare if fuse else prepared
    x, y = prepare(pixels, labels, here.tensors, images.order_of(task), colours, frame.size, frame.padding)
    return rotate(x, task.angle) if task.angle else x, y


def prepared(
    pixels: Tensor,
    labels: Tensor,
    part: tuple[Tensor, Tensor, Tensor, Tensor],
    order: Tensor | None,
    colours: tuple[Tensor, Tensor, Tensor],
    size: int,
    padding: int,
) -> Batch:
    """What a pass says of some images, cropped, mirrored, normalised and with their pixels in this order; and labels.

    `colours` are those of the border, of the mean and of the standard deviation.
    """
    places, top, left, mirrored = part
    fill, mean, std = colours
    x = (crop(pixels[places], top, left, mirrored, fill, size, padding).float() - mean) / std
    if order is not None:
        x = x.flatten(2)[:, :, order].view_as(x)
    return x, labels[places]


def crop(pixels: Tensor, top: Tensor, left: Tensor, mirrored: Tensor, fill: Tensor, size: int, padding: int) -> Tensor:
    """Of each image the square of `size` whose corner is at `top` and `left`, mirrored where it says so.

    Around the images is a border of width `padding` and colour `fill`, where the corners count from.
    """
    samples, channels, height, width = pixels.shape
    along = torch.arange(-padding, size - padding, device=pixels.device)
    rows, columns = top[:, None] + along, left[:, None] + torch.where(mirrored[:, None], along.flip(0), along)
    near_rows, near_columns = rows.clamp(0, height - 1), columns.clamp(0, width - 1)
    near = (near_rows[:, :, None] * width + near_columns[:, None]).flatten(1)[:, None].expand(-1, channels, -1)
    found = pixels.flatten(2).gather(2, near).view(samples, channels, size, size)
    inside = (rows == near_rows)[:, :, None] & (columns == near_columns)[:, None]
    return torch.where(inside[:, None], found, fill)


@cache
def _turn(angle: float, device: torch.device) -> Tensor:
    cos, sin = math.cos(math.radians(angle)), math.sin(math.radians(angle))
    return torch.tensor([[cos, -sin, 0.0], [sin, cos, 0.0]], device=device)


def rotate(x: Tensor, angle: float) -> Tensor:
    """Images turned to the left by an angle in degrees; what comes in from outside is the nearest border."""
    grid = affine_grid(_turn(angle, x.device).expand(len(x), 2, 3), list(x.shape), align_corners=False)
    return grid_sample(x, grid, padding_mode="border", align_corners=False)


class Batches:
    """The batches of one part of a task, centred and as they are, in an order that is always the same.

    They can be iterated again and again. With `seed` they come shuffled, so that the first few are a fair sample.
    """

    def __init__(self, images: Images, task: Task, places: Tensor, size: int, *, seed: int | None = None) -> None:
        if seed is not None:
            places = places[torch.randperm(len(places), generator=torch.Generator().manual_seed(seed))]
        self.images, self.task, self.size = images, task, size
        self.whole = plain_pass(images.stream, places)

    def __len__(self) -> int:
        return -(-len(self.whole.places) // self.size)

    def __iter__(self) -> Iterator[Batch]:
        whole = self.images.bring(self.whole)
        for start in range(0, len(whole.places), self.size):
            yield batch(self.images, self.task, whole[slice(start, start + self.size)], fuse=False)


class Shuffled:
    """Batches for training, pass after pass without an end; it can be taken up again where it was.

    A pass leaves out the last samples that do not fill a batch; they come in another pass.
    """

    def __init__(self, images: Images, task: Task, size: int, generator: torch.Generator) -> None:
        self.images, self.task, self.generator = images, task, generator
        self.size = min(size, len(task.train))
        self.position = 0
        self.began = generator.get_state()
        self._pass: Pass | None = None
        self._ahead: Tensor | None = None

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        part = self.draw()
        assert self._pass is not None
        drawn = batch(self.images, self.task, part, self._ahead)
        following = self._pass.places[self.position : self.position + self.size]
        fetch = not self.images.resident and len(following) == self.size
        self._ahead = self.images.take(following) if fetch else None
        return drawn

    def draw(self) -> Pass:
        """Which images come next, and how."""
        if self._pass is None or self.position + self.size > len(self.task.train):
            self._begin()
        assert self._pass is not None
        part = self._pass[slice(self.position, self.position + self.size)]
        self.position += self.size
        return part

    def _begin(self) -> None:
        self._ahead, self.position = None, 0
        self.began = self.generator.get_state()
        self._pass = self.images.bring(random_pass(self.images.stream, self.task.train, self.generator))

    def state_dict(self) -> dict[str, Tensor | int]:
        """Where the pass is, and the generator's state from which it was drawn."""
        return {"position": self.position, "began": self.began, "drawn": int(self._pass is not None)}

    def load_state_dict(self, state: dict[str, Tensor | int]) -> None:
        assert isinstance(state["began"], Tensor)
        self.generator.set_state(state["began"])
        self.position, self._pass = 0, None
        if state["drawn"]:
            self._begin()
            self.position = int(state["position"])


class Rehearsal:
    """Batches of a task as in training, without an end; every iteration begins anew and is the same."""

    def __init__(self, images: Images, task: Task, size: int, *, seed: int) -> None:
        self.images, self.task, self.size, self.seed = images, task, size, seed

    def __iter__(self) -> Iterator[Batch]:
        return Shuffled(self.images, self.task, self.size, torch.Generator().manual_seed(self.seed))
