"""Plasticity by direction: frozen neurons still learn where no old input lies."""

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from holdfast.directions import Directions, capacity, dense, directed, leading, normalized, second_moment
from holdfast.importance import precise
from holdfast.methods.anchor import check_finite, check_samples
from holdfast.methods.measured import Measured
from holdfast.methods.memory import AS_BEFORE, PLAIN
from holdfast.methods.method import Commit, Needs
from holdfast.methods.npc import NPC, limit_all_
from holdfast.methods.settings import Count, Fraction, Positive
from holdfast.neurons import Layer
from holdfast.neurons.rows import Layout, batched, group_rows
from holdfast.samples import Batch, device_of, samples_of
from holdfast.taps import CallTap, module_inputs

_CHUNK = 2**26  # elements of unfolded inputs at once


class Side(NamedTuple):
    """The input side of a layer in one step."""

    number: int
    """The number of the layer."""
    layout: Layout
    indices: tuple[int, ...]
    """The indices of the weight, and of the bias if it has a gradient, among the changing tensors."""
    directions: Directions

    def matrices(self, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
        """The weight, `[groups, neurons, inputs]`, and the bias, `[groups, neurons, 1]`, if it has a gradient.

        They are not joined into one matrix: products with an odd number of inputs are slow on a GPU.
        """
        weight, *bias = (tensors[index].to(self.directions.vectors.dtype) for index in self.indices)
        return self.layout.matrix(weight), bias[0].view(self.layout.groups, -1, 1) if bias else None

    def write_(self, tensors: Sequence[Tensor], matrices: tuple[Tensor, Tensor | None]) -> None:
        """The inverse of `matrices`, in place."""
        weight = tensors[self.indices[0]]
        weight.copy_(self.layout.weight(matrices[0], weight.shape))
        if matrices[1] is not None:
            tensors[self.indices[1]].copy_(matrices[1].reshape(-1))


def direct_all_(
    shares: Tensor,
    widths: list[int],
    changing: Sequence[Tensor],
    sides: Sequence[Side],
    before: Sequence[Tensor] | None,
    kappa: float,
) -> None:
    """Change the weight and bias of every layer by s G + (1 - s) G P instead of G, in place.

    Args:
        shares: the plasticity s of all neurons of all layers.
        widths: the number of neurons of each layer.
        changing: gradients, or parameters after their step if `before` holds their values before it.
        sides: the input sides of the layers.
        before: the parameters before their step, or None for gradients.
        kappa: the strength of the protection.
    """
    split = torch.split(shares, widths)
    for side in sides:
        weight, bias = side.matrices(changing)
        share = split[side.number].to(weight).view(side.layout.groups, -1, 1)
        if before is None:
            side.write_(changing, directed(weight, bias, share, side.directions, kappa))
            continue
        old_weight, old_bias = side.matrices(before)
        change = None if bias is None or old_bias is None else bias - old_bias
        moved, moved_bias = directed(weight - old_weight, change, share, side.directions, kappa)
        plastic = share == 1  # to the bit
        moved = torch.where(plastic, weight, old_weight + moved)
        if bias is not None and old_bias is not None and moved_bias is not None:
            moved_bias = torch.where(plastic, bias, old_bias + moved_bias)
        side.write_(changing, (moved, moved_bias))


class DPC(NPC):
    """Changes each neuron by its plasticity and, beyond that, only in directions without old inputs.

    For neuron i of a layer with inputs a (with a 1 appended if the layer has a bias) and full change G_i:

        A_k  = E[a a^T] on the finished task k, divided by the mean of its diagonal
        A    = sum of A_k over the finished tasks,   P = (I + kappa A)^-1
        dW_i = s_i G_i + (1 - s_i) G_i P

    with the plasticity s_i of NPC. A plastic neuron (s_i = 1) changes freely. A frozen one (s_i = 0) changes where it
    leaves the layer's outputs on old inputs alone. Before the first `consolidate`, a step is NPC's: dW_i = s_i G_i.
    Affine parameters of normalizations have no input side and always change by s_i.

    Args:
        model: the model in training. It gets hooks, which `close` removes, and nothing else.
        optimizer: an optimizer of its parameters. Its learning rate is that of a fully plastic neuron.
        beta: the importance at which a neuron freezes; the mean importance of a layer is 1.
        kappa: the strength of the protection of old inputs.
        rate: the weight of the newest measurement in the moving average of importance.
        gain: the factor of plasticity below its maximum of 1.
        free: modules that keep the full learning rate, above all the task heads.
        observe: modules at whose outputs neurons are tapped, as in `NPC`.
        example: one batch of inputs, as in `NPC`.
        samples: the number of samples per task on which A is measured, the first of its batches; all if None.
        rank: the number of directions of A kept per layer; all if None. The others share their mean eigenvalue.
        every: for tasks whose ends are unknown: A grows by rate * every * E[a a^T], normalized as above, measured
            every so many steps on the first `samples` samples of the training batch. `consolidate` then does nothing.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> optimizer = DPC(model, torch.optim.SGD(model.parameters(), lr=0.1), free=[model[2]])
    >>> x = torch.randn(16, 4)
    >>> loss = model(x).square().mean()
    >>> optimizer.zero_grad(); loss.backward(); optimizer.step()
    >>> optimizer.consolidate([x])  # the task is finished
    >>> {name: round(share, 1) for name, share in optimizer.capacity.items()}
    {'0': 1.0}
    """

    needs: ClassVar = Needs(heads=True, example=True, data=True)
    remembers: ClassVar = {
        "importance": AS_BEFORE,
        "tasks": PLAIN,
        "_vectors": AS_BEFORE,
        "_values": AS_BEFORE,
        "_rest": AS_BEFORE,
        "steps": PLAIN,
    }

    kappa: float
    samples: int | None
    rank: int | None
    every: int | None

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        beta: Positive = 0.5,
        kappa: Positive = 100.0,
        rate: Fraction = 5e-4,
        gain: Positive = 1.0,
        free: Iterable[nn.Module] = (),
        observe: Mapping[str, str] | None = None,
        example: Any = None,
        samples: Count = 4096,
        rank: Count = None,
        every: Count = None,
    ) -> None:
        super().__init__(model, optimizer, beta=beta, rate=rate, gain=gain, free=free, observe=observe, example=example)
        self._set(kappa=kappa, samples=samples, rank=rank, every=every)
        self.tasks = self.steps = 0
        self._vectors: dict[str, Tensor] = {}
        self._values: dict[str, Tensor] = {}
        self._rest: dict[str, Tensor] = {}
        for _, layer, parts in self._sided():
            self._keep(layer.name, self._nothing(layer, parts))
        self._calls = CallTap(self.model) if every else None
        if self._calls is not None:
            weakref.finalize(self, self._calls.close).atexit = False

    # ---- the layers ----

    def _sided(self) -> Iterator[tuple[int, Layer, list[nn.Parameter]]]:
        """The layers with an input side, those whose weight is trained: number, layer, weight and bias."""
        for number, layer in enumerate(self._layers):
            if parts := layer.weight_and_bias:
                yield number, layer, parts

    def _nothing(self, layer: Layer, parts: list[nn.Parameter]) -> Directions:
        """Directions of a layer without any old inputs."""
        groups, _, inputs = Layout.of(layer.modules[0]).joined(*(p.detach() for p in parts)).shape
        kept = inputs if self.rank is None else min(self.rank, inputs)
        like = torch.zeros((), dtype=precise(parts[0].dtype), device=parts[0].device)
        return Directions(like.new_zeros(groups, inputs, kept), like.new_zeros(groups, kept), like.new_zeros(groups))

    def _keep(self, name: str, directions: Directions) -> None:
        self._vectors[name], self._values[name], self._rest[name] = directions

    def _directions(self, layer: Layer, device: torch.device) -> Directions:
        kept = (memory[layer.name].to(device) for memory in (self._vectors, self._values, self._rest))
        self._keep(layer.name, directions := Directions(*kept))
        return directions

    @property
    def directions(self) -> dict[str, Directions]:
        """The second moment A of each layer's old inputs, by its leading directions."""
        return {layer.name: self._directions(layer, parts[0].device) for _, layer, parts in self._sided()}

    @property
    def capacity(self) -> dict[str, float]:
        """The share of each layer's input directions that finished tasks take, from 0 (free) to 1 (full).

        It is trace(kappa A (I + kappa A)^-1) / d for d inputs.
        """
        return {
            layer.name: float(capacity(self._directions(layer, parts[0].device), self.kappa))
            for _, layer, parts in self._sided()
        }

    # ---- a step ----

    def _change(self, shares: Tensor) -> None:
        if self.tasks == 0:
            super()._change(shares)
            return
        moving = self._moving()
        parameters = [parameter for parameter, _, _ in moving]
        sides = self._sides({parameter: index for index, parameter in enumerate(parameters)})
        directed = {index for side in sides for index in side.indices}
        others = [index for index in range(len(parameters)) if index not in directed]
        owners = [(moving[index][1], moving[index][2]) for index in others]
        direct, limit = self._compiled_like_model(direct_all_), self._compiled_like_model(limit_all_)

        def limit_or_direct(changing: list[Tensor], before: list[Tensor] | None) -> None:
            earlier = None if before is None else [before[index] for index in others]
            limit(shares, self._widths, [changing[index] for index in others], owners, earlier)
            direct(shares, self._widths, changing, sides, before, self.kappa)

        self._limited_step(parameters, limit_or_direct)

    def _sides(self, indices: Mapping[nn.Parameter, int]) -> list[Side]:
        return [
            Side(
                number,
                Layout.of(layer.modules[0]),
                tuple(indices[p] for p in parts if p in indices),
                self._directions(layer, parts[0].device),
            )
            for number, layer, parts in self._sided()
            if parts[0] in indices
        ]

    # ---- the end of a task ----

    def _consolidate(self, batches: Iterable[Any], active: Sequence[int] | None) -> Commit | None:
        if self.every is not None:
            return None
        return partial(self._remember, self._with(self._measured(batches, self.samples)))

    def _with(self, moments: Mapping[str, Tensor], weight: float = 1.0) -> dict[str, Directions]:
        """A plus weighted second moments of further inputs, by layer."""
        return {
            layer.name: self._sum(self._directions(layer, moments[layer.name].device), weight * moments[layer.name])
            for _, layer, _ in self._sided()
        }

    def _sum(self, before: Directions, moment: Tensor) -> Directions:
        """Directions of a known second moment plus another one."""
        total = dense(Directions(*(each.double() for each in before))) + moment
        return Directions(*(each.to(like) for each, like in zip(leading(total, self.rank), before, strict=True)))

    def remember(self, measured: Measured) -> None:
        """Take over the importances and the inputs of a model trained elsewhere, measured by `holdfast.measure`.

        The first step is then limited already. The measured inputs count as those of a finished task.
        """
        measured.fit(self.importance, self._vectors)
        moments = {}
        for _, layer, parts in self._sided():
            directions = (each.to(parts[0].device).double() for each in measured.directions[layer.name])
            moments[layer.name] = dense(Directions(*directions))
        found = self._with(moments)
        super().remember(measured)
        self._remember(found)

    def _remember(self, found: Mapping[str, Directions]) -> None:
        for name, directions in found.items():
            self._keep(name, directions)
        self.tasks += 1

    @torch.no_grad()
    def _measured(self, batches: Iterable[Any], samples: int | None) -> dict[str, Tensor]:
        """A of each layer on the first samples of the batches, in float64."""
        moments = self._moments(batches, samples)
        self._sum_over_processes(moments.values())
        for name, moment in moments.items():
            check_finite(name, moment)
        return {name: normalized(moment) for name, moment in moments.items()}

    def _moments(self, batches: Iterable[Any], samples: int | None) -> dict[str, Tensor]:
        """The sums of a a^T over all inputs of each layer on the batches, in float64."""
        biased = {layer.name: len(parts) > 1 for _, layer, parts in self._sided()}
        modules = {(layer.name, module): module for _, layer, _ in self._sided() for module in layer.modules}
        sums = {layer.name: dense(self._nothing(layer, parts)).double() for _, layer, parts in self._sided()}
        count = 0
        for inputs in module_inputs(self.model, modules, samples_of(batches, samples, device_of(self.model))):
            count += 1
            for (name, module), given in inputs.items():
                for x in given:
                    sums[name] += _second_moment(module, x, bias=biased[name])
        check_samples(count)
        return sums

    # ---- without task boundaries ----

    def _update(self) -> None:
        super()._update()
        call = None if self._calls is None else self._calls.take()
        if self.every is None or call is None:
            return
        self.steps += 1
        if self.steps % self.every == 0:
            moments = self._measured([Batch(call.args, call.kwargs, labels=None)], self.samples)
            weight = min(1.0, self.rate * self.every)
            self._remember(self._with(moments, weight))

    @property
    def _recordable(self) -> bool:
        return self.every is None  # its steps differ

    def _close(self) -> None:
        super()._close()
        if self._calls is not None:
            self._calls.close()


def _second_moment(module: nn.Module, x: Tensor, *, bias: bool) -> Tensor:
    """The sum of a a^T over the inputs `x` of a layer, in float64. Inputs are unfolded in chunks of samples."""
    x = batched(module, x.to(precise(x.dtype)))
    samples = max(1, _CHUNK // max(1, group_rows(module, x[:1]).numel()))
    moments = [second_moment(group_rows(module, part), bias=bias).double() for part in torch.split(x, samples)]
    return torch.stack(moments).sum(0)
