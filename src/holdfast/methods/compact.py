"""A penalty on the effective rank of the inputs of each layer, which leaves room for later tasks."""

import math
import weakref
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from holdfast.importance import precise
from holdfast.methods.method import Method
from holdfast.methods.settings import Count, NonNegative
from holdfast.neurons import weight_layers
from holdfast.neurons.kinds import neuron_axis
from holdfast.neurons.rows import batched
from holdfast.taps import Taps
from holdfast.taps.hooks import first_input, needs_grad


def participation_ratio(rows: Tensor) -> Tensor:
    """The effective rank (tr M)^2 / tr(M^2) of the second moment M of the rows, `[n, inputs]`.

    It lies between 1 and min(n, inputs), and is that number if as many directions are equally strong. Without any
    inputs, it is 1.

    >>> participation_ratio(torch.tensor([[2.0, 0.0], [0.0, 2.0]])), participation_ratio(torch.tensor([[1.0, 1.0]]))
    (tensor(2.), tensor(1.))
    """
    largest = rows.detach().abs().amax()  # the ratio does not depend on the scale, but sums of powers may overflow
    present = largest > 0
    rows = rows / torch.where(present, largest, 1)
    gram = rows.mT @ rows if rows.shape[1] <= rows.shape[0] else rows @ rows.mT  # both have the same eigenvalues
    trace, of_square = rows.square().sum(), gram.square().sum()
    return torch.where(present, trace, 1).square() / torch.where(present, of_square, 1)


def log_rank(inputs: Tensor, axis: int) -> Tensor:
    """The ratio log r / log d: the effective rank r of d inputs, which lie along `axis`, on a scale from 0 to 1.

    >>> log_rank(torch.eye(4), axis=1), log_rank(torch.ones(4, 4), axis=1)
    (tensor(1.), tensor(0.))
    """
    rows = inputs.to(precise(inputs.dtype)).movedim(axis, -1).flatten(0, -2)
    return participation_ratio(rows).log() / math.log(rows.shape[1])


def log_rank_of_all(layers: Sequence[tuple[Tensor, int]], weight: float) -> Tensor:
    """The weighted mean of `log_rank` over layers."""
    return weight * torch.stack([log_rank(*layer) for layer in layers]).mean()


class _InputTaps:
    """Keep the inputs of the layers in the last training forward, with the axis of their channels or features.

    Inputs without a gradient, such as images, and inputs of a single channel cannot become more compact, and are left
    out.
    """

    def __init__(self, model: nn.Module) -> None:
        self.samples: int | None = None
        """The number of samples to keep, the first of the batch; all if None."""
        self._kept: list[tuple[Tensor, int]] = []
        self._taps = Taps()
        self._taps.on_input(model, self._begin)
        for layer in weight_layers(model).values():
            self._taps.on_input(layer, self._keep)

    def take(self) -> list[tuple[Tensor, int]]:
        """Return and forget the inputs of the last training forward."""
        kept, self._kept = self._kept, []
        return kept

    def close(self) -> None:
        self._taps.close()
        self._kept = []

    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._kept = []

    def _keep(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        x = first_input(args, kwargs)
        if not needs_grad(x):
            return
        x = batched(module, x)
        axis = neuron_axis(module, x)
        if x.shape[axis] > 1:
            self._kept.append((x[: self.samples].clone(), axis))  # the model may change it in place


class Compact(Method):
    """Presses a task to use few input directions of each layer, so that DPC keeps more of them for later tasks.

        penalty = weight mean over layers of log(r) / log(d),   r = (tr M)^2 / tr(M^2)

    for a layer with d input channels or features a, and M = E[a a^T] over the samples and positions of the batch. The
    participation ratio r is an effective rank, between 1 and d. Layers whose input has no gradient, such as the first
    one, are left out. Heads count too: their inputs are activations. By itself this does not prevent forgetting: put it
    around another method, as in `compact+dpc`.

    Source of r: Gao et al., "A theory of multineuronal dimensionality, dynamics and measurement", bioRxiv 214262, 2017.

    Args:
        model: the model in training. Samples lie along the first axis of its activations.
        optimizer: an optimizer of its parameters.
        weight: the weight of the penalty.
        samples: the number of samples to measure on in each step, the first of the batch; all if None.

    >>> from holdfast import DPC
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> dpc = DPC(model, torch.optim.SGD(model.parameters(), lr=0.1), free=[model[2]])
    >>> optimizer = Compact(model, dpc, weight=0.1)
    >>> x = torch.randn(16, 4)
    >>> loss = model(x).square().mean() + optimizer.penalty()
    >>> optimizer.zero_grad(); loss.backward(); optimizer.step()
    >>> optimizer.consolidate([x])  # the task is finished
    """

    searched: ClassVar = "weight"
    reads_forward: ClassVar = True

    weight: float

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, *, weight: NonNegative = 0.01, samples: Count = 64
    ) -> None:
        super().__init__(model, optimizer)
        self._taps = _InputTaps(self.model)
        weakref.finalize(self, self._taps.close).atexit = False
        self._set(weight=weight, samples=samples)

    @property
    def samples(self) -> int | None:
        """The number of samples to measure on in each step."""
        return self._taps.samples

    @samples.setter
    def samples(self, samples: int | None) -> None:
        self._taps.samples = samples

    @property
    def _adds_penalty(self) -> bool:
        return self.weight > 0

    def _penalty(self) -> Tensor:
        layers = self._taps.take()
        if not self._adds_penalty:
            return super()._penalty()
        if not layers:
            raise ValueError(
                "Compact found no inputs of layers with a gradient: penalty() needs a forward before it, of a model "
                "with at least two layers, one behind the other"
            )
        mean = self._compiled(log_rank_of_all, [inputs for inputs, _ in layers])
        with torch.autocast(layers[0][0].device.type, enabled=False):  # in whose precision ranks would be wrong
            term: Tensor = mean(layers, self.weight)
        return term

    def _update(self) -> None:
        super()._update()
        if not self._adds_penalty:
            self._taps.take()  # free the memory

    def _close(self) -> None:
        self._taps.close()
