"""Connection-level plasticity control (Paik et al.): the rule of NPC for single connections."""

from collections.abc import Iterable, Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from holdfast.importance import precise
from holdfast.methods.memory import AS_BEFORE
from holdfast.methods.plastic import Plastic, is_plain_sgd
from holdfast.methods.settings import Fraction, Positive
from holdfast.neurons import Choice
from holdfast.plasticity import limited, plastic_bits, plasticity

Normalize = Literal["parameter", "model"]


def connection_average(importance: Tensor, measured: Tensor, mean: Tensor, rate: float) -> Tensor:
    """Eq. 3 and 4 for connections: C <- (1 - rate) C + rate c / mean(c), with importance C and measurement c.

    If the measurement is all zero or not finite, the importance stays the same.

    >>> measured = torch.tensor([1.0, 3.0])
    >>> connection_average(torch.zeros(2), measured, measured.mean(), rate=0.5)
    tensor([0.2500, 0.7500])
    """
    average = torch.lerp(importance, measured / mean, rate)
    return torch.where((mean > 0) & (mean < torch.inf), average, importance)


def measure_(
    importances: Sequence[Tensor],
    values: Sequence[Tensor],
    gradients: Sequence[Tensor],
    rate: float,
    normalize: Normalize,
) -> None:
    """Update the importances of several parameters in place: eq. 2 to 4 with |w dL/dw| as the measurement."""
    measured = [
        (value.to(importance) * gradient.to(importance)).abs()
        for importance, value, gradient in zip(importances, values, gradients, strict=True)
    ]
    means = [each.mean() for each in measured]
    if normalize == "model":
        total = torch.stack([each.sum() for each in measured]).sum()
        means = [total / sum(each.numel() for each in measured)] * len(measured)
    for importance, each, mean in zip(importances, measured, means, strict=True):
        importance.copy_(connection_average(importance, each, mean, rate))


def limit_all(
    importances: Sequence[Tensor],
    changing: Sequence[Tensor],
    before: Sequence[Tensor] | None,
    beta: float,
    gain: float,
) -> list[Tensor]:
    """Scale every change by the plasticity of its connections (eq. 10 and 11).

    Gradients are scaled in new tensors, parameters after their step in place.
    """
    found = []
    for i, (importance, tensor) in enumerate(zip(importances, changing, strict=True)):
        share = plasticity(importance, beta=beta, gain=gain).to(tensor.dtype)
        old = None if before is None else before[i]
        found.append(limited(tensor, old, share, plastic_bits(share, tensor.dtype)))
    return found


def control_(
    importances: Sequence[Tensor],
    values: Sequence[Tensor],
    gradients: Sequence[Tensor],
    settings: tuple[float, float, float],
    normalize: Normalize,
) -> list[Tensor]:
    """Update the importances, in place, and scale the gradients: a single pass if compiled."""
    rate, beta, gain = settings
    measure_(importances, values, gradients, rate, normalize)
    return limit_all(importances, gradients, None, beta, gain)


class CPC(Plastic):
    """Changes each connection by its plasticity times the change of the wrapped optimizer.

    For connection w with gradient g, at every step:

        c = |w g|;   C <- (1 - rate) C + rate c / mean(c);   s = min(1, gain sqrt(max(sqrt(beta / C) - 1, 0)))

    and w changes by s times the full change. Source: Paik, Oh, Kwak, Kim, "Overcoming Catastrophic Forgetting by
    Neuron-level Plasticity Control", the control experiment: eq. 2 to 4, 10 and 11 with connections as neurons.

    Args:
        model: the model in training.
        optimizer: an optimizer of its parameters. Its learning rate is that of a fully plastic connection.
        beta: the importance at which a connection freezes; the mean importance is 1.
        rate: the weight of the newest measurement in the moving average of importance.
        gain: the factor of plasticity below its maximum of 1.
        normalize: the set of connections whose mean importance is 1: those of a "parameter", or of the whole "model".
        free: what keeps the full learning rate, above all the task heads: modules, parameters, and names of either,
            which may be patterns, as in `[model.head, "*.bias"]`.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> optimizer = CPC(model, torch.optim.SGD(model.parameters(), lr=0.1), free=[model[2]])
    >>> model(torch.randn(16, 4)).square().mean().backward(); optimizer.step()
    >>> {name: tuple(values.shape) for name, values in optimizer.importance.items()}
    {'0.weight': (8, 4), '0.bias': (8,)}
    """

    remembers: ClassVar = {"_importance": AS_BEFORE.at_least(0)}

    normalize: Normalize

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        beta: Positive = 0.7,
        rate: Fraction = 5e-4,
        gain: Positive = 1.0,
        normalize: Normalize = "parameter",
        free: Choice | Iterable[Choice] = (),
    ) -> None:
        super().__init__(model, optimizer, beta=beta, rate=rate, gain=gain, free=free)
        self._set(normalize=normalize)
        controlled = self._trained() - self._free
        least = 2 if normalize == "parameter" else 1  # a single one has nothing to be more important than
        named = self.model.named_parameters()
        self._parameters = {name: p for name, p in named if p in controlled and p.numel() >= least}
        if not self._parameters:
            raise ValueError("no connection is left to control: all parameters of the optimizer are in free=")
        self._importance = {
            name: torch.zeros_like(p, dtype=precise(p.dtype), requires_grad=False)
            for name, p in self._parameters.items()
        }

    @property
    def importance(self) -> dict[str, Tensor]:
        """The moving average of importance, one value per connection, by parameter."""
        return {name: values.clone() for name, values in self._importance.items()}

    def _update(self) -> None:
        moving, importances, gradients = [], [], []
        for name, p in self._parameters.items():
            if p.grad is not None:
                if p.grad.is_sparse:
                    raise TypeError(f"CPC needs dense gradients, {name!r} has sparse ones: name its module in free=")
                self._importance[name] = self._importance[name].to(p.device)
                moving.append(p)
                importances.append(self._importance[name])
                gradients.append(p.grad)
        values = [p.detach() for p in moving]
        if is_plain_sgd(self.wrapped):
            settings = self.rate, self.beta, self.gain
            control = self._compiled(control_, moving)
            self._step_along(control(importances, values, gradients, settings, self.normalize), moving)
            return
        self._compiled(measure_, moving)(importances, values, gradients, self.rate, self.normalize)
        limit = self._compiled(limit_all, moving)
        self._limited_step(moving, lambda changing, before: limit(importances, changing, before, self.beta, self.gain))
