"""Instance norm, ReLU and 2x2 max pooling in one kernel for GPUs: the plane of a filter is read once and never written.

Forward, a program takes one sample and some channels, whose planes it has in registers: mean, deviation, normalised
values, and of each 2x2 window the largest, if it is above 0. Backward it reads the plane again and does the same, since
that is quicker than to read what would have had to be stored.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from holdfast.fast import EPS

_ELEMENTS = 4096  # of a pooled tile; what one program holds is four times as much


@triton.jit
def _window(x, sample, at, channel, height, width, channels, present):
    """The four values of each 2x2 window, [window, channel], of a sample that lies as [height, width, channel]."""
    row, column = at // (width // 2), at % (width // 2)
    corner = ((sample * height + 2 * row) * width + 2 * column) * channels
    place = x + corner[:, None] + channel[None, :]
    below = width * channels
    a = tl.load(place, mask=present, other=0.0).to(tl.float32)
    b = tl.load(place + channels, mask=present, other=0.0).to(tl.float32)
    c = tl.load(place + below, mask=present, other=0.0).to(tl.float32)
    d = tl.load(place + below + channels, mask=present, other=0.0).to(tl.float32)
    return a, b, c, d


@triton.jit
def _forward(
    x, out, mean_of, rstd_of, height, width, channels, eps, window_block: tl.constexpr, channel_block: tl.constexpr
):
    sample, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    windows = (height // 2) * (width // 2)
    at, channel = tl.arange(0, window_block), block * channel_block + tl.arange(0, channel_block)
    present = (at < windows)[:, None] & (channel < channels)[None, :]
    a, b, c, d = _window(x, sample, at, channel, height, width, channels, present)
    mean = tl.sum(a + b + c + d, 0) / (4 * windows)
    within = present.to(tl.float32)
    a, b, c, d = (a - mean) * within, (b - mean) * within, (c - mean) * within, (d - mean) * within
    rstd = 1 / tl.sqrt(tl.sum(a * a + b * b + c * c + d * d, 0) / (4 * windows) + eps)
    largest = tl.maximum(tl.maximum(a, b), tl.maximum(c, d)) * rstd
    place = out + (sample * windows + at)[:, None] * channels + channel[None, :]
    tl.store(place, tl.where(largest < 0, 0.0, largest), mask=present)  # which lets through what is no number
    tl.store(mean_of + sample * channels + channel, mean, mask=channel < channels)
    tl.store(rstd_of + sample * channels + channel, rstd, mask=channel < channels)


@triton.jit
def _backward(
    x, slope, mean_of, rstd_of, out, height, width, channels, window_block: tl.constexpr, channel_block: tl.constexpr
):
    sample, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    windows = (height // 2) * (width // 2)
    at, channel = tl.arange(0, window_block), block * channel_block + tl.arange(0, channel_block)
    present = (at < windows)[:, None] & (channel < channels)[None, :]
    mean = tl.load(mean_of + sample * channels + channel, mask=channel < channels, other=0.0)
    rstd = tl.load(rstd_of + sample * channels + channel, mask=channel < channels, other=0.0)
    a, b, c, d = _window(x, sample, at, channel, height, width, channels, present)
    a, b, c, d = (a - mean) * rstd, (b - mean) * rstd, (c - mean) * rstd, (d - mean) * rstd
    largest = tl.maximum(tl.maximum(a, b), tl.maximum(c, d))
    place = slope + (sample * windows + at)[:, None] * channels + channel[None, :]
    g = tl.load(place, mask=present, other=0.0).to(tl.float32)
    g = tl.where(largest > 0, g, 0.0)
    # The slope goes to the first of the window's largest values, as in torch.
    is_a = a == largest
    is_b = (b == largest) & ~is_a
    is_c = (c == largest) & ~is_a & ~is_b
    is_d = ~is_a & ~is_b & ~is_c
    total = tl.sum(g, 0) / (4 * windows)
    along = tl.sum(g * largest, 0) / (4 * windows)
    row, column = at // (width // 2), at % (width // 2)
    corner = ((sample * height + 2 * row) * width + 2 * column) * channels
    to, below = out + corner[:, None] + channel[None, :], width * channels
    tl.store(to, rstd * (tl.where(is_a, g, 0.0) - total - a * along), mask=present)
    tl.store(to + channels, rstd * (tl.where(is_b, g, 0.0) - total - b * along), mask=present)
    tl.store(to + below, rstd * (tl.where(is_c, g, 0.0) - total - c * along), mask=present)
    tl.store(to + below + channels, rstd * (tl.where(is_d, g, 0.0) - total - d * along), mask=present)


def _tile(x: Tensor) -> tuple[tuple[int, int], int, int]:
    """How many programs there are, and how many windows and channels each has."""
    samples, channels, height, width = x.shape
    windows = triton.next_power_of_2(height // 2 * (width // 2))
    block = max(1, min(triton.next_power_of_2(channels), _ELEMENTS // windows))
    return (samples, triton.cdiv(channels, block)), windows, block


@torch.library.custom_op("holdfast::norm_relu_pool", mutates_args=())
def norm_relu_pool(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Instance norm, ReLU and 2x2 max pooling of `x`, and the means and the inverse deviations of its planes."""
    x = x.contiguous(memory_format=torch.channels_last)
    samples, channels, height, width = x.shape
    out = torch.empty_like(x[:, :, ::2, ::2], memory_format=torch.channels_last)
    mean, rstd = (torch.empty(samples, channels, dtype=torch.float32, device=x.device) for _ in range(2))
    grid, windows, block = _tile(x)
    with torch.cuda.device_of(x):
        _forward[grid](x, out, mean, rstd, height, width, channels, EPS, windows, block, num_warps=8)
    return out, mean, rstd


@norm_relu_pool.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    out = torch.empty_like(x[:, :, ::2, ::2], memory_format=torch.channels_last)
    mean, rstd = (torch.empty(x.shape[:2], dtype=torch.float32, device=x.device) for _ in range(2))
    return out, mean, rstd


@torch.library.custom_op("holdfast::norm_relu_pool_backward", mutates_args=())
def _slopes(slope: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    x, slope = (each.contiguous(memory_format=torch.channels_last) for each in (x, slope))
    _, channels, height, width = x.shape
    out = torch.empty_like(x)
    grid, windows, block = _tile(x)
    with torch.cuda.device_of(x):
        _backward[grid](x, slope, mean, rstd, out, height, width, channels, windows, block, num_warps=8)
    return out


@_slopes.register_fake
def _(slope: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.channels_last)


def _keep(ctx, inputs, output):
    ctx.save_for_backward(inputs[0], output[1], output[2])


def _differentiate(ctx, slope, *_):
    return _slopes(slope, *ctx.saved_tensors)


norm_relu_pool.register_autograd(_differentiate, setup_context=_keep)
