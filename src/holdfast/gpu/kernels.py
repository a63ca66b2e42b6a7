"""Instance norm, ReLU and 2x2 max pooling in one Triton kernel, without intermediate results in memory.

A program handles one sample and a block of channels. A plane is one channel of one sample. The program reads each plane
twice, the second time from the cache:

- forward: for mean and standard deviation, then for the maximum of each 2x2 window, clipped at 0;
- backward: for two sums over the plane, then for the gradients.

On request the forward kernel also returns the activity of each plane, its mean after the ReLU. The backward kernel
has the quantity that NPC measures at hand, the sum over positions of n * dL/dn, and only needs to write one number per
plane.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from holdfast.gpu.fused import EPS


@triton.jit
def _program(channels, channel_block: tl.constexpr):
    """The sample, channels and planes of this program, and the mask of valid channels."""
    sample = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * channel_block + tl.arange(0, channel_block)
    return sample, channel, sample * channels + channel, channel < channels


@triton.jit
def _offsets(start, sample, channel, height, width, channels, window_block: tl.constexpr):
    """The offsets of windows in the input [height, width, channel] and in the output, and the mask of valid ones."""
    windows = (height // 2) * (width // 2)
    at = start + tl.arange(0, window_block)
    row, column = at // (width // 2), at % (width // 2)
    corner = ((sample * height + 2 * row) * width + 2 * column) * channels
    pooled = (sample * windows + at)[:, None] * channels + channel[None, :]
    valid = (at < windows)[:, None] & (channel < channels)[None, :]
    return corner[:, None] + channel[None, :], pooled, valid


@triton.jit
def _window(pointer, width, channels, valid):
    """The four values of each 2x2 window, [window, channel]."""
    below = width * channels
    a = tl.load(pointer, mask=valid, other=0.0).to(tl.float32)
    b = tl.load(pointer + channels, mask=valid, other=0.0).to(tl.float32)
    c = tl.load(pointer + below, mask=valid, other=0.0).to(tl.float32)
    d = tl.load(pointer + below + channels, mask=valid, other=0.0).to(tl.float32)
    return a, b, c, d


@triton.jit
def _median(pointer, height, width, channels, known):
    """The median of three values of a plane: a typical value, robust to a single outlier."""
    step = (height // 2) * (width // 2)
    a = tl.load(pointer, mask=known, other=0.0).to(tl.float32)
    b = tl.load(pointer + (step + width // 2) * channels, mask=known, other=0.0).to(tl.float32)
    c = tl.load(pointer + (2 * step + width // 2) * channels, mask=known, other=0.0).to(tl.float32)
    return tl.maximum(tl.minimum(a, b), tl.minimum(tl.maximum(a, b), c))


@triton.jit
def _positive(value):
    return tl.where(value < 0, 0.0, value)  # passes NaN on, unlike tl.maximum


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
    # Sums relative to a typical value: the square of a large mean would drown the deviation.
    typical = _median(x + sample * height * width * channels + channel, height, width, channels, known)
    total = tl.zeros([window_block, channel_block], tl.float32)
    squares = tl.zeros([window_block, channel_block], tl.float32)
    for start in range(0, windows, window_block):
        within, _, valid = _offsets(start, sample, channel, height, width, channels, window_block)
        a, b, c, d = _window(x + within, width, channels, valid)
        inside = valid.to(tl.float32)
        a, b, c, d = (a - typical) * inside, (b - typical) * inside, (c - typical) * inside, (d - typical) * inside
        total += (a + b) + (c + d)
        squares += (a * a + b * b) + (c * c + d * d)
    over = tl.sum(total, 0) / (4 * windows)
    mean = typical + over
    rstd = 1 / tl.sqrt(_positive(tl.sum(squares, 0) / (4 * windows) - over * over) + eps)
    deviations = tl.zeros([window_block, channel_block], tl.float32)
    positives = tl.zeros([window_block, channel_block], tl.float32)
    for start in range(0, windows, window_block):
        within, pooled, valid = _offsets(start, sample, channel, height, width, channels, window_block)
        a, b, c, d = _window(x + within, width, channels, valid)
        largest = (tl.maximum(tl.maximum(a, b), tl.maximum(c, d)) - mean) * rstd
        tl.store(out + pooled, _positive(largest), mask=valid)
        if shows:
            inside = valid.to(tl.float32)
            a, b, c, d = a - mean, b - mean, c - mean, d - mean
            deviations += ((tl.abs(a) + tl.abs(b)) + (tl.abs(c) + tl.abs(d))) * inside
            positives += ((_above(a) + _above(b)) + (_above(c) + _above(d))) * inside
    tl.store(mean_of + plane, mean, mask=known)
    tl.store(rstd_of + plane, rstd, mask=known)
    if shows:
        # Deviations above the mean have the same sum as those below, so half of all is the sum after the ReLU.
        tl.store(activity_of + plane, tl.sum(deviations, 0) * rstd / (8 * windows), mask=known)
        tl.store(share_of + plane, tl.sum(positives, 0) / (4 * windows), mask=known)


@triton.jit
def _backward(
    x,
    gradient,
    gradient_of_activity,
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
    gradients = tl.zeros([window_block, channel_block], tl.float32)
    products = tl.zeros([window_block, channel_block], tl.float32)
    for start in range(0, windows, window_block):
        within, pooled, valid = _offsets(start, sample, channel, height, width, channels, window_block)
        a, b, c, d = _window(x + within, width, channels, valid)
        largest = (tl.maximum(tl.maximum(a, b), tl.maximum(c, d)) - mean) * rstd
        g = tl.load(gradient + pooled, mask=valid, other=0.0).to(tl.float32)
        g = tl.where(largest > 0, g, 0.0)
        gradients += g
        products += g * largest
    product = tl.sum(products, 0)
    total, along = tl.sum(gradients, 0) / (4 * windows), product / (4 * windows)
    if measures:
        tl.store(taylor_of + plane, tl.abs(product) / windows, mask=known)
    each = tl.zeros([channel_block], tl.float32)
    if shows:
        each = tl.load(gradient_of_activity + plane, mask=known, other=0.0) / (4 * windows)
        total += each * tl.load(share_of + plane, mask=known, other=0.0)
        along += each * tl.load(activity_of + plane, mask=known, other=0.0)
    active, silent = each - total, -total
    for start in range(0, windows, window_block):
        within, pooled, valid = _offsets(start, sample, channel, height, width, channels, window_block)
        a, b, c, d = _window(x + within, width, channels, valid)
        a, b, c, d = (a - mean) * rstd, (b - mean) * rstd, (c - mean) * rstd, (d - mean) * rstd
        largest = tl.maximum(tl.maximum(a, b), tl.maximum(c, d))
        g = tl.load(gradient + pooled, mask=valid, other=0.0).to(tl.float32)
        g = tl.where(largest > 0, g, 0.0)
        # The gradient goes to the first of the window's largest values, as in torch.
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
        tl.store(to, rstd * (at_a - a * along), mask=valid)
        tl.store(to + channels, rstd * (at_b - b * along), mask=valid)
        tl.store(to + below, rstd * (at_c - c * along), mask=valid)
        tl.store(to + below + channels, rstd * (at_d - d * along), mask=valid)


class _Tile(NamedTuple):
    grid: tuple[int, int]
    """The number of programs, by sample and block of channels."""
    windows: int
    channels: int
    """The block that a program loads at a time: windows by channels."""
    warps: int


def _tile(x: Tensor) -> _Tile:
    """The fastest tiles on an H200, for planes of 32x32, 16x16 and 8x8."""
    samples, channels, height, width = x.shape
    windows = triton.next_power_of_2(height // 2 * (width // 2))
    block = min(triton.next_power_of_2(channels), 64 if windows > 16 else 32)
    grid = samples, triton.cdiv(channels, block)
    return _Tile(grid, 64, block, 8) if windows > 64 else _Tile(grid, min(windows, 32), block, 4)


Parts = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def _allocate(x: Tensor, shows: bool) -> Parts:
    """Allocate the output and, per plane, the mean, the inverse standard deviation and, if `shows`, the activity and
    the share of active positions.
    """
    out = torch.empty_like(x[:, :, ::2, ::2], memory_format=torch.channels_last)
    mean, rstd, activity, share = (
        x.new_empty(x.shape[:2] if wanted else 0, dtype=torch.float32) for wanted in (True, True, shows, shows)
    )
    return out, mean, rstd, activity, share


@torch.library.custom_op("holdfast::norm_relu_pool", mutates_args=())
def norm_relu_pool(x: Tensor, shows: bool, carrier: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Instance norm, ReLU and 2x2 max pooling of `x`, with the statistics of its planes that `_allocate` lists.

    A `carrier`, one value per channel, receives `taylor` of the output as its gradient, as from `Observe`.
    """
    x = x.contiguous(memory_format=torch.channels_last)
    out, *of_planes = _allocate(x, shows)
    grid, *blocks, warps = _tile(x)
    with torch.cuda.device_of(x):
        _forward[grid](x, out, *of_planes, *_sizes(x), EPS, shows, *blocks, num_warps=warps)
    return out, *of_planes  # type: ignore[return-value]


@norm_relu_pool.register_fake
def _(x: Tensor, shows: bool, carrier: Tensor | None) -> Parts:
    return _allocate(x, shows)


def _sizes(x: Tensor) -> tuple[int, int, int]:
    _, channels, height, width = x.shape
    return height, width, channels


@torch.library.custom_op("holdfast::norm_relu_pool_backward", mutates_args=())
def _gradients(
    gradient: Tensor, gradient_of_activity: Tensor | None, x: Tensor, of_planes: Sequence[Tensor], measures: bool
) -> tuple[Tensor, Tensor]:
    """The gradient of `x` and, if `measures`, each plane's summand of the output's `taylor`."""
    x, gradient = (each.contiguous(memory_format=torch.channels_last) for each in (x, gradient))
    shows = gradient_of_activity is not None
    of_activity = gradient if gradient_of_activity is None else gradient_of_activity.contiguous()
    out, taylor = _allocate_gradients(x, measures)
    grid, *blocks, warps = _tile(x)
    with torch.cuda.device_of(x):
        _backward[grid](
            *(x, gradient, of_activity, *of_planes, out, taylor, *_sizes(x), shows, measures, *blocks), num_warps=warps
        )
    return out, taylor


@_gradients.register_fake
def _(
    gradient: Tensor, gradient_of_activity: Tensor | None, x: Tensor, of_planes: Sequence[Tensor], measures: bool
) -> tuple[Tensor, Tensor]:
    return _allocate_gradients(x, measures)


def _allocate_gradients(x: Tensor, measures: bool) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(x, memory_format=torch.channels_last)
    return out, x.new_empty(x.shape[:2] if measures else 0, dtype=torch.float32)


def _setup_context(ctx, inputs, output):
    x, ctx.shows, _ = inputs
    ctx.save_for_backward(x, *output[1:])


def _backpropagate(ctx, gradient, _, __, gradient_of_activity, ___):
    measures = ctx.needs_input_grad[2]
    x, *of_planes = ctx.saved_tensors
    out, taylor = _gradients(gradient, gradient_of_activity if ctx.shows else None, x, of_planes, measures)
    return out, None, taylor.sum(0) if measures else None


norm_relu_pool.register_autograd(_backpropagate, setup_context=_setup_context)
