"""Separate training: a fresh model for every task, the accuracy of each task on its own."""

import copy
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from holdfast.methods.memory import AS_BEFORE
from holdfast.methods.method import Method, Needs


class Separate(Method):
    """Starts every task from the model's initial state, with a fresh optimizer state.

    `consolidate` resets the model to its state at construction. Evaluate the model before that.

    Args:
        model: the model in training.
        optimizer: an optimizer of its parameters.
    """

    needs: ClassVar = Needs(fresh_model=True)
    remembers: ClassVar = {"_first": AS_BEFORE}
    alone: ClassVar = True

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        super().__init__(model, optimizer)
        self._first = copy.deepcopy(self.model.state_dict())

    @torch.no_grad()
    def _consolidate(self, batches: Iterable[Any], active: Sequence[int] | None) -> None:
        self.model.load_state_dict(self._first, strict=False)  # later additions have no initial state
        self.state.clear()
