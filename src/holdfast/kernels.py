"""Instance norm, ReLU and 2x2 max pooling in one kernel for GPUs: the plane of a filter is read once and never written.

Forward, a program takes one sample and some channels, whose planes it has in registers: mean, deviation, normalised
values, and of each 2x2 window the largest, if it is above 0. Backward it reads the plane again and does the same, since
that is quicker than to read what would have had to be stored. If asked to, it also gives the activity of each plane:
the mean of what comes out of the ReLU, which is nowhere written. And backward it has at hand what NPC measures, the sum
over positions of n * dL/dn, so that this costs nothing but to write one number a plane.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from holdfast.fast import EPS

_FEW, _MANY = 4096, 8192  # elements of a pooled tile; what one program holds is four times as much
_CHANNELS = 32  # that lie side by side are worth reading together, even if the tile gets larger by it


@triton.jit
def _places(height, width, channels, window_block: tl.constexpr, channel_block: tl.constexpr):
    """Where the windows and channels of this program lie: in an image [height, width, channel], pooled, and by plane.

    And which of the windows and of the channels there are, since the blocks are powers of two.
    """
    sample, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    windows = (height // 2) * (width // 2)
    at, channel = tl.arange(0, window_block), block * channel_block + tl.arange(0, channel_block)
    present = (at < windows)[:, None] & (channel < channels)[None, :]
    row, column = at // (width // 2), at % (width // 2)
    corner = ((sample * height + 2 * row) * width + 2 * column) * channels
    within = corner[:, None] + channel[None, :]
    pooled = (sample * windows + at)[:, None] * channels + channel[None, :]
    return within, pooled, sample * channels + channel, present, channel < channels


@triton.jit
def _window(place, width, channels, present):
    """The four values of each 2x2 window, [window, channel]."""
    below = width * channels
    a = tl.load(place, mask=present, other=0.0).to(tl.float32)
    b = tl.load(place + channels, mask=present, other=0.0).to(tl.float32)
    c = tl.load(place + below, mask=present, other=0.0).to(tl.float32)
    d = tl.load(place + below + channels, mask=present, other=0.0).to(tl.float32)
    return a, b, c, d


@triton.jit
def _positive(value):
    return tl.where(value < 0, 0.0, value)  # which lets through what is no number


@triton.jit
def _forward(
    x,
    out,
    mean_of,
    rstd_of,
    activity_of,
    height,
    width,
    channels,
    eps,
    shows: tl.constexpr,
    window_block: tl.constexpr,
    channel_block: tl.constexpr,
):
    within, pooled, plane, present, known = _places(height, width, channels, window_block, channel_block)
    size = 4 * (height // 2) * (width // 2)
    a, b, c, d = _window(x + within, width, channels, present)
    mean = tl.sum(a + b + c + d, 0) / size
    there = present.to(tl.float32)
    a, b, c, d = (a - mean) * there, (b - mean) * there, (c - mean) * there, (d - mean) * there
    rstd = 1 / tl.sqrt(tl.sum(a * a + b * b + c * c + d * d, 0) / size + eps)
    largest = tl.maximum(tl.maximum(a, b), tl.maximum(c, d)) * rstd
    tl.store(out + pooled, _positive(largest), mask=present)
    tl.store(mean_of + plane, mean, mask=known)
    tl.store(rstd_of + plane, rstd, mask=known)
    if shows:
        active = tl.sum(_positive(a) + _positive(b) + _positive(c) + _positive(d), 0)
        tl.store(activity_of + plane, active * rstd / size, mask=known)


@triton.jit
def _backward(
    x,
    slope,
    slope_of_activity,
    mean_of,
    rstd_of,
    out,
    taylor_of,
    height,
    width,
    channels,
    shows: tl.constexpr,
    measures: tl.constexpr,
    window_block: tl.constexpr,
    channel_block: tl.constexpr,
):
    within, pooled, plane, present, known = _places(height, width, channels, window_block, channel_block)
    size = 4 * (height // 2) * (width // 2)
    mean = tl.load(mean_of + plane, mask=known, other=0.0)
    rstd = tl.load(rstd_of + plane, mask=known, other=0.0)
    a, b, c, d = _window(x + within, width, channels, present)
    a, b, c, d = (a - mean) * rstd, (b - mean) * rstd, (c - mean) * rstd, (d - mean) * rstd
    largest = tl.maximum(tl.maximum(a, b), tl.maximum(c, d))
    g = tl.load(slope + pooled, mask=present, other=0.0).to(tl.float32)
    g = tl.where(largest > 0, g, 0.0)
    # The slope goes to the first of the window's largest values, as in torch.
    is_a = a == largest
    is_b = (b == largest) & ~is_a
    is_c = (c == largest) & ~is_a & ~is_b
    is_d = ~is_a & ~is_b & ~is_c
    at_a, at_b = tl.where(is_a, g, 0.0), tl.where(is_b, g, 0.0)
    at_c, at_d = tl.where(is_c, g, 0.0), tl.where(is_d, g, 0.0)
    product = tl.sum(g * largest, 0)
    if measures:
        tl.store(taylor_of + plane, tl.abs(product) * 4 / size, mask=known)
    if shows:
        each = tl.load(slope_of_activity + plane, mask=known, other=0.0) / size
        everywhere = tl.where(present, each[None, :], 0.0)
        at_a, at_b = at_a + tl.where(a > 0, everywhere, 0.0), at_b + tl.where(b > 0, everywhere, 0.0)
        at_c, at_d = at_c + tl.where(c > 0, everywhere, 0.0), at_d + tl.where(d > 0, everywhere, 0.0)
        total = tl.sum(at_a + at_b + at_c + at_d, 0) / size
        along = tl.sum(at_a * a + at_b * b + at_c * c + at_d * d, 0) / size
    else:
        total = tl.sum(g, 0) / size
        along = product / size
    to, below = out + within, width * channels
    tl.store(to, rstd * (at_a - total - a * along), mask=present)
    tl.store(to + channels, rstd * (at_b - total - b * along), mask=present)
    tl.store(to + below, rstd * (at_c - total - c * along), mask=present)
    tl.store(to + below + channels, rstd * (at_d - total - d * along), mask=present)


class _Tile(NamedTuple):
    grid: tuple[int, int]
    """How many programs there are."""
    windows: int
    channels: int
    """How many of them each has."""
    warps: int


def _tile(x: Tensor) -> _Tile:
    """Sizes that were the fastest of some on an H200 for the layers of the paper's network."""
    samples, channels, height, width = x.shape
    windows = triton.next_power_of_2(height // 2 * (width // 2))
    wanted = min(max(_CHANNELS, _FEW // windows), _MANY // windows)
    block = max(1, min(triton.next_power_of_2(channels), wanted))
    return _Tile((samples, triton.cdiv(channels, block)), windows, block, 4 if windows * block <= _FEW else 8)


Parts = tuple[Tensor, Tensor, Tensor, Tensor]


def _room(x: Tensor, shows: bool) -> Parts:
    """Where the pooled values, and the means, inverse deviations and, if it shows, activities of planes go."""
    out = torch.empty_like(x[:, :, ::2, ::2], memory_format=torch.channels_last)
    planes = x.shape[:2]
    mean, rstd, activity = (x.new_empty(planes if wanted else 0, dtype=torch.float32) for wanted in (True, True, shows))
    return out, mean, rstd, activity


@torch.library.custom_op("holdfast::norm_relu_pool", mutates_args=())
def norm_relu_pool(x: Tensor, shows: bool, carrier: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Instance norm, ReLU and 2x2 max pooling of `x`; the means and the inverse deviations of its planes; and, if
    `shows`, how active they are between ReLU and pooling.

    A `carrier`, one value per channel, gets `taylor` of what is pooled as its gradient, as from `Observe`.
    """
    x = x.contiguous(memory_format=torch.channels_last)
    _, channels, height, width = x.shape
    out, mean, rstd, activity = _room(x, shows)
    grid, *blocks, warps = _tile(x)
    with torch.cuda.device_of(x):
        _forward[grid](x, out, mean, rstd, activity, height, width, channels, EPS, shows, *blocks, num_warps=warps)
    return out, mean, rstd, activity


@norm_relu_pool.register_fake
def _(x: Tensor, shows: bool, carrier: Tensor | None) -> Parts:
    return _room(x, shows)


@torch.library.custom_op("holdfast::norm_relu_pool_backward", mutates_args=())
def _slopes(
    slope: Tensor, slope_of_activity: Tensor | None, x: Tensor, mean: Tensor, rstd: Tensor, measures: bool
) -> tuple[Tensor, Tensor]:
    """The slope of `x` and, if it `measures`, `taylor` of what was pooled."""
    x, slope = (each.contiguous(memory_format=torch.channels_last) for each in (x, slope))
    shows = slope_of_activity is not None
    activity = mean if slope_of_activity is None else slope_of_activity.contiguous()
    sizes = x.shape[2], x.shape[3], x.shape[1]
    out, each = torch.empty_like(x), torch.empty_like(mean) if measures else mean.new_empty(0)
    grid, *blocks, warps = _tile(x)
    with torch.cuda.device_of(x):
        _backward[grid](x, slope, activity, mean, rstd, out, each, *sizes, shows, measures, *blocks, num_warps=warps)
    return out, each.sum(0) if measures else each  # here, since Inductor would make two kernels of this sum


@_slopes.register_fake
def _(
    slope: Tensor, slope_of_activity: Tensor | None, x: Tensor, mean: Tensor, rstd: Tensor, measures: bool
) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(x, memory_format=torch.channels_last)
    return out, mean.new_empty(x.shape[1] if measures else 0)


def _keep(ctx, inputs, output):
    x, ctx.shows, _ = inputs
    ctx.save_for_backward(x, output[1], output[2])


def _differentiate(ctx, slope, _, __, slope_of_activity):
    measures = ctx.needs_input_grad[2]
    out, taylor = _slopes(slope, slope_of_activity if ctx.shows else None, *ctx.saved_tensors, measures)
    return out, None, taylor if measures else None


norm_relu_pool.register_autograd(_differentiate, setup_context=_keep)
