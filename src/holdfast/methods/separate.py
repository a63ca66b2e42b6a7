"""Separate training: a fresh model for every task, which is what each task is worth on its own."""

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from holdfast.methods.method import Method, check_shapes


class Separate(Method):
    """The bare optimizer, which starts every task from the model's first state and with a fresh optimizer state.

    `consolidate` is the end of the old model: evaluate it before. The first state is that at construction.

    Args:
        model: the model in training.
        optimizer: an optimizer of its parameters.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        super().__init__(model, optimizer)
        self._first = copy.deepcopy(self.model.state_dict())

    @torch.no_grad()
    def consolidate(self, batches: Iterable[Any], active: Iterable[int] | None = None) -> None:
        self.model.load_state_dict(self._first, strict=False)  # what was added since has no first state
        self.state.clear()

    def _memory(self) -> dict[str, Any]:
        return {"first": copy.deepcopy(self._first)}

    def _check_memory(self, memory: dict[str, Any]) -> None:
        check_shapes(memory["first"], self._first)

    def _remember(self, memory: dict[str, Any]) -> None:
        self._first = copy.deepcopy(memory["first"])
