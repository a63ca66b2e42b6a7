"""The layer a tensor was computed from, read off the autograd graph.

Outputs are labeled on their autograd nodes, so a model's `forward` may be written in any way.
"""

from collections.abc import Iterable
from typing import Any, cast

from torch import Tensor
from torch.autograd.graph import Node

from holdfast.importance import Observe, ObserveAgain
from holdfast.neurons.layers import Layer

_OBSERVE = {f"{function.__name__}Backward" for function in (Observe, ObserveAgain)}


def label(output: Tensor, owner: object, layer: Layer | None) -> None:
    """Label `output` as computed by `layer`, or by parameters of no layer. Only `owner` sees the label."""
    if output.grad_fn is not None:
        _metadata(output.grad_fn)[owner] = layer


def source_of(tensor: Any, owner: object) -> tuple[Layer | None, bool]:
    """Return the layer that `tensor` was computed from, and whether axes were moved on the way.

    The layer is None if other parameters took part, or if something without a gradient was added, as by a skip from
    frozen layers.
    """
    if not isinstance(tensor, Tensor):
        return None, False
    sources, moved = _walk([tensor.grad_fn], owner)
    alone = len(sources) == 1 and not _adds_constant(tensor.grad_fn, owner)
    return (sources.pop() if alone else None), moved


def used_by(outputs: Iterable[Tensor], owner: object) -> set[Layer]:
    """Return the layers that `outputs` were computed from, with no labeled output in between.

    An output that is labeled itself is not a use: a module only passed it on.
    """
    nodes = [output.grad_fn for output in outputs]
    return layers_behind([node for node in nodes if node is not None and owner not in _metadata(node)], owner)


def layers_behind(nodes: Iterable[Node | None], owner: object) -> set[Layer]:
    """Return the layers whose labels are the first on the ways back from `nodes`."""
    return {layer for layer in _walk(nodes, owner)[0] if layer is not None}


def _walk(nodes: Iterable[Node | None], owner: object) -> tuple[set[Layer | None], bool]:
    """Walk back to the next labels or parameters. Return what was found, and whether axes were moved on the way."""
    sources: set[Layer | None] = set()
    pending = list(nodes)
    visited: set[Node] = set()
    moved = False
    while pending:
        node = pending.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        moved |= node.name().startswith(("Permute", "Transpose"))
        if owner in (labels := _metadata(node)):
            sources.add(labels[owner])
        elif node.next_functions:
            pending.extend(_earlier(node))
        else:
            sources.add(None)  # a parameter
    return sources, moved


def _adds_constant(node: Node | None, owner: object) -> bool:
    """Whether a sum with something that has no gradient lies on the way back, before the way branches."""
    while node is not None and owner not in _metadata(node):
        earlier = _earlier(node)
        followed = [each for each in earlier if each is not None]
        if len(followed) != 1:
            return False
        if len(earlier) > 1 and node.name().startswith(("Add", "Sub")):
            return True
        node = followed[0]
    return False


def _earlier(node: Node) -> list[Node | None]:
    earlier = [each for each, _ in node.next_functions]
    return earlier[:1] if node.name() in _OBSERVE else earlier  # the activation; the carrier is not a parameter


def _metadata(node: Node) -> dict[Any, Any]:
    return cast(dict[Any, Any], node.metadata)  # a dict, which the stubs declare as a method
