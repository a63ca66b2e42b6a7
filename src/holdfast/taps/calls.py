"""A tap of a model's inputs and outputs."""

from typing import Any, NamedTuple

from torch import nn

from holdfast.taps.hooks import Taps


class Call(NamedTuple):
    """One call of a model: its arguments and its output."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any


class CallTap:
    """Keep the inputs and the output of the last training forward of `model`.

    >>> import torch
    >>> model = nn.Linear(4, 2)
    >>> tap = CallTap(model)
    >>> output = model(torch.zeros(3, 4))
    >>> tap.take().output is output, tap.take()
    (True, None)
    """

    def __init__(self, model: nn.Module) -> None:
        self._call: Call | None = None
        self._taps = Taps()
        self._taps.on_output(model, self._keep)

    def _keep(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self._call = Call(args, kwargs, output)

    def take(self) -> Call | None:
        """Return and forget the last training forward."""
        call, self._call = self._call, None
        return call

    def close(self) -> None:
        self._taps.close()
        self._call = None
