"""Selfless sequential learning (Aljundi et al., 2019)."""

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from holdfast.fast import NormReluPool
from holdfast.hooks import Hook, inside_transform, needs_grad
from holdfast.importance import precise
from holdfast.methods.anchor import Form, check_finite
from holdfast.methods.mas import MAS, squared_norm
from holdfast.methods.method import modules_of, number
from holdfast.neurons import LAYERS, neuron_axis, width_of
from holdfast.persample import Batch, device_of, select, sum_over_samples

_ACTIVATIONS = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.RReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish),
    *(nn.Sigmoid, nn.Tanh, nn.Softplus, nn.Softsign, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh),
    NormReluPool,  # at whose output the slopes of a channel have the same sum as before its pooling
)


@lru_cache(maxsize=16)
def neighbourhood(width: int, device: torch.device) -> Tensor:
    """How near neurons i and j of a layer are: exp(-(i - j)^2 / (2 sigma^2)), sigma = width / 6; 0 for i = j."""
    place = torch.arange(width, dtype=torch.float32, device=device)
    distance = (place[:, None] - place) / (width / 6)
    return torch.exp(-distance.square() / 2).fill_diagonal_(0)


def crowding(neurons: Tensor, importance: Tensor | None, near: Tensor) -> Tensor:
    """The mean over samples of the sum over i != j of near(i, j) e^-(a_i + a_j) n_i n_j, neurons [sample, i].

    Importances a of None are zero. Its slope is right, but not to be differentiated again.

    >>> near = neighbourhood(2, torch.device("cpu"))
    >>> crowding(torch.tensor([[1.0, 2.0], [0.0, 5.0]]), None, near)  # 2 * 1 * 2 * exp(-9 / 2), and 0
    tensor(0.0222)
    """
    weighted = neurons.to(precise(neurons.dtype))
    if importance is not None:
        weighted = weighted * torch.exp(-importance)
    others = weighted.detach() @ near.to(weighted.dtype)
    product = others * weighted
    return (2 * product - product.detach()).sum(1).mean()  # near is symmetric, so that the slope is 2 * others


def crowding_of_all(layers: Sequence[tuple[Tensor, Tensor | None, Tensor]], weight: float) -> Tensor:
    return weight * torch.stack([crowding(*layer) for layer in layers]).sum()


def _wide_range(device: str) -> AbstractContextManager[None]:
    """No autocast to a type in which sums over neurons may overflow."""
    narrow = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.float16
    return torch.autocast(device, enabled=False) if narrow else nullcontext()


class _Record:
    """The hidden activations of the last forward: behind each layer, the first module that is an activation."""

    def __init__(self, model: nn.Module, layers: Mapping[str, nn.Module], activations: Iterable[nn.Module]) -> None:
        self.whole = False
        self.layers = layers
        self.called: str | None = None
        self.kept: list[tuple[str, int, Tensor]] = []
        self.handles: list[RemovableHandle] = [model.register_forward_pre_hook(_Begin(self))]
        self.handles += [layer.register_forward_hook(_Called(self, name)) for name, layer in layers.items()]
        self.handles += [module.register_forward_hook(_Keep(self)) for module in activations]

    def take(self) -> list[tuple[str, int, Tensor]]:
        kept, self.kept = self.kept, []
        return kept

    def close(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.kept = []


class _Begin(Hook):
    def __init__(self, record: _Record) -> None:
        self.record = record

    def __call__(self, module: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled() and not inside_transform():
            self.record.kept, self.record.called = [], None


class _Called(Hook):
    def __init__(self, record: _Record, name: str) -> None:
        self.record, self.name = record, name

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self.record.called = self.name


class _Keep(Hook):
    def __init__(self, record: _Record) -> None:
        self.record = record

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        name, self.record.called = self.record.called, None
        shown = module.take_activity() if isinstance(module, NormReluPool) else None
        if name is None or not (torch.is_grad_enabled() and needs_grad(output)) or inside_transform():
            return
        axis = neuron_axis(self.record.layers[name], output)
        if self.record.whole:
            shown = output
        self.record.kept.append((name, axis, over_positions(output, axis) if shown is None else shown))


def over_positions(activation: Tensor, axis: int) -> Tensor:
    """One value per sample and neuron: the mean over positions."""
    return activation.movedim(axis, 1).flatten(2).mean(2) if activation.dim() > 2 else activation.clone()


class SSL(MAS):
    """MAS, and a term in the loss that keeps few neurons active at a time, so that later tasks find room.

    Args:
        model: the model in training. It returns one tensor, with the output nodes along axis 1.
        optimizer: an optimizer of its parameters.
        sparsity: the weight of the term in the loss.
        strength: how strong the pull to old values is.
        samples: how many samples of a task to measure on, the first ones of its batches; all if not given.
        penalty: the form of the pull, "proximal" or "loss".
        observe: modules whose outputs are the hidden activations. If not given, the activation modules of torch, such
            as `nn.ReLU`, that come after a linear layer or a convolution.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> optimizer = SSL(model, torch.optim.SGD(model.parameters(), lr=0.1), sparsity=1e-3)
    >>> loss = model(torch.randn(16, 4)).square().mean() + optimizer.penalty()
    >>> optimizer.zero_grad(); loss.backward(); optimizer.step()
    >>> optimizer.consolidate([torch.randn(16, 4)])  # the task is finished
    >>> {name: tuple(values.shape) for name, values in optimizer.neurons.items()}
    {'0': (8,)}
    """

    looks_at_activations = True

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        sparsity: float = 1e-6,
        strength: float = 1.0,
        samples: int | None = None,
        penalty: Form = "proximal",
        observe: Iterable[nn.Module] | None = None,
    ) -> None:
        super().__init__(model, optimizer, strength=strength, samples=samples, penalty=penalty)
        self.sparsity = number("sparsity", sparsity)
        modules = {module: name for name, module in self.model.named_modules()}
        layers = {name: module for module, name in modules.items() if isinstance(module, LAYERS)}
        found = [module for module in modules if isinstance(module, _ACTIVATIONS)]
        activations = found if observe is None else modules_of(self.model, observe, "observe")
        self._record = _Record(self.model, layers, activations)
        weakref.finalize(self, self._record.close).atexit = False
        self._neurons: dict[str, Tensor] = {}
        self._newest: dict[str, Tensor] = {}

    @property
    def neurons(self) -> dict[str, Tensor]:
        """How important each hidden neuron is to the tasks so far, by layer."""
        return dict(self._neurons)

    # ---- the term in the loss ----

    @property
    def _acts_through_loss(self) -> bool:
        return self.sparsity > 0 or super()._acts_through_loss

    def _penalty(self) -> Tensor:
        kept = self._record.take()
        if self.sparsity == 0:
            return super()._penalty()
        if not kept:
            raise ValueError(
                "SSL saw no hidden activations: penalty() needs a forward before it, of a model with activation "
                "modules such as nn.ReLU behind its layers; name others with observe=[model.block, ...]"
            )
        layers = []
        for name, _, neurons in kept:
            self._check_width(name, neurons)
            importance = self._neurons.get(name)
            if importance is not None:
                importance = importance.to(neurons.device, precise(neurons.dtype))
            layers.append((neurons, importance, neighbourhood(neurons.shape[1], neurons.device)))
        crowded = self._fused(crowding_of_all, [neurons for neurons, _, _ in layers])
        with _wide_range(kept[0][2].device.type):
            term: Tensor = crowded(layers, self.sparsity)
        return term + super()._penalty() if self.form == "loss" else term

    def _update(self) -> None:
        super()._update()
        if not self._acts_through_loss:
            self._record.take()  # which no one has asked for, and is not to be kept for longer

    def _check_width(self, name: str, neurons: Tensor) -> None:
        width = width_of(self._record.layers[name])
        if neurons.shape[1] != width:
            raise ValueError(
                f"layer {name!r} has {width} neurons, but the activation behind it shows {neurons.shape[1]}: name the "
                "modules at whose outputs they lie as in the layer's own, observe=[model.block, ...]"
            )

    # ---- the end of a task ----

    def consolidate(self, batches: Iterable[Any], active: Iterable[int] | None = None) -> None:
        super().consolidate(batches, active)
        for name, newest in self._newest.items():
            self._neurons[name] = self._neurons[name].to(newest) + newest if name in self._neurons else newest

    def _measure(self, batches: Iterable[Any], active: list[int] | None) -> dict[str, Tensor]:
        neurons: dict[str, Tensor] = {}
        measured = self._listening(self._samples(batches), active, neurons)
        sums, count = sum_over_samples(self.model, self._parameters(), measured, squared_norm, torch.abs, active)
        means = self._mean(sums, count)
        self._newest = self._mean(neurons, count)
        for name, values in self._newest.items():
            check_finite(name, values)
        return means

    def _listening(
        self, batches: Iterable[Batch], active: list[int] | None, neurons: dict[str, Tensor]
    ) -> Iterator[Batch]:
        """The same batches, with the importance of the neurons summed up as they pass by."""
        for batch in batches:
            for name, values in self._neuron_importance(batch, active).items():
                neurons[name] = neurons[name] + values if name in neurons else values
            yield batch

    @torch.enable_grad()
    def _neuron_importance(self, batch: Batch, active: list[int] | None) -> dict[str, Tensor]:
        """The sum over samples of |d ||f||^2 / d n_i|, by layer; a shift of n_i is one of all its positions."""
        self._record.whole = True
        try:
            outputs = select(batch.outputs(self.model), active)
        finally:
            self._record.whole = False
        kept = self._record.take()
        if not kept:
            return {}
        activations = [activation for _, _, activation in kept]
        slopes = torch.autograd.grad(outputs.square().sum(), activations, materialize_grads=True)
        found: dict[str, Tensor] = {}
        for (name, axis, _), slope in zip(kept, slopes, strict=True):
            each = slope.to(precise(slope.dtype)).movedim(axis, 1).flatten(2).sum(2) if slope.dim() > 2 else slope
            found[name] = found.get(name, 0) + each.abs().sum(0)
        return found

    def close(self) -> None:
        self._record.close()
        super().close()

    # ---- state ----

    def _memory(self) -> dict[str, Any]:
        neurons = {name: values.clone() for name, values in self._neurons.items()}
        return {**super()._memory(), "sparsity": self.sparsity, "neurons": neurons}

    def _remember(self, memory: dict[str, Any]) -> None:
        super()._remember(memory)
        device = device_of(self.model)
        self.sparsity = memory["sparsity"]
        self._neurons = {name: values.to(device, copy=True) for name, values in memory["neurons"].items()}
