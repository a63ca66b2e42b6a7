"""The choice of taps, given the trace of a forward."""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from torch import Tensor, nn

from holdfast.neurons.chains import Chain
from holdfast.neurons.layers import Layer
from holdfast.neurons.protocols import MeasuresImportance
from holdfast.neurons.wiring import Wiring

Site = tuple[Layer, nn.Module | None]
"""A layer and the point where its importance is summed: its first module for its own outputs, the end of a chain, or
None for its normalizations."""


class Trace:
    """Record of the forwards traced so far."""

    def __init__(self) -> None:
        self.shown: dict[nn.Module, list[Layer | None]] = {}
        """Layers whose neurons a module showed, in the order of its calls. None stands for no layer."""
        self.ends: set[Site] = set()
        """Ends of chains that showed a layer's neurons."""
        self.calls: Counter[nn.Module] = Counter()
        self.overwritten: set[nn.Module] = set()
        """Modules whose tapped outputs were changed in place afterwards."""
        self._outputs: dict[nn.Module, Tensor] = {}

    def add(self, module: nn.Module, layers: Collection[Layer | None]) -> None:
        shown = self.shown.setdefault(module, [])
        shown.extend(layer for layer in layers if layer not in shown)

    def add_output(self, module: nn.Module, output: Tensor) -> None:
        """Keep a tapped output until it is known whether the model changes it in place."""
        self.check_overwritten(module)
        self._outputs[module] = output.detach()  # shares the version counter

    def check_overwritten(self, module: nn.Module) -> None:
        if module in self._outputs and self._outputs[module]._version > 0:
            self.overwritten.add(module)


@dataclass(frozen=True, eq=False)
class Tap:
    """A point of measurement: the output of `module`, laid out as the output of `origin`.

    The two differ if the tap is at the end of a chain behind `origin`. With `copy` the output is copied, because the
    model changes it in place. `fused` is the module itself if it can measure.
    """

    module: nn.Module
    origin: nn.Module
    sites: tuple[Site, ...]
    copy: bool
    fused: MeasuresImportance | None

    @property
    def layers(self) -> list[Layer]:
        return [layer for layer, _ in self.sites]


def site_at(wiring: Wiring, layer: Layer, module: nn.Module) -> Site:
    """Site of a layer shown by `module`: shared by all modules of the layer, or else by all its normalizations."""
    return layer, layer.modules[0] if module in wiring.layer_of else None


def choose_taps(wiring: Wiring, trace: Trace, hooked: Collection[nn.Module]) -> list[Tap]:
    """Choose the taps of the traced modules. A module among `hooked` may hand its output to others."""
    origins = _origins(wiring, trace)
    taps_per_layer = Counter(layer for layers in origins.values() for layer in layers)
    taps = []
    for origin, layers in origins.items():
        chain = wiring.chain_after.get(origin)
        single = all(taps_per_layer[layer] == 1 for layer in layers)
        end = chain.end if chain and single and _all_pass(chain, layers, wiring, trace, hooked) else None
        fused = _fused(origin, end or origin, layers, trace)
        module = origin if fused is not None or end is None else end
        sites = tuple(site_at(wiring, layer, origin) if module is origin else (layer, module) for layer in layers)
        taps.append(Tap(module, origin, sites, module in trace.overwritten, fused))
    return taps


def shared_norms(wiring: Wiring, trace: Trace) -> dict[str, list[str]]:
    """Find normalizations of several layers, by name. They show none of these: their calls cannot be told apart."""
    return {
        wiring.names[module]: names
        for module, shown in trace.shown.items()
        if module not in wiring.observed and len(names := [layer.name for layer in shown if layer is not None]) > 1
    }


def _origins(wiring: Wiring, trace: Trace) -> dict[nn.Module, list[Layer]]:
    """Modules that show neurons, with their layers: normalizations first, own outputs for all other layers."""
    origins: dict[nn.Module, list[Layer]] = {}
    for module, shown in trace.shown.items():
        layers = [layer for layer in shown if layer is not None]
        if module in wiring.observed or (module not in wiring.layer_of and len(layers) == len(shown) == 1):
            origins[module] = layers
    normalized = {layer for layers in origins.values() for layer in layers}
    for module, shown in trace.shown.items():
        layer = wiring.layer_of.get(module)
        if layer in shown and layer is not None and layer not in normalized:
            origins[module] = [layer]
    return origins


def _all_pass(chain: Chain, layers: list[Layer], wiring: Wiring, trace: Trace, hooked: Collection[nn.Module]) -> bool:
    """Whether all outputs of the chain's start pass through the chain: no other call or hook takes them elsewhere."""
    calls = {trace.calls[module] for module in (chain.caller, chain.start, chain.end)}
    return (
        chain.start not in wiring.observed
        and len(calls) == 1
        and not any(module in hooked for module in (chain.start, *chain.modules[:-1]))
        and all((layer, chain.end) in trace.ends for layer in layers)
    )


def _fused(origin: nn.Module, at: nn.Module, layers: list[Layer], trace: Trace) -> MeasuresImportance | None:
    """Return `origin` if it can measure: it has one layer and no other user, and its output is not overwritten."""
    if not isinstance(origin, MeasuresImportance) or origin.carrier is not None or len(layers) > 1:
        return None
    return origin if trace.overwritten.isdisjoint((origin, at)) else None
