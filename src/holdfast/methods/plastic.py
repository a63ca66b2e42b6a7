"""What NPC and CPC share: a step that changes each part of a model by its plasticity, and by no more."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from holdfast.methods.method import Method, check_shapes, modules_of, number
from holdfast.plasticity import plasticity


class Plastic(Method):
    """Keeps importances as a moving average and turns them into plasticity (eq. 4, 10 and 11)."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        beta: float,
        rate: float,
        gain: float,
        free: Iterable[nn.Module],
    ) -> None:
        super().__init__(model, optimizer)
        self.beta = number("beta", beta, above=0)
        self.rate = number("rate", rate, above=0, most=1)
        self.gain = number("gain", gain, above=0)
        self._free_modules = modules_of(self.model, free, "free")

    @property
    def _free(self) -> set[nn.Parameter]:
        """The parameters of the free modules, those that were added later among them."""
        return {parameter for module in self._free_modules for parameter in module.parameters()}

    @property
    def importance(self) -> dict[str, Tensor]:
        """The moving average of importance, by name."""
        raise NotImplementedError

    @property
    def plasticity(self) -> dict[str, Tensor]:
        """The share of the learning rate that is left at each place, by name."""
        return {name: plasticity(values, beta=self.beta, gain=self.gain) for name, values in self.importance.items()}

    def _limited_step(
        self, parameters: list[nn.Parameter], limit: Callable[[list[Tensor], list[Tensor] | None], None]
    ) -> None:
        """The wrapped optimizer's step, in which `limit` leaves only a share of what changes.

        `limit` gets gradients, or else the parameters after their step and what they were before it.
        """
        if is_plain_sgd(self.wrapped):
            # Its change is proportional to the gradient: eq. 11 to the letter, and no copy is needed.
            limit([p.grad for p in parameters if p.grad is not None], None)
            self.wrapped.step()
        else:
            after = [p.detach() for p in parameters]
            before = [p.clone() for p in after]
            self.wrapped.step()
            limit(after, before)

    def _memory(self) -> dict[str, Any]:
        importance = {name: values.clone() for name, values in self.importance.items()}
        return {"beta": self.beta, "rate": self.rate, "gain": self.gain, "importance": importance}

    def _check_memory(self, memory: dict[str, Any]) -> None:
        check_shapes(memory["importance"], self.importance)

    def _remember(self, memory: dict[str, Any]) -> None:
        self.beta, self.rate, self.gain = memory["beta"], memory["rate"], memory["gain"]
        self._restore(memory["importance"])

    def _restore(self, importance: Mapping[str, Tensor]) -> None:
        raise NotImplementedError


def is_plain_sgd(optimizer: Optimizer) -> bool:
    return type(optimizer) is SGD and not any(
        group["momentum"] or group["weight_decay"] or group["maximize"] for group in optimizer.param_groups
    )
