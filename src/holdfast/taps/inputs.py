"""Inputs of layers and modules, and gradients at their outputs, on given data in evaluation mode."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from holdfast.neurons.kinds import CONVOLUTIONS, TRANSPOSED
from holdfast.neurons.products import Product
from holdfast.neurons.rows import has_input_rows, input_rows
from holdfast.samples import Batch, device_of, evaluating, read
from holdfast.taps.hooks import Taps, first_input

K = TypeVar("K")
"""The key of a module, such as its name."""


def layer_inputs(
    model: nn.Module, layers: Mapping[str, nn.Module], batches: Iterable[Any]
) -> Iterator[dict[str, Tensor]]:
    """Iterate over the inputs of `layers`, batch by batch, as rows `[n, inputs]` by layer name.

    A row is the input of one product with `weight.flatten(1)`: the input of a linear layer, or a patch of a
    convolution's input. Forwards run in evaluation mode and without gradients. The model has no hooks between batches.
    A layer not called for a batch is missing from it; a layer called repeatedly has the rows of all calls.

    Args:
        model: the model.
        layers: some of its linear and convolutional modules, as from `weight_layers`.
        batches: batches of inputs, or of `(inputs, labels)`.

    >>> from holdfast.neurons import weight_layers
    >>> model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3))
    >>> moments = {name: torch.zeros(inputs, inputs) for name, inputs in (("0", 9), ("3", 8))}
    >>> for inputs in layer_inputs(model, weight_layers(model), [torch.randn(5, 1, 4, 4)]):
    ...     for name, rows in inputs.items():
    ...         moments[name] += rows.T @ rows
    """
    for name, module in layers.items():
        if not has_input_rows(module):
            raise ValueError(
                f"layer {name!r} is {module}; only Linear and ungrouped Conv layers are supported: leave it out"
            )
    return (
        {name: torch.cat([input_rows(layers[name], x) for x in given]) for name, given in inputs.items()}
        for inputs in module_inputs(model, layers, batches)
    )


def module_inputs(
    model: nn.Module, modules: Mapping[K, nn.Module], batches: Iterable[Any]
) -> Iterator[dict[K, list[Tensor]]]:
    """Iterate over the first inputs of `modules`, batch by batch: one tensor per call, by the key of the module."""
    for batch in batches:
        yield _inputs_on(batch if isinstance(batch, Batch) else read(batch, device_of(model)), model, modules)


def product_inputs(
    model: nn.Module, products: Iterable[Product], batches: Iterable[Any]
) -> Iterator[dict[tuple[Product, nn.Module], list[list[Tensor]]]]:
    """Iterate over the inputs of `products`, batch by batch: what each call of its modules shows."""
    for given in batches:
        batch = given if isinstance(given, Batch) else read(given, device_of(model))
        inputs: dict[tuple[Product, nn.Module], list[list[Tensor]]] = {}
        with Taps() as taps, torch.no_grad(), evaluating(model), _attention_by_modules():
            for product in products:
                for module in product.modules:
                    taps.on_output(module, partial(_keep_inputs, inputs, product, batch.attended), always=True)
            batch.outputs(model)
        yield inputs


@contextmanager
def _attention_by_modules() -> Iterator[None]:
    """Let torch's transformer layers call their modules, instead of the fast path that they take in evaluation."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


def _keep_inputs(
    inputs: dict[tuple[Product, nn.Module], list[list[Tensor]]],
    product: Product,
    attended: Tensor | None,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: Any,
) -> None:
    given = [x.clone() for x in product.read(module, args, kwargs, output)]  # the model may change them in place
    if product.lookup:
        given = [attended_indices(x, attended) for x in given]
    else:
        given = [_tokens(module, x, attended) for x in given]
    if given:
        inputs.setdefault((product, module), []).append(given)


class Signal(NamedTuple, Generic[K]):
    """One call of a module: its key, its first input, and the gradient at its output."""

    key: K
    input: Tensor
    gradient: Tensor


def module_signals(
    model: nn.Module,
    modules: Mapping[K, nn.Module],
    batches: Iterable[Batch],
    objective: Callable[[Any, Batch], Tensor],
) -> Iterator[tuple[Batch, list[Signal[K]]]]:
    """Iterate over the inputs of `modules` and the gradients of an objective at their outputs, batch by batch.

    Args:
        model: the model.
        modules: some of its modules, by keys of any kind.
        batches: the batches.
        objective: maps the model's output for a batch to a number: a sum over samples, so that the gradients are those
            of single samples.
    """
    for batch in batches:
        calls: list[tuple[K, Tensor, Tensor]] = []
        with Taps() as taps, torch.enable_grad(), evaluating(model):
            for key, module in modules.items():
                taps.on_output(module, partial(_keep_call, calls, key))
            value = objective(batch.outputs(model), batch)
            gradients = torch.autograd.grad(value, [output for *_, output in calls], materialize_grads=True)
        signals = []
        for (key, x, _), gradient in zip(calls, gradients, strict=True):
            signals.append(Signal(key, *(_tokens(modules[key], each, batch.attended) for each in (x, gradient))))
        yield batch, signals


def _keep_call(
    calls: list[tuple[K, Tensor, Tensor]], key: K, module: nn.Module, args: Any, kwargs: Any, output: Tensor
) -> Tensor | None:
    if not output.requires_grad:
        return None
    calls.append((key, first_input(args, kwargs).detach().clone(), output))
    return output.clone()  # the model may change its output in place


def _inputs_on(batch: Batch, model: nn.Module, modules: Mapping[K, nn.Module]) -> dict[K, list[Tensor]]:
    inputs: dict[K, list[Tensor]] = {}

    def keep(key: K, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = first_input(args, kwargs).clone()  # the model may change it in place
        inputs.setdefault(key, []).append(_tokens(module, x, batch.attended))

    with Taps() as taps, torch.no_grad(), evaluating(model), _attention_by_modules():
        for key, module in modules.items():
            taps.on_input(module, partial(keep, key), always=True)
        batch.outputs(model)
    return inputs


def _tokens(module: nn.Module, x: Tensor, attended: Tensor | None) -> Tensor:
    """The rows of `[samples, tokens, features]` that are no padding; other tensors, as of convolutions, as they are."""
    spatial = isinstance(module, (*CONVOLUTIONS, *TRANSPOSED))
    if attended is None or spatial or x.dim() != 3 or x.shape[:2] != attended.shape:
        return x
    return x[attended.to(x.device)]


def attended_indices(indices: Tensor, attended: Tensor | None) -> Tensor:
    """Indices of tokens, or of positions that all samples share, without those of padding; others as they are.

    >>> attended_indices(torch.tensor([[0, 1, 2]]), torch.tensor([[True, True, True], [True, False, False]]))
    tensor([0, 1, 2, 0])
    """
    if attended is None or indices.shape not in (attended.shape, attended[:1].shape, attended.shape[1:]):
        return indices
    return indices.expand(attended.shape)[attended.to(indices.device)]
