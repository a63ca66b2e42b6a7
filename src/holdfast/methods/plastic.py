"""The step that NPC and CPC share: each part of a model changes by its plasticity times the full change."""

from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar

from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from holdfast.methods.method import Method, Needs
from holdfast.methods.settings import Fraction, Positive
from holdfast.neurons import Choice, Selection
from holdfast.plasticity import plasticity


class Plastic(Method):
    """Keeps importances as a moving average and turns them into plasticity (eq. 4, 10 and 11)."""

    needs: ClassVar = Needs(heads=True)
    searched: ClassVar = "beta"
    role: ClassVar = "plasticity"
    alters_step: ClassVar = True

    beta: float
    rate: float
    gain: float

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        beta: Positive,
        rate: Fraction,
        gain: Positive,
        free: Choice | Iterable[Choice],
    ) -> None:
        super().__init__(model, optimizer)
        self._set(beta=beta, rate=rate, gain=gain)
        self._selection = Selection(self.model, free, "free")

    @property
    def _free(self) -> set[nn.Parameter]:
        """The free parameters, including parameters added to free modules later."""
        return self._selection.parameters

    @property
    def plasticity(self) -> dict[str, Tensor]:
        """The share of the learning rate that is left, by name (eq. 11)."""
        return {name: plasticity(values, beta=self.beta, gain=self.gain) for name, values in self.importance.items()}

    def _adapt(self, new: Sequence[nn.Parameter]) -> None:
        free = self._free
        self._warn_of_unprotected([parameter for parameter in new if parameter not in free])

    def _limited_step(
        self, parameters: list[nn.Parameter], limit: Callable[[list[Tensor], list[Tensor] | None], list[Tensor]]
    ) -> None:
        """Take the wrapped optimizer's step, limited by plasticity.

        `limit` is called with gradients, and returns others, or else with the parameters after the step and their
        values before it, and changes them in place.
        """
        if is_plain_sgd(self.wrapped):
            # Its change is proportional to the gradient: eq. 11 to the letter.
            self._step_along(limit([p.grad for p in parameters if p.grad is not None], None), parameters)
        else:
            after = [p.detach() for p in parameters]
            before = [p.clone() for p in after]
            self.wrapped.step()
            limit(after, before)


def is_plain_sgd(optimizer: Optimizer) -> bool:
    """Whether a step is the gradient times the learning rate and nothing else."""
    return type(optimizer) is SGD and not any(
        group["momentum"] or group["weight_decay"] or group["maximize"] for group in optimizer.param_groups
    )
