"""Instance norm, ReLU and 2x2 max pooling in one kernel for GPUs: what is between is never written.

A program takes one sample and some channels, and goes twice over their planes: forward, for mean and deviation, and
then for the largest value of each 2x2 window, if it is above 0; backward, for two sums over the plane, and then for
the slopes. The second time the plane comes from the cache. If asked to, forward also gives the activity of each
plane: the mean of what comes out of the ReLU. And backward it has at hand what NPC measures, the sum over positions
of n * dL/dn, so that this costs nothing but to write one number a plane.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from holdfast.fast import EPS


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
def _middle(place, height, width, channels, known):
    """The median of three of a plane's values: not a single outlier."""
    step = (height // 2) * (width // 2)
    a = tl.load(place, mask=known, other=0.0).to(tl.float32)
    b = tl.load(place + (step + width // 2) * channels, mask=known, other=0.0).to(tl.float32)
    c = tl.load(place + (2 * step + width // 2) * channels, mask=known, other=0.0).to(tl.float32)
    return tl.maximum(tl.minimum(a, b), tl.minimum(tl.maximum(a, b), c))


@triton.jit
def _positive(value):
    return tl.where(value < 0, 0.0, value)  # which lets through what is no number


@triton.jit
def _above(value):
    return tl.where(value > 0, 1.0, 0.0)


@triton.jit
def _forward(
    x,
    out,
    mean_of,
    rstd_of,
    activity_of,
    share_of,
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
    # Sums of what is left over some middle value, so that the square of a large mean does not drown the deviation.
    middle = _middle(x + sample * height * width * channels + channel, height, width, channels, known)
    total = tl.zeros([window_block, channel_block], tl.float32)
    squares = tl.zeros([window_block, channel_block], tl.float32)
    for start in range(0, windows, window_block):
        within, _, present = _places(start, sample, channel, height, width, channels, window_block)
        a, b, c, d = _window(x + within, width, channels, present)
        there = present.to(tl.float32)
        a, b, c, d = (a - middle) * there, (b - middle) * there, (c - middle) * there, (d - middle) * there
        total += (a + b) + (c + d)
        squares += (a * a + b * b) + (c * c + d * d)
    over = tl.sum(total, 0) / (4 * windows)
    mean = middle + over
    rstd = 1 / tl.sqrt(_positive(tl.sum(squares, 0) / (4 * windows) - over * over) + eps)
    away = tl.zeros([window_block, channel_block], tl.float32)
    number = tl.zeros([window_block, channel_block], tl.float32)
    for start in range(0, windows, window_block):
        within, pooled, present = _places(start, sample, channel, height, width, channels, window_block)
        a, b, c, d = _window(x + within, width, channels, present)
        largest = (tl.maximum(tl.maximum(a, b), tl.maximum(c, d)) - mean) * rstd
        tl.store(out + pooled, _positive(largest), mask=present)
        if shows:
            there = present.to(tl.float32)
            a, b, c, d = a - mean, b - mean, c - mean, d - mean
            away += ((tl.abs(a) + tl.abs(b)) + (tl.abs(c) + tl.abs(d))) * there
            number += ((_above(a) + _above(b)) + (_above(c) + _above(d))) * there
    tl.store(mean_of + plane, mean, mask=known)
    tl.store(rstd_of + plane, rstd, mask=known)
    if shows:
        # What lies above the mean lies as far away from it, all together, as what lies below.
        tl.store(activity_of + plane, tl.sum(away, 0) * rstd / (8 * windows), mask=known)
        tl.store(share_of + plane, tl.sum(number, 0) / (4 * windows), mask=known)


@triton.jit
def _backward(
    x,
    slope,
    slope_of_activity,
    mean_of,
    rstd_of,
    activity_of,
    share_of,
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
    for start in range(0, windows, window_block):
        within, pooled, present = _places(start, sample, channel, height, width, channels, window_block)
        a, b, c, d = _window(x + within, width, channels, present)
        largest = (tl.maximum(tl.maximum(a, b), tl.maximum(c, d)) - mean) * rstd
        g = tl.load(slope + pooled, mask=present, other=0.0).to(tl.float32)
        g = tl.where(largest > 0, g, 0.0)
        slopes += g
        products += g * largest
    product = tl.sum(products, 0)
    total, along = tl.sum(slopes, 0) / (4 * windows), product / (4 * windows)
    if measures:
        tl.store(taylor_of + plane, tl.abs(product) / windows, mask=known)
    each = tl.zeros([channel_block], tl.float32)
    if shows:
        each = tl.load(slope_of_activity + plane, mask=known, other=0.0) / (4 * windows)
        total += each * tl.load(share_of + plane, mask=known, other=0.0)
        along += each * tl.load(activity_of + plane, mask=known, other=0.0)
    active, silent = each - total, -total
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
            at_a, at_b = at_a + tl.where(a > 0, active, silent), at_b + tl.where(b > 0, active, silent)
            at_c, at_d = at_c + tl.where(c > 0, active, silent), at_d + tl.where(d > 0, active, silent)
        else:
            at_a, at_b, at_c, at_d = at_a + silent, at_b + silent, at_c + silent, at_d + silent
        to, below = out + within, width * channels
        tl.store(to, rstd * (at_a - a * along), mask=present)
        tl.store(to + channels, rstd * (at_b - b * along), mask=present)
        tl.store(to + below, rstd * (at_c - c * along), mask=present)
        tl.store(to + below + channels, rstd * (at_d - d * along), mask=present)


class _Tile(NamedTuple):
    grid: tuple[int, int]
    """How many programs there are."""
    windows: int
    channels: int
    """How many of them each takes at a time."""
    warps: int


def _tile(x: Tensor) -> _Tile:
    """What was the fastest on an H200, of planes of 32x32, 16x16 and 8x8."""
    samples, channels, height, width = x.shape
    windows = triton.next_power_of_2(height // 2 * (width // 2))
    wide = min(triton.next_power_of_2(channels), 64 if windows > 16 else 32)
    grid = samples, triton.cdiv(channels, wide)
    return _Tile(grid, 64, wide, 8) if windows > 64 else _Tile(grid, min(windows, 32), wide, 4)


Parts = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def _room(x: Tensor, shows: bool) -> Parts:
    """Where the pooled values go; the means and inverse deviations of planes; and, if it shows, their activities and
    the shares of their positions that are active.
    """
    out = torch.empty_like(x[:, :, ::2, ::2], memory_format=torch.channels_last)
    mean, rstd, activity, share = (
        x.new_empty(x.shape[:2] if wanted else 0, dtype=torch.float32) for wanted in (True, True, shows, shows)
    )
    return out, mean, rstd, activity, share


@torch.library.custom_op("holdfast::norm_relu_pool", mutates_args=())
def norm_relu_pool(x: Tensor, shows: bool, carrier: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Instance norm, ReLU and 2x2 max pooling of `x`, and what `_room` says of its planes.

    A `carrier`, one value per channel, gets `taylor` of what is pooled as its gradient, as from `Observe`.
    """
    x = x.contiguous(memory_format=torch.channels_last)
    out, *of_planes = _room(x, shows)
    grid, *blocks, warps = _tile(x)
    with torch.cuda.device_of(x):
        _forward[grid](x, out, *of_planes, *_sizes(x), EPS, shows, *blocks, num_warps=warps)
    return out, *of_planes  # type: ignore[return-value]


@norm_relu_pool.register_fake
def _(x: Tensor, shows: bool, carrier: Tensor | None) -> Parts:
    return _room(x, shows)


def _sizes(x: Tensor) -> tuple[int, int, int]:
    _, channels, height, width = x.shape
    return height, width, channels


@torch.library.custom_op("holdfast::norm_relu_pool_backward", mutates_args=())
def _slopes(
    slope: Tensor, slope_of_activity: Tensor | None, x: Tensor, of_planes: Sequence[Tensor], measures: bool
) -> tuple[Tensor, Tensor]:
    """The slope of `x` and, if it `measures`, each plane's part in `taylor` of what was pooled."""
    x, slope = (each.contiguous(memory_format=torch.channels_last) for each in (x, slope))
    shows = slope_of_activity is not None
    of_activity = slope if slope_of_activity is None else slope_of_activity.contiguous()
    out, taylor = _room_for_slopes(x, measures)
    grid, *blocks, warps = _tile(x)
    with torch.cuda.device_of(x):
        _backward[grid](
            *(x, slope, of_activity, *of_planes, out, taylor, *_sizes(x), shows, measures, *blocks), num_warps=warps
        )
    return out, taylor


@_slopes.register_fake
def _(
    slope: Tensor, slope_of_activity: Tensor | None, x: Tensor, of_planes: Sequence[Tensor], measures: bool
) -> tuple[Tensor, Tensor]:
    return _room_for_slopes(x, measures)


def _room_for_slopes(x: Tensor, measures: bool) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(x, memory_format=torch.channels_last)
    return out, x.new_empty(x.shape[:2] if measures else 0, dtype=torch.float32)


def _keep(ctx, inputs, output):
    x, ctx.shows, _ = inputs
    ctx.save_for_backward(x, *output[1:])


def _differentiate(ctx, slope, _, __, slope_of_activity, ___):
    measures = ctx.needs_input_grad[2]
    x, *of_planes = ctx.saved_tensors
    out, taylor = _slopes(slope, slope_of_activity if ctx.shows else None, x, of_planes, measures)
    return out, None, taylor.sum(0) if measures else None


norm_relu_pool.register_autograd(_differentiate, setup_context=_keep)
