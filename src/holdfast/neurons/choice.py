"""The choice of taps, given the trace of a forward."""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from torch import Tensor, nn

from holdfast.neurons.chains import Chain
from holdfast.neurons.kinds import NORMS, normalizes_singly
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
        self.branching: set[Layer] = set()
        """Layers whose outputs were used by something else than a normalization that shows them."""
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
    model changes it in place. `fused` is the module itself if it can measure. The affine parameters of `norms` belong
    to the layers.
    """

    module: nn.Module
    origin: nn.Module
    sites: tuple[Site, ...]
    norms: tuple[nn.Module, ...]
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
    followers = _followers(wiring, trace)
    origins = _origins(wiring, trace, followers)
    taps_per_layer = Counter(layer for layers in origins.values() for layer in layers)
    taps = []
    for origin, layers in origins.items():
        chain = wiring.chain_after.get(origin)
        single = all(taps_per_layer[layer] == 1 for layer in layers)
        end = chain.end if chain and single and _all_pass(chain, layers, wiring, trace, hooked) else None
        fused = _fused(origin, end or origin, layers, trace)
        module = origin if fused is not None or end is None else end
        sites = tuple(site_at(wiring, layer, origin) if module is origin else (layer, module) for layer in layers)
        norms = [origin] if isinstance(origin, NORMS) else [n for layer in layers for n in followers.get(layer, [])]
        taps.append(Tap(module, origin, sites, tuple(norms), module in trace.overwritten, fused))
    return taps


def shared_norms(wiring: Wiring, trace: Trace) -> dict[str, list[str]]:
    """Find normalizations of several layers, by name. They show none of these: their calls cannot be told apart."""
    return {
        wiring.names[module]: names
        for module, shown in trace.shown.items()
        if module not in wiring.observed and len(names := [layer.name for layer in shown if layer is not None]) > 1
    }


def _followers(wiring: Wiring, trace: Trace) -> dict[Layer, list[nn.Module]]:
    """Normalizations that follow each layer, and no other."""
    followers: dict[Layer, list[nn.Module]] = {}
    for module, shown in trace.shown.items():
        if module not in wiring.observed and module not in wiring.layer_of and len(shown) == 1:
            (layer,) = shown
            if layer is not None:
                followers.setdefault(layer, []).append(module)
    return followers


def _origins(wiring: Wiring, trace: Trace, followers: dict[Layer, list[nn.Module]]) -> dict[nn.Module, list[Layer]]:
    """Modules that show neurons, with their layers: chosen ones, normalizations, and the layers themselves.

    A layer is shown by the normalizations behind it. If its output has other uses, too, it is shown by itself, and also
    by those normalizations that hide each neuron's scale, because its own output shows nothing of what passes them.
    """
    origins = {
        module: [layer for layer in shown if layer is not None]
        for module, shown in trace.shown.items()
        if module in wiring.observed
    }
    for layer, norms in followers.items():
        origins |= {norm: [layer] for norm in norms if layer not in trace.branching or normalizes_singly(norm)}
    for module, layer in wiring.layer_of.items():
        if layer in trace.shown.get(module, []) and (layer not in followers or layer in trace.branching):
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
