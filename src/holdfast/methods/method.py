"""What all methods have in common: each is an optimizer around another optimizer."""

from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

_MEMORY = "holdfast"


class Method(Optimizer):
    """An optimizer that wraps `optimizer` and shares its parameter groups, state and defaults.

    `consolidate` and `penalty` are the places for methods that act at a task's end or through the loss; for all others
    they do nothing, so that one training loop serves every method.
    """

    wrapped: Optimizer
    model: nn.Module

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
        if isinstance(optimizer, Method):
            raise TypeError(f"optimizer is already a holdfast {type(optimizer).__name__}: wrap the optimizer inside it")
        if isinstance(optimizer, torch.optim.LBFGS):
            raise TypeError("LBFGS evaluates the model many times in one step: wrap a first-order optimizer instead")
        if isinstance(model, DataParallel):
            raise TypeError("torch.nn.DataParallel is not supported: use DistributedDataParallel")
        self.wrapped = optimizer
        self.model = bare(model)
        self.__setstate__({})  # Optimizer's own preparations, less the parameter groups, which are the wrapped one's

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.wrapped.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.wrapped.param_groups = groups

    @property
    def state(self) -> Any:
        return self.wrapped.state

    @state.setter
    def state(self, state: Any) -> None:
        self.wrapped.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        return self.wrapped.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.wrapped.defaults = defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.wrapped.add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.wrapped.zero_grad(set_to_none)

    def consolidate(self, batches: Iterable[Any], active: Iterable[int] | None = None) -> None:
        """Called when a task is finished, with its batches and its output nodes."""

    def penalty(self) -> Tensor:
        """The term to add to the loss."""
        return torch.zeros((), device=next(self.model.parameters()).device)

    def close(self) -> None:
        """Take every hook off the model again."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state and, beside it, what the method itself remembers."""
        return {**self.wrapped.state_dict(), _MEMORY: {"method": type(self).__name__, **self._memory()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on exactly where the state_dict was taken. Nothing is changed if it does not fit."""
        if _MEMORY not in state_dict:
            raise ValueError(
                f"this state_dict was not made by a holdfast method: it has {sorted(state_dict)} but no {_MEMORY!r}; "
                "load it into the optimizer before wrapping it"
            )
        memory = state_dict[_MEMORY]
        if memory["method"] != type(self).__name__:
            raise ValueError(f"this state_dict was made by {memory['method']}, not by {type(self).__name__}")
        self._check_memory(memory)
        self.wrapped.load_state_dict({key: value for key, value in state_dict.items() if key != _MEMORY})
        self._remember(memory)

    def _memory(self) -> dict[str, Any]:
        return {}

    def _check_memory(self, memory: dict[str, Any]) -> None:
        """Raise a ValueError if `memory` is not of this method and model."""

    def _remember(self, memory: dict[str, Any]) -> None:
        """Take back what `_memory` gave."""

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(f"{type(self).__name__} belongs to one model in memory: save its state_dict() instead")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.wrapped!r})"


def bare(model: nn.Module) -> nn.Module:
    """The model itself, out of the wrappers of torch.compile and DistributedDataParallel."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model
