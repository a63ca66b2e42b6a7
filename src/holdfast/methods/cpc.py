"""Connection-level plasticity control: the rule of NPC on single connections, the paper's own control experiment."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from holdfast.importance import precise
from holdfast.methods.plastic import Plastic, is_plain_sgd
from holdfast.plasticity import limit_, plastic_bits, plasticity


def connection_average(importance: Tensor, value: Tensor, gradient: Tensor, rate: float) -> Tensor:
    """Eq. 2 to 4 for connections: |w dL/dw| over its mean in the parameter, as a moving average.

    A parameter without a usable measurement (all zero, or not finite) keeps the importance it had.

    >>> connection_average(torch.zeros(2), torch.tensor([1.0, -3.0]), torch.tensor([1.0, 1.0]), rate=0.5)
    tensor([0.2500, 0.7500])
    """
    measured = (value.to(importance) * gradient.to(importance)).abs()
    mean = measured.mean()
    average = torch.lerp(importance, measured / mean, rate)
    return torch.where((mean > 0) & (mean < torch.inf), average, importance)


def measure_(importances: Sequence[Tensor], values: Sequence[Tensor], slopes: Sequence[Tensor], rate: float) -> None:
    """`connection_average` of several parameters, in place."""
    for importance, value, slope in zip(importances, values, slopes, strict=True):
        importance.copy_(connection_average(importance, value, slope, rate))


def limit_all_(
    importances: Sequence[Tensor],
    changing: Sequence[Tensor],
    before: Sequence[Tensor] | None,
    beta: float,
    gain: float,
) -> None:
    """In place, only so much of every change as the importance of its connections allows."""
    for i, (importance, tensor) in enumerate(zip(importances, changing, strict=True)):
        share = plasticity(importance, beta=beta, gain=gain).to(tensor.dtype)
        limit_(tensor, None if before is None else before[i], share, plastic_bits(share, tensor.dtype))


def control_(
    importances: Sequence[Tensor], values: Sequence[Tensor], slopes: Sequence[Tensor], knobs: tuple[float, float, float]
) -> None:
    """In place, the new importances, and of every slope only so much as they allow; at once, to read all of it once."""
    rate, beta, gain = knobs
    measure_(importances, values, slopes, rate)
    limit_all_(importances, slopes, None, beta, gain)


class CPC(Plastic):
    """Wraps an optimizer so that each connection changes by its plasticity times what the optimizer alone would do.

    Args:
        model: the model in training.
        optimizer: an optimizer of its parameters. Its learning rate is that of a fully plastic connection.
        beta: the importance from which a connection is frozen; the mean importance in a parameter is 1.
        rate: the weight of the newest measurement in the moving average of importance.
        gain: the slope of plasticity in importance.
        free: modules that keep the full learning rate, the task heads above all.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> optimizer = CPC(model, torch.optim.SGD(model.parameters(), lr=0.1), free=[model[2]])
    >>> model(torch.randn(16, 4)).square().mean().backward(); optimizer.step()
    >>> {name: tuple(values.shape) for name, values in optimizer.importance.items()}
    {'0.weight': (8, 4), '0.bias': (8,)}
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        beta: float = 0.7,
        rate: float = 5e-4,
        gain: float = 1.0,
        free: Iterable[nn.Module] = (),
    ) -> None:
        super().__init__(model, optimizer, beta=beta, rate=rate, gain=gain, free=free)
        controlled = self._trained() - self._free
        self._parameters = {name: p for name, p in self.model.named_parameters() if p in controlled}
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
        moving, importances, slopes = [], [], []
        for name, p in self._parameters.items():
            if p.grad is not None:
                if p.grad.is_sparse:
                    raise TypeError(f"CPC needs dense gradients, {name!r} has sparse ones: name its module in free=")
                self._importance[name] = self._importance[name].to(p.device)
                moving.append(p)
                importances.append(self._importance[name])
                slopes.append(p.grad)
        values = [p.detach() for p in moving]
        if is_plain_sgd(self.wrapped):
            self._fused(control_, moving)(importances, values, slopes, (self.rate, self.beta, self.gain))
            self.wrapped.step()
            return
        self._fused(measure_, moving)(importances, values, slopes, self.rate)
        limit = self._fused(limit_all_, moving)
        self._limited_step(moving, lambda changing, before: limit(importances, changing, before, self.beta, self.gain))

    def _restore(self, importance: Mapping[str, Tensor]) -> None:
        self._importance = {name: importance[name].to(old, copy=True) for name, old in self._importance.items()}
