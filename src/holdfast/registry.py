"""Lazy registries: values are imported on first use."""

from collections.abc import Iterator, MutableMapping
from importlib import import_module
from typing import TypeVar

T = TypeVar("T")


class Registry(MutableMapping[str, T]):
    """A mapping whose values are imported when they are first used.

    >>> functions: Registry[object] = Registry({"root": "math:sqrt"})
    >>> list(functions), functions["root"](9.0)
    (['root'], 3.0)
    """

    def __init__(self, paths: dict[str, str]) -> None:
        self._paths = paths
        self._loaded: dict[str, T] = {}

    def __getitem__(self, name: str) -> T:
        if name not in self._loaded:
            module, _, attribute = self._paths[name].partition(":")
            self._loaded[name] = getattr(import_module(module), attribute)
        return self._loaded[name]

    def __setitem__(self, name: str, value: T) -> None:
        self._paths[name] = f"{getattr(value, '__module__', '')}:{getattr(value, '__name__', name)}"
        self._loaded[name] = value

    def __delitem__(self, name: str) -> None:
        del self._paths[name]
        self._loaded.pop(name, None)

    def __contains__(self, name: object) -> bool:
        return name in self._paths

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)

    def named(self, attribute: str) -> str | None:
        """The name under which a class or function is registered, or None."""
        return next((name for name, path in self._paths.items() if path.partition(":")[2] == attribute), None)
