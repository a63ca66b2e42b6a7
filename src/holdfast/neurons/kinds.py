"""Kinds of modules, and the axis of a module's output along which its neurons lie."""

from torch import Tensor, nn

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
LAYERS = (nn.Linear, *CONVOLUTIONS, *TRANSPOSED)

_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
TRAILING_NORMS = (nn.LayerNorm, nn.RMSNorm)
NORMS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.GroupNorm),
    *_INSTANCE_NORMS,
    *TRAILING_NORMS,
)

POOLS = (
    *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
    *(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
)
# Positively homogeneous, each neuron on its own: f(a n) = a f(n) for a > 0.
HOMOGENEOUS = (nn.ReLU, nn.LeakyReLU, nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, *POOLS)

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)

ACTIVATIONS = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.RReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish),
    *(nn.Sigmoid, nn.Tanh, nn.Softplus, nn.Softsign, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh),
)


def is_transposed_linear(module: nn.Module) -> bool:
    """Whether `module` is a linear layer with a weight `[inputs, outputs]`, as `Conv1D` in GPT-2 of transformers.

    Such a module has its numbers of inputs and outputs as `nx` and `nf`.
    """
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.shape == (getattr(module, "nx", None), getattr(module, "nf", None))


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or is_transposed_linear(module)


def is_layer(module: nn.Module) -> bool:
    """Whether `module` is a linear or convolutional layer."""
    return isinstance(module, LAYERS) or is_transposed_linear(module)


def width_of(module: nn.Module) -> int:
    """Number of neurons of a layer."""
    name = "out_features" if isinstance(module, nn.Linear) else "nf" if is_linear(module) else "out_channels"
    return int(getattr(module, name))


def normalizes_singly(norm: nn.Module) -> bool:
    """Whether a normalization treats each neuron on its own, so that the loss does not depend on a neuron's scale.

    >>> normalizes_singly(nn.BatchNorm2d(4)), normalizes_singly(nn.LayerNorm(4)), normalizes_singly(nn.GroupNorm(2, 4))
    (True, False, False)
    """
    if isinstance(norm, nn.GroupNorm):
        return norm.num_groups == norm.num_channels
    return isinstance(norm, (*_INSTANCE_NORMS, *_BATCH_NORMS))


def neuron_axis(module: nn.Module, output: Tensor) -> int:
    """Axis of the neurons in an output of `module`, a layer or a normalization.

    >>> import torch
    >>> neuron_axis(nn.Conv2d(3, 8, 3), torch.zeros(2, 8, 5, 5)), neuron_axis(nn.Linear(4, 6), torch.zeros(2, 3, 6))
    (1, 2)
    """
    if isinstance(module, nn.Linear):
        return output.dim() - 1
    if isinstance(module, TRAILING_NORMS):
        return output.dim() - len(module.normalized_shape)
    if isinstance(module, (*CONVOLUTIONS, *TRANSPOSED)):
        return output.dim() - len(module.kernel_size) - 1
    if isinstance(module, _INSTANCE_NORMS):
        spatial = next(i for i, kind in enumerate(_INSTANCE_NORMS, start=1) if isinstance(module, kind))
        return output.dim() - spatial - 1
    return 1 if isinstance(module, NORMS) else output.dim() - 1


def axis_at(layer: nn.Module, module: nn.Module, output: Tensor) -> int:
    """Axis of the neurons of `layer` in an output of `module`.

    A normalization defines the axis itself. Any other module is expected to keep the layout of the layer's own output.
    """
    return neuron_axis(module if isinstance(module, NORMS) else layer, output)
