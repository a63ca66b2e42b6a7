"""Memory Aware Synapses (Aljundi et al., 2018)."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from holdfast.methods.anchor import Form, Sampled
from holdfast.methods.method import Method
from holdfast.methods.settings import Count, NonNegative
from holdfast.samples import sum_over_samples, without_ignored


def squared_norm(outputs: Tensor, label: Tensor) -> Tensor:
    """The squared length of a sample's outputs, without those of ignored tokens."""
    return without_ignored(outputs, label).square().sum().view(1)


class MAS(Sampled):
    """Pulls each parameter to its old values, in proportion to the sensitivity of the outputs to it.

        W_k = mean over samples of |d ||f(x)||^2 / d theta|                  the importance for task k
        penalty = strength sum_k W_k (theta - theta_k)^2                     theta_k: the values after task k

    Source: Aljundi, Babiloni, Elhoseiny, Rohrbach, Tuytelaars, "Memory Aware Synapses: Learning what (not) to forget",
    ECCV 2018.

    Args:
        model: the model in training. Its output nodes lie along axis 1, or along the last axis of
            `[samples, tokens, nodes]`.
        optimizer: an optimizer of its parameters.
        strength: the strength of the pull, lambda in the paper.
        samples: the number of samples per task to measure on, the first of its batches; all if None.
        form: "proximal", stable at any strength, or "loss" for the paper's penalty in the loss.

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
        strength: NonNegative = 1.0,
        samples: Count = None,
        form: Form = "proximal",
    ) -> None:
        super().__init__(model, optimizer, strength=strength, samples=samples, form=form)

    @classmethod
    def check_combination(cls, inner: Sequence[type[Method]]) -> None:
        super().check_combination(inner)
        for kind in inner:
            if issubclass(kind, MAS):
                larger = kind if cls is MAS else cls
                raise ValueError(
                    f"{cls.__name__} and {kind.__name__} cannot be combined: {larger.__name__} already includes MAS"
                )

    def _measure(self, batches: Iterable[Any], active: list[int] | None) -> dict[str, Tensor]:
        measured, parameters = (batch.marked for batch in self._samples(batches)), self._parameters()
        return self._mean(*sum_over_samples(self.model, parameters, measured, squared_norm, torch.abs, active))
