"""Taps of hidden activations: the first activation module behind each layer, or a module chosen by the user."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from holdfast.neurons.kinds import ACTIVATIONS, axis_at, is_layer
from holdfast.neurons.observe import check_observed, resolve_observe
from holdfast.neurons.protocols import ShowsActivity
from holdfast.taps.hooks import Taps, needs_grad


class Activation(NamedTuple):
    """The activation of a layer's neurons, which lie along `axis`."""

    layer: str
    axis: int
    values: Tensor


class ActivationTaps:
    """Keep the hidden activations of the last training forward, one value per sample and neuron.

    A layer's activation is the output of the first activation module of torch called behind it, such as `nn.ReLU`.
    Values are averaged over positions.

    Args:
        model: the model in training.
        observe: modules at whose next outputs the activations of some layers are read instead, as
            `{layer name: module name}`.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> taps = ActivationTaps(model)
    >>> _ = model(torch.zeros(5, 4))
    >>> [(layer, tuple(values.shape)) for layer, _, values in taps.take()]
    [('0', (5, 8))]
    """

    def __init__(self, model: nn.Module, observe: Mapping[str, str] | None = None) -> None:
        self.layers = {name: module for name, module in model.named_modules() if is_layer(module)}
        self._names = {module: name for name, module in model.named_modules()}
        self._kept: list[Activation] = []
        self._called: str | None = None  # the last layer called
        self._pending: list[str] = []  # called layers whose chosen modules have not been called yet
        self._whole = False
        observed = resolve_observe(model, self.layers, observe)
        self._taps = Taps()
        self._taps.on_input(model, self._begin)
        for name, layer in self.layers.items():
            self._taps.on_output(layer, partial(self._call_observed if name in observed else self._call, name))
        self._fused: list[ShowsActivity] = []
        for module in self._names:
            chosen = tuple(name for name, at in observed.items() if at is module)
            fused = module if isinstance(module, ShowsActivity) else None
            activates = fused is not None or isinstance(module, ACTIVATIONS)
            if chosen or activates:
                self._taps.on_output(module, partial(self._read, chosen, activates, fused))
            if fused is not None:
                fused.shows += 1
                self._fused.append(fused)

    def take(self) -> list[Activation]:
        """Return and forget the activations of the last training forward."""
        kept, self._kept = self._kept, []
        return kept

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Keep whole outputs instead of averages over positions."""
        self._whole = True
        try:
            yield
        finally:
            self._whole = False

    def close(self) -> None:
        self._taps.close()
        for fused in self._fused:
            fused.shows -= 1
        self._fused, self._kept = [], []

    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._kept, self._called, self._pending = [], None, []

    def _call(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._called = name

    def _call_observed(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._called = None
        self._pending.append(name)

    def _read(
        self,
        chosen: tuple[str, ...],
        activates: bool,
        fused: ShowsActivity | None,
        module: nn.Module,
        args: Any,
        kwargs: Any,
        output: Any,
    ) -> None:
        """Keep the output of `module` for the `chosen` layers called before and, if it activates, the last layer."""
        names = [name for name in chosen if name in self._pending]
        for name in names:
            check_observed(name, self.layers[name], self._names[module], module, output)
            self._pending.remove(name)
        if activates and self._called is not None:
            names.append(self._called)
            self._called = None
        activity = None if fused is None else fused.take_activity()
        if not needs_grad(output):
            return
        for name in names:
            axis = axis_at(self.layers[name], module, output)
            values = output if self._whole else over_positions(output, axis) if activity is None else activity
            self._kept.append(Activation(name, axis, values))


def over_positions(activation: Tensor, axis: int) -> Tensor:
    """Average over positions: one value per sample and neuron."""
    return activation.movedim(axis, 1).flatten(2).mean(2) if activation.dim() > 2 else activation.clone()
