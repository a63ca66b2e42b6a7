"""A layer's inputs as rows of a matrix, so that every layer is a matrix product."""

from torch import Tensor, nn
from torch.nn.functional import pad

from holdfast.neurons.kinds import CONVOLUTIONS


def has_input_rows(module: nn.Module) -> bool:
    """Whether `input_rows` supports `module`: a linear layer or an ungrouped convolution."""
    return isinstance(module, nn.Linear) or (isinstance(module, CONVOLUTIONS) and module.groups == 1)


def input_rows(module: nn.Module, x: Tensor) -> Tensor:
    """Return the inputs `x` of a layer as rows `[n, inputs]`, in the column order of `weight.flatten(1)`.

    A linear layer has one row per sample and position, a convolution one row per sample and output position: its
    unfolded patch. With `rows = input_rows(module, x)`, `F.linear(rows, module.weight.flatten(1), module.bias)` has the
    values of `module(x)`, one output position per row.

    >>> import torch
    >>> conv = nn.Conv2d(3, 8, 3, padding=1)
    >>> input_rows(conv, torch.zeros(2, 3, 5, 5)).shape  # 2 * 5 * 5 positions, 3 * 3 * 3 inputs
    torch.Size([50, 27])
    """
    if not has_input_rows(module):
        raise ValueError(
            f"input rows are defined for Linear and ungrouped Conv layers, not for {module}; leave this layer out"
        )
    if isinstance(module, CONVOLUTIONS):
        return _patches(module, x)
    return x.reshape(-1, x.shape[-1])


def _patches(conv: nn.Conv1d | nn.Conv2d | nn.Conv3d, x: Tensor) -> Tensor:
    axes = len(conv.kernel_size)
    if x.dim() == axes + 1:
        x = x.unsqueeze(0)
    mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
    x = pad(x, conv._reversed_padding_repeated_twice, mode=mode)
    for axis, (size, stride, dilation) in enumerate(zip(conv.kernel_size, conv.stride, conv.dilation, strict=True)):
        x = x.unfold(2 + axis, (size - 1) * dilation + 1, stride)[..., ::dilation]
    # [sample, channel, *position, *kernel] -> [sample, *position, channel, *kernel]
    x = x.movedim(1, 1 + axes)
    return x.flatten(1 + axes).flatten(0, axes)
