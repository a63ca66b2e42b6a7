"""Elastic weight consolidation (Kirkpatrick et al., 2017)."""

from collections.abc import Iterable, Iterator
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from holdfast.methods.anchor import Form, Sampled
from holdfast.persample import Batch, Objective, sum_over_samples

Labels = Literal["true", "exact"]


def log_likelihood(outputs: Tensor, label: Tensor) -> Tensor:
    """The log probability of a sample's label; its squared gradient is the empirical Fisher information."""
    return _log_probabilities(outputs).gather(0, label.view(1))


def expected_log_likelihoods(outputs: Tensor, label: Tensor) -> Tensor:
    """One value per class, whose squared gradients add up to the Fisher information: sqrt(p) times log p."""
    log_p = _log_probabilities(outputs)
    return log_p.detach().exp().sqrt() * log_p


def _log_probabilities(outputs: Tensor) -> Tensor:
    if outputs.dim() != 1:
        raise ValueError(f"EWC needs a model that returns [samples, classes], a sample here has {tuple(outputs.shape)}")
    return outputs.log_softmax(0)


class EWC(Sampled):
    """Pulls each parameter to its old values, as strongly as the diagonal of the Fisher information says.

    Args:
        model: the model in training. It returns `[samples, classes]`, as for cross entropy.
        optimizer: an optimizer of its parameters.
        strength: how strong the pull is, lambda in the literature.
        labels: "true" takes the likelihood of the labels that come with the batches; "exact" its expectation under
            the model over the active outputs, for which each of them costs a backward.
        samples: how many samples of a task to measure on, the first ones of its batches; all if not given.
        penalty: "proximal", stable at any strength, or "loss" for the textbook's term in the loss.

    >>> model = nn.Linear(4, 2)
    >>> optimizer = EWC(model, torch.optim.SGD(model.parameters(), lr=0.1), strength=10)
    >>> x, y = torch.randn(16, 4), torch.randint(2, (16,))
    >>> loss = nn.functional.cross_entropy(model(x), y) + optimizer.penalty()
    >>> optimizer.zero_grad(); loss.backward(); optimizer.step()
    >>> optimizer.consolidate([(x, y)])  # the task is finished
    >>> {name: tuple(values.shape) for name, values in optimizer.importance.items()}
    {'weight': (2, 4), 'bias': (2,)}
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        strength: float = 100.0,
        labels: Labels = "true",
        samples: int | None = None,
        penalty: Form = "proximal",
    ) -> None:
        super().__init__(model, optimizer, strength=strength, samples=samples, penalty=penalty)
        if labels not in get_args(Labels):
            raise ValueError(f'labels must be "true" or "exact", got {labels!r}')
        self.labels: Labels = labels

    def _measure(self, batches: Iterable[Any], active: list[int] | None) -> dict[str, Tensor]:
        measured = self._samples(batches)
        if self.labels == "exact":
            return self._squares(measured, expected_log_likelihoods, active)
        ranges: list[tuple[Tensor, int]] = []
        found = self._squares(self._with_labels(measured, active, ranges), log_likelihood, active)
        for labels, classes in ranges:
            _check_range(labels, classes)
        return found

    def _squares(self, batches: Iterable[Batch], objective: Objective, active: list[int] | None) -> dict[str, Tensor]:
        return self._mean(*sum_over_samples(self.model, self._parameters(), batches, objective, torch.square, active))

    def _memory(self) -> dict[str, Any]:
        return {**super()._memory(), "labels": self.labels}

    def _remember(self, memory: dict[str, Any]) -> None:
        super()._remember(memory)
        self.labels = memory["labels"]

    def _with_labels(
        self, batches: Iterable[Batch], active: list[int] | None, ranges: list[tuple[Tensor, int]]
    ) -> Iterator[Batch]:
        """The batches with labels that can be used; their lowest and highest go to `ranges`, to be checked.

        Those of the first batch are checked at once. To look at the others now would be to wait for the device.
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
                _check_range(*ranges[0])
            yield Batch(batch.inputs, batch.keywords, labels.long().clamp(0, classes - 1))


def _check_range(labels: Tensor, classes: int) -> None:
    lowest, highest = labels.tolist()
    if lowest < 0 or highest >= classes:
        raise ValueError(
            f"labels must count within the task, from 0 to {classes - 1} for its {classes} outputs; got "
            f"{lowest} to {highest}"
        )
