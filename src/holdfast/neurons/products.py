"""Products of inputs and weights: the input sides of a layer's neurons."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, multi_head_attention_forward
from torch.nn.utils.rnn import PackedSequence

from holdfast.importance import precise
from holdfast.neurons.rows import Layout, chunked_rows

Reader = Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], list[Tensor]]
"""Reads inputs off one call of a module, given its arguments, its keyword arguments and its output."""


@dataclass(frozen=True, eq=False)
class Product:
    """A trained weight, the bias that is added if trained, and the calls that show the inputs of the product.

    Args:
        name: the name of the product.
        weight: the weight.
        bias: the bias, or None.
        layout: the layout of the weight.
        modules: the modules whose calls show the inputs.
        read: reads the inputs off a call: one tensor for all groups of the weight, or one for each; none if the call
            does not show them.
        unfolds: whether a module unfolds its inputs to rows, as a convolution does.
        lookup: whether the inputs are indices of the weight's rows, as in an embedding.
    """

    name: str
    weight: nn.Parameter
    bias: nn.Parameter | None
    layout: Layout
    modules: Sequence[nn.Module]
    read: Reader
    unfolds: bool = False
    lookup: bool = False

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [self.weight] if self.bias is None else [self.weight, self.bias]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Groups, neurons per group, and inputs, of which the last is the bias."""
        groups, neurons, inputs = self.layout.matrix(self.weight.detach()).shape
        return groups, neurons, inputs + (self.bias is not None)

    def rows(self, module: nn.Module, inputs: Sequence[Tensor]) -> list[Iterable[Tensor]]:
        """Inputs as rows `[groups, n, inputs]`, in chunks: one set for all groups, or one for each."""
        if self.unfolds:
            return [chunked_rows(module, x) for x in inputs]
        return [[x.reshape(1, -1, x.shape[-1]).to(precise(x.dtype))] for x in inputs]


def argument(args: Sequence[Any], kwargs: Mapping[str, Any], index: int, name: str) -> Any:
    """An argument of a call, given by position or by name; None if it is not given."""
    return args[index] if index < len(args) else kwargs.get(name)


def first_input(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> list[Tensor]:
    """The first argument of a call."""
    return [args[0] if args else next(iter(kwargs.values()))]


def looked_up(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> list[Tensor]:
    """The indices of the rows that an embedding looked up.

    A subclass may look up other rows than those given. Its indices count if it returns a multiple of their rows.
    """
    assert isinstance(module, nn.Embedding)
    (indices,) = first_input(module, args, kwargs, output)
    if type(module).forward is nn.Embedding.forward:
        return [indices]
    if not isinstance(indices, Tensor) or indices.is_floating_point() or output.shape[:-1] != indices.shape:
        return []
    rows = embedding(indices.clamp(0, len(module.weight) - 1), module.weight)
    scale = (output * rows).sum() / rows.square().sum()
    return [indices] if torch.allclose(output, scale * rows, rtol=1e-2) else []


def attention_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> list[Tensor]:
    """The inputs of the projections in `nn.MultiheadAttention`: query, key and value."""
    return [argument(args, kwargs, index, name) for index, name in enumerate(("query", "key", "value"))]


def attended(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> list[Tensor]:
    """The inputs of the output projection in `nn.MultiheadAttention`: its output with the identity as projection."""
    assert isinstance(module, nn.MultiheadAttention)
    given = attention_inputs(module, args, kwargs, output)
    if module.batch_first and given[0].dim() == 3:
        given = [x.transpose(0, 1) for x in given]
    query, key, value = given
    attention, _ = multi_head_attention_forward(
        query,
        key,
        value,
        module.embed_dim,
        module.num_heads,
        module.in_proj_weight,
        module.in_proj_bias,
        module.bias_k,
        module.bias_v,
        module.add_zero_attn,
        0.0,
        torch.eye(module.embed_dim).to(query),
        None,
        training=False,
        key_padding_mask=argument(args, kwargs, 3, "key_padding_mask"),
        need_weights=False,
        attn_mask=argument(args, kwargs, 5, "attn_mask"),
        is_causal=bool(argument(args, kwargs, 7, "is_causal")),
        use_separate_proj_weight=not module._qkv_same_embed_dim,
        q_proj_weight=module.q_proj_weight,
        k_proj_weight=module.k_proj_weight,
        v_proj_weight=module.v_proj_weight,
    )
    return [attention]


def sequence_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> list[Tensor]:
    """The inputs of the first layer of a recurrent network."""
    return [_values(argument(args, kwargs, 0, "input"))]


def hidden_states(reverse: bool) -> Reader:
    """Read the hidden states of the last layer of a recurrent network, which are its outputs, in one direction.

    They stand for the states before each step: the last state of a sequence takes the place of the initial one.
    """

    def read(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> list[Tensor]:
        assert isinstance(module, nn.RNNBase)
        states = _values(output[0])
        return [states.chunk(2, -1)[int(reverse)] if module.bidirectional else states]

    return read


def cell_state(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> list[Tensor]:
    """The hidden state before a step of a recurrent cell."""
    state = argument(args, kwargs, 1, "hx")
    if state is None:
        new = output[0] if isinstance(output, tuple) else output
        return [torch.zeros_like(new)]
    return [state[0] if isinstance(state, tuple) else state]


def routed_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> list[Tensor]:
    """The tokens routed to each expert: rows of the first argument, by the indices of experts in the second one.

    Without such indices, every expert gets all tokens.
    """
    tokens = argument(args, kwargs, 0, "hidden_states").flatten(0, -2)
    chosen = argument(args, kwargs, 1, "top_k_index")
    experts = range(module.num_experts)  # type: ignore[arg-type]
    if not isinstance(chosen, Tensor) or chosen.is_floating_point() or len(chosen) != len(tokens):
        return [tokens for _ in experts]
    return [tokens[(chosen == expert).flatten(1).any(1)] for expert in experts]


def gated_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> list[Tensor]:
    """The inputs of each expert's second projection: its first one, computed again, behind the module's own gate.

    None if the module has no `gate_up_proj` or no function `_apply_gate`, as experts in transformers have.
    """
    weight, gate = getattr(module, "gate_up_proj", None), getattr(module, "_apply_gate", None)
    if not isinstance(weight, Tensor) or gate is None:
        return []
    weight = weight.mT if getattr(module, "is_transposed", False) else weight
    bias = getattr(module, "gate_up_proj_bias", None)
    return [
        gate(linear(tokens, weight[expert], None if bias is None else bias[expert]))
        for expert, tokens in enumerate(routed_inputs(module, args, kwargs, output))
    ]


def _values(sequence: Tensor | PackedSequence) -> Tensor:
    return sequence.data if isinstance(sequence, PackedSequence) else sequence
