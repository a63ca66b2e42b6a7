"""Layers of a model, and the parameters of each of their neurons."""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from holdfast.neurons.kinds import TRANSPOSED, axis_at, is_layer, is_transposed_linear, width_of
from holdfast.neurons.products import Product, first_input
from holdfast.neurons.rows import Layout
from holdfast.neurons.selection import Choice, Selection


@dataclass(frozen=True)
class Spread:
    """Reshape one value per neuron so that it broadcasts over a parameter of these neurons.

    In a grouped transposed convolution, the neurons of each group repeat once per input channel of the group.
    """

    shape: tuple[int, ...]
    groups: int = 1
    inputs: int = 1

    def __call__(self, values: Tensor) -> Tensor:
        if self.inputs > 1:
            values = values.view(self.groups, 1, -1).expand(-1, self.inputs, -1)
        return values if values.shape == self.shape else values.reshape(self.shape)

    def sum(self, values: Tensor) -> Tensor:
        """Sum the values at the parameter's elements for each neuron.

        >>> import torch
        >>> Spread((3, 1)).sum(torch.ones(3, 5))
        tensor([5., 5., 5.])
        """
        axes = [axis for axis, length in enumerate(self.shape) if length == 1]
        total = values.sum(axes) if axes else values
        if self.inputs > 1:
            total = total.view(self.groups, self.inputs, -1).sum(1)
        return total.reshape(-1)

    @property
    def size(self) -> int:
        """The number of neurons."""
        return math.prod(self.shape) // self.inputs


@dataclass(eq=False)
class Layer:
    """A set of neurons: the outputs of one module, or of several modules that share a weight.

    A layer without modules has neurons that no module shows.

    Args:
        name: the name of its first module, or of its parameter.
        size: the number of neurons.
        modules: the modules.
        parameters: the trained parameters of the neurons, each with its layout.
        products: the products of inputs with those of its weights whose inputs can be read.
        parts: the number of equal parts with an importance of mean 1 each, as the gates of a recurrent cell.
    """

    name: str
    size: int
    modules: list[nn.Module]
    parameters: list[tuple[nn.Parameter, Spread]] = field(default_factory=list)
    products: list[Product] = field(default_factory=list)
    parts: int = 1

    @property
    def weight_and_bias(self) -> list[nn.Parameter]:
        """The weight and the bias, as far as they are trained; empty if the weight is not."""
        mine = {parameter for parameter, _ in self.parameters}
        found = [getattr(self.modules[0], name) for name in ("weight", "bias")]
        return [p for p in found if p is not None and p in mine] if found[0] in mine else []

    def own(self, parameter: nn.Parameter, spread: Spread) -> None:
        if all(parameter is not mine for mine, _ in self.parameters):
            self.parameters.append((parameter, spread))

    def adopt(self, norm: nn.Module, trained: Collection[nn.Parameter], owners: Mapping[nn.Parameter, "Layer"]) -> None:
        """Add the trained affine parameters of a normalization that follows the layer. Their owners give them up."""
        for parameter in norm.parameters(recurse=False):
            if parameter in trained:
                if parameter in owners:
                    owners[parameter].disown(parameter)
                self.own(parameter, spread_of(norm, parameter))

    def disown(self, parameter: nn.Parameter) -> None:
        self.parameters = [(mine, spread) for mine, spread in self.parameters if mine is not parameter]

    def axis_at(self, module: nn.Module, output: Tensor) -> int:
        """Axis of the layer's neurons in an output of `module`."""
        return axis_at(self.modules[0], module, output)

    def is_shown(self, module: nn.Module, output: Tensor) -> bool:
        """Whether an output of `module` has the right number of neurons on the expected axis."""
        axis = self.axis_at(module, output)
        return 0 <= axis < output.dim() and output.shape[axis] == self.size


def find_layers(model: nn.Module, trained: Collection[nn.Parameter], free: Collection[nn.Parameter]) -> list[Layer]:
    """Find the layers of `model` with a trained parameter and a weight that is not free."""
    layers: dict[nn.Parameter, Layer] = {}
    for name, module, weight in _weighted(model, free):
        layer = layers.setdefault(weight, Layer(name, width_of(module), []))
        layer.modules.append(module)
        for parameter in module.parameters(recurse=False):
            if parameter in trained and parameter not in free:
                layer.own(parameter, spread_of(module, parameter))
    for layer in layers.values():
        layer.products += _products(layer)
    return [layer for layer in layers.values() if layer.parameters]


def _products(layer: Layer) -> list[Product]:
    if not (parts := layer.weight_and_bias):
        return []
    weight, *bias = parts
    layout = Layout.of(layer.modules[0])
    return [Product(layer.name, weight, bias[0] if bias else None, layout, layer.modules, first_input, unfolds=True)]


def weight_layers(model: nn.Module, free: Choice | Iterable[Choice] = ()) -> dict[str, nn.Module]:
    """Return all linear and convolutional modules whose weight is not `free`, by name.

    Modules that share a weight are all listed.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2))
    >>> list(weight_layers(model, free=[model[3]]))
    ['0']
    """
    return {name: module for name, module, _ in _weighted(model, Selection(model, free, "free").parameters)}


def _weighted(model: nn.Module, excluded: Collection[nn.Parameter]) -> Iterator[tuple[str, nn.Module, nn.Parameter]]:
    """Iterate over the name, module and weight of every layer that is called and has its own weight."""
    # Attention uses the weight of its output projection without calling that module, so no hook ever runs there.
    attention = [module for module in model.modules() if isinstance(module, nn.MultiheadAttention)]
    excluded = {*excluded, *(parameter for module in attention for parameter in module.parameters())}
    for name, module in model.named_modules():
        if is_layer(module):
            weight = dict(module.named_parameters(recurse=False)).get("weight")
            if weight is not None and weight not in excluded:  # None if parametrized: recomputed in every call
                yield name, module, weight


def spread_of(module: nn.Module, parameter: nn.Parameter) -> Spread:
    """The layout of a parameter of a layer or normalization."""
    ones = [1] * (parameter.dim() - 2)
    if is_transposed_linear(module) and parameter.dim() == 2:
        return Spread((1, parameter.shape[1]))
    if not isinstance(module, TRANSPOSED) or parameter.dim() == 1:
        return Spread((len(parameter), 1, *ones)[: parameter.dim()])
    inputs, outputs = parameter.shape[:2]  # a transposed weight is [inputs, outputs / groups, *kernel]
    if module.groups == 1:
        return Spread((1, outputs, *ones))
    return Spread((inputs, outputs, *ones), module.groups, inputs // module.groups)
