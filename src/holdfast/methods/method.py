"""The contract of all methods: each is an optimizer around another optimizer."""

import inspect
import operator
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from holdfast.compiling import compiled
from holdfast.errors import warn
from holdfast.methods import memory
from holdfast.methods.report import Report
from holdfast.methods.settings import checked, settings_of
from holdfast.samples import device_of
from holdfast.taps import ForwardTap, before_step

KEY = "holdfast"
"""The entry of the first parameter group in a state_dict under which a method keeps its memory."""
LIVE = "the memory is in the state_dict() of the method"
"""The same entry of the live parameter group. Without it, torch would drop the memory from a flattened state_dict."""

Commit = Callable[[], None]
"""Remembers what was measured on a finished task. It does not fail."""


@dataclass(frozen=True)
class Needs:
    """The needs of a method, to be met by the training loop."""

    heads: bool = False
    """Its setting `free` takes the task heads."""
    example: bool = False
    """Its setting `example` takes a batch of inputs, if the model is compiled before the first step."""
    data: bool = False
    """`consolidate` reads the batches of the finished task."""
    old_data: bool = False
    """The batches given to `consolidate` are read until the end of training. To resume, they are given again."""
    fresh_model: bool = False
    """Every task starts from a fresh model, so a finished task is evaluated at its end only."""

    def __or__(self, other: "Needs") -> "Needs":
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Needs(*(ours or theirs for ours, theirs in pairs))


class Method(Optimizer):
    """An optimizer that wraps `optimizer` and shares its parameter groups, state and defaults.

    One training loop serves every method:

        loss = criterion(model(x)[:, active], y) + method.penalty()
        method.zero_grad()
        loss.backward()
        method.step()

    and, at the end of a task, `method.consolidate(batches, active)`.

    The wrapped optimizer may be another method: penalties add up, all parts consolidate, and states nest.

    A subclass declares its settings in the signature of its constructor, its needs in `needs`, and its memory in
    `remembers`. It overrides `_update` (a step), `_penalty` and `_adds_penalty` (a term of the loss), `_consolidate`
    (the end of a task), `_adapt` (parameters that came later), `_recordable` and `_close` where it differs from the
    wrapped optimizer.
    """

    needs: ClassVar[Needs] = Needs()
    remembers: ClassVar[Mapping[str, memory.Kind]] = {}
    """The attributes in a state_dict besides the settings, each with its kind."""
    searched: ClassVar[str] = "lr"
    """The setting that a search varies by default."""
    role: ClassVar[str] = ""
    """The quantity that the method controls, if two methods cannot both control it."""
    alone: ClassVar[bool] = False
    """Whether the method cannot be combined with others."""
    alters_step: ClassVar[bool] = False
    """Whether the method changes the step of the wrapped optimizer, by scaling it or by a pull after it."""
    measures_step: ClassVar[bool] = False
    """Whether the method measures the change of parameters in its step, which no outer method may alter afterwards."""

    reads_forward: ClassVar[bool] = False
    """Whether `penalty` acts on the last forward, so that each forward in the loss needs a penalty of its own."""

    wrapped: Optimizer
    model: nn.Module
    compile: bool = False
    """Whether to compile its own part of a step on a GPU, where launching many small operations is slow."""

    def __init_subclass__(cls) -> None:
        """Refuse a class whose state would have two entries of one name."""
        super().__init_subclass__()
        settings = list(inspect.signature(cls).parameters)[2:]  # after the model and the optimizer
        names = [*memory.RESERVED, *settings, *memory.names_of(cls).values()]
        if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
            raise TypeError(
                f"{cls.__name__} has two entries {twice[0]!r} in its state_dict: settings and remembered attributes "
                f"need different names, other than {', '.join(memory.RESERVED)}"
            )

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
        if isinstance(optimizer, torch.optim.LBFGS):
            raise TypeError("LBFGS evaluates the model many times in one step: wrap a first-order optimizer instead")
        if isinstance(model, DataParallel):
            raise TypeError("torch.nn.DataParallel is not supported: use DistributedDataParallel")
        self.wrapped = optimizer
        self.model = bare(model)
        self._outer: weakref.ref[Method] | None = None
        self._check_wrapped()
        self.param_groups[0][KEY] = LIVE
        # Weak: a wrapper keeps its process group.
        self._wrapper = weakref.ref(model) if isinstance(model, DistributedDataParallel) else None
        self._held = self._held_now()
        self._started = False
        self._stepping = False
        self._closed = False
        self._penalty_taken = False
        self._guard = before_step(optimizer, _Guard(self))
        self._coverage = Coverage(self.model) if self.reads_forward else None
        if self._coverage is not None:
            weakref.finalize(self, self._coverage.close).atexit = False
        self.__setstate__({})  # Optimizer's own setup, without parameter groups: they are the wrapped optimizer's

    def _check_wrapped(self) -> None:
        if self._trained().isdisjoint(self.model.parameters()):
            raise ValueError(
                "the optimizer holds none of the model's parameters: build it from this model's parameters(), after "
                "any step that replaces them"
            )
        inner = self._inner
        if inner is None:
            return
        self.check_combination([type(part) for part in inner.parts.values()])
        if inner.model is not self.model:
            raise ValueError(f"the inner {type(inner).__name__} belongs to another model: build both for the same one")
        if inner._closed:
            raise ValueError(f"the inner {type(inner).__name__} is closed: build a new one")
        outer = None if inner._outer is None else inner._outer()
        if outer is not None and outer._complete:
            raise ValueError(
                f"the inner {type(inner).__name__} is already wrapped by {type(outer).__name__}: build a new one, or "
                "use that stack"
            )
        inner._outer = weakref.ref(self)

    @property
    def _complete(self) -> bool:
        """Whether all settings are set: a traceback may keep a method whose constructor refused one of them."""
        return all(hasattr(self, name) for name in settings_of(type(self)))

    @classmethod
    def check_combination(cls, inner: Sequence["type[Method]"]) -> None:
        """Raise a ValueError if this method cannot wrap the `inner` ones."""
        for kind in inner:
            ours, theirs, reason = cls.__name__, kind.__name__, None
            if kind is cls:
                reason = "one of them is enough"
            elif cls.alone or kind.alone:
                reason = f"{ours if cls.alone else theirs} works alone"
            elif cls.role and cls.role == kind.role:
                reason = f"both control {cls.role}"
            elif ours.lower() == theirs.lower():
                reason = f"both would be the part {ours.lower()!r}; rename one of the classes"
            if reason is not None:
                raise ValueError(f"{ours} and {theirs} cannot be combined: {reason}")
            if cls.alters_step and kind.measures_step:
                raise ValueError(
                    f"{ours} cannot wrap {theirs}: {theirs} measures the step, which {ours} alters afterwards; use "
                    f"{theirs.lower()}+{ours.lower()}"
                )

    def _set(self, **settings: Any) -> None:
        """Check settings against the declarations in the constructor, and keep them as attributes."""
        for name, value in settings.items():
            setattr(self, name, checked(type(self), name, value))

    # ---- composition ----

    @property
    def _inner(self) -> "Method | None":
        return self.wrapped if isinstance(self.wrapped, Method) else None

    @property
    def parts(self) -> "dict[str, Method]":
        """All methods of the stack, the outermost first, by the lower-case names of their classes."""
        inner = self._inner
        return {type(self).__name__.lower(): self} | ({} if inner is None else inner.parts)

    @property
    def all_needs(self) -> Needs:
        """The needs of all parts together."""
        inner = self._inner
        return self.needs if inner is None else self.needs | inner.all_needs

    # ---- an optimizer like the wrapped one ----

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
        if self._coverage is not None:
            self._coverage.restart()

    def _trained(self) -> set[nn.Parameter]:
        return set(self._held_now())

    # ---- a step ----

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step along the accumulated gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._closed:
            raise ValueError(f"this {type(self).__name__} is closed: build a new one, or use the wrapped optimizer")
        self._notice_parameters()
        penalty_missing = self._adds_penalty and not self._penalty_taken
        self._stepping = True
        try:
            self._take_step(penalty_missing)
        finally:
            self._stepping = False
        return loss

    def _take_step(self, penalty_missing: bool) -> None:
        if (penalty_missing or not self._started) and self._is_dry_run():
            self.wrapped.step()
            return
        if not self._started and all(parameter.grad is None for parameter in self._trained()):
            raise ValueError(
                "step() came before any backward(): there is no gradient to step along; call loss.backward() first"
            )
        if penalty_missing:
            raise ValueError(
                f"the penalty of {type(self).__name__} is missing from the loss: loss = criterion(model(x), y) + "
                "optimizer.penalty()"
            )
        if self._coverage is not None:
            self._coverage.check(needed=self._adds_penalty)
        self._update()
        self._started, self._penalty_taken = True, False

    # ---- parameters that came later ----

    def _held_now(self) -> list[nn.Parameter]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _notice_parameters(self, *, always: bool = False) -> None:
        """Adapt if the optimizer holds other parameters than at the last step, or `always`."""
        held = self._held_now()
        if always or len(held) != len(self._held) or any(map(operator.is_not, held, self._held)):
            known, self._held = set(self._held), held
            self._adapt([parameter for parameter in held if parameter not in known])

    def _adapt(self, new: Sequence[nn.Parameter]) -> None:
        """Adapt to the present parameters of the model and the optimizer; `new` came since the last step."""

    def _warn_of_unprotected(self, new: Sequence[nn.Parameter]) -> None:
        """Warn of parameters that came after this method was built, and that it therefore leaves alone."""
        names = [name for name, parameter in self.model.named_parameters() if any(parameter is p for p in new)]
        if names:
            name = type(self).__name__
            warn(
                f"these parameters were added or replaced after {name} was built, so it does not protect them: "
                f"{', '.join(names)}; build a new {name}, and load this one's state_dict if the layers are the same"
            )

    def _is_dry_run(self) -> bool:
        """Whether all learning rates are 0: `torch.distributed.checkpoint` initializes the state by such a step."""
        return all(float(group.get("lr", 1)) == 0 for group in self.param_groups)

    def _update(self) -> None:
        self.wrapped.step()

    def _step_along(self, gradients: Iterable[Tensor], parameters: Sequence[nn.Parameter]) -> None:
        """Step the wrapped optimizer along these gradients. The parameters keep their own."""
        own = [parameter.grad for parameter in parameters]
        try:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            self.wrapped.step()
        finally:
            for parameter, kept in zip(parameters, own, strict=True):
                parameter.grad = kept

    def _compiled(self, function: Callable[..., Any], tensors: Iterable[Tensor]) -> Callable[..., Any]:
        """Compile a part of the step if `compile` is set and all its tensors are on a GPU."""
        return compiled(function) if self.compile and all(tensor.is_cuda for tensor in tensors) else function

    @property
    def recordable(self) -> bool:
        """Whether all steps until the end of the task are the same operations on the same tensors.

        Such steps can be captured as one CUDA graph.
        """
        return self._recordable and (self._inner is None or self._inner.recordable)

    @property
    def _recordable(self) -> bool:
        return True

    # ---- the loss ----

    def penalty(self) -> Tensor:
        """The term to add to the loss; zero for methods that do not act through the loss."""
        self._penalty_taken = True
        if self._coverage is not None:
            self._coverage.cover()
        term = self._penalty()
        if any(group.get("maximize") for group in self.param_groups):
            term = -term
        return term if self._inner is None else term + self._inner.penalty()

    @property
    def has_penalty(self) -> bool:
        """Whether a step would now be wrong without `penalty` in the loss."""
        return self._adds_penalty or (self._inner is not None and self._inner.has_penalty)

    def _penalty(self) -> Tensor:
        return torch.zeros((), device=device_of(self.model))

    @property
    def _adds_penalty(self) -> bool:
        return False

    # ---- the end of a task ----

    def consolidate(self, batches: Iterable[Any], active: Iterable[int] | None = None) -> None:
        """Finish a task.

        Args:
            batches: the batches of the task, as `(inputs, labels)` or as dicts of the model's arguments; labels count
                within the task.
            active: the output nodes of the task; all by default.
        """
        readers = [part for part in self.parts.values() if part.needs.data]
        if len(readers) > 1 and iter(batches) is batches:
            names = " and ".join(type(part).__name__ for part in readers)
            raise TypeError(f"{names} each read all batches: give a list or a DataLoader, not an iterator")
        active = None if active is None else list(active)
        commits = [part._consolidate(batches, active) for part in self.parts.values()]
        for commit in commits:
            if commit is not None:
                commit()

    def _consolidate(self, batches: Iterable[Any], active: Sequence[int] | None) -> Commit | None:
        """Measure the finished task, and return a function that remembers what was measured.

        The functions are called after all parts of a stack have measured: if one fails, none remembers the task.
        """
        return None

    def _sum_over_processes(self, tensors: Iterable[Tensor]) -> bool:
        """Sum tensors in place over the processes that train this model. Return whether there are several."""
        wrapper = None if self._wrapper is None else self._wrapper()
        if wrapper is not None:
            for tensor in tensors:
                dist.all_reduce(tensor, group=wrapper.process_group)
        elif several_processes():
            warn(
                "several processes are running, but the model was given without its DistributedDataParallel, so each "
                f"process consolidates alone; if they train one model, give {type(self).__name__} that wrapper"
            )
        return wrapper is not None

    # ---- importance ----

    @property
    def importance(self) -> dict[str, Tensor]:
        """The importance of parameters or neurons, by name; that of the inner method if this one has none."""
        return {} if self._inner is None else self._inner.importance

    @property
    def neuron_importance(self) -> dict[str, Tensor]:
        """The importance of single neurons, by layer; empty if no part measures it."""
        return {} if self._inner is None else self._inner.neuron_importance

    @property
    def plasticity(self) -> dict[str, Tensor]:
        """The share of the learning rate that is left, by name; empty if no part controls it."""
        return {} if self._inner is None else self._inner.plasticity

    @property
    def capacity(self) -> dict[str, float]:
        """The share of each layer that finished tasks take, from 0 (free) to 1 (full); empty if no part measures it."""
        return {} if self._inner is None else self._inner.capacity

    def report(self) -> Report | None:
        """What the method controls, layer by layer; None if no part controls neurons."""
        return None if self._inner is None else self._inner.report()

    # ---- memory ----

    def memory(self) -> dict[str, int]:
        """The size of the remembered tensors, in bytes, by name.

        These are the tensors of a `state_dict`, without those that are blank before the first task. Working buffers
        and data, such as the batches that joint training keeps, are not counted.
        """
        parts, kept = self.parts, {}
        for part, method in parts.items():
            for attribute, name in memory.names_of(type(method)).items():
                if tensors := memory.tensors_in(getattr(method, attribute)):
                    kept[name if len(parts) == 1 else f"{part}.{name}"] = sum(tensor.nbytes for tensor in tensors)
        return kept

    def state_dict(self) -> dict[str, Any]:
        """The state of the wrapped optimizer and the memory of the method, in the first parameter group."""
        self._notice_parameters(always=True)
        state = self.wrapped.state_dict()
        first, *others = state["param_groups"]
        own = memory.state_of(self)
        if self._inner is not None:
            own["wrapped"] = first[KEY]
        return {**state, "param_groups": [{**first, KEY: own}, *others]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state. If it does not fit, a ValueError is raised and nothing changes."""
        self._notice_parameters(always=True)
        own, rest = self._split_state(state_dict)
        restored = memory.restored(self, own)
        self._check_nesting(own)
        self.wrapped.load_state_dict(rest)  # raises before it changes anything
        for attribute, value in restored.items():
            setattr(self, attribute, value)

    def _split_state(self, state_dict: dict[str, Any]) -> tuple[Mapping[str, Any], dict[str, Any]]:
        """Split a state_dict into the memory of this method and the state_dict of the wrapped optimizer."""
        groups, state = state_dict.get("param_groups"), state_dict.get("state")
        if not isinstance(groups, list) or not groups or not all(isinstance(group, Mapping) for group in groups):
            raise ValueError("this state_dict is incomplete: its 'param_groups' are not a list of dictionaries")
        own = groups[0].get(KEY)
        if not isinstance(own, Mapping):
            raise ValueError(
                "this state_dict was not made by a holdfast method: its first parameter group has no memory under "
                f"{KEY!r}; load it into the optimizer before wrapping it"
            )
        if not isinstance(state, Mapping) or not all(isinstance(group.get("params"), list) for group in groups):
            raise ValueError("this state_dict is incomplete: it lacks 'state', or a parameter group lacks 'params'")
        first = {**groups[0], KEY: own.get("wrapped", LIVE)}
        return own, {**state_dict, "param_groups": [first, *groups[1:]]}

    def _check_nesting(self, own: Mapping[str, Any]) -> None:
        """Raise a ValueError if a state is of a stack and this method is alone, or the other way around."""
        name, inner = type(self).__name__, self._inner
        if inner is None and "wrapped" in own:
            raise ValueError(f"this state_dict was made by {name} around another method, not by {name} alone")
        if inner is not None and "wrapped" not in own:
            raise ValueError(f"this state_dict was made by {name} alone, not by {name} around {type(inner).__name__}")

    # ---- closing ----

    def close(self) -> None:
        """Remove all hooks from the model."""
        for part in self.parts.values():
            part._close()
            part._guard.remove()
            if part._coverage is not None:
                part._coverage.close()
            part._closed = True

    def _close(self) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(f"{type(self).__name__} belongs to one model in memory: save its state_dict() instead")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.wrapped!r})"


class Coverage:
    """Checks that `penalty` was called for every forward in the loss."""

    def __init__(self, model: nn.Module) -> None:
        self._tap = ForwardTap(model)
        self._covered: set[int] = set()

    def cover(self) -> None:
        """Note that `penalty` acts on the last forward."""
        self._covered.add(self._tap.last)

    def restart(self) -> None:
        """Forget the backwards so far: their gradients are not part of the next step."""
        self._tap.take()

    def check(self, needed: bool) -> None:
        """Raise a ValueError if a forward in the loss has no penalty, and start anew."""
        missing = self._tap.take() - self._covered
        self._covered.clear()
        if needed and missing:
            raise ValueError(
                "the loss has a forward without its penalty: call penalty() right after each forward whose loss is "
                "stepped, and add all of them to the loss; after any other backward, call zero_grad()"
            )

    def close(self) -> None:
        self._tap.close()


class _Guard:
    """Called before every step of a wrapped optimizer: warns once if it is stepped directly."""

    def __init__(self, method: Method) -> None:
        self._method = weakref.ref(method)
        self._warned = False

    def __call__(self) -> None:
        method = self._method()
        if method is None or method._stepping or self._warned:
            return
        self._warned = True
        if method._complete:
            name, wrapped = type(method).__name__, type(method.wrapped).__name__
            warn(
                f"the {wrapped} inside {name} was stepped directly: this is training without {name}; call step() of "
                f"the {name}"
            )


def bare(model: nn.Module) -> nn.Module:
    """The model inside the wrappers of torch.compile and DistributedDataParallel."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def several_processes() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
