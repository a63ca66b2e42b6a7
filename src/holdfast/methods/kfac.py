"""Elastic weight consolidation with a Kronecker-factored Fisher information (Ritter et al., 2018)."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from holdfast.directions import second_moment
from holdfast.importance import precise
from holdfast.methods.anchor import check_finite, check_samples
from holdfast.methods.ewc import check_labels, check_range, label_range
from holdfast.methods.memory import AS_BEFORE, PLAIN
from holdfast.methods.method import Commit, Method, Needs
from holdfast.methods.settings import Count, NonNegative
from holdfast.neurons import Layer, find_layers
from holdfast.neurons.rows import Layout, group_rows, output_rows
from holdfast.samples import (
    Batch,
    aligned,
    device_of,
    log_likelihood,
    output_nodes,
    samples_of,
    select,
)
from holdfast.taps import module_signals


class Basis(NamedTuple):
    """The eigenvectors and eigenvalues of both factors of a layer, with a leading axis of groups."""

    inputs: Tensor
    input_values: Tensor
    outputs: Tensor
    output_values: Tensor


def basis_of(inputs: Tensor, outputs: Tensor) -> Basis:
    (a, u), (g, v) = (torch.linalg.eigh(factor.double()) for factor in (inputs, outputs))
    return Basis(*(each.to(inputs.dtype) for each in (u, a.clamp(min=0), v, g.clamp(min=0))))


def pulled(value: Tensor, anchor: Tensor, basis: Basis, stiffness: float | Tensor) -> Tensor:
    """The proximal step of tr(G (W - M) A (W - M)^T): the minimum of |X - W|^2 / 2 + stiffness / 2 times that over X.

    In the eigenbasis of A and G, each entry of W - M shrinks by 1 / (1 + stiffness a g). It never diverges.

    >>> one = torch.ones(1, 1, 1)
    >>> pulled(3 * one, one, Basis(one, one[0], one, 4 * one[0]), stiffness=0.25)
    tensor([[[2.]]])
    """
    inside = basis.outputs.mT @ (value - anchor) @ basis.inputs
    stiff = stiffness * basis.output_values.unsqueeze(2) * basis.input_values.unsqueeze(1)
    return value - basis.outputs @ (inside * (stiff / (1 + stiff))) @ basis.inputs.mT


class KFAC(Method):
    """Pulls each layer to its last values, by a Kronecker-factored Fisher information.

    For a layer with inputs a (with a 1 appended if the layer has a bias) and gradients g of log p(label | x) at its
    outputs, on the samples of a task (for tokens: of the sum over tokens, without padding):

        A_k = mean over samples of the sum over positions of a a^T,   A = sum of A_k over the finished tasks
        G_k = mean over samples and positions of g g^T,               G = mean of G_k over the finished tasks
        penalty = strength tr(G (W - M) A (W - M)^T)                  M: the values after the last task

    as a proximal step after each step of the wrapped optimizer. Parameters outside of linear and convolutional layers
    are not pulled. Source: Ritter, Botev, Barber, "Online structured Laplace approximations for overcoming catastrophic
    forgetting", NeurIPS 2018; for convolutions: Grosse, Martens, "A Kronecker-factored approximate Fisher matrix for
    convolution layers", ICML 2016.

    Args:
        model: the model in training. It returns `[samples, classes]` or `[samples, tokens, classes]`.
        optimizer: an optimizer of its parameters.
        strength: the strength of the pull.
        samples: the number of samples per task to measure on, the first of its batches; all if None.

    >>> model = nn.Linear(4, 2)
    >>> optimizer = KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1), strength=10)
    >>> x, y = torch.randn(16, 4), torch.randint(2, (16,))
    >>> loss = nn.functional.cross_entropy(model(x), y) + optimizer.penalty()
    >>> optimizer.zero_grad(); loss.backward(); optimizer.step()
    >>> optimizer.consolidate([(x, y)])  # the task is finished
    """

    needs: ClassVar = Needs(data=True)
    remembers: ClassVar = {
        "tasks": PLAIN,
        "_inputs": AS_BEFORE,
        "_outputs": AS_BEFORE,
        "_anchor": AS_BEFORE,
    }
    searched: ClassVar = "strength"
    alters_step: ClassVar = True

    strength: float
    samples: int | None

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        strength: NonNegative = 100.0,
        samples: Count = 4096,
    ) -> None:
        super().__init__(model, optimizer)
        self._set(strength=strength, samples=samples)
        self.tasks = 0
        self._layers: dict[str, Layer] = {}
        self._anchor: dict[str, Tensor] = {}
        self._inputs: dict[str, Tensor] = {}
        self._outputs: dict[str, Tensor] = {}
        self._bases: dict[str, tuple[Tensor, Basis]] = {}
        self._adapt([])

    def _adapt(self, new: Sequence[nn.Parameter]) -> None:
        """Add new layers, such as heads. Parameters that take the place of known ones are not protected."""
        for layer in find_layers(self.model, self._trained(), free=()):
            if layer.weight_and_bias and layer.name not in self._layers:
                self._layers[layer.name] = layer
                self._anchor[layer.name] = value = self._value(layer)
                self._inputs[layer.name] = (value.mT @ value).zero_()
                self._outputs[layer.name] = (value @ value.mT).zero_()
        pulled = {parameter for layer in self._layers.values() for parameter in layer.weight_and_bias}
        self._warn_of_unprotected([parameter for parameter in new if parameter not in pulled])

    def _value(self, layer: Layer) -> Tensor:
        """A copy of weight and bias as one matrix, `[groups, neurons, inputs]`."""
        parts = (p.detach().to(precise(p.dtype), copy=True) for p in layer.weight_and_bias)
        return Layout.of(layer.modules[0]).joined(*parts)

    # ---- a step ----

    def _update(self) -> None:
        self.wrapped.step()
        if self.tasks == 0:
            return
        rates = {p: group["lr"] for group in self.param_groups for p in group["params"]}
        for name, layer in self._layers.items():
            weight, *bias = layer.weight_and_bias
            if weight in rates and weight.grad is not None:
                value = self._value(layer)
                anchor, basis = self._to(self._anchor, name, value), self._basis(name, value)
                moved = pulled(value, anchor, basis, 2 * self.strength * rates[weight])
                Layout.of(layer.modules[0]).write_(moved, weight, *(each for each in bias if each.grad is not None))

    def _to(self, memory: dict[str, Tensor], name: str, like: Tensor) -> Tensor:
        memory[name] = memory[name].to(like.device)
        return memory[name]

    def _basis(self, name: str, like: Tensor) -> Basis:
        """The eigenbasis of a layer's factors; computed anew if these were replaced."""
        inputs = self._to(self._inputs, name, like)
        source, basis = self._bases.get(name, (None, None))
        if source is not inputs or basis is None:
            basis = basis_of(inputs, self._to(self._outputs, name, like))
            self._bases[name] = inputs, basis
        return basis

    # ---- the end of a task ----

    def _consolidate(self, batches: Iterable[Any], active: Sequence[int] | None) -> Commit:
        self._notice_parameters()
        inputs, outputs, samples, positions = self._sums(batches, output_nodes(active))
        for name in self._layers:
            check_finite(name, outputs[name])
            inputs[name] /= samples
            outputs[name] /= positions[name].clamp(min=1)
        return partial(self._remember, inputs, outputs)

    def _remember(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        for name, layer in self._layers.items():
            self._anchor[name] = value = self._value(layer)
            before, after = self._to(self._inputs, name, value), self._to(self._outputs, name, value)
            self._inputs[name] = before + inputs[name].to(before)
            self._outputs[name] = torch.lerp(after, outputs[name].to(after), 1 / (self.tasks + 1))
            self._basis(name, value)
        self.tasks += 1

    def _sums(
        self, batches: Iterable[Any], active: list[int] | None
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor, dict[str, Tensor]]:
        """The sums of a a^T and of g g^T by layer, the number of samples, and the number of positions by layer."""
        biased = {name: len(layer.weight_and_bias) > 1 for name, layer in self._layers.items()}
        modules = {(name, module): module for name, layer in self._layers.items() for module in layer.modules}
        inputs = {name: torch.zeros_like(factor, dtype=torch.float64) for name, factor in self._inputs.items()}
        outputs = {name: torch.zeros_like(factor, dtype=torch.float64) for name, factor in self._outputs.items()}
        samples = torch.zeros((), dtype=torch.float64, device=device_of(self.model))
        positions = {name: torch.zeros_like(samples) for name in self._layers}

        def likelihood(answer: Any, batch: Batch) -> Tensor:
            return _log_likelihood(answer, batch.labels, active)

        measured = samples_of(batches, self.samples, device_of(self.model))
        for batch, signals in module_signals(self.model, modules, measured, likelihood):
            samples += batch.size
            for (name, module), x, gradient in signals:
                rows = output_rows(module, gradient.to(precise(gradient.dtype)))
                inputs[name] += second_moment(group_rows(module, x.to(rows.dtype)), bias=biased[name])
                outputs[name] += second_moment(rows, bias=False)
                positions[name] += rows.shape[1]
        self._sum_over_processes([*inputs.values(), *outputs.values(), samples, *positions.values()])
        check_samples(float(samples))
        return inputs, outputs, samples, positions


def _log_likelihood(outputs: Any, labels: Tensor | None, active: list[int] | None) -> Tensor:
    """The sum over samples, and over their tokens, of the log probability of their labels."""
    if labels is None:
        raise ValueError("KFAC needs (inputs, labels) batches, or dicts with labels: labels count within the task")
    selected = select(outputs, active)
    check_labels(labels, selected.shape[:-1])
    check_range(label_range(labels), selected.shape[-1])
    return log_likelihood(selected, aligned(outputs, labels.long()))
