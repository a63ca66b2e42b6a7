"""Elastic Weight Consolidation (Kirkpatrick et al., 2017)."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from holdfast.methods.anchor import Form, Sampled
from holdfast.methods.settings import Count, NonNegative
from holdfast.samples import (
    IGNORED,
    Batch,
    Objective,
    following,
    log_likelihood,
    predicts_next,
    sampled_labels,
    select,
    sum_over_samples,
    without_ignored,
)

Labels = Literal["true", "sampled", "exact"]


def log_likelihood_of_one(outputs: Tensor, label: Tensor) -> Tensor:
    """The log probability of a sample's label, or of all labels of its tokens."""
    return log_likelihood(_classes(outputs), label).view(1)


def expected_log_likelihoods(outputs: Tensor, label: Tensor) -> Tensor:
    """The values sqrt(p) log p, one per class, with sqrt(p) constant: their squared gradients sum to the Fisher.

    Tokens are independent given the inputs, so the squared gradients also sum over tokens.
    """
    log_p = _classes(outputs).log_softmax(-1)
    return without_ignored(log_p.detach().exp().sqrt() * log_p, label).flatten()


def _classes(outputs: Tensor) -> Tensor:
    if outputs.dim() > 2:
        raise ValueError(
            "EWC needs a model that returns [samples, classes] or [samples, tokens, classes], a sample here has "
            f"{tuple(outputs.shape)}"
        )
    return outputs


class EWC(Sampled):
    """Pulls each parameter to its old values, in proportion to the diagonal of the Fisher information.

        F_k = mean over samples of (d log p(label | x) / d theta)^2          the importance for task k
        penalty = strength sum_k F_k (theta - theta_k)^2                     theta_k: the values after task k

    If the model has an output for each token, log p(label | x) is the sum over the tokens of a sample.

    Source: Kirkpatrick et al., "Overcoming catastrophic forgetting in neural networks", PNAS 114(13), 2017, eq. 3.
    Its lambda / 2 is `strength` here.

    Args:
        model: the model in training. It returns `[samples, classes]` or `[samples, tokens, classes]`.
        optimizer: an optimizer of its parameters.
        strength: the strength of the pull.
        labels: "true" takes the likelihood of the labels in the batches, the empirical Fisher information. "sampled"
            takes labels drawn from the model's own probabilities, one per sample or token. "exact" takes the
            expectation over labels under the model, at the cost of one backward per active output of each token:
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
            return self._squares((batch.marked for batch in measured), expected_log_likelihoods, active)
        if self.labels == "sampled":
            return self._squares(self._with_sampled_labels(measured, active), log_likelihood_of_one, active)
        ranges: list[tuple[Tensor, int]] = []
        found = self._squares(self._with_labels(measured, active, ranges), log_likelihood_of_one, active)
        for labels, classes in ranges:
            check_range(labels, classes)
        return found

    def _squares(self, batches: Iterable[Batch], objective: Objective, active: list[int] | None) -> dict[str, Tensor]:
        return self._mean(*sum_over_samples(self.model, self._parameters(), batches, objective, torch.square, active))

    def _with_sampled_labels(self, batches: Iterable[Batch], active: list[int] | None) -> Iterator[Batch]:
        for batch in batches:
            outputs = select(batch.outputs(self.model), active)
            yield batch.labeled(sampled_labels(outputs, batch.attended))

    def _with_labels(
        self, batches: Iterable[Batch], active: list[int] | None, ranges: list[tuple[Tensor, int]]
    ) -> Iterator[Batch]:
        """Iterate over the batches, with labels clamped to the range of classes. The true ranges go to `ranges`.

        Only the first batch is checked at once, the others at the end: each check synchronizes with the device.
        """
        shifted = None
        for batch in batches:
            labels = batch.labels
            if labels is None:
                raise ValueError(
                    'labels="true" needs (inputs, labels) batches, or dicts with labels; without labels, use '
                    'labels="exact" or labels="sampled"'
                )
            *shape, classes = select(batch.part(0, 1).outputs(self.model), active).shape
            check_labels(labels, (batch.size, *shape[1:]))
            ranges.append((label_range(labels), classes))
            if len(ranges) == 1:
                check_range(*ranges[0])
            clamped = labels.long().clamp(0, classes - 1)
            if labels.dim() == 2:
                clamped = clamped.masked_fill(labels == IGNORED, IGNORED)
                if shifted is None:
                    shifted = predicts_next(batch.outputs(self.model), clamped)
                clamped = torch.where(shifted, following(clamped), clamped)
            yield batch.labeled(clamped)


def check_labels(labels: Tensor, shape: Sequence[int]) -> None:
    """Raise a ValueError unless labels are class numbers in the given shape, `[samples]` or `[samples, tokens]`."""
    if len(shape) > 2:
        raise ValueError(
            "the model must return [samples, classes] or [samples, tokens, classes], but classes here follow axes "
            f"{tuple(shape)}"
        )
    if labels.is_floating_point() or labels.shape != tuple(shape):
        each = f"token, {tuple(shape)}" if len(shape) == 2 else "sample"
        raise ValueError(f"labels must be one class number per {each}, got {labels.dtype} {tuple(labels.shape)}")


def label_range(labels: Tensor) -> Tensor:
    """The lowest and the highest label, without those of ignored tokens."""
    return torch.stack((labels.where(labels != IGNORED, 0) if labels.dim() == 2 else labels).aminmax())


def check_range(labels: Tensor, classes: int) -> None:
    """Raise a ValueError if the lowest and the highest label, given as one tensor, are not numbers of classes."""
    lowest, highest = labels.tolist()
    if lowest < 0 or highest >= classes:
        raise ValueError(
            f"labels must count within the task, from 0 to {classes - 1} for its {classes} outputs; got "
            f"{lowest} to {highest}"
        )
