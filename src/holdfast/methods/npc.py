"""Neuron-level plasticity control: important neurons learn more slowly (Algorithm 1 of the paper)."""

import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from holdfast.fast import compiled
from holdfast.importance import layer_means, moving_average
from holdfast.methods.method import several_processes
from holdfast.methods.plastic import Plastic
from holdfast.neurons import Layer, Spread, find_layers
from holdfast.observation import Observation
from holdfast.plasticity import limit_, plastic_bits, plasticity


class NPC(Plastic):
    """Wraps an optimizer so that each neuron changes by its plasticity times what the optimizer alone would do.

    Args:
        model: the model in training; nothing is added to it but hooks, which `close` takes off again.
        optimizer: an optimizer of its parameters. Its learning rate is that of a fully plastic neuron.
        beta: the importance from which a neuron is frozen; a layer's mean importance is 1.
        rate: the weight of the newest measurement in the moving average of importance.
        gain: the slope of plasticity in importance.
        free: modules that keep the full learning rate, the task heads above all.
        observe: where a layer's neurons are observed, as `{layer name: module name}`, if it cannot be found.
        sample: one batch of inputs (a tensor, a tuple of arguments or a dict of keyword arguments). The places of
            observation are then found at once instead of in the first training forward, as a model needs that is
            compiled with `fullgraph=True` before its first step.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> optimizer = NPC(model, torch.optim.SGD(model.parameters(), lr=0.1), free=[model[2]])
    >>> loss = model(torch.randn(16, 4)).square().mean()
    >>> optimizer.zero_grad(); loss.backward(); optimizer.step()
    >>> {name: tuple(values.shape) for name, values in optimizer.importance.items()}
    {'0': (8,)}
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        beta: float = 0.7,
        rate: float = 5e-4,
        gain: float = 1.0,
        free: Iterable[nn.Module] = (),
        observe: Mapping[str, str] | None = None,
        sample: Any = None,
    ) -> None:
        super().__init__(model, optimizer, beta=beta, rate=rate, gain=gain, free=free)
        trained = self._trained()
        self._layers = find_layers(self.model, trained, self._free)
        _check_layers(self.model, self._layers)
        places = _places(self.model, self._layers, observe)
        self._observation = Observation(self.model, self._layers, trained - self._free, places)
        weakref.finalize(self, self._observation.close).atexit = False
        self._observation.wrapper = self._wrapper
        self._prepare_importance()
        self._unmeasured: set[str] = set()
        if sample is not None:
            self._observation.rehearse(self.model, sample)

    def _prepare_importance(self) -> None:
        sizes = self._widths = [layer.size for layer in self._layers]
        like = [layer.parameters[0][0] for layer in self._layers]
        dtype = torch.float64 if any(p.dtype == torch.float64 for p in like) else torch.float32
        self._importance = torch.zeros(sum(sizes), dtype=dtype, device=like[0].device)
        self._sizes = torch.tensor(sizes, device=like[0].device)
        self._layer = torch.arange(len(sizes), device=like[0].device).repeat_interleave(self._sizes).int()

    # ---- what a user looks at ----

    @property
    def importance(self) -> dict[str, Tensor]:
        """The moving average of importance, one value per neuron, by layer."""
        return dict(zip(self._names, self._split(self._importance.clone()), strict=True))

    @property
    def _names(self) -> list[str]:
        return [layer.name for layer in self._layers]

    def _split(self, values: Tensor) -> Sequence[Tensor]:
        return values.split_with_sizes(self._widths)

    # ---- a step ----

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self._observation.discard()

    def _update(self) -> None:
        """Measure the importance of the neurons in the gradients that have come in, then take a controlled step."""
        self._observation.settle()
        measured = self._observation.collect()
        if not self._started:
            self._start(measured)
        elif 0 < sum(values is None for values in measured) < len(measured):
            self._check_unmeasured(measured)
        rows, moving = self._rows(measured), self._moving()
        # Launched one by one, these many small operations can take a GPU longer than the neurons themselves.
        fuse = self._importance.is_cuda and self._observation.compiled
        measure, limit = (compiled(measure_), compiled(limit_all_)) if fuse else (measure_, limit_all_)
        knobs = self.rate, self.beta, self.gain
        shares = measure(self._importance, rows, self._layer, self._sizes, self._widths, knobs)
        places = [(number, spread) for _, number, spread in moving]
        self._limited_step(
            [parameter for parameter, _, _ in moving],
            lambda changing, before: limit(shares, self._widths, changing, places, before),
        )

    def _rows(self, measured: list[Tensor | None]) -> list[Tensor]:
        """The measurements of all layers one after another, of all processes together; 0 where there is none."""
        home = next((values.device for values in measured if values is not None), self._importance.device)
        if home != self._importance.device:  # the model was moved after this optimizer was built
            self._importance, self._sizes, self._layer = (
                tensor.to(home) for tensor in (self._importance, self._sizes, self._layer)
            )
        rows = [
            self._importance.new_zeros(layer.size) if values is None else values.to(self._importance)
            for layer, values in zip(self._layers, measured, strict=True)
        ]
        if (group := self._observation.process_group) is not None:
            rows = [torch.cat(rows)]
            dist.all_reduce(rows[0], group=group)
        return rows

    def _moving(self) -> list[tuple[nn.Parameter, int, Spread]]:
        """The parameters under control that are about to change, and which layer's neurons lie in them how."""
        return [
            (parameter, number, spread)
            for number, layer in enumerate(self._layers)
            for parameter, spread in layer.parameters
            if parameter.grad is not None
        ]

    # ---- the first step says what a user should know ----

    def _start(self, measured: list[Tensor | None]) -> None:
        self._unmeasured = self._learning_unmeasured(measured)  # the first warning names their parameters
        if uncontrolled := self._uncontrolled(measured):
            warnings.warn(
                "these parameters belong to no neuron that was observed and train at the full rate: "
                f"{', '.join(uncontrolled)}; name their modules in free= to say that this is meant",
                stacklevel=6,
            )
        if self._observation.process_group is None and several_processes():
            warnings.warn(
                "several processes are running, but the model was not seen inside a DistributedDataParallel, so each "
                "process measures importance alone; if they train one model, give NPC that wrapper as model",
                stacklevel=6,
            )

    def _check_unmeasured(self, measured: list[Tensor | None]) -> None:
        if new := self._learning_unmeasured(measured) - self._unmeasured:
            self._unmeasured |= new
            warnings.warn(
                "these layers have gradients but were not seen where their neurons are observed, so that their "
                f"importance stays as it is: {', '.join(sorted(new))}; if the model computes in another way than in "
                "its first step, build a new NPC and load this one's state_dict, or say where to look with observe=",
                stacklevel=6,
            )

    def _learning_unmeasured(self, measured: list[Tensor | None]) -> set[str]:
        return {
            layer.name
            for layer, values in zip(self._layers, measured, strict=True)
            if values is None and any(parameter.grad is not None for parameter, _ in layer.parameters)
        }

    def _uncontrolled(self, measured: list[Tensor | None]) -> list[str]:
        controlled = {
            parameter
            for layer, values in zip(self._layers, measured, strict=True)
            for parameter, _ in layer.parameters
            if values is not None
        }
        trained = {p for group in self.param_groups for p in group["params"] if p.grad is not None}
        uncontrolled = trained - controlled - self._free
        return [name for name, p in self.model.named_parameters() if p in uncontrolled]

    def _restore(self, importance: Mapping[str, Tensor]) -> None:
        self._importance = torch.cat([importance[name].to(self._importance) for name in self._names])

    def close(self) -> None:
        self._observation.close()
        super().close()


def measure_(
    importance: Tensor,
    rows: Sequence[Tensor],
    layer: Tensor,
    sizes: Tensor,
    widths: list[int],
    knobs: tuple[float, float, float],
) -> Tensor:
    """In place, the new importance; and the plasticity that comes of it."""
    rate, beta, gain = knobs
    row = torch.cat(list(rows))
    importance.copy_(moving_average(importance, row, layer_means(row, sizes, widths), layer, rate))
    return plasticity(importance, beta=beta, gain=gain)


def limit_all_(
    shares: Tensor,
    widths: list[int],
    changing: Sequence[Tensor],
    places: Sequence[tuple[int, Spread]],
    before: Sequence[Tensor] | None,
) -> None:
    """In place, only so much of every change as the plasticity of its neurons allows.

    `changing` are gradients, or parameters after their step if `before` says what they were; `places` says of each
    which layer's neurons lie in it, and how.
    """
    split = {
        kind: list(zip(torch.split(share, widths), torch.split(plastic_bits(share, share.dtype), widths), strict=True))
        for kind in {(tensor.dtype, tensor.device) for tensor in changing}
        for share in [shares.to(kind[1], kind[0])]
    }
    for i, (tensor, (number, spread)) in enumerate(zip(changing, places, strict=True)):
        share, plastic = (spread(values) for values in split[tensor.dtype, tensor.device][number])
        limit_(tensor, None if before is None else before[i], share, plastic)


def _places(model: nn.Module, layers: list[Layer], observe: Mapping[str, str] | None) -> dict[Layer, nn.Module]:
    modules, by_name = dict(model.named_modules()), {layer.name: layer for layer in layers}
    for layer_name, module_name in (observe or {}).items():
        if layer_name not in by_name:
            raise ValueError(f"observe: {layer_name!r} is no layer under control; there are {', '.join(by_name)}")
        if module_name not in modules:
            raise ValueError(f"observe: the model has no module {module_name!r} to observe {layer_name!r} at")
        if module_name != layer_name and module_name in by_name:
            raise ValueError(
                f"observe: {module_name!r} shows its own neurons, so it cannot show those of {layer_name!r}"
            )
    return {by_name[layer]: modules[module] for layer, module in (observe or {}).items()}


def _check_layers(model: nn.Module, layers: list[Layer]) -> None:
    if layers:
        return
    if find_layers(model, set(model.parameters()), free=()):
        raise ValueError(
            "no neuron is left to control: the optimizer holds no weight or bias of a Linear, Conv or ConvTranspose "
            "layer that is not in free="
        )
    raise ValueError(
        f"{type(model).__name__} has no neurons to control: no Linear, Conv or ConvTranspose layer with a weight"
    )
