"""Which neurons a model has: their layers, their parameters, and the axis along which they lie."""

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from itertools import takewhile

import torch
from torch import Tensor, nn

from holdfast.importance import precise

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
LAYERS = (nn.Linear, *_CONVOLUTIONS, *_TRANSPOSED)

_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_TRAILING_NORMS = (nn.LayerNorm, nn.RMSNorm)
NORMS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.GroupNorm),
    *_INSTANCE_NORMS,
    *_TRAILING_NORMS,
)

# What keeps a positive factor: f(a n) = a f(n), for each neuron on its own.
_POOLS = (
    *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
    *(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
)
_HOMOGENEOUS = (nn.ReLU, nn.LeakyReLU, nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, *_POOLS)


@dataclass(frozen=True)
class Spread:
    """Turns one value per neuron into a tensor that broadcasts over a parameter of these neurons.

    In a transposed convolution with `groups` each group's neurons stand once for each of its `inputs`.
    """

    shape: tuple[int, ...]
    groups: int = 1
    inputs: int = 1

    def __call__(self, values: Tensor) -> Tensor:
        if self.inputs > 1:
            values = values.view(self.groups, 1, -1).expand(-1, self.inputs, -1)
        return values if values.shape == self.shape else values.reshape(self.shape)


@dataclass(eq=False)
class Layer:
    """A set of neurons: the outputs of a module, or of several modules that share one weight."""

    name: str
    size: int
    modules: list[nn.Module]
    parameters: list[tuple[nn.Parameter, Spread]] = field(default_factory=list)
    carrier: Tensor | None = None
    """Receives the neurons' importance of the current step as its gradient."""

    def own(self, parameter: nn.Parameter, spread: Spread) -> None:
        if all(parameter is not mine for mine, _ in self.parameters):
            self.parameters.append((parameter, spread))

    def forget_if_discarded(self) -> None:
        """Drop a measurement whose gradients are gone, as after `model.zero_grad()`."""
        carrier = self.carrier
        if carrier is not None and carrier.grad is not None and all(p.grad is None for p, _ in self.parameters):
            carrier.grad = None

    def new_carrier(self, like: Tensor) -> Tensor:
        return torch.zeros(self.size, dtype=precise(like.dtype), device=like.device, requires_grad=True)


def find_layers(model: nn.Module, trained: Collection[nn.Parameter], free: Collection[nn.Parameter]) -> list[Layer]:
    """The layers of `model` that have a parameter among `trained` and whose weight is not among `free`."""
    # Attention uses the weight of its output projection without calling that module, so it cannot be observed.
    attention = [module for module in model.modules() if isinstance(module, nn.MultiheadAttention)]
    excluded = {*free, *(parameter for module in attention for parameter in module.parameters())}
    layers: dict[nn.Parameter, Layer] = {}
    for name, module in model.named_modules():
        if not isinstance(module, LAYERS):
            continue
        parameters = dict(module.named_parameters(recurse=False))
        weight = parameters.get("weight")  # absent when it is parametrised, so computed anew at every call
        if weight is None or weight in excluded:
            continue
        layer = layers.setdefault(weight, Layer(name, width_of(module), []))
        layer.modules.append(module)
        for parameter in parameters.values():
            if parameter in trained:
                layer.own(parameter, _spread(module, parameter))
    return [layer for layer in layers.values() if layer.parameters]


def width_of(module: nn.Module) -> int:
    return int(module.out_features if isinstance(module, nn.Linear) else module.out_channels)  # type: ignore[arg-type]


def _spread(module: nn.Module, parameter: nn.Parameter) -> Spread:
    ones = [1] * (parameter.dim() - 2)
    if not isinstance(module, _TRANSPOSED) or parameter.dim() == 1:
        return Spread((len(parameter), 1, *ones)[: parameter.dim()])
    inputs, outputs = parameter.shape[:2]  # of a transposed weight: [inputs, outputs / groups, *kernel]
    if module.groups == 1:
        return Spread((1, outputs, *ones))
    return Spread((inputs, outputs, *ones), module.groups, inputs // module.groups)


def adopt(layer: Layer, norm: nn.Module, trained: Collection[nn.Parameter]) -> None:
    """Count the affine parameters of a normalisation among those of the layer it follows."""
    for parameter in norm.parameters(recurse=False):
        if parameter in trained:
            layer.own(parameter, _spread(norm, parameter))


def neuron_axis(module: nn.Module, output: Tensor) -> int:
    """The axis of `module`'s output along which its neurons lie."""
    if isinstance(module, nn.Linear):
        return output.dim() - 1
    if isinstance(module, _TRAILING_NORMS):
        return output.dim() - len(module.normalized_shape)
    if isinstance(module, (*_CONVOLUTIONS, *_TRANSPOSED)):
        return output.dim() - len(module.kernel_size) - 1
    if isinstance(module, _INSTANCE_NORMS):
        spatial = next(i for i, kind in enumerate(_INSTANCE_NORMS, start=1) if isinstance(module, kind))
        return output.dim() - spatial - 1
    return 1


@dataclass(frozen=True)
class Run:
    """Modules that keep a positive factor, next after `place` in what `caller` calls."""

    caller: nn.Module
    place: nn.Module
    modules: tuple[nn.Module, ...]

    @property
    def pools(self) -> bool:
        return any(isinstance(module, _POOLS) for module in self.modules)


def find_runs(model: nn.Module) -> list[Run]:
    """The runs after layers and normalisations in those modules of torch whose order of calls is known."""
    callers = {caller: calls for caller in model.modules() if (calls := _calls_of(caller))}
    uses = Counter(module for calls in callers.values() for module in calls)
    runs = []
    for caller, calls in callers.items():
        for i, place in enumerate(calls):
            if not isinstance(place, (*LAYERS, *NORMS)):
                continue
            run = tuple(takewhile(_keeps_neurons_of(place), calls[i + 1 :]))
            if run and all(uses[module] == 1 for module in (place, *run)):
                runs.append(Run(caller, place, run))
    return runs


def _calls_of(module: nn.Module) -> list[nn.Module]:
    """Modules that `module` calls, each with nothing but the output of the one before, or with a ReLU of that."""
    if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
        return list(module)
    for kind in (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer):
        if isinstance(module, kind) and type(module)._ff_block is kind._ff_block and _is_relu(module.activation):
            return [module.linear1, module.dropout, module.linear2]
    return []


def _is_relu(activation: object) -> bool:
    return activation in (nn.functional.relu, torch.relu) or isinstance(activation, nn.ReLU)


def _keeps_neurons_of(place: nn.Module) -> Callable[[nn.Module], bool]:
    # Pooling works along the last axes, where the neurons of a linear layer lie.
    mixing = _POOLS if isinstance(place, (nn.Linear, *_TRAILING_NORMS)) else ()
    return lambda module: isinstance(module, _HOMOGENEOUS) and not isinstance(module, mixing)
