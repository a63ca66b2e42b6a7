"""Measures a model that was trained elsewhere, so that NPC and DPC protect it from the first step on."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD

from holdfast.methods.dpc import DPC
from holdfast.methods.measured import Measured
from holdfast.methods.method import bare
from holdfast.methods.settings import count
from holdfast.neurons import Choice
from holdfast.samples import (
    Batch,
    aligned,
    device_of,
    evaluating,
    loss_of,
    output_nodes,
    sampled_labels,
    samples_of,
    select,
)

Loss = Callable[[Any, Any], Tensor]
"""Maps the model's outputs and the labels of a batch, if it has any, to the loss."""


class _Meter(DPC):
    """A DPC whose steps measure importance and change nothing."""

    def _change(self, shares: Tensor) -> None:
        pass

    @property
    def all_importance(self) -> dict[str, Tensor]:
        """The importances of all layers, including normalizations that belong to others."""
        return self._importance

    def _start(self, measured: list[Tensor | None]) -> None:
        pass  # what is not controlled is reported by the method that trains


def measure(
    model: nn.Module,
    batches: Iterable[Any],
    active: Iterable[int] | None = None,
    *,
    loss: Loss | None = None,
    free: Choice | Iterable[Choice] = (),
    observe: Mapping[str, str] | None = None,
    samples: int | None = 512,
    rank: int | None = 128,
) -> Measured:
    """Measure the importances and the input directions of a trained model, for the `remember` of NPC and DPC.

    The importance of a neuron is the mean over batches of its importance relative to its layer (eq. 2 and 3): that of
    NPC after long training on these batches. The input directions are those of a DPC that consolidates on them. The
    model is in evaluation mode and does not change.

    Args:
        model: the trained model. Only layers with parameters that require gradients are measured.
        batches: batches of about the size used in training, as for `consolidate`; labels are optional.
        active: the output nodes of the task that these batches belong to; all by default.
        loss: maps the outputs of the model and the labels of a batch to the loss. By default the loss that the model
            itself returns, or else cross entropy of the active outputs with the labels. Without labels, they are drawn
            from the model's own probabilities.
        free: modules, parameters or names that need no measurements, such as a head that will be replaced.
        observe: modules at whose outputs neurons are tapped, as in `NPC`.
        samples: the number of samples to measure on, the first of the batches; all if None.
        rank: the number of directions kept per layer; all if None.

    >>> from holdfast import NPC
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> measured = measure(model, [torch.randn(16, 4)], free=[model[2]])
    >>> measured
    Measured(8 neurons in 1 layers, on 16 samples)
    >>> optimizer = NPC(model, torch.optim.SGD(model.parameters(), lr=0.1), free=[model[2]])
    >>> optimizer.remember(measured)
    >>> round(optimizer.importance["0"].mean().item(), 4)
    1.0
    """
    inner = bare(model)
    trained = [p for p in inner.parameters() if p.requires_grad]
    if not trained:
        raise ValueError("the model has no parameters that require gradients: measure it before freezing it")
    nodes = output_nodes(active)
    given = list(samples_of(batches, count("samples", samples, least=1), device_of(inner)))
    meter = _Meter(model, SGD(trained, lr=1.0), free=free, observe=observe, samples=None, rank=rank)
    with meter, _gradients_kept(trained):
        for number, batch in enumerate(given, start=1):
            meter.rate = 1 / number  # which makes the moving average of eq. 4 a mean
            meter.zero_grad()
            with evaluating(inner), torch.enable_grad():
                _loss(batch.outputs(inner), batch, nodes, loss).backward()  # type: ignore[no-untyped-call]
            meter.step()
        meter.consolidate(given)
        return Measured(_relative(meter.all_importance), meter.moments, sum(batch.size for batch in given))


def _loss(outputs: Any, batch: Batch, active: list[int] | None, loss: Loss | None) -> Tensor:
    if loss is not None:
        return loss(outputs, batch.labels)
    own = loss_of(outputs)
    if own is not None and active is None:
        return own
    logits, labels = select(outputs, active), batch.labels
    if labels is None:
        return _cross_entropy(logits, sampled_labels(logits.detach(), batch.attended))
    if labels.is_floating_point() or labels.shape != logits.shape[:-1]:
        raise ValueError(
            f"labels {labels.dtype} {tuple(labels.shape)} are no class numbers for outputs {tuple(logits.shape)}: give "
            "the loss, as in measure(..., loss=lambda outputs, labels: ...)"
        )
    return _cross_entropy(logits, aligned(outputs, labels.long()))


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, -2), labels.flatten())


def _relative(importance: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Importances relative to the mean of their layer, which is below 1 if some batches had no gradient there."""
    means = {name: float(values.mean()) for name, values in importance.items()}
    if not any(means.values()):
        raise ValueError("no neuron has a finite effect on the loss of these batches: check the loss and the inputs")
    return {name: values / (means[name] or 1.0) for name, values in importance.items()}


@contextmanager
def _gradients_kept(parameters: list[nn.Parameter]) -> Iterator[None]:
    kept = [parameter.grad for parameter in parameters]
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, kept, strict=True):
            parameter.grad = gradient
