"""Plasticity by direction: frozen neurons still learn where no old input lies."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.optim import Optimizer

from holdfast.directions import Directions, capacity, dense, directed, leading, normalized, second_moment
from holdfast.importance import precise
from holdfast.methods.anchor import check_finite, check_samples
from holdfast.methods.memory import AS_BEFORE, PLAIN
from holdfast.methods.method import Commit, Needs
from holdfast.methods.npc import NPC, limit_all_
from holdfast.methods.settings import Count, Fraction, Positive
from holdfast.neurons import Layer
from holdfast.neurons.rows import Layout, batched, group_rows
from holdfast.samples import device_of, samples_of
from holdfast.taps import module_inputs

_CHUNK = 2**26  # elements of unfolded inputs at once


class Side(NamedTuple):
    """The input side of a layer in one step."""

    number: int
    """The number of the layer."""
    layout: Layout
    indices: tuple[int, ...]
    """The indices of the weight, and of the bias if it has a gradient, among the changing tensors."""
    directions: Directions

    def matrix(self, tensors: Sequence[Tensor]) -> Tensor:
        """Weight and bias as one matrix, `[groups, neurons, inputs]`. The column of a missing bias is 0."""
        matrix = self.layout.joined(*(tensors[index] for index in self.indices)).to(self.directions.vectors.dtype)
        return pad(matrix, (0, self.directions.vectors.shape[1] - matrix.shape[2]))

    def write_(self, tensors: Sequence[Tensor], matrix: Tensor) -> None:
        """The inverse of `matrix`, in place."""
        self.layout.write_(matrix, *(tensors[index] for index in self.indices))


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
        now = side.matrix(changing)
        share = split[side.number].to(now).view(side.layout.groups, -1, 1)
        if before is None:
            side.write_(changing, directed(now, share, side.directions, kappa))
        else:
            old = side.matrix(before)
            moved = old + directed(now - old, share, side.directions, kappa)
            side.write_(changing, torch.where(share == 1, now, moved))


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
    }

    kappa: float
    samples: int | None
    rank: int | None

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
    ) -> None:
        super().__init__(model, optimizer, beta=beta, rate=rate, gain=gain, free=free, observe=observe, example=example)
        self._set(kappa=kappa, samples=samples, rank=rank)
        self.tasks = 0
        self._vectors: dict[str, Tensor] = {}
        self._values: dict[str, Tensor] = {}
        self._rest: dict[str, Tensor] = {}
        for _, layer, parts in self._sided():
            self._keep(layer.name, self._nothing(layer, parts))

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

    @torch.no_grad()
    def _consolidate(self, batches: Iterable[Any], active: Sequence[int] | None) -> Commit:
        moments = self._moments(batches)
        self._sum_over_processes(moments.values())
        found = {}
        for _, layer, (weight, *_) in self._sided():
            check_finite(layer.name, moments[layer.name])
            before = Directions(*(each.double() for each in self._directions(layer, weight.device)))
            newest = leading(dense(before) + normalized(moments[layer.name]), self.rank)
            found[layer.name] = Directions(*(each.to(precise(weight.dtype)) for each in newest))
        return partial(self._remember, found)

    def _remember(self, found: Mapping[str, Directions]) -> None:
        for name, directions in found.items():
            self._keep(name, directions)
        self.tasks += 1

    def _moments(self, batches: Iterable[Any]) -> dict[str, Tensor]:
        """The sums of a a^T over all inputs of each layer on the batches, in float64."""
        biased = {layer.name: len(parts) > 1 for _, layer, parts in self._sided()}
        modules = {(layer.name, module): module for _, layer, _ in self._sided() for module in layer.modules}
        sums = {layer.name: dense(self._nothing(layer, parts)).double() for _, layer, parts in self._sided()}
        count = 0
        for inputs in module_inputs(self.model, modules, samples_of(batches, self.samples, device_of(self.model))):
            count += 1
            for (name, module), given in inputs.items():
                for x in given:
                    sums[name] += _second_moment(module, x, bias=biased[name])
        check_samples(count)
        return sums


def _second_moment(module: nn.Module, x: Tensor, *, bias: bool) -> Tensor:
    """The sum of a a^T over the inputs `x` of a layer, in float64. Inputs are unfolded in chunks of samples."""
    x = batched(module, x.to(precise(x.dtype)))
    samples = max(1, _CHUNK // max(1, group_rows(module, x[:1]).numel()))
    moments = [second_moment(group_rows(module, part), bias=bias).double() for part in torch.split(x, samples)]
    return torch.stack(moments).sum(0)
