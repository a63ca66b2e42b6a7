"""Batches as methods receive them: the arguments of the model, and labels."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.func import functional_call

from holdfast.samples.outputs import IGNORED


@dataclass(frozen=True)
class Batch:
    """The arguments of the model, positional and by keyword, and the samples' labels.

    Arguments other than tensors, such as those of a call in training, belong to no sample.
    """

    inputs: tuple[Any, ...]
    keywords: dict[str, Any]
    labels: Tensor | None

    @property
    def size(self) -> int:
        return len(self._first)

    @property
    def _first(self) -> Tensor:
        return next(value for value in (*self.inputs, *self.keywords.values()) if _has_samples(value))

    def part(self, start: int, stop: int) -> "Batch":
        def cut(value: Any) -> Any:
            return value[start:stop] if _has_samples(value) else value

        keywords = {name: cut(value) for name, value in self.keywords.items()}
        return Batch(tuple(cut(value) for value in self.inputs), keywords, cut(self.labels))

    def parts(self, size: int) -> Iterator["Batch"]:
        for start in range(0, self.size, size):
            yield self.part(start, start + size)

    def labeled(self, labels: Tensor | None) -> "Batch":
        """The same samples with other labels."""
        return replace(self, labels=labels)

    @property
    def labels_or_zeros(self) -> Tensor:
        return self._first.new_zeros(self.size) if self.labels is None else self.labels

    @property
    def attended(self) -> Tensor | None:
        """Which tokens are no padding, `[samples, tokens]`, by the keyword `attention_mask`; None without one."""
        mask = self.keywords.get("attention_mask")
        return mask != 0 if isinstance(mask, Tensor) and mask.dim() == 2 else None

    @property
    def marked(self) -> "Batch":
        """The same samples, with labels that only say which tokens are padding: IGNORED, or else 0."""
        attended = self.attended
        return self.labeled(None if attended is None else torch.where(attended, 0, IGNORED))

    def outputs(self, model: nn.Module, parameters: Mapping[str, Tensor] | None = None) -> Any:
        return functional_call(model, dict(parameters or {}), self.inputs, self.keywords)


def _has_samples(value: Any) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.dim() > 0


def read(batch: Any, device: torch.device) -> Batch:
    """Read a batch: `(inputs, labels)`, a tensor of inputs, or a dict of all arguments of the model.

    The inputs of a pair are a tensor, a tuple of arguments or a dict of them. A dict alone may contain `labels`, which
    the model gets, too.
    """
    inputs, labels = batch, None
    if isinstance(batch, Mapping):
        labels = batch.get("labels")
    elif isinstance(batch, tuple | list) and len(batch) == 2:
        inputs, labels = batch
    elif not isinstance(batch, Tensor):
        raise TypeError(f"batches must be (inputs, labels) pairs or dicts, got a {type(batch).__name__}")
    keywords = dict(inputs) if isinstance(inputs, Mapping) else {}
    arguments = () if keywords else tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
    if not all(map(_has_samples, (*arguments, *keywords.values()))):
        raise TypeError("the inputs of a batch must be tensors with samples along their first axis")
    return Batch(
        tuple(value.to(device) for value in arguments),
        {name: value.to(device) for name, value in keywords.items()},
        _labels(labels, device),
    )


def _labels(labels: Any, device: torch.device) -> Tensor | None:
    try:
        return None if labels is None else torch.as_tensor(labels, device=device)
    except (TypeError, ValueError, RuntimeError):  # an error only for methods that need labels
        return None


def samples_of(batches: Iterable[Any], budget: int | None, device: torch.device) -> Iterator[Batch]:
    """The first `budget` samples of the batches, or all if it is None."""
    left = budget
    for raw in batches:
        if left == 0:
            return
        batch = raw if isinstance(raw, Batch) else read(raw, device)
        if batch.size == 0:
            continue
        if left is not None:
            batch = batch.part(0, left)
            left -= batch.size
        yield batch


def device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
