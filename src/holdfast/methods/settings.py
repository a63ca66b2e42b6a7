"""Settings of methods: declared once, in the signature of the constructor, with their ranges.

    def __init__(self, model, optimizer, *, beta: Positive = 0.7, form: Form = "proximal") -> None: ...

The constructor, `load_state_dict` and study files all check values against these declarations.
"""

import inspect
import math
from dataclasses import dataclass
from numbers import Real
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from holdfast.methods.method import Method


@dataclass(frozen=True)
class Range:
    """The range of a number: above `above` if given, else at least `least`, and at most `most`."""

    least: float = 0
    above: float | None = None
    most: float = math.inf


Positive = Annotated[float, Range(above=0)]
NonNegative = Annotated[float, Range()]
Fraction = Annotated[float, Range(above=0, most=1)]
Count = Annotated[int | None, Range(least=1)]
"""A whole number of at least 1, or None for no limit."""


def number(name: str, value: float, *, above: float | None = None, least: float = 0, most: float = math.inf) -> float:
    """Return `value` as a float if it is a finite number within the limits of a `Range`."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r}")
    above_lower = value >= least if above is None else value > above
    if not above_lower or not value <= most or math.isinf(value):
        lower = f"at least {least:g}" if above is None else f"above {above:g}"
        upper = "" if math.isinf(most) else f" and at most {most:g}"
        raise ValueError(f"{name} must be {lower}{upper}, got {value!r}")
    return float(value)


def count(name: str, value: int | None, *, least: float) -> int | None:
    """Return `value` if it is a whole number of at least `least`, or None."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise TypeError(f"{name} must be a whole number or None, got {value!r}")
    if value is not None and value < least:
        raise ValueError(f"{name} must be at least {least:g}, got {value}")
    return value


def checked(kind: "type[Method]", name: str, value: Any) -> Any:
    """Check a value of a setting against its declaration, and return it.

    >>> from holdfast.methods import NPC
    >>> checked(NPC, "rate", 2)
    Traceback (most recent call last):
    ValueError: rate must be above 0 and at most 1, got 2
    """
    hint = _hint(kind, name)
    if get_origin(hint) is Literal and value not in get_args(hint):
        choices = " or ".join(f'"{choice}"' for choice in get_args(hint))
        raise ValueError(f"{name} must be {choices}, got {value!r}")
    if get_origin(hint) is Annotated:
        inner, limits = get_args(hint)
        if inner is float:
            return number(name, value, above=limits.above, least=limits.least, most=limits.most)
        return count(name, value, least=limits.least)
    return value


def settings_of(kind: "type[Method]") -> dict[str, Any]:
    """The settings of a method that are plain values, with their defaults."""
    _model, _optimizer, *parameters = inspect.signature(kind).parameters.values()
    return {p.name: p.default for p in parameters if _is_plain(_hint(kind, p.name))}


def _hint(kind: "type[Method]", name: str) -> Any:
    """The declared type of a setting, in the nearest class that declares it."""
    for base in kind.__mro__:
        if "__init__" in vars(base):
            hints = get_type_hints(vars(base)["__init__"], include_extras=True)
            if name in hints:
                return hints[name]
    return None


def _is_plain(hint: Any) -> bool:
    """Whether values of a type can be written in a file: modules and functions cannot."""
    if get_origin(hint) is Annotated:
        return _is_plain(get_args(hint)[0])
    if get_origin(hint) in (Union, UnionType):
        return all(map(_is_plain, get_args(hint)))
    return hint in (None, bool, int, float, str, NoneType) or get_origin(hint) is Literal
