"""Importance of neurons, measured in the backward pass.

Equation numbers are those of Paik, Oh, Kwak, Kim, "Overcoming Catastrophic Forgetting by Neuron-level Plasticity
Control". `docs/npc.md` derives them.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor


def precise(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which to sum values of type `dtype`: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def taylor(activation: Tensor, gradient: Tensor, axis: int) -> Tensor:
    """Eq. 2 without its constant factor: the sum over samples of |mean over positions of n * dL/dn|, per neuron.

    Samples lie along axis 0 and neurons along `axis`; all other axes are positions. If neurons lie along axis 0, there
    is a single sample.

    >>> n = torch.tensor([[[1.0, 3.0], [2.0, 0.0]]])  # one sample, two neurons, two positions
    >>> taylor(n, torch.ones_like(n), axis=1)
    tensor([2., 1.])
    """
    if activation.dtype == torch.float16:  # products would overflow, above all under loss scaling
        activation, gradient = activation.float(), gradient.float()
    product = activation * gradient
    dtype = precise(product.dtype)
    positions = [i for i in range(product.dim()) if i not in (0, axis)]
    per_sample = product.mean(positions, dtype=dtype) if positions else product.to(dtype)
    return per_sample.abs() if axis == 0 else per_sample.abs().sum(0)


def parameter_taylor(terms: Iterable[tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]]) -> Tensor:
    """Eq. 2 without taps: |the sum of w * dL/dw over the parameters w of a neuron|, per neuron.

    If the output n of a neuron is of degree 1 in its parameters, as a weighted sum of inputs plus a bias is, then
    n = sum of w * dn/dw, and the sum of w * dL/dw is that of n * dL/dn over all samples and positions (Euler). Unlike
    in `taylor`, the absolute value is taken after the sum over samples, so terms of opposite signs cancel.

    Args:
        terms: for each parameter, its value, its gradient, and a function that sums its elements for each neuron.

    >>> weight, gradient = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[1.0, -1.0], [1.0, 1.0]])
    >>> parameter_taylor([(weight, gradient, lambda product: product.sum(1))])
    tensor([1., 7.])
    """
    sums = [total(value.to(precise(value.dtype)) * gradient) for value, gradient, total in terms]
    return torch.stack(sums).sum(0).abs() if len(sums) > 1 else sums[0].abs()


class Observe(torch.autograd.Function):
    """The identity. Its backward also returns `taylor` of the activation as the gradient of `carrier`.

    Autograd thus sums importance over calls and micro-batches. With `copy` the output has its own memory, for
    activations that the model changes in place.
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


class ObserveAgain(torch.autograd.Function):
    """As `Observe`, for an activation that the model changes in place, without a copy of it.

    Its backward computes the activation again, as `compute(given)`, from a tensor that autograd keeps in any case.
    """

    @staticmethod
    def forward(
        ctx: Any, activation: Tensor, carrier: Tensor, axis: int, given: Tensor, compute: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.axis, ctx.compute = axis, compute
        ctx.save_for_backward(given)
        ctx.mark_dirty(activation)  # the output is the activation itself: as a view it could not be changed in place
        return activation

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        (given,) = ctx.saved_tensors
        return gradient, taylor(ctx.compute(given).detach(), gradient.detach(), ctx.axis), None, None, None


def layer_means(measured: Tensor, sizes: Tensor, widths: Sequence[int]) -> Tensor:
    """Average each layer's part of `measured`, the concatenated neurons of all layers.

    Layer sizes are given twice: as a tensor `sizes` and as numbers `widths`.

    >>> layer_means(torch.tensor([3.0, 1.0, 5.0]), torch.tensor([2, 1]), [2, 1])
    tensor([2., 5.])
    """
    if torch.compiler.is_compiling():  # small operations fuse into one kernel, segment_reduce does not
        return torch.stack([values.mean() for values in measured.split_with_sizes(list(widths))])
    return torch.segment_reduce(measured, "mean", lengths=sizes, unsafe=True)


def moving_average(importance: Tensor, measured: Tensor, mean: Tensor, layer: Tensor, rate: float) -> Tensor:
    """Eq. 3 and 4: C <- (1 - rate) C + rate c / mean(c), with importance C, measurement c and its mean over the layer.

    Neurons of all layers are concatenated, and `layer` is the index of each neuron's layer. A layer whose measurement
    is all zero or not finite keeps its importance.

    >>> mean, layer = torch.tensor([2.0, torch.nan]), torch.tensor([0, 0, 1])
    >>> moving_average(torch.zeros(3), torch.tensor([3.0, 1.0, torch.nan]), mean, layer, rate=0.5)
    tensor([0.7500, 0.2500, 0.0000])
    """
    usable = (mean > 0) & (mean < torch.inf)
    normalized = measured / mean.index_select(0, layer)  # eq. 3
    average = torch.lerp(importance, normalized, rate)  # eq. 4
    return torch.where(usable.index_select(0, layer), average, importance)
