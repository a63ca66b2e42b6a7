"""Neuron-level plasticity control (Paik et al., Algorithm 1): important neurons learn more slowly."""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from holdfast.compiling import compiled
from holdfast.errors import warn
from holdfast.importance import layer_means, moving_average
from holdfast.methods.measured import Measured
from holdfast.methods.memory import AS_BEFORE
from holdfast.methods.method import Needs, several_processes
from holdfast.methods.plastic import Plastic
from holdfast.methods.settings import Fraction, Positive
from holdfast.neurons import Layer, Spread, find_layers, resolve_observe
from holdfast.plasticity import limit_, plastic_bits, plasticity
from holdfast.taps import ImportanceTaps


class NPC(Plastic):
    """Changes each neuron by its plasticity times the change of the wrapped optimizer.

    For neuron i with activation n_i, at every step:

        c_i = mean over samples of |mean over positions of n_i dL/dn_i|             (eq. 2)
        C_i <- (1 - rate) C_i + rate c_i / mean of c over the layer                 (eq. 3, 4)
        s_i = min(1, gain sqrt(max(sqrt(beta / C_i) - 1, 0)))                       (eq. 10, 11)

    and the neuron's parameters change by s_i times the full change. Source: Paik, Oh, Kwak, Kim, "Overcoming
    Catastrophic Forgetting by Neuron-level Plasticity Control", Algorithm 1.

    Args:
        model: the model in training. It is hooked until `close`, and not changed otherwise.
        optimizer: an optimizer of its parameters. Its learning rate is that of a fully plastic neuron.
        beta: the importance at which a neuron freezes; the mean importance of a layer is 1.
        rate: the weight of the newest measurement in the moving average of importance.
        gain: the factor of plasticity below its maximum of 1.
        free: modules that keep the full learning rate, above all the task heads.
        observe: modules at whose outputs neurons are tapped, as `{layer name: module name}`, for layers whose taps
            are not found automatically.
        example: one batch of inputs: a tensor, a tuple of arguments or a dict of keyword arguments. Taps are then found
            at once instead of in the first training forward. Required before a model is compiled with
            `fullgraph=True`.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> optimizer = NPC(model, torch.optim.SGD(model.parameters(), lr=0.1), free=[model[2]])
    >>> loss = model(torch.randn(16, 4)).square().mean()
    >>> optimizer.zero_grad(); loss.backward(); optimizer.step()
    >>> {name: tuple(values.shape) for name, values in optimizer.importance.items()}
    {'0': (8,)}
    """

    needs: ClassVar = Needs(heads=True, example=True)
    remembers: ClassVar = {"importance": AS_BEFORE}

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        beta: Positive = 0.7,
        rate: Fraction = 5e-4,
        gain: Positive = 1.0,
        free: Iterable[nn.Module] = (),
        observe: Mapping[str, str] | None = None,
        example: Any = None,
    ) -> None:
        super().__init__(model, optimizer, beta=beta, rate=rate, gain=gain, free=free)
        trained = self._trained()
        self._layers = find_layers(self.model, trained, self._free)
        _check_layers(self.model, self._layers)
        observed = resolve_observe(self.model, self._names, observe)
        self._taps = ImportanceTaps(self.model, self._layers, trained - self._free, observed)
        weakref.finalize(self, self._taps.close).atexit = False
        self._taps.wrapper = self._wrapper
        self._prepare_importance()
        self._unmeasured: set[str] = set()
        if example is not None:
            self._taps.rehearse(example)

    def _prepare_importance(self) -> None:
        sizes = self._widths = [layer.size for layer in self._layers]
        like = [layer.parameters[0][0] for layer in self._layers]
        dtype = torch.float64 if any(p.dtype == torch.float64 for p in like) else torch.float32
        self._importance = torch.zeros(sum(sizes), dtype=dtype, device=like[0].device)
        self._sizes = torch.tensor(sizes, device=like[0].device)
        self._layer = torch.arange(len(sizes), device=like[0].device).repeat_interleave(self._sizes).int()

    # ---- importance ----

    @property
    def importance(self) -> dict[str, Tensor]:
        """The moving average of importance, one value per neuron, by layer."""
        return dict(zip(self._names, self._split(self._importance.clone()), strict=True))

    @importance.setter
    def importance(self, importance: Mapping[str, Tensor]) -> None:
        self._importance = torch.cat([importance[name].to(self._importance) for name in self._names])

    @property
    def neuron_importance(self) -> dict[str, Tensor]:
        return self.importance

    @property
    def _names(self) -> list[str]:
        return [layer.name for layer in self._layers]

    def _split(self, values: Tensor) -> Sequence[Tensor]:
        return values.split_with_sizes(self._widths)

    def remember(self, measured: Measured) -> None:
        """Take over the importances of a model trained elsewhere, measured by `holdfast.measure`.

        The first step is then limited already. Importances that were known before are replaced.
        """
        measured.fit(self.importance)
        self.importance = measured.importance

    # ---- a step ----

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self._taps.discard()

    def _update(self) -> None:
        """Measure the importance of the neurons from the accumulated gradients, then take a limited step."""
        self._taps.settle()
        measured = self._taps.collect()
        if not self._started:
            self._start(measured)
        elif 0 < sum(values is None for values in measured) < len(measured):
            self._check_unmeasured(measured)
        measure = self._compiled_like_model(measure_)
        settings = self.rate, self.beta, self.gain
        rows = self._rows(measured)
        self._change(measure(self._importance, rows, self._layer, self._sizes, self._widths, settings))

    def _compiled_like_model(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Compile a part of the step on a GPU, where launching small operations is slow, if the model runs compiled."""
        return compiled(function) if self._importance.is_cuda and self._taps.compiled else function

    def _change(self, shares: Tensor) -> None:
        """Take the wrapped optimizer's step, limited by the plasticity of the neurons."""
        moving = self._moving()
        owners = [(number, spread) for _, number, spread in moving]
        limit = self._compiled_like_model(limit_all_)
        self._limited_step(
            [parameter for parameter, _, _ in moving],
            lambda changing, before: limit(shares, self._widths, changing, owners, before),
        )

    def _rows(self, measured: list[Tensor | None]) -> list[Tensor]:
        """The measurements of all layers, summed over processes; 0 for layers without one."""
        home = next((values.device for values in measured if values is not None), self._importance.device)
        if home != self._importance.device:  # the model was moved
            self._importance, self._sizes, self._layer = (
                tensor.to(home) for tensor in (self._importance, self._sizes, self._layer)
            )
        rows = [
            self._importance.new_zeros(layer.size) if values is None else values.to(self._importance)
            for layer, values in zip(self._layers, measured, strict=True)
        ]
        if (group := self._taps.process_group) is not None:
            rows = [torch.cat(rows)]
            dist.all_reduce(rows[0], group=group)
        return rows

    def _moving(self) -> list[tuple[nn.Parameter, int, Spread]]:
        """The controlled parameters that have a gradient, each with the number of its layer and its spread."""
        return [
            (parameter, number, spread)
            for number, layer in enumerate(self._layers)
            for parameter, spread in layer.parameters
            if parameter.grad is not None
        ]

    # ---- warnings ----

    def _start(self, measured: list[Tensor | None]) -> None:
        self._unmeasured = self._learning_unmeasured(measured)  # the first warning names their parameters
        if uncontrolled := self._uncontrolled(measured):
            warn(
                "these parameters belong to no tapped neuron and train at the full rate: "
                f"{', '.join(uncontrolled)}; list their modules in free= if this is intended"
            )
        if self._taps.process_group is None and several_processes():
            warn(
                "several processes are running, but the model was not called by a DistributedDataParallel, so each "
                "process measures importance alone; if they train one model, give NPC that wrapper as model"
            )

    def _check_unmeasured(self, measured: list[Tensor | None]) -> None:
        if new := self._learning_unmeasured(measured) - self._unmeasured:
            self._unmeasured |= new
            warn(
                "these layers have gradients but were not measured at their taps, so their importance stays the same: "
                f"{', '.join(sorted(new))}; if the forward differs from that of the first step, build a new NPC and "
                "load this one's state_dict, or choose the taps with observe="
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

    def _close(self) -> None:
        self._taps.close()


def measure_(
    importance: Tensor,
    rows: Sequence[Tensor],
    layer: Tensor,
    sizes: Tensor,
    widths: list[int],
    settings: tuple[float, float, float],
) -> Tensor:
    """Update the importance in place and return the resulting plasticity."""
    rate, beta, gain = settings
    row = torch.cat(list(rows))
    importance.copy_(moving_average(importance, row, layer_means(row, sizes, widths), layer, rate))
    return plasticity(importance, beta=beta, gain=gain)


def limit_all_(
    shares: Tensor,
    widths: list[int],
    changing: Sequence[Tensor],
    owners: Sequence[tuple[int, Spread]],
    before: Sequence[Tensor] | None,
) -> None:
    """Scale every change, in place, by the plasticity of its neurons.

    Args:
        shares: the plasticity of all neurons of all layers.
        widths: the number of neurons of each layer.
        changing: gradients, or parameters after their step if `before` holds their values before it.
        owners: the number of the layer of each tensor, and the spread of its neurons over the tensor.
        before: the parameters before their step, or None for gradients.
    """
    split = {
        kind: list(zip(torch.split(share, widths), torch.split(plastic_bits(share, share.dtype), widths), strict=True))
        for kind in {(tensor.dtype, tensor.device) for tensor in changing}
        for share in [shares.to(kind[1], kind[0])]
    }
    for i, (tensor, (number, spread)) in enumerate(zip(changing, owners, strict=True)):
        share, plastic = (spread(values) for values in split[tensor.dtype, tensor.device][number])
        limit_(tensor, None if before is None else before[i], share, plastic)


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
