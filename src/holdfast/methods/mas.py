"""Memory aware synapses (Aljundi et al., 2018)."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from holdfast.methods.anchor import Form, Sampled
from holdfast.persample import sum_over_samples


def squared_norm(outputs: Tensor, label: Tensor) -> Tensor:
    return outputs.square().sum().view(1)


class MAS(Sampled):
    """Pulls each parameter to its old values, as strongly as the outputs' squared length depends on it.

    Args:
        model: the model in training. It returns one tensor, with the output nodes along axis 1.
        optimizer: an optimizer of its parameters.
        strength: how strong the pull is.
        samples: how many samples of a task to measure on, the first ones of its batches; all if not given.
        penalty: "proximal", stable at any strength, or "loss" for the textbook's term in the loss.

    >>> model = nn.Linear(4, 2)
    >>> optimizer = MAS(model, torch.optim.SGD(model.parameters(), lr=0.1))
    >>> model(torch.randn(16, 4)).square().mean().backward(); optimizer.step()
    >>> optimizer.consolidate([torch.randn(16, 4)])  # the task is finished; labels are not needed
    >>> {name: tuple(values.shape) for name, values in optimizer.importance.items()}
    {'weight': (2, 4), 'bias': (2,)}
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        strength: float = 1.0,
        samples: int | None = None,
        penalty: Form = "proximal",
    ) -> None:
        super().__init__(model, optimizer, strength=strength, samples=samples, penalty=penalty)

    def _measure(self, batches: Iterable[Any], active: list[int] | None) -> dict[str, Tensor]:
        measured, parameters = self._samples(batches), self._parameters()
        return self._mean(*sum_over_samples(self.model, parameters, measured, squared_norm, torch.abs, active))
