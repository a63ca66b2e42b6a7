"""What all methods have in common: each is an optimizer around another optimizer."""

import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from types import TracebackType
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from holdfast.fast import compiled
from holdfast.persample import device_of

_MEMORY = "holdfast"


class Method(Optimizer):
    """An optimizer that wraps `optimizer` and shares its parameter groups, state and defaults.

    One training loop serves every method:

        loss = criterion(model(x)[:, active], y) + method.penalty()
        method.zero_grad()
        loss.backward()
        method.step()

    and, when a task is finished, `method.consolidate(batches, active)`. A method says in `_update` what it makes of a
    step, in `_penalty` what it adds to the loss and in `_acts_through_loss` when that is not zero, in `consolidate`
    what it does at a task's end, and in `_memory`, `_check_memory` and `_remember` what it remembers. Where it says
    nothing, it is the wrapped optimizer.
    """

    wrapped: Optimizer
    model: nn.Module
    looks_at_activations: ClassVar[bool] = False
    """Whether it looks at the outputs of the model's activation modules."""
    fuse: bool = False
    """Whether its own part of a step is compiled on a GPU, where many small operations take long.

    NPC's is in any case, if the model is compiled.
    """

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
        if self._trained().isdisjoint(self.model.parameters()):
            raise ValueError(
                "the optimizer holds none of the model's parameters: build it from this model's parameters(), after "
                "any step that replaces them"
            )
        # Weak, because a wrapper holds on to its process group.
        self._wrapper = weakref.ref(model) if isinstance(model, DistributedDataParallel) else None
        self._started = False
        self._closed = False
        self._penalty_taken = False
        self.__setstate__({})  # Optimizer's own preparations, less the parameter groups, which are the wrapped one's

    # ---- an optimizer like the one inside ----

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

    def _trained(self) -> set[nn.Parameter]:
        return {parameter for group in self.param_groups for parameter in group["params"]}

    # ---- what a method does ----

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step along the gradients that have come in."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        name = type(self).__name__
        if self._closed:
            raise ValueError(f"this {name} is closed: build a new one, or go on with the optimizer that it wrapped")
        if not self._started and all(parameter.grad is None for parameter in self._trained()):
            raise ValueError(
                "step() came before any backward(): there is no gradient to step along; call loss.backward() first"
            )
        if self._acts_through_loss and not self._penalty_taken:
            raise ValueError(
                f"the term of {name} is missing from the loss: loss = criterion(model(x), y) + optimizer.penalty()"
            )
        self._update()
        self._started, self._penalty_taken = True, False
        return loss

    def _update(self) -> None:
        self.wrapped.step()

    def _fused(self, function: Callable[..., Any], tensors: Iterable[Tensor]) -> Callable[..., Any]:
        """A part of the step, compiled if it is to be and the tensors that it works on are on a GPU."""
        return compiled(function) if self.fuse and all(tensor.is_cuda for tensor in tensors) else function

    def penalty(self) -> Tensor:
        """The term to add to the loss; zero for methods that do not act through the loss."""
        self._penalty_taken = True
        maximizing = any(group.get("maximize") for group in self.param_groups)
        return -self._penalty() if maximizing else self._penalty()

    def _penalty(self) -> Tensor:
        return torch.zeros((), device=device_of(self.model))

    @property
    def repeatable(self) -> bool:
        """Whether every step until the end of the task is the same operations on the same tensors, so that it may be
        recorded as a CUDA graph.
        """
        return True

    @property
    def _acts_through_loss(self) -> bool:
        """Whether a step would now be wrong without `penalty` in the loss."""
        return False

    def consolidate(self, batches: Iterable[Any], active: Iterable[int] | None = None) -> None:
        """Finish a task.

        Args:
            batches: the task's batches, as `(inputs, labels)`; labels count within the task.
            active: the output nodes of the task, all of them if not given.
        """

    # ---- an end to it ----

    def close(self) -> None:
        """Take every hook off the model again."""
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- state ----

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


def several_processes() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def number(name: str, value: float, *, above: float | None = None, least: float = 0, most: float = math.inf) -> float:
    """`value` as a float, if it is a finite number above `above` (or at least `least`) and at most `most`."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r}")
    enough = value >= least if above is None else value > above
    if not enough or not value <= most or math.isinf(value):
        lower = f"at least {least:g}" if above is None else f"above {above:g}"
        upper = "" if math.isinf(most) else f" and at most {most:g}"
        raise ValueError(f"{name} must be {lower}{upper}, got {value!r}")
    return float(value)


def whole(name: str, value: int | None) -> int | None:
    """`value`, if it is a whole number of at least 1 or None."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise TypeError(f"{name} must be a whole number or None, got {value!r}")
    if value is not None and value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
    return value


def modules_of(model: nn.Module, given: Iterable[nn.Module], argument: str) -> list[nn.Module]:
    """The modules given as `argument`, if they are modules of this model."""
    if isinstance(given, nn.Module):
        given = [given]
    inside = set(model.modules())
    chosen: list[nn.Module] = []
    for module in given:
        if not isinstance(module, nn.Module):
            raise TypeError(f"{argument} takes modules of the model, as in {argument}=[model.head]; got {module!r}")
        if module not in inside:
            raise ValueError(f"{argument} has a {type(module).__name__} that is not a module of this model: {module}")
        chosen.append(module)
    return chosen


def check_shapes(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Raise a ValueError if what a state_dict holds by name is not of the model that is here."""
    for name in (*ours, *theirs):
        here, there = (_shape(tensors.get(name)) for tensors in (ours, theirs))
        if here != there:
            raise ValueError(
                f"this state_dict is of another model: it has {there} for {name!r}, this model has {here}; "
                "build the model and the method as they were then"
            )


def _shape(value: Any) -> str:
    return str(tuple(value.shape)) if isinstance(value, Tensor) else "nothing" if value is None else "other data"
