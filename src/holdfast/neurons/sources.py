"""The layer a tensor was computed from, read off the autograd graph.

Outputs are labeled on their autograd nodes, so a model's `forward` may be written in any way.
"""

from typing import Any, cast

from torch import Tensor
from torch.autograd.graph import Node

from holdfast.importance import Observe
from holdfast.neurons.layers import Layer

_OBSERVE = f"{Observe.__name__}Backward"


def label(output: Tensor, owner: object, layer: Layer | None) -> None:
    """Label `output` as computed by `layer`, or by parameters of no layer. Only `owner` sees the label."""
    if output.grad_fn is not None:
        _metadata(output.grad_fn)[owner] = layer


def source_of(tensor: Any, owner: object) -> tuple[Layer | None, bool]:
    """Return the layer that `tensor` was computed from, and whether axes were moved on the way.

    The layer is None if other parameters took part.
    """
    sources: set[Layer | None] = set()
    pending: list[Node | None] = [tensor.grad_fn] if isinstance(tensor, Tensor) else []
    visited: set[Node] = set()
    moved = False
    while pending and len(sources) < 2:
        node = pending.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        moved |= node.name().startswith(("Permute", "Transpose"))
        if owner in (labels := _metadata(node)):
            sources.add(labels[owner])
        elif node.name() == _OBSERVE:
            pending.append(node.next_functions[0][0])  # the activation; the carrier is not a parameter
        elif node.next_functions:
            pending.extend(earlier for earlier, _ in node.next_functions)
        else:
            sources.add(None)  # a parameter
    return (sources.pop() if len(sources) == 1 else None), moved


def _metadata(node: Node) -> dict[Any, Any]:
    return cast(dict[Any, Any], node.metadata)  # a dict, which the stubs declare as a method
