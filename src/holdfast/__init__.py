"""Continual learning by neuron-level plasticity control."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from holdfast.version import __version__

if TYPE_CHECKING:
    from holdfast.forgetting import Forgetting
    from holdfast.methods import (
        CPC,
        DPC,
        EWC,
        KFAC,
        MAS,
        METHODS,
        NPC,
        SI,
        SSL,
        Compact,
        FineTune,
        Joint,
        LwF,
        Separate,
        explain,
    )
    from holdfast.methods.measured import Measured, load_measured
    from holdfast.methods.measuring import measure

__all__ = [
    "CPC",
    "Compact",
    "DPC",
    "EWC",
    "FineTune",
    "Forgetting",
    "Joint",
    "KFAC",
    "LwF",
    "MAS",
    "METHODS",
    "Measured",
    "NPC",
    "SI",
    "SSL",
    "Separate",
    "__version__",
    "explain",
    "load_measured",
    "measure",
]

_MODULES = {
    "Forgetting": "holdfast.forgetting",
    "Measured": "holdfast.methods.measured",
    "load_measured": "holdfast.methods.measured",
    "measure": "holdfast.methods.measuring",
}
"""The modules of names that are not in `holdfast.methods`."""


def __getattr__(name: str) -> Any:
    """Import methods and functions, and with them torch, when they are first used."""
    if name not in __all__:
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
    return getattr(import_module(_MODULES.get(name, "holdfast.methods")), name)


def __dir__() -> list[str]:
    return __all__
