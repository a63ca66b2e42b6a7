"""Chains of ReLU, pooling and dropout behind a layer or normalization.

These modules preserve the sum of n * dL/dn over positions (docs/npc.md), so neurons can be tapped at the end of a
chain. It has fewer values there, and autograd saves them in any case.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import nn

from holdfast.neurons.kinds import HOMOGENEOUS, LAYERS, NORMS, POOLS, TRAILING_NORMS


@dataclass(frozen=True)
class Chain:
    """Homogeneous modules that `caller` calls one after another, right behind `start`."""

    caller: nn.Module
    start: nn.Module
    modules: tuple[nn.Module, ...]

    @property
    def end(self) -> nn.Module:
        return self.modules[-1]

    @property
    def pools(self) -> bool:
        return any(isinstance(module, POOLS) for module in self.modules)


def find_chains(model: nn.Module) -> list[Chain]:
    """Find the chains inside those torch modules whose order of calls is known."""
    callers = {caller: calls for caller in model.modules() if (calls := _calls_of(caller))}
    uses = Counter(module for calls in callers.values() for module in calls)
    chains = []
    for caller, calls in callers.items():
        for i, start in enumerate(calls):
            if not isinstance(start, (*LAYERS, *NORMS)):
                continue
            modules = tuple(takewhile(_preserves_neurons_of(start), calls[i + 1 :]))
            if modules and all(uses[module] == 1 for module in (start, *modules)):
                chains.append(Chain(caller, start, modules))
    return chains


def _calls_of(module: nn.Module) -> list[nn.Module]:
    """Modules that `module` calls in sequence, each on the previous output alone or on its ReLU."""
    if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
        return list(module)
    for kind in (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer):
        if isinstance(module, kind) and type(module)._ff_block is kind._ff_block and _is_relu(module.activation):
            return [module.linear1, module.dropout, module.linear2]
    return []


def _is_relu(activation: object) -> bool:
    return activation in (nn.functional.relu, torch.relu) or isinstance(activation, nn.ReLU)


def _preserves_neurons_of(start: nn.Module) -> Callable[[nn.Module], bool]:
    # Pooling runs along the last axes, where the neurons of a linear layer lie.
    mixing = POOLS if isinstance(start, (nn.Linear, *TRAILING_NORMS)) else ()
    return lambda module: isinstance(module, HOMOGENEOUS) and not isinstance(module, mixing)
