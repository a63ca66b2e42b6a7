"""Outputs of models: the tensor among them, the active output nodes, and the labels of tokens."""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, pad

IGNORED = -100
"""The label of a token that does not count, as in torch's cross entropy and Hugging Face's data collators."""


def logits_of(outputs: Any) -> Tensor:
    """The tensor of outputs: the only one, the one named `logits`, or the first with samples.

    >>> logits_of({"loss": torch.tensor(0.5), "logits": torch.zeros(4, 2)}).shape
    torch.Size([4, 2])
    """
    if isinstance(outputs, Tensor):
        return outputs
    named = _entry(outputs, "logits")
    if isinstance(named, Tensor):
        return named
    values = outputs.values() if isinstance(outputs, Mapping) else outputs if isinstance(outputs, tuple | list) else ()
    for value in values:
        if isinstance(value, Tensor) and value.dim() > 0:
            return value
    raise TypeError(f"the model must return a tensor of outputs, alone or as `logits`, got a {type(outputs).__name__}")


def loss_of(outputs: Any) -> Tensor | None:
    """The model's own loss, if it returns one by the name `loss`."""
    loss = None if isinstance(outputs, Tensor) else _entry(outputs, "loss")
    return loss if isinstance(loss, Tensor) and loss.numel() == 1 else None


def _entry(outputs: Any, name: str) -> Any:
    return outputs.get(name) if isinstance(outputs, Mapping) else getattr(outputs, name, None)


def output_nodes(active: Iterable[int] | None) -> list[int] | None:
    """Check `active` and return it as a list of output nodes."""
    if active is None:
        return None
    listed = list(active)
    if any(str(getattr(node, "dtype", type(node).__name__)).endswith("bool") for node in listed):
        raise TypeError("active must list output nodes by number, as in [2, 3]; got a boolean mask")
    nodes = [int(node) for node in listed]
    if not nodes or min(nodes) < 0 or len(set(nodes)) < len(nodes):
        raise ValueError(f"active must list the task's output nodes, each once, counted from 0; got {nodes}")
    return nodes


def select(outputs: Any, active: Sequence[int] | None) -> Tensor:
    """Select the active nodes of a model's outputs: along axis 1, or the last axis of `[samples, tokens, nodes]`."""
    logits = logits_of(outputs)
    if logits.dim() < 2:
        raise ValueError(f"the model must return [samples, outputs], got shape {tuple(logits.shape)}")
    if active is None:
        return logits
    axis = 2 if logits.dim() == 3 else 1
    if max(active) >= logits.shape[axis]:
        raise ValueError(f"active names output {max(active)}, but the model has {logits.shape[axis]} outputs")
    return logits.index_select(axis, _index(tuple(active), logits.device))


@lru_cache(maxsize=256)
def _index(active: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(active, device=device)  # cached: copying would synchronize


# ---- tokens ----


def without_ignored(values: Tensor, labels: Tensor) -> Tensor:
    """Values with zeros in place of ignored tokens: `labels` has their shape, without the last axis.

    >>> without_ignored(torch.ones(3, 2), torch.tensor([0, 4, IGNORED]))
    tensor([[1., 1.],
            [1., 1.],
            [0., 0.]])
    """
    return values.masked_fill((labels == IGNORED).unsqueeze(-1), 0) if labels.shape == values.shape[:-1] else values


def log_likelihood(outputs: Tensor, labels: Tensor) -> Tensor:
    """The log probabilities of labels, summed; 0 for ignored ones. Classes lie along the last axis of the outputs."""
    log_p = outputs.log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1))
    return without_ignored(log_p, labels).sum()


def following(labels: Tensor) -> Tensor:
    """The label of the next token, for each token.

    >>> following(torch.tensor([[3, 1, 2]]))
    tensor([[   1,    2, -100]])
    """
    return pad(labels[:, 1:], (0, 1), value=IGNORED)


def predicts_next(outputs: Any, labels: Tensor) -> Tensor:
    """Whether a model's own loss compares the output at each token with the label of the next one.

    So do the causal language models of Hugging Face. If the model returns no loss, the answer is no.
    """
    loss = loss_of(outputs)
    if loss is None:
        return torch.zeros((), dtype=torch.bool, device=labels.device)
    logits = logits_of(outputs).flatten(0, 1)
    here, ahead = (cross_entropy(logits, each.flatten()) for each in (labels, following(labels)))
    return (ahead - loss).abs() < (here - loss).abs()


def aligned(outputs: Any, labels: Tensor) -> Tensor:
    """The labels of tokens, each at the token whose output predicts it; other labels as they are."""
    return torch.where(predicts_next(outputs, labels), following(labels), labels) if labels.dim() == 2 else labels


def sampled_labels(outputs: Tensor, attended: Tensor | None) -> Tensor:
    """Labels drawn from the model's own probabilities, one per sample or token; padding is ignored.

    Classes lie along the last axis of the outputs.
    """
    p = outputs.softmax(-1)
    labels = torch.multinomial(p.flatten(0, -2), num_samples=1).view(p.shape[:-1])
    padded = attended is not None and attended.shape == labels.shape
    return labels.where(attended, IGNORED) if padded and attended is not None else labels
