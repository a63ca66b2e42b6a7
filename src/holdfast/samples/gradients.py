"""Sums over per-sample gradients, in bounded memory."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from holdfast.errors import warn
from holdfast.importance import precise
from holdfast.samples.batch import Batch, device_of
from holdfast.samples.convolution import PerSampleConvolutions
from holdfast.samples.outputs import select

Objective = Callable[[Tensor, Tensor], Tensor]
"""Maps a sample's active outputs and its label, or the labels of its tokens, to a vector of values."""
Reduce = Callable[[Tensor], Tensor]
"""Maps the gradient of one value of one sample to the summand, elementwise."""

_CHUNK_BYTES = 2**26


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluate in evaluation mode, full precision and eagerly; restore the modes afterwards."""
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
    """Sum `reduce` of the per-sample gradients of `objective`, by parameter; also return the number of samples.

    `torch.func` computes the gradients in chunks, which bounds the memory.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> batch = Batch((torch.tensor([[1.0], [-2.0]]),), {}, None)
    >>> parameters = dict(model.named_parameters())
    >>> sum_over_samples(model, parameters, [batch], lambda outputs, label: outputs, torch.abs)
    ({'weight': tensor([[3.]])}, 2)
    """
    statistic = _Statistic(model, parameters, objective, reduce, active)
    totals = {name: torch.zeros_like(p, dtype=precise(p.dtype)) for name, p in parameters.items()}
    chunk, compute, count = _chunk(parameters.values()), statistic.of_many, 0
    with torch.no_grad(), evaluating(model):
        for batch in batches:
            for part in batch.parts(chunk):
                try:
                    sums = compute(part)
                except RuntimeError as error:
                    if compute == statistic.one_by_one or isinstance(error, torch.OutOfMemoryError):
                        raise
                    compute = statistic.one_by_one
                    sums = compute(part)
                    _warn_of_slowness(error)
                for name, total in sums.items():
                    totals[name] += total
            count += batch.size
    return totals, count


@dataclass(frozen=True)
class _Statistic:
    """A sum over per-sample gradients, computed for one batch at a time."""

    model: nn.Module
    parameters: Mapping[str, nn.Parameter]
    objective: Objective
    reduce: Reduce
    active: Sequence[int] | None

    def of_many(self, batch: Batch) -> dict[str, Tensor]:
        try:
            return self._vectorized(batch)
        except torch.OutOfMemoryError:
            if batch.size == 1:
                raise
            halves = [self.of_many(half) for half in batch.parts((batch.size + 1) // 2)]
            return {name: torch.stack([half[name] for half in halves]).sum(0) for name in halves[0]}

    def _vectorized(self, batch: Batch) -> dict[str, Tensor]:
        values = {name: p.detach() for name, p in self.parameters.items()}
        each = vmap(self._of_one, in_dims=(None, 0, 0, 0), randomness="different")
        with PerSampleConvolutions(), sdpa_kernel(SDPBackend.MATH):  # the only attention kernel that vmap supports
            summands = each(values, batch.inputs, batch.keywords, batch.labels_or_zeros)
        return {name: summand.sum(0) for name, summand in summands.items()}

    def _of_one(self, values: dict[str, Tensor], inputs: Any, keywords: Any, label: Tensor) -> dict[str, Tensor]:
        sample = Batch(tuple(x[None] for x in inputs), {name: x[None] for name, x in keywords.items()}, None)

        def evaluate(values: dict[str, Tensor]) -> Tensor:
            return self.objective(select(sample.outputs(self.model, values), self.active)[0], label)

        outcome, pull_back, *_ = vjp(evaluate, values)
        basis = torch.eye(len(outcome), dtype=outcome.dtype, device=outcome.device)
        return self._reduced(pull_back(one)[0] for one in basis)

    def one_by_one(self, batch: Batch) -> dict[str, Tensor]:
        """The same, for models that torch.func does not support."""
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
    """The number of samples per chunk."""
    parameters = list(parameters)
    bytes_per_sample = 2 * sum(p.numel() * p.element_size() for p in parameters)  # the gradient and its reduction
    device = parameters[0].device
    budget = torch.cuda.mem_get_info(device)[0] // 4 if device.type == "cuda" else _CHUNK_BYTES
    return max(1, budget // bytes_per_sample)


def _warn_of_slowness(error: RuntimeError) -> None:
    warn(
        "torch.func.vmap does not support this model, so its samples are processed one by one, which is slow: "
        f"{str(error).splitlines()[0]}",
    )
