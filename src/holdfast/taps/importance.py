"""Taps that measure the importance of neurons.

At first, every module that may show neurons is traced. `settle()` replaces the trace by final taps, one hook each.
"""

import weakref
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from holdfast.errors import warn
from holdfast.importance import Observe, ObserveAgain, precise
from holdfast.neurons.chains import Chain
from holdfast.neurons.choice import Site, Tap, Trace, choose_taps, shared_norms, site_at
from holdfast.neurons.kinds import NORMS
from holdfast.neurons.layers import Layer
from holdfast.neurons.observe import check_observed
from holdfast.neurons.renormalize import renormalization
from holdfast.neurons.sources import label, layers_behind, used_by
from holdfast.neurons.wiring import Wiring, has_parameters
from holdfast.taps.hooks import Taps, first_input, is_hooked, needs_grad, tensors_in

_NEEDS_EXAMPLE = (
    "holdfast has not yet found the taps of this model's neurons, and cannot trace inside a compiled graph: "
    "give one batch of inputs when building the method, as in NPC(model, optimizer, example=x)"
)


class ImportanceTaps:
    """Measure the importance of the neurons of `layers` in every backward (eq. 2).

    Args:
        model: the model in training.
        layers: its layers under control.
        trained: parameters that the layers adopt from normalizations behind them.
        observed: modules at whose outputs some layers are tapped, by layer name. All other taps are found.
        owners: the layers from which such parameters are taken.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Collection[Layer],
        trained: Collection[nn.Parameter],
        observed: Mapping[str, nn.Module],
        owners: Mapping[nn.Parameter, Layer] | None = None,
    ) -> None:
        self.wrapper: weakref.ref[DistributedDataParallel] | None = None  # weak: a wrapper keeps its process group
        self.carriers = {layer: Carrier(layer) for layer in layers}
        self._model = model
        self._trained = trained
        self._owners = owners or {}
        self._wiring = Wiring(model, layers, observed)
        self._taps = Taps()
        self._settled: dict[_Measurement, RemovableHandle] = {}
        self._labels: dict[nn.Module, RemovableHandle] = {}
        self._trace_eagerly = torch.compiler.disable(self._trace_call, reason=_NEEDS_EXAMPLE)  # type: ignore[no-untyped-call]
        self._tracing = {
            module: self._taps.on_output(module, self._trace_unless_frozen, first=True)
            for module in self._wiring.traced
        }
        self._start_trace()

    def _start_trace(self) -> None:
        self._trace = Trace()
        self._candidates: dict[Site, Tensor] = {}  # carriers, of which one per layer will be chosen

    # ---- tracing ----

    def _trace_unless_frozen(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Tensor | None:
        """Trace a call. In a compiled graph, pass over frozen modules, of which there is nothing to trace."""
        if torch.compiler.is_compiling() and self._is_frozen(module, args, kwargs, output):
            return None
        traced: Tensor | None = self._trace_eagerly(module, args, kwargs, output)
        return traced

    def _is_frozen(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> bool:
        """Whether no gradient reaches an output of `module`, or the layer before a normalization."""
        if isinstance(module, NORMS) and module not in self._wiring.observed:
            return not needs_grad(first_input(args, kwargs))
        return not any(needs_grad(out) for out in tensors_in(output))

    def _trace_call(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Tensor | None:
        self._find_wrapper()
        self._trace.calls[module] += 1
        for layer in self._wiring.observed.get(module, []):
            check_observed(layer.name, layer.modules[0], self._wiring.names[module], module, output)
        outputs = [out for out in tensors_in(output) if needs_grad(out)]
        if not outputs:
            return None
        if module is self._model:
            self._trace.branching |= layers_behind([out.grad_fn for out in outputs], self._wiring)
        if module not in self._wiring.observed:
            if module in self._wiring.chain_ending_at:
                return self._trace_end(self._wiring.chain_ending_at[module], output)
            if (module is self._model or module in self._wiring.callers) and not has_parameters(module):
                self._trace.add(module, [])
                return None
            if isinstance(module, NORMS) and not needs_grad(first_input(args, kwargs)):
                return None  # it follows a frozen layer, which may be trained later
        return self._trace_neurons(module, first_input(args, kwargs), output, outputs)

    def _trace_neurons(self, module: nn.Module, given: Any, output: Any, outputs: list[Tensor]) -> Tensor | None:
        wiring = self._wiring
        layers, follows = wiring.shown(module, given, outputs[0]) if isinstance(output, Tensor) else ([], None)
        self._trace.add(module, layers or [None])
        self._trace.branching |= used_by(outputs, wiring) - {*layers, follows}
        for layer in layers:
            outputs = [self._measure(outputs[0], site_at(wiring, layer, module), origin=module, at=module)]
        for out in outputs:
            label(out, wiring, follows)
        return outputs[0] if layers else None

    def _trace_end(self, chain: Chain, output: Any) -> Tensor | None:
        """Trace the end of a chain, where the neurons of its start may be tapped."""
        layers = self._trace.shown.get(chain.start, [])
        self._trace.add(chain.end, [])
        if len(layers) != 1 or layers[0] is None or not isinstance(output, Tensor):
            return None
        if not layers[0].is_shown(chain.start, output) or (chain.pools and output.dim() < 3):
            return None
        site = layers[0], chain.end
        self._trace.ends.add(site)
        measured = self._measure(output, site, chain.start, at=chain.end)
        label(measured, self._wiring, self._wiring.layer_of.get(chain.start))
        return measured

    def _measure(self, output: Tensor, site: Site, origin: nn.Module, at: nn.Module) -> Tensor:
        carrier = self._candidates.setdefault(site, _new_carrier(site[0], output))
        measured = _measured(output, carrier, site[0].axis_at(origin, output), copy=True)
        self._trace.add_output(at, measured)
        return measured

    def _find_wrapper(self) -> None:
        wrapper = getattr(DistributedDataParallel, "_active_ddp_module", None)
        if self.wrapper is None and wrapper is not None:
            self.wrapper = weakref.ref(wrapper)

    @property
    def process_group(self) -> ProcessGroup | None:
        """Process group in which the model is trained."""
        wrapper = None if self.wrapper is None else self.wrapper()
        return None if wrapper is None else wrapper.process_group

    # ---- settling ----

    def settle(self) -> None:
        """Choose the taps of all modules traced since the last call. Tracing of the others continues."""
        traced, wiring = self._trace, self._wiring
        if not traced.shown:
            return
        for module in traced.shown:
            self._tracing.pop(module).remove()
            traced.check_overwritten(module)
        for norm, names in shared_norms(wiring, traced).items():
            warn(
                f"{norm!r} normalizes several layers ({', '.join(names)}); they are tapped before it, where their "
                "importance may be hidden: give each layer its own normalization",
            )
        taps = choose_taps(wiring, traced, {module for module in wiring.names if is_hooked(module)})
        self._replace({layer for tap in taps if tap.origin not in wiring.layer_of for layer in tap.layers})
        self._share_carriers({site for tap in taps for site in tap.sites})
        for tap in taps:
            self._add(tap)
        self._keep_labeling()
        self._start_trace()

    def _add(self, tap: Tap) -> None:
        for layer, site in tap.sites:
            self.carriers[layer].tensor = self._candidates[layer, site]
            for norm in tap.norms:
                layer.adopt(norm, self._trained, self._owners)
        measurement = _Measurement(tap, [self.carriers[layer] for layer in tap.layers])
        measurement.hand_over()
        self._settled[measurement] = self._taps.on_output(tap.module, measurement, first=True)

    def _share_carriers(self, sites: set[Site]) -> None:
        """Let layers that are tapped at their own outputs and behind normalizations use one carrier for both."""
        for layer, at in sites:
            if at is None and (own := (layer, layer.modules[0])) in sites:
                carrier, other = self._candidates[own], self._candidates[layer, None]
                if carrier.grad is not None and other.grad is not None:
                    carrier.grad += other.grad
                self._candidates[layer, None] = carrier

    def _replace(self, layers: set[Layer]) -> None:
        """Remove the taps of these layers at their own outputs: a normalization follows them."""
        for measurement in list(self._settled):
            tap = measurement.tap
            if tap.origin in self._wiring.layer_of and not layers.isdisjoint(tap.layers):
                self._settled.pop(measurement).remove()

    def _keep_labeling(self) -> None:
        """Label the outputs of traced layers while any normalization is untraced: it may follow one of them."""
        if not any(isinstance(module, NORMS) for module in self._tracing):
            for handle in self._labels.values():
                handle.remove()
            self._labels.clear()
            return
        for module in self._trace.shown:
            layer = self._wiring.layer_of.get(module)
            if layer is not None and module not in self._labels:
                self._labels[module] = self._taps.on_output(module, partial(_label, self._wiring, layer))

    def rehearse(self, example: Any) -> None:
        """Trace one training forward. Buffers, modes and the state of random generators are restored afterwards."""
        model = self._model
        devices = {p.device for p in model.parameters() if p.device.type not in ("cpu", "meta")}
        with torch.random.fork_rng(devices), _restored(model), torch.enable_grad():
            model.train()
            if isinstance(example, Mapping):
                model(**example)
            elif isinstance(example, tuple | list):
                model(*example)
            else:
                model(example)
        self.settle()

    def locations(self) -> dict[Layer, str]:
        """The names of the modules at whose outputs each layer is tapped, as far as they are found."""
        found: dict[Layer, list[str]] = {}
        for measurement in self._settled:
            for layer in measurement.tap.layers:
                found.setdefault(layer, []).append(self._wiring.names[measurement.tap.module])
        return {layer: ", ".join(names) for layer, names in found.items()}

    # ---- measurements ----

    @property
    def compiled(self) -> bool:
        """Whether the model runs compiled."""
        return bool(self._settled) and not any(measurement.ran_eagerly for measurement in self._settled)

    def collect(self) -> list[Tensor | None]:
        """Return the measurements since the last call, per layer; None for a layer that took no part."""
        measured = [carrier.gradient for carrier in self.carriers.values()]
        self.discard()
        return measured

    def discard(self) -> None:
        """Forget the measurements since the last call."""
        for tensor in (*self._candidates.values(), *(carrier.tensor for carrier in self.carriers.values())):
            if tensor is not None:
                tensor.grad = None

    def close(self) -> None:
        self._taps.close()
        for measurement in self._settled:
            measurement.take_back()
        self._tracing.clear()
        self._labels.clear()
        self._settled.clear()
        self._start_trace()


class Carrier:
    """Receives the importance of a layer's neurons in the current step, as the gradient of `tensor`."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        self.tensor: Tensor | None = None

    @property
    def gradient(self) -> Tensor | None:
        return None if self.tensor is None else self.tensor.grad

    def refresh(self, output: Tensor) -> None:
        """Drop a measurement whose gradients were discarded, as by `model.zero_grad()`, and follow a moved model."""
        tensor = self.tensor
        if tensor is None:
            return
        if tensor.grad is not None and all(p.grad is None for p, _ in self.layer.parameters):
            tensor.grad = None
        if tensor.device != output.device:
            self.tensor = _new_carrier(self.layer, output)


class _Measurement:
    """The function called at a settled tap: it measures, unless a fused module does."""

    def __init__(self, tap: Tap, carriers: list[Carrier]) -> None:
        self.tap = tap
        self.carriers = carriers
        self.ran_eagerly = False

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor | None:
        if not output.requires_grad:
            return None
        tap = self.tap
        if not torch.compiler.is_compiling():
            self.ran_eagerly = True
            for carrier in self.carriers:
                carrier.refresh(output)
        for carrier in self.carriers:
            assert carrier.tensor is not None
            if tap.fused is not None and tap.fused.carrier is carrier.tensor:
                return None
            axis = carrier.layer.axis_at(tap.origin, output)
            output = self._measured(carrier.tensor, axis, first_input(args, kwargs), output)
        if not torch.compiler.is_compiling():
            self.hand_over()
        return output

    def _measured(self, carrier: Tensor, axis: int, given: Tensor, output: Tensor) -> Tensor:
        """Measure `output`. If the model changes it in place, compute it again in the backward rather than copy it."""
        module = self.tap.module
        compute = None
        if self.tap.copy and not output._is_view() and not torch.compiler.is_compiling():
            compute = renormalization(module, given)
        if compute is None:
            return _measured(output, carrier, axis, self.tap.copy)
        again: Tensor = ObserveAgain.apply(output, carrier, axis, given.detach(), compute)  # type: ignore[no-untyped-call]
        return again

    def hand_over(self) -> None:
        """Let a fused module measure from now on."""
        if self.tap.fused is not None:
            (self.tap.fused.carrier,) = (carrier.tensor for carrier in self.carriers)

    def take_back(self) -> None:
        if self.tap.fused is not None:
            self.tap.fused.carrier = None


def _label(wiring: Wiring, layer: Layer, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    if not torch.compiler.is_compiling() and needs_grad(output):
        label(output, wiring, layer)


def _measured(output: Tensor, carrier: Tensor, axis: int, copy: bool) -> Tensor:
    measured: Tensor = Observe.apply(output, carrier, axis, copy)  # type: ignore[no-untyped-call]
    return measured


def _new_carrier(layer: Layer, like: Tensor) -> Tensor:
    return torch.zeros(layer.size, dtype=precise(like.dtype), device=like.device, requires_grad=True)


@contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    """Restore the modes and buffers of `model` on exit."""
    modes = {module: module.training for module in model.modules()}
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in modes
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
    ]
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        with torch.no_grad():
            for module, name, buffer, value in buffers:
                setattr(module, name, buffer.copy_(value))
