"""Batches as methods receive them: the arguments of the model, and labels."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call


@dataclass(frozen=True)
class Batch:
    """The arguments of the model, positional and by keyword, and the samples' labels."""

    inputs: tuple[Tensor, ...]
    keywords: dict[str, Tensor]
    labels: Tensor | None

    @property
    def size(self) -> int:
        return len(self._first)

    @property
    def _first(self) -> Tensor:
        return next(iter((*self.inputs, *self.keywords.values())))

    def part(self, start: int, stop: int) -> "Batch":
        return Batch(
            tuple(x[start:stop] for x in self.inputs),
            {name: x[start:stop] for name, x in self.keywords.items()},
            None if self.labels is None else self.labels[start:stop],
        )

    def parts(self, size: int) -> Iterator["Batch"]:
        for start in range(0, self.size, size):
            yield self.part(start, start + size)

    @property
    def labels_or_zeros(self) -> Tensor:
        return self._first.new_zeros(self.size) if self.labels is None else self.labels

    def outputs(self, model: nn.Module, parameters: Mapping[str, Tensor] | None = None) -> Tensor:
        return functional_call(model, dict(parameters or {}), self.inputs, self.keywords)  # type: ignore[no-any-return]


def read(batch: Any, device: torch.device) -> Batch:
    """Read `(inputs, labels)` or a tensor of inputs. Inputs are a tensor, a tuple of arguments or a dict of them."""
    inputs, labels = batch, None
    if not isinstance(batch, Tensor):
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise TypeError(f"batches must be (inputs, labels) pairs, got a {type(batch).__name__}")
        inputs, labels = batch
    keywords = dict(inputs) if isinstance(inputs, Mapping) else {}
    arguments = () if keywords else tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
    if not all(isinstance(value, Tensor) and value.dim() > 0 for value in (*arguments, *keywords.values())):
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


def select(outputs: Tensor, active: Sequence[int] | None) -> Tensor:
    """Select the active outputs, along axis 1."""
    if not isinstance(outputs, Tensor):
        raise TypeError(f"the model must return one tensor of outputs, got a {type(outputs).__name__}")
    if outputs.dim() < 2:
        raise ValueError(f"the model must return [samples, outputs], got shape {tuple(outputs.shape)}")
    if active is None:
        return outputs
    if max(active) >= outputs.shape[1]:
        raise ValueError(f"active names output {max(active)}, but the model has {outputs.shape[1]} outputs")
    return outputs.index_select(1, _index(tuple(active), outputs.device))


@lru_cache(maxsize=256)
def _index(active: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(active, device=device)  # cached: copying would synchronize


def device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
