"""Layers as matrix products: the inputs of a layer as rows, its weight as a matrix."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from holdfast.importance import precise
from holdfast.neurons.kinds import CONVOLUTIONS, TRANSPOSED, is_layer, is_linear, is_transposed_linear

_CHUNK = 2**26  # elements of unfolded inputs at once

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d
TransposedConvolution = nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d


@dataclass(frozen=True)
class Layout:
    """The layout of a layer's weight: `[outputs, inputs / groups, *kernel]`, or transposed, by groups.

    If `stacked`, the groups lie along an axis of their own: `[groups, outputs, inputs]`.
    """

    groups: int = 1
    transposed: bool = False
    stacked: bool = False

    @classmethod
    def of(cls, module: nn.Module) -> "Layout":
        return cls(getattr(module, "groups", 1), isinstance(module, TRANSPOSED) or is_transposed_linear(module))

    def matrix(self, weight: Tensor) -> Tensor:
        """The weight as a matrix for each group, `[groups, outputs / groups, inputs]`.

        >>> Layout(groups=2).matrix(torch.zeros(8, 3, 5, 5)).shape
        torch.Size([2, 4, 75])
        """
        grouped = weight if self.stacked else weight.reshape(self.groups, -1, *weight.shape[1:])
        return (grouped.transpose(1, 2) if self.transposed else grouped).flatten(2)

    def joined(self, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Weight and bias as one matrix for each group. The bias, if given, is its last column."""
        matrix = self.matrix(weight)
        return matrix if bias is None else torch.cat([matrix, bias.view(self.groups, -1, 1)], 2)

    def write_(self, matrix: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
        """Copy a matrix as from `joined` into weight and bias. Columns beyond them are ignored."""
        columns = weight.numel() // (matrix.shape[0] * matrix.shape[1])
        weight.copy_(self.weight(matrix[:, :, :columns], weight.shape))
        if bias is not None:
            bias.copy_(matrix[:, :, columns].reshape(-1))

    def weight(self, matrix: Tensor, shape: torch.Size) -> Tensor:
        """The inverse of `matrix`, for a weight of this shape."""
        if not self.transposed:
            return matrix.reshape(shape)
        split = matrix if self.stacked else matrix.reshape(*matrix.shape[:2], shape[0] // self.groups, *shape[2:])
        return split.transpose(1, 2).reshape(shape)


def has_input_rows(module: nn.Module) -> bool:
    """Whether `input_rows` supports `module`: a linear layer or an ungrouped convolution."""
    return isinstance(module, (nn.Linear, *CONVOLUTIONS)) and getattr(module, "groups", 1) == 1


def input_rows(module: nn.Module, x: Tensor) -> Tensor:
    """Return the inputs `x` of a layer as rows `[n, inputs]`, in the column order of `weight.flatten(1)`.

    A linear layer has one row per sample and position, a convolution one row per sample and output position: its
    unfolded patch. With `rows = input_rows(module, x)`, `F.linear(rows, module.weight.flatten(1), module.bias)` has the
    values of `module(x)`, one output position per row.

    >>> conv = nn.Conv2d(3, 8, 3, padding=1)
    >>> input_rows(conv, torch.zeros(2, 3, 5, 5)).shape  # 2 * 5 * 5 positions, 3 * 3 * 3 inputs
    torch.Size([50, 27])
    """
    if not has_input_rows(module):
        raise ValueError(
            f"input rows are defined for Linear and ungrouped Conv layers, not for {module}; leave this layer out"
        )
    return group_rows(module, x).squeeze(0)


def group_rows(module: nn.Module, x: Tensor) -> Tensor:
    """Return the inputs of any layer as rows for each group, `[groups, n, inputs]`.

    The columns are those of `Layout.matrix`. In a transposed convolution, a row holds the inputs of one output
    position; inputs that the kernel does not reach are 0.
    """
    if not is_layer(module):
        raise TypeError(f"{module} is not a layer: its inputs have no rows")
    if is_linear(module):
        return x.reshape(1, -1, x.shape[-1])
    x = batched(module, x)
    assert isinstance(module, (*CONVOLUTIONS, *TRANSPOSED))
    patches = _transposed_patches(module, x) if isinstance(module, TRANSPOSED) else _patches(module, x)
    return patches.reshape(len(patches), module.groups, -1).transpose(0, 1)


def chunked_rows(module: nn.Module, x: Tensor) -> Iterator[Tensor]:
    """The rows of `group_rows` in at least float32, in chunks of samples."""
    x = batched(module, x.to(precise(x.dtype)))
    samples = max(1, _CHUNK // max(1, group_rows(module, x[:1]).numel()))
    return (group_rows(module, part) for part in torch.split(x, samples))


def output_rows(module: nn.Module, y: Tensor) -> Tensor:
    """Return values at the outputs of a layer as rows for each group, `[groups, n, neurons / groups]`."""
    if is_linear(module):
        return y.reshape(1, -1, y.shape[-1])
    rows = batched(module, y).movedim(1, -1).flatten(0, -2)
    return rows.reshape(len(rows), Layout.of(module).groups, -1).transpose(0, 1)


def batched(module: nn.Module, x: Tensor) -> Tensor:
    """The inputs of a layer with an axis of samples, which a convolution can lack."""
    lacking = isinstance(module, (*CONVOLUTIONS, *TRANSPOSED)) and x.dim() == len(module.kernel_size) + 1
    return x.unsqueeze(0) if lacking or x.dim() == 1 else x


def _patches(conv: Convolution, x: Tensor) -> Tensor:
    mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
    x = pad(x, conv._reversed_padding_repeated_twice, mode=mode)
    return _unfolded(x, conv.kernel_size, conv.stride, conv.dilation)


def _transposed_patches(conv: TransposedConvolution, x: Tensor) -> Tensor:
    """The patches of the equivalent convolution: zeros between the inputs, a border, and a flipped kernel."""
    axes = range(len(conv.kernel_size))
    spread = x.new_zeros(*x.shape[:2], *((x.shape[2 + i] - 1) * conv.stride[i] + 1 for i in axes))
    every = tuple(slice(None, None, conv.stride[i]) for i in axes)
    spread[(slice(None), slice(None), *every)] = x
    border: list[int] = []
    for i in reversed(axes):
        before = conv.dilation[i] * (conv.kernel_size[i] - 1) - int(conv.padding[i])
        border += [before, before + conv.output_padding[i]]
    ones = (1,) * len(conv.kernel_size)
    return _unfolded(pad(spread, border), conv.kernel_size, ones, conv.dilation, flip=True)


def _unfolded(
    x: Tensor, kernel: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...], *, flip: bool = False
) -> Tensor:
    """One row per sample and output position: its patch, `[n, channels * kernel]`."""
    axes = len(kernel)
    for axis in range(axes):
        x = x.unfold(2 + axis, (kernel[axis] - 1) * dilation[axis] + 1, stride[axis])[..., :: dilation[axis]]
    if flip:
        x = x.flip(*range(2 + axes, 2 + 2 * axes))
    # [sample, channel, *position, *kernel] -> [sample, *position, channel, *kernel]
    return x.movedim(1, 1 + axes).flatten(1 + axes).flatten(0, axes)
