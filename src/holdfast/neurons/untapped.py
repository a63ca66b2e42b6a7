"""Layers whose neurons no module shows. Their importance follows from their parameters and gradients.

These are embeddings, packed projections of attention, recurrent cells, packed experts, normalizations that follow no
layer, and parameters of any other module.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from holdfast.neurons.kinds import NORMS
from holdfast.neurons.layers import Layer, Spread, spread_of
from holdfast.neurons.products import (
    Product,
    Reader,
    attended,
    attention_inputs,
    cell_state,
    gated_inputs,
    hidden_states,
    looked_up,
    routed_inputs,
    sequence_inputs,
)
from holdfast.neurons.rows import Layout

_ROWS = Layout()
_EXPERT_INPUTS = {"gate_up_proj": routed_inputs, "up_proj": routed_inputs, "down_proj": gated_inputs}
"""The inputs of the weights of packed experts, by their names in transformers."""


class _Own(NamedTuple):
    """A module, its name, its own parameters to be controlled, by name, and all modules of its kind that share them."""

    name: str
    module: nn.Module
    parameters: Mapping[str, nn.Parameter]
    sharing: Sequence[nn.Module]

    def path(self, name: str) -> str:
        return f"{self.name}.{name}".strip(".")

    def only(self, chosen: Callable[[str], bool]) -> "_Own":
        return self._replace(parameters={name: p for name, p in self.parameters.items() if chosen(name)})

    def layers(self, name: str, spreads: Mapping[str, Spread], *, parts: int = 1) -> Iterator[Layer]:
        """The layer of some of the parameters, unless it has a single neuron, which has none to be compared with."""
        size = max((spread.size for spread in spreads.values()), default=0)
        if size > 1:
            yield Layer(
                name, size, [], [(self.parameters[key], spread) for key, spread in spreads.items()], parts=parts
            )

    def along_first(self, *names: str) -> dict[str, Spread]:
        """The spreads of those of the named parameters that are to be controlled, with neurons along the first axis."""
        return {name: _spread_along(self.parameters[name], 0) for name in names if name in self.parameters}

    def products(
        self, name: str, weight: str, bias: str, read: Reader, layout: Layout = _ROWS, *, lookup: bool = False
    ) -> list[Product]:
        """The product with a weight, if it is to be controlled."""
        if weight not in self.parameters:
            return []
        shift = self.parameters.get(bias)
        return [Product(name, self.parameters[weight], shift, layout, self.sharing, read, lookup=lookup)]


def find_norms(model: nn.Module, controlled: Collection[nn.Parameter]) -> list[Layer]:
    """A layer for each normalization with affine parameters, which belong to it until another layer adopts them."""
    layers = []
    for name, module in model.named_modules():
        if isinstance(module, NORMS):
            own = [p for p in module.parameters(recurse=False) if p in controlled]
            if own and len(own[0]) > 1:
                layers.append(Layer(name, len(own[0]), [], [(p, spread_of(module, p)) for p in own]))
    return layers


def find_untapped(model: nn.Module, controlled: Collection[nn.Parameter]) -> list[Layer]:
    """Find the layers of all controlled parameters outside of normalizations.

    Left out are sparse embeddings, and parameters with a single neuron.
    """
    left = set(controlled)
    layers: list[Layer] = []
    for name, module in model.named_modules():
        if not isinstance(module, NORMS):
            own = {key: p for key, p in _parameters_of(module) if p in left}
            left -= set(own.values())
            layers += _layers_of(_Own(name, module, own, _sharing(model, module)))
    return layers


def _sharing(model: nn.Module, module: nn.Module) -> list[nn.Module]:
    """All embeddings with the weight of an embedding. Other modules are expected to share none."""
    if not isinstance(module, nn.Embedding):
        return [module]
    return [other for other in model.modules() if isinstance(other, nn.Embedding) and other.weight is module.weight]


def _parameters_of(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that a module uses itself: its own, and the output projection of attention."""
    yield from module.named_parameters(recurse=False)
    if isinstance(module, nn.MultiheadAttention):
        yield from module.out_proj.named_parameters(prefix="out_proj", recurse=False)


def _layers_of(own: _Own) -> Iterator[Layer]:
    module = own.module
    if isinstance(module, nn.MultiheadAttention):
        return _attention(own)
    if isinstance(module, nn.RNNBase | nn.RNNCellBase):
        return _recurrent(own, module)
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return _embedding(own, module)
    if isinstance(experts := getattr(module, "num_experts", None), int):
        return _experts(own, experts)
    return _bare(own)


def _attention(own: _Own) -> Iterator[Layer]:
    """Query, key and value projections packed in one weight, or separate ones with a packed bias."""
    for layer in own.layers(own.path("in_proj"), own.along_first("in_proj_weight", "in_proj_bias"), parts=3):
        layer.products += own.products(layer.name, "in_proj_weight", "in_proj_bias", attention_inputs, Layout(groups=3))
        yield layer
    for index, weight in enumerate(("q_proj_weight", "k_proj_weight", "v_proj_weight")):
        for layer in own.layers(own.path(weight), own.along_first(weight)):
            layer.products += own.products(layer.name, weight, "", _only(attention_inputs, index))
            yield layer
    for layer in own.layers(own.path("out_proj"), own.along_first("out_proj.weight", "out_proj.bias")):
        layer.products += own.products(layer.name, "out_proj.weight", "out_proj.bias", attended)
        yield layer
    yield from _bare(own.only(lambda name: name in ("bias_k", "bias_v")))


def _recurrent(own: _Own, module: nn.RNNBase | nn.RNNCellBase) -> Iterator[Layer]:
    """The gates of each recurrent layer and direction. A neuron has a row of two weights and an entry of two biases."""
    last = None if isinstance(module, nn.RNNCellBase) else module.num_layers - 1  # None for a cell
    for suffix in dict.fromkeys(re.sub("^(weight|bias)_(ih|hh|hr)", "", name) for name in own.parameters):
        names = [f"{kind}{suffix}" for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
        spreads = own.along_first(*names)
        gates = max((spread.size for spread in spreads.values()), default=0) // int(module.hidden_size)
        for layer in own.layers(own.path(suffix.strip("_")), spreads, parts=gates):
            if last is None or suffix in ("_l0", "_l0_reverse"):
                layer.products += own.products(f"{layer.name}.ih".strip("."), names[0], names[2], sequence_inputs)
            if last is None or suffix.startswith(f"_l{last}"):
                read = cell_state if last is None else hidden_states(suffix.endswith("_reverse"))
                layer.products += own.products(f"{layer.name}.hh".strip("."), names[1], names[3], read)
            yield layer
        projection = f"weight_hr{suffix}"  # of the hidden states of an LSTM
        yield from own.layers(own.path(projection), own.along_first(projection))


def _embedding(own: _Own, module: nn.Embedding | nn.EmbeddingBag) -> Iterator[Layer]:
    """A linear layer on one-hot inputs: its neurons are the dimensions of the embedding."""
    if module.sparse or not own.parameters:
        return
    for layer in own.layers(own.name, {"weight": Spread((1, int(module.embedding_dim)))}):
        if isinstance(module, nn.Embedding):
            layer.products += own.products(layer.name, "weight", "", looked_up, Layout(transposed=True), lookup=True)
        yield layer


def _experts(own: _Own, experts: int) -> Iterator[Layer]:
    """Packed weights `[experts, outputs, inputs]`, or transposed: one layer, so that unused experts stay free."""
    transposed = bool(getattr(own.module, "is_transposed", False))
    packed = {name: p for name, p in own.parameters.items() if p.dim() == 3 and len(p) == experts}
    for name, weight in packed.items():
        outputs, bias = weight.shape[2 if transposed else 1], f"{name}_bias"
        spreads = {name: Spread((experts, 1, outputs) if transposed else (experts, outputs, 1))}
        if bias in own.parameters:
            spreads[bias] = Spread((experts, outputs))
        for layer in own.layers(own.path(name), spreads):
            if (read := _EXPERT_INPUTS.get(name)) is not None:
                layout = Layout(groups=experts, transposed=transposed, stacked=True)
                layer.products += own.products(layer.name, name, bias, read, layout)
            yield layer
    yield from _bare(own.only(lambda name: name.removesuffix("_bias") not in packed))


def _bare(own: _Own) -> Iterator[Layer]:
    """Parameters of a module of any kind.

    A weight has its neurons along its first axis, as in torch, and shares them with a bias of that length. All other
    parameters, such as position tables, have their neurons along the last axis.
    """
    weights = own.only(lambda name: name.startswith(("weight", "original", "bias"))).parameters
    joined = _joined(list(weights.items()))
    yield from own.layers(own.name if "weight" in joined else own.path(next(iter(joined), "")), joined)
    for name, p in own.parameters.items():
        if name not in joined and p.dim() > 0:
            yield from own.layers(own.path(name), {name: _spread_along(p, p.dim() - 1)})


def _joined(weights: Sequence[tuple[str, nn.Parameter]]) -> dict[str, Spread]:
    """The spreads of the first weight, and of other parameters that have the same neurons."""
    if not weights or weights[0][1].dim() == 0:
        return {}
    first = weights[0][1]
    biases = [len(p) for _, p in weights[1:] if p.dim() == 1]
    at_end = first.shape[0] == 1 or (bool(biases) and biases[0] == first.shape[-1] != first.shape[0])
    spreads = {name: _spread_along(p, p.dim() - 1 if at_end else 0) for name, p in weights if p.dim() > 0}
    return {name: spread for name, spread in spreads.items() if spread.size == first.shape[-1 if at_end else 0]}


def _spread_along(parameter: Tensor, axis: int) -> Spread:
    return Spread(tuple(n if i == axis else 1 for i, n in enumerate(parameter.shape)))


def _only(read: Reader, index: int) -> Reader:
    return lambda *call: [read(*call)[index]]
