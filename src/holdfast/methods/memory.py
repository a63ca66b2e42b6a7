"""The memory of a method: the attributes in its state_dict, with their checks and restoration."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from holdfast.importance import precise
from holdfast.methods.settings import checked, settings_of

if TYPE_CHECKING:
    from holdfast.methods.method import Method

RESERVED = ("method", "tensors", "blank", "layout", "wrapped")
"""The entries of a state besides settings and remembered attributes.

The name of the class, the number of remembered tensors, the names of blank ones, the memory layout of those that are
not contiguous, and the state of an inner method.
"""

Like = Callable[["Method", str], Mapping[str, Any]]
"""Returns the tensors of a method or its model that saved tensors must match, by name."""


@dataclass(frozen=True)
class Kind:
    """A kind of remembered attribute, which saves values, and checks and restores saved ones.

    Args:
        like: returns the tensors that set the shapes of saved tensors and the devices and types of restored ones; None
            for plain data.
        exact: whether tensors are restored in at least float32, the type of sums.
        whole: whether all of these tensors are remembered from the start.
        finite: whether all values are finite.
        least: the least value, if there is one.
    """

    like: Like | None = None
    exact: bool = False
    whole: bool = False
    finite: bool = True
    least: float = -math.inf

    def at_least(self, least: float) -> "Kind":
        """The same kind, with values of at least `least`."""
        return replace(self, least=least)

    def saved(self, method: "Method", attribute: str) -> Any:
        """Return a copy of the value. A list becomes a text, because torch's tools take lists apart."""
        value = getattr(method, attribute)
        if self.like is not None:
            return copied(value or {})
        if tensors_in(value):
            raise TypeError(f"{attribute!r} holds tensors: PLAIN is for numbers, choose a kind that checks shapes")
        return json.dumps(value) if isinstance(value, list) else value

    def blanks(self, method: "Method", attribute: str) -> dict[str, Tensor]:
        """Return zeros for tensors that are not remembered yet, because torch's tools load only entries that exist."""
        if self.like is None or self.whole:
            return {}
        held, likes = getattr(method, attribute) or {}, self.like(method, attribute)
        return {
            name: torch.zeros(like.shape, dtype=self._type(like), device=like.device)
            for name, like in likes.items()
            if name not in held and isinstance(like, Tensor)
        }

    def check(self, method: "Method", attribute: str, value: Any) -> None:
        """Raise a ValueError if a saved value does not fit the method and its model."""
        if self.like is None:
            if isinstance(getattr(method, attribute), Real) and not isinstance(value, Real):
                raise ValueError(f"this state_dict has {value!r} for {attribute.lstrip('_')!r}, not a number")
            return
        likes = self.like(method, attribute)
        check_shapes(value, likes if self.whole else {name: likes[name] for name in value if name in likes})
        for name, tensor in value.items():
            if isinstance(tensor, Tensor):
                self._check_values(f"{attribute.lstrip('_')} of {name!r}", tensor)

    def _check_values(self, what: str, values: Tensor) -> None:
        if self.finite and not values.isfinite().all():
            raise ValueError(f"this state_dict has values that are not finite as the {what}: load an earlier one")
        if not (values >= self.least).all():
            raise ValueError(f"this state_dict has values below {self.least:g} as the {what}: load an earlier one")

    def restored(self, method: "Method", attribute: str, saved: Any) -> Any:
        """Return a copy of the saved value on the device where the method uses it, or raise a ValueError."""
        value = parsed(saved, list) if isinstance(getattr(method, attribute), list) else saved
        self.check(method, attribute, value)
        if self.like is None:
            return value
        likes = self.like(method, attribute)
        return {name: self._copied(value[name], like) for name, like in likes.items() if name in value}

    def _copied(self, value: Any, like: Any) -> Any:
        return value.to(like.device, self._type(like), copy=True) if isinstance(value, Tensor) else value

    def _type(self, like: Tensor) -> torch.dtype:
        return precise(like.dtype) if self.exact else like.dtype


def _parameters(method: "Method", attribute: str) -> dict[str, Tensor]:
    trained = method._trained()
    return {name: p for name, p in method.model.named_parameters() if p in trained}


def _model(method: "Method", attribute: str) -> dict[str, Any]:
    return method.model.state_dict()


def _present(method: "Method", attribute: str) -> Mapping[str, Tensor]:
    value: Mapping[str, Tensor] = getattr(method, attribute)
    return value


PLAIN = Kind()
"""Numbers, names and lists of them."""
BY_PARAMETER = Kind(_parameters, exact=True)
"""One tensor per parameter, of the same shape, for some or all parameters, by name."""
BY_MODEL = Kind(_model, finite=False)  # masks in a model's buffers may be infinite
"""A state_dict of the model, perhaps from before it grew."""
AS_BEFORE = Kind(_present, whole=True)
"""Tensors with the same names and shapes as in the attribute's present value."""


# ---- the state of a method ----


def names_of(kind: "type[Method]") -> dict[str, str]:
    """The names in a state of the attributes in `remembers`."""
    return {attribute: attribute.lstrip("_") for attribute in kind.remembers}


def rename(method: "Method", names: Mapping[str, str]) -> None:
    """Rename parameters in everything that a method remembers by parameter."""
    for attribute, kind in type(method).remembers.items():
        if kind.like is _parameters:
            memory = getattr(method, attribute)
            setattr(method, attribute, {names.get(name, name): value for name, value in memory.items()})


def state_of(method: "Method") -> dict[str, Any]:
    """The settings and the memory of a method.

    All tensors that it may remember are in the state from the start. Those that it does not remember yet are zeros, and
    `blank` lists their names. All are contiguous, and `layout` has the order of the axes in memory where it differs.
    """
    kind, tensors, blank, layout = type(method), 0, {}, {}
    state: dict[str, Any] = {"method": kind.__name__}
    state |= {name: getattr(method, name) for name in settings_of(kind)}
    for attribute, name in names_of(kind).items():
        remembered = kind.remembers[attribute]
        saved, blanks = remembered.saved(method, attribute), remembered.blanks(method, attribute)
        state[name] = {**saved, **blanks} if blanks else saved
        tensors += len(tensors_in(saved))
        blank[name] = list(blanks)
        layout[name] = _layout(getattr(method, attribute)) if remembered.like is not None else {}
    return {**state, "tensors": tensors, "blank": json.dumps(blank), "layout": json.dumps(layout)}


def restored(method: "Method", state: Mapping[str, Any]) -> dict[str, Any]:
    """The settings and remembered attributes in a state. A ValueError is raised if it does not fit the method."""
    kind, names = type(method), names_of(type(method))
    if (made_by := state.get("method")) != kind.__name__:
        raise ValueError(f"this state_dict was made by {made_by}, not by {kind.__name__}")
    plain = [name for attribute, name in names.items() if kind.remembers[attribute].like is None]
    if missing := [name for name in (*settings_of(kind), *plain, "tensors", "blank", "layout") if name not in state]:
        raise ValueError(
            f"this state_dict of {kind.__name__} has no {', '.join(missing)}: load all of it, into the version of "
            "holdfast that saved it"
        )
    values = {name: _setting(kind, name, state[name]) for name in settings_of(kind)}
    blank, layout, count = parsed(state["blank"], dict), parsed(state["layout"], dict), 0
    for attribute, name in names.items():
        saved = state.get(name, {})  # torch's tools drop empty dictionaries
        if name not in plain:
            if not isinstance(saved, Mapping):
                raise ValueError(f"this state_dict of {kind.__name__} has {saved!r} for {name!r}, not tensors by name")
            saved = {key: value for key, value in saved.items() if key not in blank.get(name, ())}
            saved |= {key: _laid_out(saved[key], axes) for key, axes in layout.get(name, {}).items() if key in saved}
        values[attribute] = kind.remembers[attribute].restored(method, attribute, saved)
        count += len(tensors_in(saved))
    if not isinstance(state["tensors"], int) or count != state["tensors"]:
        raise ValueError(
            f"this state_dict of {kind.__name__} has {count} of the {state['tensors']} tensors it was saved with: load "
            "all of it, not only the entries that a new optimizer has"
        )
    return values


def _layout(tensors: Mapping[str, Any] | None) -> dict[str, list[int]]:
    """The axes of tensors that are not contiguous, the slowest in memory first."""
    found = {name: tensor for name, tensor in (tensors or {}).items() if isinstance(tensor, Tensor)}
    return {
        name: sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
        for name, tensor in found.items()
        if not tensor.is_contiguous()
    }


def _laid_out(tensor: Any, axes: list[int]) -> Any:
    """Copy a tensor to memory in the given order of its axes: the bits of a product may depend on it."""
    if not isinstance(tensor, Tensor) or len(axes) != tensor.dim():
        return tensor
    return torch.empty_permuted(tensor.shape, axes, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _setting(kind: "type[Method]", name: str, value: Any) -> Any:
    try:
        return checked(kind, name, value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"this state_dict of {kind.__name__} has a wrong setting: {error}") from None


def parsed(text: Any, kind: type) -> Any:
    """Parse a list or dictionary that was saved as a text."""
    try:
        value = json.loads(text)
    except (TypeError, ValueError):
        value = None
    if not isinstance(value, kind):
        raise ValueError(f"this state_dict is damaged: it has {text!r} instead of a {kind.__name__} as a text")
    return value


# ---- tensors ----


def copied(value: Any) -> Any:
    """Copy tensors and plain data, also inside dictionaries and lists.

    Copies are contiguous: torch would broadcast the elements of other tensors in a wrong order.
    """
    if isinstance(value, Tensor):
        return value.detach().clone(memory_format=torch.contiguous_format)
    if isinstance(value, Mapping):
        return {key: copied(inner) for key, inner in value.items()}
    return [copied(inner) for inner in value] if isinstance(value, list) else value


def tensors_in(value: Any) -> list[Tensor]:
    """Find all tensors inside dictionaries and lists."""
    if isinstance(value, Tensor):
        return [value]
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return [tensor for each in inner for tensor in tensors_in(each)]


def check_shapes(saved: Mapping[str, Any], present: Mapping[str, Any]) -> None:
    """Raise a ValueError unless saved and present tensors have the same names and shapes."""
    for name in (*present, *saved):
        here, there = (_shape(tensors.get(name)) for tensors in (present, saved))
        if here != there:
            raise ValueError(
                f"this state_dict is of another model: it has {there} for {name!r}, this model has {here}; "
                "build the model and the method as they were when it was saved"
            )


def _shape(value: Any) -> str:
    return str(tuple(value.shape)) if isinstance(value, Tensor) else "nothing" if value is None else "other data"
