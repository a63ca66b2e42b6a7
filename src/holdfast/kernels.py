"""Instance norm, ReLU and 2x2 max pooling in one kernel for GPUs: what is between is never written.

A program takes one sample and some channels, and goes twice over their planes: forward, for mean and deviation, and
then for the largest value of each 2x2 window, if it is above 0; backward, for two sums over the plane, and then for
the slopes. The second time the plane comes from the cache. If asked to, forward also gives the activity of each
plane: the mean of what comes out of the ReLU. And backward it has at hand what NPC measures, the sum over positions
of n * dL/dn, so that this costs nothing but to write one number a plane.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from holdfast.fast import EPS

_ELEMENTS, _CHANNELS = 1024, 32  # of a pooled tile, and of those that lie side by side, at least if there are as many


@triton.jit
def _program(channels, channel_block: tl.constexpr):
    """The sample and the channels of this program, the numbers of their planes, and which of the channels there are."""
    sample = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * channel_block + tl.arange(0, channel_block)
    return sample, channel, sample * channels + channel, channel < channels


@triton.jit
def _places(start, sample, channel, height, width, channels, window_block: tl.constexpr):
    """Where some windows lie in an image [height, width, channel] and pooled, and which of them there are."""
    windows = (height // 2) * (width // 2)
    at = start + tl.arange(0, window_block)
    row, column = at // (width // 2), at % (width // 2)
    corner = ((sample * height + 2 * row) * width + 2 * column) * channels
    pooled = (sample * windows + at)[:, None] * channels + channel[None, :]
    present = (at < windows)[:, None] & (channel < channels)[None, :]
    return corner[:, None] + channel[None, :], pooled, present


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
    sample, channel, plane, known = _program(channels, channel_block)
    windows = (height // 2) * (width // 2)
    # Sums of what is left over a first value, so that the square of a large mean does not drown the deviation.
    first = tl.load(x + sample * height * width * channels + channel, mask=known, other=0.0).to(tl.float32)
    total = tl.zeros([window_block, channel_block], tl.float32)
    squares = tl.zeros([window_block, channel_block], tl.float32)
    for start in range(0, windows, window_block):
        within, _, present = _places(start, sample, channel, height, width, channels, window_block)
        a, b, c, d = _window(x + within, width, channels, present)
        there = present.to(tl.float32)
        a, b, c, d = (a - first) * there, (b - first) * there, (c - first) * there, (d - first) * there
        total += (a + b) + (c + d)
        squares += (a * a + b * b) + (c * c + d * d)
    over = tl.sum(total, 0) / (4 * windows)
    mean = first + over
    rstd = 1 / tl.sqrt(_positive(tl.sum(squares, 0) / (4 * windows) - over * over) + eps)
    active = tl.zeros([window_block, channel_block], tl.float32)
    for start in range(0, windows, window_block):
        within, pooled, present = _places(start, sample, channel, height, width, channels, window_block)
        a, b, c, d = _window(x + within, width, channels, present)
        largest = (tl.maximum(tl.maximum(a, b), tl.maximum(c, d)) - mean) * rstd
        tl.store(out + pooled, _positive(largest), mask=present)
        if shows:
            above = (_positive(a - mean) + _positive(b - mean)) + (_positive(c - mean) + _positive(d - mean))
            active += above * present.to(tl.float32)
    tl.store(mean_of + plane, mean, mask=known)
    tl.store(rstd_of + plane, rstd, mask=known)
    if shows:
        tl.store(activity_of + plane, tl.sum(active, 0) * rstd / (4 * windows), mask=known)


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
    sample, channel, plane, known = _program(channels, channel_block)
    windows = (height // 2) * (width // 2)
    mean = tl.load(mean_of + plane, mask=known, other=0.0)
    rstd = tl.load(rstd_of + plane, mask=known, other=0.0)
    slopes = tl.zeros([window_block, channel_block], tl.float32)
    products = tl.zeros([window_block, channel_block], tl.float32)
    number = tl.zeros([window_block, channel_block], tl.float32)
    active = tl.zeros([window_block, channel_block], tl.float32)
    for start in range(0, windows, window_block):
        within, pooled, present = _places(start, sample, channel, height, width, channels, window_block)
        a, b, c, d = _window(x + within, width, channels, present)
        largest = (tl.maximum(tl.maximum(a, b), tl.maximum(c, d)) - mean) * rstd
        g = tl.load(slope + pooled, mask=present, other=0.0).to(tl.float32)
        g = tl.where(largest > 0, g, 0.0)
        slopes += g
        products += g * largest
        if shows:
            a, b, c, d = (a - mean) * rstd, (b - mean) * rstd, (c - mean) * rstd, (d - mean) * rstd
            there = present.to(tl.float32)
            above = ((a > 0).to(tl.float32) + (b > 0).to(tl.float32)) + (
                (c > 0).to(tl.float32) + (d > 0).to(tl.float32)
            )
            number += above * there
            active += ((_positive(a) + _positive(b)) + (_positive(c) + _positive(d))) * there
    product = tl.sum(products, 0)
    total = tl.sum(slopes, 0)
    along = product
    if measures:
        tl.store(taylor_of + plane, tl.abs(product) / windows, mask=known)
    each = tl.zeros([channel_block], tl.float32)
    if shows:
        each = tl.load(slope_of_activity + plane, mask=known, other=0.0) / (4 * windows)
        total += each * tl.sum(number, 0)
        along += each * tl.sum(active, 0)
    total, along = total / (4 * windows), along / (4 * windows)
    for start in range(0, windows, window_block):
        within, pooled, present = _places(start, sample, channel, height, width, channels, window_block)
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
        if shows:
            at_a, at_b = at_a + tl.where(a > 0, each, 0.0), at_b + tl.where(b > 0, each, 0.0)
            at_c, at_d = at_c + tl.where(c > 0, each, 0.0), at_d + tl.where(d > 0, each, 0.0)
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
    """How many of them each takes at a time."""
    warps: int = 4


def _tile(x: Tensor) -> _Tile:
    samples, channels, height, width = x.shape
    most = triton.next_power_of_2(height // 2 * (width // 2))
    wide = min(triton.next_power_of_2(channels), max(_CHANNELS, _ELEMENTS // most))
    return _Tile((samples, triton.cdiv(channels, wide)), min(most, _ELEMENTS // wide), wide)


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
