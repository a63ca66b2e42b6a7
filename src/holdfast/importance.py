"""How important a neuron is: eq. 2 to 4 of the paper, measured while autograd goes backward."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def precise(dtype: torch.dtype) -> torch.dtype:
    """The type to sum up in."""
    return torch.promote_types(dtype, torch.float32)


def taylor(activation: Tensor, gradient: Tensor, axis: int) -> Tensor:
    """Eq. 2 without its constant factor: the sum over samples of |mean over positions of n * dL/dn|, per neuron.

    Samples lie along axis 0 and neurons along `axis`; all other axes are positions. Where the neurons themselves
    lie along axis 0 there is one sample.

    >>> n = torch.tensor([[[1.0, 3.0], [2.0, 0.0]]])  # one sample, two neurons, two positions
    >>> taylor(n, torch.ones_like(n), axis=1)
    tensor([2., 1.])
    """
    if activation.dtype == torch.float16:  # whose products overflow, above all under loss scaling
        activation, gradient = activation.float(), gradient.float()
    product = activation * gradient
    dtype = precise(product.dtype)
    positions = [i for i in range(product.dim()) if i not in (0, axis)]
    per_sample = product.mean(positions, dtype=dtype) if positions else product.to(dtype)
    return per_sample.abs() if axis == 0 else per_sample.abs().sum(0)


class Observe(torch.autograd.Function):
    """The identity, whose backward also hands `taylor` of the activation to `carrier` as its gradient.

    So importance rides on autograd: it adds up over calls and micro-batches by itself, and no code runs per neuron.
    With `copy` the output has memory of its own, for activations that the model goes on to change in place.
    """

    @staticmethod
    def forward(ctx: Any, activation: Tensor, carrier: Tensor, axis: int, copy: bool) -> Tensor:
        ctx.axis = axis
        ctx.save_for_backward(activation)
        return activation.clone() if copy else activation.view_as(activation)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (activation,) = ctx.saved_tensors
        return gradient, taylor(activation.detach(), gradient.detach(), ctx.axis), None, None


def layer_means(measured: Tensor, sizes: Tensor, widths: Sequence[int]) -> Tensor:
    """The mean of each layer, of all neurons of all layers in one row; a layer's size as a number, and in a tensor.

    >>> layer_means(torch.tensor([3.0, 1.0, 5.0]), torch.tensor([2, 1]), [2, 1])
    tensor([2., 5.])
    """
    if torch.compiler.is_compiling():  # where small operations become one kernel, and this one would be many
        return torch.stack([values.mean() for values in measured.split_with_sizes(list(widths))])
    return torch.segment_reduce(measured, "mean", lengths=sizes, unsafe=True)


def moving_average(importance: Tensor, measured: Tensor, mean: Tensor, layer: Tensor, rate: float) -> Tensor:
    """Eq. 3 and 4: divide by the layer's mean and move the average towards the result by `rate`.

    All neurons of all layers stand in one row, and `layer` says of each which layer it is in. A layer without a usable
    measurement (all zero, or not finite) keeps the importance it had.

    >>> mean, layer = torch.tensor([2.0, torch.nan]), torch.tensor([0, 0, 1])
    >>> moving_average(torch.zeros(3), torch.tensor([3.0, 1.0, torch.nan]), mean, layer, rate=0.5)
    tensor([0.7500, 0.2500, 0.0000])
    """
    usable = (mean > 0) & (mean < torch.inf)
    normalised = measured / mean.index_select(0, layer)  # eq. 3
    average = torch.lerp(importance, normalised, rate)  # eq. 4
    return torch.where(usable.index_select(0, layer), average, importance)
