"""Algorithm 1 of the paper in plain Python loops, written from the paper; it shares no code with `src/`.

Readings of the paper's unclear points: delta is the weight of the newest measurement (eq. 4 as printed exchanges the
two weights), and a neuron that is shared over positions averages over them before the absolute value is taken.
Parameters that belong to no neuron learn at eta_max.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

Index = tuple[int, ...]
Parameters = dict[str, Tensor]
Forward = Callable[[Parameters, Tensor], tuple[list[Tensor], Tensor]]
"""From parameters and inputs to each layer's neurons, as [sample, neuron, position], and the loss."""


@dataclass
class ReferenceNPC:
    parameters: Parameters
    neurons: list[list[list[tuple[str, Index]]]]  # [layer][neuron]: where the neuron's own parameters stand
    beta: float
    delta: float
    alpha: float
    eta_max: float
    importance: list[list[float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.importance = [[0.0 for _ in layer] for layer in self.neurons]

    def step(self, forward: Forward, inputs: Tensor) -> None:
        names = list(self.parameters)
        leaves = {name: value.clone().requires_grad_() for name, value in self.parameters.items()}
        activations, loss = forward(leaves, inputs)
        gradients = torch.autograd.grad(loss, [*activations, *leaves.values()])
        gradients, by_name = gradients[: len(activations)], dict(zip(names, gradients[len(activations) :], strict=True))

        rate_of = {name: torch.full_like(value, self.eta_max) for name, value in self.parameters.items()}
        for layer, (activation, gradient) in enumerate(zip(activations, gradients, strict=True)):
            measured = self.measure(activation.tolist(), gradient.tolist())
            mean = sum(measured) / len(measured)
            for i in range(len(measured)):
                normalized = measured[i] / mean  # eq. 3
                before = self.importance[layer][i]
                self.importance[layer][i] = (1 - self.delta) * before + self.delta * normalized  # eq. 4
                for name, index in self.neurons[layer][i]:
                    rate_of[name][index] = self.learning_rate(self.importance[layer][i])
        for name, value in self.parameters.items():
            self.parameters[name] = value - rate_of[name] * by_name[name]

    @staticmethod
    def measure(activation: list[list[list[float]]], gradient: list[list[list[float]]]) -> list[float]:
        samples, neurons, positions = len(activation), len(activation[0]), len(activation[0][0])
        measured = []
        for i in range(neurons):
            total = 0.0
            for s in range(samples):
                inner = 0.0
                for p in range(positions):
                    inner += activation[s][i][p] * gradient[s][i][p]
                total += abs(inner / positions)
            measured.append(total / samples)  # eq. 2
        return measured

    def learning_rate(self, importance: float) -> float:
        if importance == 0:
            return self.eta_max
        return min(self.eta_max, self.alpha * math.sqrt(max(math.sqrt(self.beta / importance) - 1, 0)))  # eq. 11
