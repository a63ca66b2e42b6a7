"""What single samples say about a model's parameters, summed over many of them in bounded memory."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from holdfast.convolution import QuickConvolutions
from holdfast.importance import precise

Objective = Callable[[Tensor, Tensor], Tensor]
"""From a sample's active outputs and its label to one or several values, as a vector."""
Reduce = Callable[[Tensor], Tensor]
"""What is summed over samples and values, of the gradient of one value in one sample."""

_CHUNK_BYTES = 2**26


@dataclass(frozen=True)
class Batch:
    """The inputs of a model, as it is called with them, and the samples' labels."""

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
    """`(inputs, labels)` or a tensor of inputs; the inputs may be a tensor, a tuple of arguments or a dict of them."""
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
    except (TypeError, ValueError, RuntimeError):  # not every method needs them
        return None


def samples_of(batches: Iterable[Any], budget: int | None, device: torch.device) -> Iterator[Batch]:
    """The first `budget` samples of the batches, or all of them."""
    left = budget
    for given in batches:
        if left == 0:
            return
        batch = read(given, device)
        if batch.size == 0:
            continue
        if left is not None:
            batch = batch.part(0, left)
            left -= batch.size
        yield batch


def output_nodes(active: Iterable[int] | None) -> list[int] | None:
    """The nodes named by `active`, checked."""
    if active is None:
        return None
    given = list(active)
    if any(str(getattr(node, "dtype", type(node).__name__)).endswith("bool") for node in given):
        raise TypeError("active names output nodes by number, as in [2, 3]; got a mask of True and False")
    nodes = [int(node) for node in given]
    if not nodes or min(nodes) < 0 or len(set(nodes)) < len(nodes):
        raise ValueError(f"active must name the task's output nodes, each once, counted from 0; got {nodes}")
    return nodes


def select(outputs: Tensor, active: Sequence[int] | None) -> Tensor:
    """The active outputs, along axis 1."""
    if not isinstance(outputs, Tensor):
        raise TypeError(f"the model must return one tensor of outputs, it returns a {type(outputs).__name__}")
    if outputs.dim() < 2:
        raise ValueError(f"the model must return [samples, outputs], it returns shape {tuple(outputs.shape)}")
    if active is None:
        return outputs
    if max(active) >= outputs.shape[1]:
        raise ValueError(f"active names output {max(active)}, but the model has {outputs.shape[1]} outputs")
    return outputs.index_select(1, _index(tuple(active), outputs.device))


@lru_cache(maxsize=256)
def _index(active: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(active, device=device)  # kept there, because to bring it there is to wait for the device


def device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """In evaluation mode, in full precision, not compiled, and back as it was."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.autocast(device_of(model).type, enabled=False), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        model.train(modes[model])
        for module, mode in modes.items():
            module.training = mode


def sum_over_samples(
    model: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    batches: Iterable[Batch],
    objective: Objective,
    reduce: Reduce,
    active: Sequence[int] | None = None,
) -> tuple[dict[str, Tensor], int]:
    """The sum over samples of `reduce` of the objective's gradient, by parameter, and the number of samples.

    The gradients are those of single samples, taken by `torch.func` in chunks that bound the memory.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> batch = Batch((torch.tensor([[1.0], [-2.0]]),), {}, None)
    >>> parameters = dict(model.named_parameters())
    >>> sum_over_samples(model, parameters, [batch], lambda outputs, label: outputs, torch.abs)
    ({'weight': tensor([[3.]])}, 2)
    """
    question = _Question(model, parameters, objective, reduce, active)
    totals = {name: torch.zeros_like(p, dtype=precise(p.dtype)) for name, p in parameters.items()}
    chunk, answer, count = _chunk(parameters.values()), question.of_many, 0
    with torch.no_grad(), evaluating(model):
        for batch in batches:
            for part in batch.parts(chunk):
                try:
                    sums = answer(part)
                except RuntimeError as error:
                    if answer == question.one_by_one or isinstance(error, torch.OutOfMemoryError):
                        raise
                    answer = question.one_by_one
                    sums = answer(part)
                    _warn_of_slowness(error)
                for name, total in sums.items():
                    totals[name] += total
            count += batch.size
    return totals, count


@dataclass(frozen=True)
class _Question:
    """What is asked of every sample."""

    model: nn.Module
    parameters: Mapping[str, nn.Parameter]
    objective: Objective
    reduce: Reduce
    active: Sequence[int] | None

    def of_many(self, batch: Batch) -> dict[str, Tensor]:
        try:
            return self._vectorised(batch)
        except torch.OutOfMemoryError:
            if batch.size == 1:
                raise
            halves = [self.of_many(half) for half in batch.parts((batch.size + 1) // 2)]
            return {name: torch.stack([half[name] for half in halves]).sum(0) for name in halves[0]}

    def _vectorised(self, batch: Batch) -> dict[str, Tensor]:
        values = {name: p.detach() for name, p in self.parameters.items()}
        each = vmap(self._of_one, in_dims=(None, 0, 0, 0), randomness="different")
        with QuickConvolutions(), sdpa_kernel(SDPBackend.MATH):  # the one kernel of attention that vmap knows
            found = each(values, batch.inputs, batch.keywords, batch.labels_or_zeros)
        return {name: answers.sum(0) for name, answers in found.items()}

    def _of_one(self, values: dict[str, Tensor], inputs: Any, keywords: Any, label: Tensor) -> dict[str, Tensor]:
        sample = Batch(tuple(x[None] for x in inputs), {name: x[None] for name, x in keywords.items()}, None)

        def ask(values: dict[str, Tensor]) -> Tensor:
            return self.objective(select(sample.outputs(self.model, values), self.active)[0], label)

        found, pull_back, *_ = vjp(ask, values)
        basis = torch.eye(len(found), dtype=found.dtype, device=found.device)
        return self._reduced(pull_back(one)[0] for one in basis)

    def one_by_one(self, batch: Batch) -> dict[str, Tensor]:
        """The same for models that torch.func does not know how to go through."""
        return self._reduced(gradients for sample in batch.parts(1) for gradients in self._gradients(sample))

    def _gradients(self, sample: Batch) -> Iterator[dict[str, Tensor]]:
        leaves = {name: p.detach().requires_grad_() for name, p in self.parameters.items()}
        with torch.enable_grad():
            outputs = select(sample.outputs(self.model, leaves), self.active)[0]
            values = self.objective(outputs, sample.labels_or_zeros[0]).unbind()
        for value in values:
            gradients = torch.autograd.grad(value, list(leaves.values()), retain_graph=True, materialize_grads=True)
            yield dict(zip(leaves, gradients, strict=True))

    def _reduced(self, gradients: Iterable[dict[str, Tensor]]) -> dict[str, Tensor]:
        total: dict[str, Tensor] = {}
        for each in gradients:
            for name, gradient in each.items():
                reduced = self.reduce(gradient.to(precise(gradient.dtype)))
                total[name] = total[name] + reduced if name in total else reduced
        return total


def _chunk(parameters: Iterable[Tensor]) -> int:
    """How many samples at once."""
    parameters = list(parameters)
    bytes_per_sample = 2 * sum(p.numel() * p.element_size() for p in parameters)  # a gradient, and what is made of it
    device = parameters[0].device
    budget = torch.cuda.mem_get_info(device)[0] // 4 if device.type == "cuda" else _CHUNK_BYTES
    return max(1, budget // bytes_per_sample)


def _warn_of_slowness(error: RuntimeError) -> None:
    warnings.warn(
        "torch.func.vmap cannot go through this model, so its samples are taken one by one, which is slow: "
        f"{str(error).splitlines()[0]}",
        stacklevel=6,
    )
