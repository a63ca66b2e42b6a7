"""The memory of a method: the attributes in its state_dict, with their checks and restoration."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from holdfast.importance import precise

if TYPE_CHECKING:
    from holdfast.methods.method import Method

Like = Callable[["Method", str, Mapping[str, Any]], Mapping[str, Tensor]]
"""Returns the tensors of a method or its model that saved tensors must match, by name."""


@dataclass(frozen=True)
class Kind:
    """A kind of remembered attribute, which checks and restores saved values.

    Args:
        like: returns the tensors that set the shapes of saved tensors and the devices and types of restored ones; None
            for plain data.
        exact: whether tensors are restored in at least float32, the type of sums.
    """

    like: Like | None = None
    exact: bool = False

    def check(self, method: "Method", attribute: str, saved: Any) -> None:
        """Raise a ValueError if a saved value does not fit the method and its model."""
        if self.like is not None and saved is not None:
            check_shapes(saved, self.like(method, attribute, saved))

    def restored(self, method: "Method", attribute: str, saved: Any) -> Any:
        """Return a copy of the saved value, on the device where the method uses it."""
        if self.like is None or saved is None:
            return copied(saved)
        likes = self.like(method, attribute, saved)
        return {name: self._copied(saved[name], like) for name, like in likes.items()}

    def _copied(self, value: Tensor, like: Tensor) -> Tensor:
        return value.to(like.device, precise(like.dtype) if self.exact else like.dtype, copy=True)


def _parameters(method: "Method", attribute: str, saved: Mapping[str, Any]) -> dict[str, Tensor]:
    trained = method._trained()
    return {name: p for name, p in method.model.named_parameters() if p in trained and name in saved}


def _model(method: "Method", attribute: str, saved: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in method.model.state_dict().items() if name in saved}


def _present(method: "Method", attribute: str, saved: Mapping[str, Any]) -> Mapping[str, Tensor]:
    value: Mapping[str, Tensor] = getattr(method, attribute)
    return value


PLAIN = Kind()
"""Numbers, names and lists of them."""
BY_PARAMETER = Kind(_parameters, exact=True)
"""One tensor per parameter, of the same shape, for some or all parameters, by name."""
BY_MODEL = Kind(_model)
"""A state_dict of the model, perhaps from before it grew."""
AS_BEFORE = Kind(_present)
"""Tensors with the same names and shapes as in the attribute's present value."""


def copied(value: Any) -> Any:
    """Copy tensors and plain data, also inside dictionaries and lists."""
    if isinstance(value, Tensor):
        return value.detach().clone()
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
