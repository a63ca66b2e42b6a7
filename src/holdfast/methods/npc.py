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
from holdfast.importance import layer_means, moving_average, parameter_taylor
from holdfast.methods.measured import Measured
from holdfast.methods.memory import AS_BEFORE
from holdfast.methods.method import Needs, several_processes
from holdfast.methods.plastic import Plastic
from holdfast.methods.report import LayerReport, Report
from holdfast.methods.settings import Fraction, Positive
from holdfast.neurons import (
    Choice,
    Layer,
    Spread,
    find_layers,
    find_norms,
    find_untapped,
    listed,
    resolve_observe,
)
from holdfast.plasticity import limited, plastic_bits, plasticity
from holdfast.taps import ImportanceTaps


class NPC(Plastic):
    """Changes each neuron by its plasticity times the change of the wrapped optimizer.

    For neuron i with activation n_i, at every step:

        c_i = mean over samples of |mean over positions of n_i dL/dn_i|             (eq. 2)
        C_i <- (1 - rate) C_i + rate c_i / mean of c over the layer                 (eq. 3, 4)
        s_i = min(1, gain sqrt(max(sqrt(beta / C_i) - 1, 0)))                       (eq. 10, 11)

    and the neuron's parameters change by s_i times the full change. Where no module shows the outputs of neurons, as
    for embeddings, packed projections and recurrent cells, c_i is |sum of w dL/dw| over the neuron's parameters w,
    which is |sum over samples and positions of n_i dL/dn_i|. Source: Paik, Oh, Kwak, Kim, "Overcoming
    Catastrophic Forgetting by Neuron-level Plasticity Control", Algorithm 1.

    Args:
        model: the model in training. It is hooked until `close`, and not changed otherwise.
        optimizer: an optimizer of its parameters. Its learning rate is that of a fully plastic neuron.
        beta: the importance at which a neuron freezes; the mean importance of a layer is 1.
        rate: the weight of the newest measurement in the moving average of importance.
        gain: the factor of plasticity below its maximum of 1.
        free: what keeps the full learning rate, above all the task heads: modules, parameters, and names of either,
            which may be patterns, as in `[model.head, "*.bias"]`.
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
    remembers: ClassVar = {"_importance": AS_BEFORE.at_least(0)}
    _least_neurons: ClassVar = 2
    """The least number of neurons of a layer under control. A single one has nothing to be more important than."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        beta: Positive = 0.7,
        rate: Fraction = 5e-4,
        gain: Positive = 1.0,
        free: Choice | Iterable[Choice] = (),
        observe: Mapping[str, str] | None = None,
        example: Any = None,
    ) -> None:
        super().__init__(model, optimizer, beta=beta, rate=rate, gain=gain, free=free)
        controlled = self._trained() - self._free
        found = find_layers(self.model, controlled, self._free)
        tapped = [layer for layer in found if layer.size >= self._least_neurons]
        controlled -= {parameter for layer in found for parameter, _ in layer.parameters}
        self._norms = find_norms(self.model, controlled)
        self._layers = [*tapped, *find_untapped(self.model, controlled), *self._norms]
        _check_layers(self.model, self._layers)
        observed = resolve_observe(self.model, [layer.name for layer in tapped], observe)
        owners = {parameter: layer for layer in self._norms for parameter, _ in layer.parameters}
        self._taps = ImportanceTaps(self.model, tapped, controlled, observed, owners)
        weakref.finalize(self, self._taps.close).atexit = False
        self._taps.wrapper = self._wrapper
        self._prepare_importance()
        self._unmeasured: set[str] = set()
        if example is not None:
            self._taps.rehearse(example)

    def _prepare_importance(self) -> None:
        self._widths = [layer.size for layer in self._layers]
        self._parts = [layer.size // layer.parts for layer in self._layers for _ in range(layer.parts)]
        like = [layer.parameters[0][0] for layer in self._layers]
        dtype = torch.float64 if any(p.dtype == torch.float64 for p in like) else torch.float32
        self._row = torch.zeros(sum(self._widths), dtype=dtype, device=like[0].device)
        self._sizes = torch.tensor(self._parts, device=like[0].device)
        self._part = torch.arange(len(self._parts), device=like[0].device).repeat_interleave(self._sizes).int()

    # ---- importance ----

    @property
    def importance(self) -> dict[str, Tensor]:
        """The moving average of importance, one value per neuron, by layer."""
        importance = self._importance
        return {layer.name: importance[layer.name] for layer in self._shown}

    @property
    def _importance(self) -> dict[str, Tensor]:
        """The importance of all layers, including normalizations whose parameters belong to another layer."""
        return dict(zip(self._names, self._split(self._row.clone()), strict=True))

    @_importance.setter
    def _importance(self, importance: Mapping[str, Tensor]) -> None:
        self._row = torch.cat([importance[name].to(self._row) for name in self._names])

    @property
    def _shown(self) -> list[Layer]:
        """The layers with parameters. Normalizations count once taps are found: a layer before them may adopt them."""
        carriers = self._taps.carriers.values()
        found = not carriers or any(carrier.tensor is not None for carrier in carriers)
        return [layer for layer in self._layers if layer.parameters and (found or layer not in self._norms)]

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
        present = self._importance
        measured.fit(present)
        self._importance = {name: measured.importance[name] for name in present}

    # ---- a step ----

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self._taps.discard()

    def _update(self) -> None:
        """Measure the importance of the neurons from the accumulated gradients, then take a limited step."""
        self._taps.settle()
        measured = self._measured_layers()
        if not self._started:
            self._start(measured)
        elif 0 < sum(values is None for values in measured) < len(measured):
            self._check_unmeasured(measured)
        measure = self._compiled_like_model(measure_)
        settings = self.rate, self.beta, self.gain
        rows = self._rows(measured)
        self._change(measure(self._row, rows, self._part, self._sizes, self._parts, settings))

    def _measured_layers(self) -> list[Tensor | None]:
        """The measurements of all layers: at their taps, or else from their gradients; None for layers with neither."""
        tapped = dict(zip(self._taps.carriers, self._taps.collect(), strict=True))
        measured = [tapped.get(layer) for layer in self._layers]
        terms = {
            number: terms
            for number, layer in enumerate(self._layers)
            if (layer not in tapped or self._taps.carriers[layer].tensor is None) and (terms := _terms(layer))
        }
        if terms:
            rows = self._compiled_like_model(measure_parameters)(list(terms.values()))
            for number, row in zip(terms, rows, strict=True):
                measured[number] = row
        return measured

    def _compiled_like_model(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Compile a part of the step on a GPU, where launching small operations is slow, if the model runs compiled."""
        return compiled(function) if self._row.is_cuda and self._taps.compiled else function

    def _change(self, shares: Tensor) -> None:
        """Take the wrapped optimizer's step, limited by the plasticity of the neurons."""
        moving = self._moving()
        owners = [(number, spread) for _, number, spread in moving]
        limit = self._compiled_like_model(limit_all)
        self._limited_step(
            [parameter for parameter, _, _ in moving],
            lambda changing, before: limit(shares, self._widths, changing, owners, before),
        )

    def _rows(self, measured: list[Tensor | None]) -> list[Tensor]:
        """The measurements of all layers, those at taps summed over processes; 0 for layers without one."""
        home = next((values.device for values in measured if values is not None), self._row.device)
        if home != self._row.device:  # the model was moved
            self._row, self._sizes, self._part = (tensor.to(home) for tensor in (self._row, self._sizes, self._part))
        rows = [
            self._row.new_zeros(layer.size) if values is None else values.to(self._row)
            for layer, values in zip(self._layers, measured, strict=True)
        ]
        tapped = len(self._taps.carriers)
        if tapped and (group := self._taps.process_group) is not None:
            rows = [torch.cat(rows[:tapped]), *rows[tapped:]]  # the others follow from gradients, which are averages
            dist.all_reduce(rows[0], group=group)
        return rows

    def _moving(self) -> list[tuple[nn.Parameter, int, Spread]]:
        """The controlled parameters that have a dense gradient, each with the number of its layer and its spread."""
        return [
            (parameter, number, spread)
            for number, layer in enumerate(self._layers)
            for parameter, spread in layer.parameters
            if parameter.grad is not None and not parameter.grad.is_sparse
        ]

    # ---- what is controlled ----

    def report(self) -> Report:
        """What is controlled, layer by layer."""
        at = self._taps.locations()
        layers = [
            LayerReport(
                layer.name,
                layer.size,
                at.get(layer, "gradients"),
                sum(parameter.numel() for parameter, _ in layer.parameters),
                self._directed(layer),
                self._memory_of(layer),
            )
            for layer in self._layers
            if layer.parameters
        ]
        controlled = {parameter for layer in self._layers for parameter, _ in layer.parameters}
        trained = {p for p in self._trained() if p.requires_grad}
        uncontrolled = {
            name: p.numel()
            for name, p in self.model.named_parameters()
            if p in trained and p not in controlled and p not in self._free
        }
        return Report(type(self).__name__, layers, uncontrolled, sum(p.numel() for p in trained & self._free))

    def _directed(self, layer: Layer) -> int:
        """The number of the layer's parameters that change by direction of their inputs."""
        return 0

    def _memory_of(self, layer: Layer) -> int:
        """The bytes remembered for the layer."""
        return layer.size * self._row.element_size()

    # ---- warnings ----

    def _start(self, measured: list[Tensor | None]) -> None:
        self._unmeasured = self._learning_unmeasured(measured)  # the first warning names their parameters
        names, share = self._uncontrolled(measured)
        if share >= 0.01:
            warn(
                f"{share:.0%} of the trained parameters are not controlled and train at the full rate: "
                f"{listed(names)}; name them in free= if this is intended; holdfast.explain(optimizer) shows all layers"
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

    def _uncontrolled(self, measured: list[Tensor | None]) -> tuple[list[str], float]:
        """The names of parameters that train without control, the largest first, and their share of those trained."""
        controlled = {
            parameter
            for layer, values in zip(self._layers, measured, strict=True)
            for parameter, _ in layer.parameters
            if values is not None
        }
        candidates = {p for p in self._trained() - self._free if p.grad is not None}
        trained = {name: p for name, p in self.model.named_parameters() if p in candidates}
        names = [name for name, p in trained.items() if p not in controlled]
        sizes = {name: p.numel() for name, p in trained.items()}
        share = sum(sizes[name] for name in names) / max(1, sum(sizes.values()))
        return sorted(names, key=lambda name: -sizes[name]), share

    def _close(self) -> None:
        self._taps.close()


def measure_(
    importance: Tensor,
    rows: Sequence[Tensor],
    part: Tensor,
    sizes: Tensor,
    widths: list[int],
    settings: tuple[float, float, float],
) -> Tensor:
    """Update the importance in place and return the resulting plasticity. Each part of a layer has mean 1."""
    rate, beta, gain = settings
    row = torch.cat(list(rows))
    importance.copy_(moving_average(importance, row, layer_means(row, sizes, widths), part, rate))
    return plasticity(importance, beta=beta, gain=gain)


def measure_parameters(layers: Sequence[Sequence[tuple[Tensor, Tensor, Spread]]]) -> list[Tensor]:
    """The importance of neurons of several layers, given the parameters of each, their gradients and spreads."""
    return [parameter_taylor([(value, gradient, spread.sum) for value, gradient, spread in layer]) for layer in layers]


def limit_all(
    shares: Tensor,
    widths: list[int],
    changing: Sequence[Tensor],
    owners: Sequence[tuple[int, Spread]],
    before: Sequence[Tensor] | None,
) -> list[Tensor]:
    """Scale every change by the plasticity of its neurons: gradients in new tensors, parameters in place.

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
    found = []
    for i, (tensor, (number, spread)) in enumerate(zip(changing, owners, strict=True)):
        share, plastic = (spread(values) for values in split[tensor.dtype, tensor.device][number])
        found.append(limited(tensor, None if before is None else before[i], share, plastic))
    return found


def _terms(layer: Layer) -> list[tuple[Tensor, Tensor, Spread]]:
    """The parameters of a layer that have a dense gradient, with this gradient and their spread."""
    return [
        (parameter.detach(), parameter.grad, spread)
        for parameter, spread in layer.parameters
        if parameter.grad is not None and not parameter.grad.is_sparse
    ]


def _check_layers(model: nn.Module, layers: list[Layer]) -> None:
    if layers:
        return
    everything = set(model.parameters())
    if find_layers(model, everything, free=()) or find_untapped(model, everything) or find_norms(model, everything):
        raise ValueError(
            "no neuron is left to control: the optimizer holds only parameters in free=, sparse embeddings, and "
            "parameters with a single neuron"
        )
    raise ValueError(
        f"{type(model).__name__} has no neurons to control: it has only sparse embeddings, and parameters with a "
        "single neuron"
    )
