"""Plasticity by direction: frozen neurons still learn where no old input lies."""

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from holdfast.directions import (
    Directions,
    Moment,
    capacity,
    dense,
    diagonal_capacity,
    diagonally_directed,
    directed,
    leading,
    normalized,
    second_moment,
    uses,
)
from holdfast.importance import precise
from holdfast.methods.anchor import check_finite, check_samples
from holdfast.methods.measured import Measured
from holdfast.methods.memory import AS_BEFORE, PLAIN
from holdfast.methods.method import Commit, Needs
from holdfast.methods.npc import NPC, limit_all
from holdfast.methods.settings import Count, Fraction, Positive
from holdfast.neurons import Choice, Layer, Product
from holdfast.neurons.rows import Layout
from holdfast.samples import Batch, device_of, samples_of
from holdfast.taps import CallTap, product_inputs

Sides = Literal["both", "inputs"]


class Side(NamedTuple):
    """The input side of a product in one step."""

    number: int
    """The number of the layer."""
    layout: Layout
    indices: tuple[int, ...]
    """The indices of the weight, and of the bias if it has a gradient, among the changing tensors."""
    moment: Moment

    def directed(
        self, change: Tensor, bias: Tensor | None, share: Tensor, kappa: float
    ) -> tuple[Tensor, Tensor | None]:
        """The change s G + (1 - s) G P of the weight and of the bias."""
        if isinstance(self.moment, Tensor):
            return diagonally_directed(change, share, self.moment, kappa), None
        return directed(change, bias, share, self.moment, kappa)

    def matrices(self, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
        """The weight, `[groups, neurons, inputs]`, and the bias, `[groups, neurons, 1]`, if it has a gradient.

        They are not joined into one matrix: products with an odd number of inputs are slow on a GPU.
        """
        dtype = self.moment.dtype if isinstance(self.moment, Tensor) else self.moment.vectors.dtype
        weight, *bias = (tensors[index].to(dtype) for index in self.indices)
        return self.layout.matrix(weight), bias[0].view(self.layout.groups, -1, 1) if bias else None

    def tensors(self, tensors: Sequence[Tensor], matrices: tuple[Tensor, Tensor | None]) -> list[Tensor]:
        """The inverse of `matrices`: new tensors like those at the indices."""
        weight, *bias = (tensors[index] for index in self.indices)
        found = [self.layout.weight(matrices[0], weight.shape).to(weight.dtype)]
        return found if matrices[1] is None else [*found, matrices[1].reshape(bias[0].shape).to(bias[0].dtype)]


def direct_all(
    shares: Tensor,
    widths: list[int],
    changing: Sequence[Tensor],
    sides: Sequence[Side],
    before: Sequence[Tensor] | None,
    kappa: float,
) -> list[Tensor]:
    """Change the weight and bias of every product by s G + (1 - s) G P instead of G.

    Args:
        shares: the plasticity s of all neurons of all layers.
        widths: the number of neurons of each layer.
        changing: gradients, or parameters after their step if `before` holds their values before it.
        sides: the input sides of the products.
        before: the parameters before their step, or None for gradients.
        kappa: the strength of the protection.

    Returns:
        For each index of each side, the other gradient, or the other value of the parameter, as a new tensor.
    """
    split = torch.split(shares, widths)
    found: list[Tensor] = []
    for side in sides:
        weight, bias = side.matrices(changing)
        share = split[side.number].to(weight).view(side.layout.groups, -1, 1)
        if before is None:
            found += side.tensors(changing, side.directed(weight, bias, share, kappa))
            continue
        old_weight, old_bias = side.matrices(before)
        change = None if bias is None or old_bias is None else bias - old_bias
        moved, moved_bias = side.directed(weight - old_weight, change, share, kappa)
        plastic = share == 1  # to the bit
        moved = torch.where(plastic, weight, old_weight + moved)
        if bias is not None and old_bias is not None and moved_bias is not None:
            moved_bias = torch.where(plastic, bias, old_bias + moved_bias)
        found += side.tensors(changing, (moved, moved_bias))
    return found


class DPC(NPC):
    """Changes each neuron by its plasticity and, beyond that, only in directions without old inputs.

    For neuron i of a layer with inputs a (with a 1 appended if the layer has a bias) and full change G_i:

        A_k  = E[a a^T] on the finished task k, divided by the mean of its diagonal
        A    = sum of A_k over the finished tasks,   P = (I + kappa A)^-1
        dW_i = s_i G_i + (1 - s_i) G_i P

    with the plasticity s_i of NPC. A plastic neuron (s_i = 1) changes freely. A frozen one (s_i = 0) changes where it
    leaves the layer's outputs on old inputs alone. Before the first `consolidate`, a step is NPC's: dW_i = s_i G_i.
    The inputs of an embedding are one-hot: A is diagonal, how often each row was used. Affine parameters of
    normalizations and weights whose inputs no call of a module shows always change by s_i.

    Args:
        model: the model in training. It gets hooks, which `close` removes, and nothing else.
        optimizer: an optimizer of its parameters. Its learning rate is that of a fully plastic neuron.
        beta: the importance at which a neuron freezes; the mean importance of a layer is 1.
        kappa: the strength of the protection of old inputs.
        rate: the weight of the newest measurement in the moving average of importance.
        gain: the factor of plasticity below its maximum of 1.
        free: what keeps the full learning rate, above all the task heads: modules, parameters, and names of either,
            which may be patterns, as in `[model.head, "*.bias"]`.
        observe: modules at whose outputs neurons are tapped, as in `NPC`.
        example: one batch of inputs, as in `NPC`.
        samples: the number of samples per task on which A is measured, the first of its batches; all if None.
        rank: the number of directions of A kept per layer; all if None. The others share their mean eigenvalue.
        every: for tasks whose ends are unknown: A grows by rate * every * E[a a^T], normalized as above, measured
            every so many steps on the first `samples` samples of the training batch. `consolidate` then does nothing.
        sides: "both", as above, or "inputs" for dW_i = G_i P, whatever the importance of the neuron, and full changes
            in the first task: less is forgotten, and less is learned.

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
        "_importance": AS_BEFORE.at_least(0),
        "tasks": PLAIN,
        "_vectors": AS_BEFORE,
        "_values": AS_BEFORE.at_least(0),
        "_rest": AS_BEFORE.at_least(0),
        "_unread": PLAIN,
        "steps": PLAIN,
    }
    _least_neurons: ClassVar = 1  # which changes by direction alone

    kappa: float
    samples: int | None
    rank: int | None
    every: int | None
    sides: Sides

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        beta: Positive = 0.5,
        kappa: Positive = 100.0,
        rate: Fraction = 5e-4,
        gain: Positive = 1.0,
        free: Choice | Iterable[Choice] = (),
        observe: Mapping[str, str] | None = None,
        example: Any = None,
        samples: Count = 4096,
        rank: Count = 128,
        every: Count = None,
        sides: Sides = "both",
    ) -> None:
        super().__init__(model, optimizer, beta=beta, rate=rate, gain=gain, free=free, observe=observe, example=example)
        self._set(kappa=kappa, samples=samples, rank=rank, every=every, sides=sides)
        self.tasks = self.steps = 0
        self._vectors: dict[str, Tensor] = {}
        self._values: dict[str, Tensor] = {}
        self._rest: dict[str, Tensor] = {}
        self._unread: list[str] = []  # products of layers that learned, without a call that showed their inputs
        for _, product in self._products():
            self._keep(product.name, self._nothing(product))
        self._calls = CallTap(self.model) if every else None
        if self._calls is not None:
            weakref.finalize(self, self._calls.close).atexit = False

    # ---- the products ----

    def _products(self) -> Iterator[tuple[int, Product]]:
        """The products with an input side, each with the number of its layer."""
        for number, layer in enumerate(self._layers):
            for product in layer.products:
                yield number, product

    def _nothing(self, product: Product) -> Moment:
        """The second moment of a product without any old inputs."""
        groups, _, inputs = product.shape
        like = torch.zeros((), dtype=precise(product.weight.dtype), device=product.weight.device)
        if product.lookup:
            return like.new_zeros(groups, inputs)
        kept = inputs if self.rank is None else min(self.rank, inputs)
        return Directions(like.new_zeros(groups, inputs, kept), like.new_zeros(groups, kept), like.new_zeros(groups))

    def _keep(self, name: str, moment: Moment) -> None:
        if isinstance(moment, Tensor):
            self._values[name] = moment
        else:
            self._vectors[name], self._values[name], self._rest[name] = moment

    def _moment(self, product: Product, device: torch.device) -> Moment:
        """The second moment of a product's old inputs, moved to the device of its weight."""
        name = product.name
        memories = [self._values] if product.lookup else [self._vectors, self._values, self._rest]
        kept = [memory[name].to(device) for memory in memories]
        self._keep(name, moment := kept[0] if product.lookup else Directions(*kept))
        return moment

    @property
    def moments(self) -> dict[str, Moment]:
        """The second moment A of old inputs, by layer: its leading directions, or its diagonal for an embedding."""
        return {product.name: self._moment(product, product.weight.device) for _, product in self._products()}

    @property
    def capacity(self) -> dict[str, float]:
        """The share of the input directions that finished tasks take, from 0 (free) to 1 (full), by layer.

        It is trace(kappa A (I + kappa A)^-1) / d for d inputs. A recurrent layer has two entries: for its inputs, with
        the ending `ih`, and for its hidden states, with the ending `hh`.
        """
        return {
            name: float(
                diagonal_capacity(moment, self.kappa) if isinstance(moment, Tensor) else capacity(moment, self.kappa)
            )
            for name, moment in self.moments.items()
        }

    @property
    def plasticity(self) -> dict[str, Tensor]:
        """The share of the learning rate that is left in all directions, by layer."""
        return {name: self._in_force(share) for name, share in super().plasticity.items()}

    def _directed(self, layer: Layer) -> int:
        read = [product for product in layer.products if product.name not in self._unread]
        return sum(parameter.numel() for product in read for parameter in product.parameters)

    def _memory_of(self, layer: Layer) -> int:
        memories = (self._vectors, self._values, self._rest)
        kept = [memory[product.name] for product in layer.products for memory in memories if product.name in memory]
        return super()._memory_of(layer) + sum(tensor.nbytes for tensor in kept)

    # ---- a step ----

    def _change(self, shares: Tensor) -> None:
        if self.sides == "inputs" or 1 in self._widths:
            shares = torch.cat([self._in_force(share) for share in torch.split(shares, self._widths)])
        if self.tasks == 0:
            super()._change(shares)
            return
        moving = self._moving()
        parameters = [parameter for parameter, _, _ in moving]
        sides = self._sides({parameter: index for index, parameter in enumerate(parameters)})
        directed = [index for side in sides for index in side.indices]
        others = sorted(set(range(len(parameters))).difference(directed))
        owners = [(moving[index][1], moving[index][2]) for index in others]
        direct, limit = self._compiled_like_model(direct_all), self._compiled_like_model(limit_all)

        def limit_or_direct(changing: list[Tensor], before: list[Tensor] | None) -> list[Tensor]:
            earlier = None if before is None else [before[index] for index in others]
            limited = limit(shares, self._widths, [changing[index] for index in others], owners, earlier)
            moved = direct(shares, self._widths, changing, sides, before, self.kappa)
            if before is not None:
                torch._foreach_copy_([changing[index] for index in directed], moved)
            found = dict(zip([*others, *directed], [*limited, *moved], strict=True))
            return [found[index] for index in range(len(changing))]

        self._limited_step(parameters, limit_or_direct)

    def _in_force(self, share: Tensor) -> Tensor:
        """The plasticity of a layer's neurons. Where importance has no say, it is 1 in the first task, then 0."""
        if self.sides == "both" and len(share) > 1:
            return share
        return torch.full_like(share, 0 if self.tasks else 1)

    def _sides(self, indices: Mapping[nn.Parameter, int]) -> list[Side]:
        return [
            Side(
                number,
                product.layout,
                tuple(indices[p] for p in product.parameters if p in indices),
                self._moment(product, product.weight.device),
            )
            for number, product in self._products()
            if product.weight in indices and product.name not in self._unread
        ]

    # ---- the end of a task ----

    def _consolidate(self, batches: Iterable[Any], active: Sequence[int] | None) -> Commit | None:
        if self.every is not None:
            return None
        moments = self._measured(batches, self.samples)
        return partial(self._remember, self._with(moments), self._without(moments))

    def _with(self, moments: Mapping[str, Tensor], weight: float = 1.0) -> dict[str, Moment]:
        """A plus weighted second moments of further inputs, by product."""
        return {
            product.name: self._sum(self._moment(product, moments[product.name].device), weight * moments[product.name])
            for _, product in self._products()
        }

    def _without(self, moments: Mapping[str, Tensor]) -> list[str]:
        """The products without any inputs so far whose layers learned: they were used, but no call showed it."""
        importance = self._split(self._row)
        return [
            product.name
            for number, product in self._products()
            if not moments[product.name].any() and not self._values[product.name].any() and importance[number].any()
        ]

    def _sum(self, before: Moment, moment: Tensor) -> Moment:
        """A known second moment plus another one."""
        if isinstance(before, Tensor):
            return before + moment.to(before)
        total = dense(Directions(*(each.double() for each in before))) + moment
        return Directions(*(each.to(like) for each, like in zip(leading(total, self.rank), before, strict=True)))

    def remember(self, measured: Measured) -> None:
        """Take over the importances and the inputs of a model trained elsewhere, measured by `holdfast.measure`.

        The first step is then limited already. The measured inputs count as those of a finished task.
        """
        products = [product for _, product in self._products()]
        measured.fit(self._importance, {each.name: (each.shape[0], each.shape[2]) for each in products})
        moments = {each.name: measured.moment(each.name).to(each.weight.device) for each in products}
        found = self._with(moments)
        super().remember(measured)
        self._remember(found, self._without(moments))

    def _remember(self, found: Mapping[str, Moment], unread: list[str]) -> None:
        for name, moment in found.items():
            self._keep(name, moment)
        self._unread = unread
        self.tasks += 1

    @torch.no_grad()
    def _measured(self, batches: Iterable[Any], samples: int | None) -> dict[str, Tensor]:
        """A of each product on the first samples of the batches, in float64."""
        moments = self._moments(batches, samples)
        self._sum_over_processes(moments.values())
        for name, moment in moments.items():
            check_finite(name, moment)
        return {name: normalized(moment) for name, moment in moments.items()}

    def _moments(self, batches: Iterable[Any], samples: int | None) -> dict[str, Tensor]:
        """The sums of a a^T over all inputs of each product on the batches, in float64."""
        products = [product for _, product in self._products()]
        sums = {product.name: _zeros_like(self._nothing(product)) for product in products}
        count = 0
        for inputs in product_inputs(self.model, products, samples_of(batches, samples, device_of(self.model))):
            count += 1
            for (product, module), given in inputs.items():
                for x in given:
                    sums[product.name] += _second_moment(product, module, x)
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
            self._remember(self._with(moments, weight), self._without(moments))

    @property
    def _recordable(self) -> bool:
        return self.every is None  # its steps differ

    def _close(self) -> None:
        super()._close()
        if self._calls is not None:
            self._calls.close()


def _zeros_like(moment: Moment) -> Tensor:
    return (moment if isinstance(moment, Tensor) else dense(moment)).double()


def _second_moment(product: Product, module: nn.Module, inputs: Sequence[Tensor]) -> Tensor:
    """The sum of a a^T over the inputs read off one call of `module`, in float64."""
    if product.lookup:
        return uses(inputs[0], product.shape[2])
    bias = product.bias is not None
    by_group = [[second_moment(part, bias=bias).double() for part in rows] for rows in product.rows(module, inputs)]
    return torch.cat([torch.stack(moments).sum(0) for moments in by_group])
