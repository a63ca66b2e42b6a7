"""Two-dimensional convolutions with efficient per-sample gradients of their weights.

Under vmap, torch computes such a gradient as a grouped convolution, which GPUs execute sample by sample. As a matrix
product it covers all samples at once.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.grad import conv2d_input
from torch.overrides import TorchFunctionMode

Pair = tuple[int, int]


def columns(x: Tensor, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair) -> Tensor:
    """The patch of inputs at each position of the output, [sample, channel * kernel, position].

    >>> x = torch.arange(9.0).view(1, 1, 3, 3)
    >>> columns(x, (2, 2), stride=(1, 1), padding=(0, 0), dilation=(1, 1))[0, :, 0]  # the upper left corner
    tensor([0., 1., 3., 4.])
    """
    x = pad(x, (padding[1], padding[1], padding[0], padding[0]))
    for axis in (0, 1):
        x = x.unfold(2 + axis, (kernel[axis] - 1) * dilation[axis] + 1, stride[axis])
    x = x[..., :: dilation[0], :: dilation[1]]  # [sample, channel, height, width, *kernel]
    return x.permute(0, 1, 4, 5, 2, 3).flatten(4).flatten(1, 3)


class _Convolution(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, stride: Pair, padding: Pair, dilation: Pair) -> Tensor:
        return torch.conv2d(x, weight, None, stride, padding, dilation)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, *ctx.geometry = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor, None, None, None]:
        x, weight = ctx.saved_tensors
        to_x = None
        if ctx.needs_input_grad[0]:
            to_x = conv2d_input(x.shape, weight, gradient, *ctx.geometry)  # type: ignore[no-untyped-call]
        patches = columns(x, weight.shape[2:], *ctx.geometry)
        to_weight = (gradient.flatten(2) @ patches.transpose(1, 2)).sum(0).view_as(weight)
        return to_x, to_weight, None, None, None


def _convolve(
    input: Tensor,  # noqa: A002
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    if groups != 1 or isinstance(padding, str):
        return torch.conv2d(input, weight, bias, stride, padding, dilation, groups)
    geometry = (_pair(stride), _pair(padding), _pair(dilation))
    output: Tensor = _Convolution.apply(input, weight, *geometry)  # type: ignore[no-untyped-call]
    return output if bias is None else output + bias[:, None, None]


def _pair(value: Any) -> Pair:
    return (value, value) if isinstance(value, int) else (value[0], value[-1])


class PerSampleConvolutions(TorchFunctionMode):
    """A context in which `conv2d` computes per-sample gradients of its weight as matrix products."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return (_convolve if func is torch.conv2d else func)(*args, **(kwargs or {}))
