"""Elastic Weight Consolidation (Kirkpatrick et al., 2017)."""

from collections.abc import Iterable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from holdfast.methods.anchor import Form, Sampled
from holdfast.methods.settings import Count, NonNegative
from holdfast.samples import Batch, Objective, sum_over_samples

Labels = Literal["true", "exact"]


def log_likelihood(outputs: Tensor, label: Tensor) -> Tensor:
    """The log probability of a sample's label; its squared gradient is the empirical Fisher information."""
    return _log_probabilities(outputs).gather(0, label.view(1))


def expected_log_likelihoods(outputs: Tensor, label: Tensor) -> Tensor:
    """The values sqrt(p) log p, one per class, with sqrt(p) constant: their squared gradients sum to the Fisher."""
    log_p = _log_probabilities(outputs)
    return log_p.detach().exp().sqrt() * log_p


def _log_probabilities(outputs: Tensor) -> Tensor:
    if outputs.dim() != 1:
        raise ValueError(f"EWC needs a model that returns [samples, classes], a sample here has {tuple(outputs.shape)}")
    return outputs.log_softmax(0)


class EWC(Sampled):
    """Pulls each parameter to its old values, in proportion to the diagonal of the Fisher information.

        F_k = mean over samples of (d log p(label | x) / d theta)^2          the importance for task k
        penalty = strength sum_k F_k (theta - theta_k)^2                     theta_k: the values after task k

    Source: Kirkpatrick et al., "Overcoming catastrophic forgetting in neural networks", PNAS 114(13), 2017, eq. 3.
    Its lambda / 2 is `strength` here.

    Args:
        model: the model in training. It returns `[samples, classes]`, as for cross entropy.
        optimizer: an optimizer of its parameters.
        strength: the strength of the pull.
        labels: "true" takes the likelihood of the labels in the batches, the empirical Fisher information. "exact"
            takes the expectation over labels under the model, at the cost of one backward per active output:
            F_k = mean over samples of sum_c p(c | x) (d log p(c | x) / d theta)^2.
        samples: the number of samples per task to measure on, the first of its batches; all if None.
        form: "proximal", stable at any strength, or "loss" for the paper's penalty in the loss.

    >>> model = nn.Linear(4, 2)
    >>> optimizer = EWC(model, torch.optim.SGD(model.parameters(), lr=0.1), strength=10)
    >>> x, y = torch.randn(16, 4), torch.randint(2, (16,))
    >>> loss = nn.functional.cross_entropy(model(x), y) + optimizer.penalty()
    >>> optimizer.zero_grad(); loss.backward(); optimizer.step()
    >>> optimizer.consolidate([(x, y)])  # the task is finished
    >>> {name: tuple(values.shape) for name, values in optimizer.importance.items()}
    {'weight': (2, 4), 'bias': (2,)}
    """

    labels: Labels

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        strength: NonNegative = 100.0,
        labels: Labels = "true",
        samples: Count = None,
        form: Form = "proximal",
    ) -> None:
        super().__init__(model, optimizer, strength=strength, samples=samples, form=form)
        self._set(labels=labels)

    def _measure(self, batches: Iterable[Any], active: list[int] | None) -> dict[str, Tensor]:
        measured = self._samples(batches)
        if self.labels == "exact":
            return self._squares(measured, expected_log_likelihoods, active)
        ranges: list[tuple[Tensor, int]] = []
        found = self._squares(self._with_labels(measured, active, ranges), log_likelihood, active)
        for labels, classes in ranges:
            check_range(labels, classes)
        return found

    def _squares(self, batches: Iterable[Batch], objective: Objective, active: list[int] | None) -> dict[str, Tensor]:
        return self._mean(*sum_over_samples(self.model, self._parameters(), batches, objective, torch.square, active))

    def _with_labels(
        self, batches: Iterable[Batch], active: list[int] | None, ranges: list[tuple[Tensor, int]]
    ) -> Iterator[Batch]:
        """Iterate over the batches, with labels clamped to the range of classes. The true ranges go to `ranges`.

        Only the first batch is checked at once, the others at the end: each check synchronizes with the device.
        """
        for batch in batches:
            classes = len(active) if active is not None else batch.part(0, 1).outputs(self.model).shape[-1]
            labels = batch.labels
            if labels is None:
                raise ValueError('labels="true" needs (inputs, labels) batches; without labels, use labels="exact"')
            if labels.shape != (batch.size,) or labels.is_floating_point():
                raise ValueError(
                    f"labels must be one class number per sample, got {labels.dtype} {tuple(labels.shape)}"
                )
            ranges.append((torch.stack(labels.aminmax()), classes))
            if len(ranges) == 1:
                check_range(*ranges[0])
            yield Batch(batch.inputs, batch.keywords, labels.long().clamp(0, classes - 1))


def check_range(labels: Tensor, classes: int) -> None:
    """Raise a ValueError if the lowest and the highest label, given as one tensor, are not numbers of classes."""
    lowest, highest = labels.tolist()
    if lowest < 0 or highest >= classes:
        raise ValueError(
            f"labels must count within the task, from 0 to {classes - 1} for its {classes} outputs; got "
            f"{lowest} to {highest}"
        )
