"""The argument `observe`: taps chosen by the user, as `{layer name: module name}`."""

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor, nn

from holdfast.neurons.kinds import axis_at, width_of


def resolve_observe(
    model: nn.Module, layers: Collection[str], observe: Mapping[str, str] | None
) -> dict[str, nn.Module]:
    """Look up the modules named by `observe`, by layer name.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8))
    >>> resolve_observe(model, ["0"], {"0": "1"})["0"] is model[1]
    True
    """
    if observe is None:
        return {}
    if not isinstance(observe, Mapping) or not all(isinstance(name, str) for name in (*observe, *observe.values())):
        raise TypeError(f'observe takes names, {{layer: module}}, as in observe={{"conv1": "norm1"}}; got {observe!r}')
    modules = dict(model.named_modules())
    for layer, module in observe.items():
        if layer not in layers:
            raise ValueError(f"observe: {layer!r} is not an observable layer; choose from {', '.join(layers)}")
        if module not in modules:
            raise ValueError(f"observe: the model has no module {module!r} to observe {layer!r} at")
        if module != layer and module in layers:
            raise ValueError(f"observe: {module!r} shows its own neurons, so it cannot show those of {layer!r}")
    return {layer: modules[module] for layer, module in observe.items()}


def check_observed(name: str, layer: nn.Module, module_name: str, module: nn.Module, output: Any) -> None:
    """Raise an error if an output of the chosen module cannot be the neurons of `layer`."""
    if not isinstance(output, Tensor):
        raise TypeError(
            f"observe: {module_name!r} returns a {type(output).__name__}; name a module that returns one tensor"
        )
    axis, width = axis_at(layer, module, output), width_of(layer)
    if not 0 <= axis < output.dim() or output.shape[axis] != width:
        raise ValueError(
            f"observe: {name!r} has {width} neurons, but the output of {module_name!r} has shape "
            f"{tuple(output.shape)}; name a module whose output has these neurons on axis {axis}"
        )
