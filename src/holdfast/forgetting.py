"""A report of forgetting: a model on several data sets, before and after training."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from holdfast.samples import (
    IGNORED,
    Batch,
    aligned,
    device_of,
    evaluating,
    loss_of,
    samples_of,
    select,
)
from holdfast.text import table

Metric = Callable[[Any, Any], Any]
"""Maps the model's outputs and the labels of a batch to a number."""


class Forgetting:
    """Measures a model on several data sets, once at construction and again at every `update`.

    Printed, it is a table of the first and the last measurement. The model is in evaluation mode while it is measured,
    without gradients, and is left as it is.

    Args:
        model: the model.
        data: batches by the name of the data set. They are iterated anew for every measurement.
        metric: "accuracy", the share of correct labels; "loss", the loss that the model returns or else cross entropy;
            or a function of the model's outputs and a batch's labels. Its mean over batches is weighted by their
            samples. With an output for every token, accuracy and loss are means over tokens that are not ignored.
        samples: the number of samples per data set, the first of its batches; all if None.

    >>> from holdfast import Forgetting
    >>> model = nn.Linear(2, 2, bias=False)
    >>> _ = model.weight.data.copy_(torch.eye(2))
    >>> x = torch.eye(2)
    >>> report = Forgetting(model, {"old": [(x, torch.tensor([0, 1]))], "new": [(x, torch.tensor([1, 1]))]})
    >>> _ = model.weight.data.copy_(torch.tensor([[0.0, 0.0], [1.0, 1.0]]))  # train
    >>> report.update()
    >>> print(report)
    accuracy  before   after   change
    old       1.0000  0.5000  -0.5000
    new       0.5000  1.0000  +0.5000
    """

    def __init__(
        self,
        model: nn.Module,
        data: Mapping[str, Iterable[Any]],
        metric: Literal["accuracy", "loss"] | Metric = "accuracy",
        *,
        samples: int | None = None,
    ) -> None:
        if not data:
            raise ValueError('there is nothing to measure: give batches by name, as in {"old": batches}')
        for name, batches in data.items():
            if iter(batches) is batches:
                raise TypeError(f"the batches of {name!r} are read for every measurement: give a list or a DataLoader")
        if not callable(metric) and metric not in _METRICS:
            raise ValueError(f'metric must be "accuracy", "loss" or a function, got {metric!r}')
        self.model = model
        self.data = dict(data)
        self.metric = metric
        self.samples = samples
        self.before = self._measure()
        """The first measurement, by data set."""
        self.after = self.before
        """The last measurement, by data set."""

    def update(self) -> None:
        """Measure the model again."""
        self.after = self._measure()

    def as_dict(self) -> dict[str, dict[str, float]]:
        """The first and the last measurement and their difference, by data set."""
        return {
            name: {"before": first, "after": self.after[name], "change": self.after[name] - first}
            for name, first in self.before.items()
        }

    def __str__(self) -> str:
        name = self.metric if isinstance(self.metric, str) else getattr(self.metric, "__name__", "metric")
        rows = [[name, "before", "after", "change"]]
        for each, values in self.as_dict().items():
            rows.append([each, *(f"{values[key]:.4f}" for key in ("before", "after")), f"{values['change']:+.4f}"])
        return table(rows)

    def _measure(self) -> dict[str, float]:
        with torch.no_grad(), evaluating(self.model):
            return {name: self._mean(name, batches) for name, batches in self.data.items()}

    def _mean(self, name: str, batches: Iterable[Any]) -> float:
        total = weights = 0.0
        for batch in samples_of(batches, self.samples, device_of(self.model)):
            value, weight = self._value(self.model(*batch.inputs, **batch.keywords), batch)
            if weight:
                total += weight * float(value)
                weights += weight
        if not weights:
            raise ValueError(f"the data set {name!r} has no samples, or all its labels are ignored")
        return total / weights

    def _value(self, outputs: Any, batch: Batch) -> tuple[Any, int]:
        """The metric on a batch, and its weight: the number of samples, or of tokens that are not ignored."""
        if callable(self.metric):
            return self.metric(outputs, batch.labels), batch.size
        own = loss_of(outputs) if self.metric == "loss" else None
        logits, labels = select(outputs, None), batch.labels
        if labels is None or labels.is_floating_point() or labels.shape != logits.shape[:-1]:
            if own is not None:
                return own, batch.size
            found = "none" if labels is None else f"{labels.dtype} {tuple(labels.shape)}"
            raise ValueError(
                f'metric="{self.metric}" needs labels that are class numbers for outputs {tuple(logits.shape)}, got '
                f"{found}; or give a function of outputs and labels"
            )
        logits, labels = logits.flatten(0, -2), aligned(outputs, labels.long()).flatten()
        return _METRICS[self.metric](logits, labels) if own is None else own, int((labels != IGNORED).sum())


def accuracy(logits: Tensor, labels: Tensor) -> Tensor:
    """The share of correct labels among those that are not ignored.

    >>> accuracy(torch.eye(3), torch.tensor([0, 2, IGNORED]))
    tensor(0.5000)
    """
    return (logits.argmax(1) == labels).sum() / (labels != IGNORED).sum()


_METRICS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"accuracy": accuracy, "loss": cross_entropy}
