"""The wiring of a model: the modules that can show the neurons of each layer.

A layer is tapped at its own output, unless all of its output passes through a normalization: then at the output of
the normalization.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from holdfast.neurons.chains import find_chains
from holdfast.neurons.kinds import NORMS, is_linear, neuron_axis
from holdfast.neurons.layers import Layer
from holdfast.neurons.sources import source_of


class Wiring:
    """The static structure of a model that determines its taps.

    Args:
        model: the model.
        layers: its layers.
        observed: modules chosen by the user, by layer name. The taps of all other layers are found by tracing.
    """

    def __init__(self, model: nn.Module, layers: Collection[Layer], observed: Mapping[str, nn.Module]) -> None:
        self.model = model
        self.names = {module: name for name, module in model.named_modules()}
        self.layer_of = {module: layer for layer in layers if layer.name not in observed for module in layer.modules}
        self.observed: dict[nn.Module, list[Layer]] = {}
        for layer in layers:
            if layer.name in observed:
                self.observed.setdefault(observed[layer.name], []).append(layer)
        self.chain_after = {chain.start: chain for chain in find_chains(model)}
        self.chain_ending_at = {chain.end: chain for chain in self.chain_after.values()}
        self.callers = {chain.caller for chain in self.chain_after.values()}

    @property
    def traced(self) -> list[nn.Module]:
        """Modules to trace: all that may show neurons, use parameters, or belong to a chain."""
        return [
            module
            for module in self.names
            if module is self.model
            or module in self.observed
            or has_parameters(module)
            or isinstance(module, NORMS)
            or module in self.chain_ending_at
            or module in self.callers
        ]

    def shown(self, module: nn.Module, first_input: Any, output: Tensor) -> tuple[Sequence[Layer], Layer | None]:
        """Return the layers whose neurons `output` shows, and the layer that a normalization of it would follow."""
        if module in self.observed:
            return self.observed[module], None
        if module in self.layer_of:
            layer = self.layer_of[module]
            return ([layer], layer) if layer.is_shown(module, output) else ([], None)
        if isinstance(module, nn.PReLU):  # an activation: its successors follow the layer before it
            return [], source_of(first_input, self)[0]
        if isinstance(module, NORMS):
            source, moved = source_of(first_input, self)
            if (
                source is not None
                and source.is_shown(module, output)
                and (moved or _normalizes_neurons(source, module, output))
            ):
                return [source], None
        return [], None


def has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(recurse=False), None) is not None


def _normalizes_neurons(layer: Layer, norm: nn.Module, output: Tensor) -> bool:
    """Whether the axis of `norm` is that of the layer's neurons, if no axes were moved in between."""
    axis = neuron_axis(norm, output)
    return axis == output.dim() - 1 if is_linear(layer.modules[0]) else axis <= 1
