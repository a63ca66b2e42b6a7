"""The hooks of one user on a model, and the rules that all of them share.

No other module of Holdfast registers hooks on modules. Those on tensors and optimizers are in `holdfast.taps.backward`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

InputTap = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]
"""Called with a module, its arguments and its keyword arguments."""
OutputTap = Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], Any]
"""Called with the output, too. A result other than None replaces the output."""


class Taps:
    """The hooks of one user on one model.

    A tap is a function that is called with the inputs or the output of a module. It is not called inside transforms of
    `torch.func`, nor, unless `always` is given, while no gradients are recorded. Copied or unpickled models are not
    tapped.

    >>> model, shapes = nn.Linear(3, 2), []
    >>> with Taps() as taps:
    ...     _ = taps.on_output(model, lambda module, args, kwargs, output: shapes.append(tuple(output.shape)))
    ...     _ = model(torch.zeros(4, 3))
    >>> shapes, len(model._forward_hooks)
    ([(4, 2)], 0)
    """

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []

    def on_input(self, module: nn.Module, tap: InputTap, *, always: bool = False) -> RemovableHandle:
        """Call `tap` before each forward of `module`."""
        handle = module.register_forward_pre_hook(_Hook(tap, always), with_kwargs=True)
        self._handles.append(handle)
        return handle

    def on_output(
        self, module: nn.Module, tap: OutputTap, *, always: bool = False, first: bool = False
    ) -> RemovableHandle:
        """Call `tap` after each forward of `module`, before all other hooks if `first`."""
        handle = module.register_forward_hook(_Hook(tap, always), with_kwargs=True, prepend=first)
        self._handles.append(handle)
        return handle

    def close(self) -> None:
        """Remove all hooks from the model."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Hook:
    """A tap inside the shared rules."""

    def __init__(self, tap: Callable[..., Any], always: bool) -> None:
        self.tap = tap
        self.always = always

    def __call__(self, *call: Any) -> Any:
        if not (self.always or torch.is_grad_enabled()) or inside_transform():
            return None
        return self.tap(*call)

    def __reduce__(self) -> tuple[type["_Idle"], tuple[()]]:
        return _Idle, ()


class _Idle:
    """Stands in for a hook on a copied or unpickled model, and does nothing."""

    def __call__(self, *_: Any) -> None:
        return None


def is_hooked(module: nn.Module) -> bool:
    """Whether `module` has a forward hook that does anything."""
    return any(not isinstance(hook, _Idle) for hook in module._forward_hooks.values())


def first_input(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return args[0] if args else next(iter(kwargs.values()), None)


def tensors_in(output: Any) -> Iterator[Tensor]:
    """Iterate over the tensors in an output, which may be a tuple, a list, a dict or a dataclass."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        yield from tensors_in(tuple(output.values()))
    elif isinstance(output, tuple | list):
        for each in output:
            yield from tensors_in(each)
    elif is_dataclass(output):
        yield from tensors_in(vars(output))


def needs_grad(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def inside_transform() -> bool:
    """Whether a transform of `torch.func` is active, as for per-sample gradients. Such a forward is not training."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()
