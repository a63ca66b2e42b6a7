"""Selfless Sequential Learning (Aljundi et al., 2019)."""

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from holdfast.importance import precise
from holdfast.methods.anchor import Form, check_finite
from holdfast.methods.mas import MAS, squared_norm
from holdfast.methods.memory import Kind
from holdfast.methods.method import Method
from holdfast.methods.settings import Count, NonNegative
from holdfast.neurons.kinds import width_of
from holdfast.samples import Batch, select, sum_over_samples, without_ignored
from holdfast.taps import ActivationTaps


@lru_cache(maxsize=16)
def neighborhood(width: int, device: torch.device) -> Tensor:
    """The proximity of neurons i and j of a layer: exp(-(i - j)^2 / (2 sigma^2)), sigma = width / 6; 0 for i = j."""
    position = torch.arange(width, dtype=torch.float32, device=device)
    distance = (position[:, None] - position) / (width / 6)
    return torch.exp(-distance.square() / 2).fill_diagonal_(0)


def crowding(neurons: Tensor, importance: Tensor | None, near: Tensor) -> Tensor:
    """The mean over samples of the sum over i != j of near(i, j) e^-(a_i + a_j) n_i n_j, neurons `[sample, i]`.

    The importances a are zero if None. The gradient is exact; second derivatives are not.

    >>> near = neighborhood(2, torch.device("cpu"))
    >>> crowding(torch.tensor([[1.0, 2.0], [0.0, 5.0]]), None, near)  # 2 * 1 * 2 * exp(-9 / 2), and 0
    tensor(0.0222)
    """
    weighted = neurons.to(precise(neurons.dtype))
    if importance is not None:
        weighted = weighted * torch.exp(-importance)
    others = weighted.detach() @ near.to(weighted.dtype)
    product = others * weighted
    return (2 * product - product.detach()).sum(1).mean()  # near is symmetric: the gradient is 2 * others


def crowding_of_all(layers: Sequence[tuple[Tensor, Tensor | None, Tensor]], weight: float) -> Tensor:
    """The weighted sum of `crowding` over layers."""
    return weight * torch.stack([crowding(*layer) for layer in layers]).sum()


def _wide_range(device: str) -> AbstractContextManager[None]:
    """Switch off autocast to float16, in which sums over neurons may overflow."""
    narrow = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.float16
    return torch.autocast(device, enabled=False) if narrow else nullcontext()


def _layers(method: Method, attribute: str) -> dict[str, Tensor]:
    """One value per neuron, by layer."""
    assert isinstance(method, SSL)
    layers = method._taps.layers.items()
    return {name: next(layer.parameters()).new_empty(width_of(layer)) for name, layer in layers}


class SSL(MAS):
    """MAS plus a penalty that keeps few neurons active at a time, which leaves room for later tasks.

    For every hidden layer, with activations n and importances a of its neurons:

        sparsity sum over i != j of exp(-(i - j)^2 / (2 sigma^2)) e^-(a_i + a_j) mean over samples of n_i n_j
        a_i = sum over tasks of the mean over samples of |d ||f(x)||^2 / d n_i|;   sigma = width / 6

    Source: Aljundi, Rohrbach, Tuytelaars, "Selfless Sequential Learning", ICLR 2019.

    Args:
        model: the model in training. Its output nodes lie along axis 1, or along the last axis of
            `[samples, tokens, nodes]`.
        optimizer: an optimizer of its parameters.
        sparsity: the weight of this penalty, lambda_SSL in the paper.
        strength: the strength of the pull of MAS.
        samples: the number of samples per task to measure on, the first of its batches; all if None.
        form: the form of the pull, "proximal" or "loss".
        observe: modules at whose outputs the activations of some layers are read, as `{layer name: module name}`. All
            other layers are read at the first activation module of torch behind them, such as `nn.ReLU`.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> optimizer = SSL(model, torch.optim.SGD(model.parameters(), lr=0.1), sparsity=1e-3)
    >>> loss = model(torch.randn(16, 4)).square().mean() + optimizer.penalty()
    >>> optimizer.zero_grad(); loss.backward(); optimizer.step()
    >>> optimizer.consolidate([torch.randn(16, 4)])  # the task is finished
    >>> {name: tuple(values.shape) for name, values in optimizer.neurons.items()}
    {'0': (8,)}
    """

    reads_forward: ClassVar = True
    remembers: ClassVar = {**MAS.remembers, "_neurons": Kind(_layers, exact=True, least=0)}

    sparsity: float

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        sparsity: NonNegative = 1e-6,
        strength: NonNegative = 1.0,
        samples: Count = None,
        form: Form = "proximal",
        observe: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(model, optimizer, strength=strength, samples=samples, form=form)
        self._set(sparsity=sparsity)
        self._taps = ActivationTaps(self.model, observe)
        weakref.finalize(self, self._taps.close).atexit = False
        self._neurons: dict[str, Tensor] = {}
        self._newest: dict[str, Tensor] = {}

    @property
    def neurons(self) -> dict[str, Tensor]:
        """The importance of each hidden neuron for the tasks so far, by layer."""
        return dict(self._neurons)

    # ---- the penalty ----

    @property
    def _adds_penalty(self) -> bool:
        return self.sparsity > 0 or super()._adds_penalty

    def _penalty(self) -> Tensor:
        kept = self._taps.take()
        if self.sparsity == 0:
            return super()._penalty()
        if not kept:
            raise ValueError(
                "SSL found no hidden activations: penalty() needs a forward before it, of a model with activation "
                'modules such as nn.ReLU behind its layers; name others with observe={"layer": "module"}'
            )
        layers = []
        for name, _, neurons in kept:
            self._check_width(name, neurons)
            importance = self._neurons.get(name)
            if importance is not None:
                importance = importance.to(neurons.device, precise(neurons.dtype))
            layers.append((neurons, importance, neighborhood(neurons.shape[1], neurons.device)))
        crowded = self._compiled(crowding_of_all, [neurons for neurons, _, _ in layers])
        with _wide_range(kept[0][2].device.type):
            term: Tensor = crowded(layers, self.sparsity)
        return term + super()._penalty() if self.form == "loss" else term

    def _update(self) -> None:
        super()._update()
        if not self._adds_penalty:
            self._taps.take()  # free the memory

    def _check_width(self, name: str, neurons: Tensor) -> None:
        width = width_of(self._taps.layers[name])
        if neurons.shape[1] != width:
            raise ValueError(
                f"layer {name!r} has {width} neurons, but the activation behind it has {neurons.shape[1]}: name a "
                f"module whose output is laid out like the layer's, observe={{{name!r}: ...}}"
            )

    # ---- the end of a task ----

    def _remember(self, found: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        super()._remember(found)
        for name, newest in self._newest.items():
            self._neurons[name] = self._neurons[name].to(newest) + newest if name in self._neurons else newest

    def _measure(self, batches: Iterable[Any], active: list[int] | None) -> dict[str, Tensor]:
        neurons: dict[str, Tensor] = {}
        measured = self._measuring_neurons((batch.marked for batch in self._samples(batches)), active, neurons)
        sums, count = sum_over_samples(self.model, self._parameters(), measured, squared_norm, torch.abs, active)
        means = self._mean(sums, count)
        self._newest = self._mean(neurons, count)
        for name, values in self._newest.items():
            check_finite(name, values)
        return means

    def _measuring_neurons(
        self, batches: Iterable[Batch], active: list[int] | None, neurons: dict[str, Tensor]
    ) -> Iterator[Batch]:
        """Pass the batches through, and add the importance of the neurons on them to `neurons`."""
        for batch in batches:
            for name, values in self._neuron_importance(batch, active).items():
                neurons[name] = neurons[name] + values if name in neurons else values
            yield batch

    @torch.enable_grad()
    def _neuron_importance(self, batch: Batch, active: list[int] | None) -> dict[str, Tensor]:
        """The sum over samples of |d ||f||^2 / d n_i|, by layer; n_i shifts at all positions together."""
        with self._taps.whole():
            outputs = without_ignored(select(batch.outputs(self.model), active), batch.labels_or_zeros)
        kept = self._taps.take()
        if not kept:
            return {}
        activations = [activation for _, _, activation in kept]
        gradients = torch.autograd.grad(outputs.square().sum(), activations, materialize_grads=True)
        found: dict[str, Tensor] = {}
        for (name, axis, _), gradient in zip(kept, gradients, strict=True):
            each = (
                gradient.to(precise(gradient.dtype)).movedim(axis, 1).flatten(2).sum(2)
                if gradient.dim() > 2
                else gradient
            )
            found[name] = found.get(name, 0) + each.abs().sum(0)
        return found

    def _close(self) -> None:
        self._taps.close()
