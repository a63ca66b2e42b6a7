"""The methods: one file each, and one line in the registry below.

Importing this package does not import torch. A class is imported when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from holdfast.errors import alternatives
from holdfast.registry import Registry

if TYPE_CHECKING:
    from holdfast.methods.compact import Compact
    from holdfast.methods.cpc import CPC
    from holdfast.methods.dpc import DPC
    from holdfast.methods.ewc import EWC
    from holdfast.methods.explaining import explain
    from holdfast.methods.finetune import FineTune
    from holdfast.methods.joint import Joint
    from holdfast.methods.kfac import KFAC
    from holdfast.methods.lwf import LwF
    from holdfast.methods.mas import MAS
    from holdfast.methods.method import Method
    from holdfast.methods.npc import NPC
    from holdfast.methods.separate import Separate
    from holdfast.methods.si import SI
    from holdfast.methods.ssl import SSL


METHODS: Registry["type[Method]"] = Registry(
    {
        "npc": "holdfast.methods.npc:NPC",
        "dpc": "holdfast.methods.dpc:DPC",
        "cpc": "holdfast.methods.cpc:CPC",
        "ewc": "holdfast.methods.ewc:EWC",
        "kfac": "holdfast.methods.kfac:KFAC",
        "mas": "holdfast.methods.mas:MAS",
        "si": "holdfast.methods.si:SI",
        "ssl": "holdfast.methods.ssl:SSL",
        "compact": "holdfast.methods.compact:Compact",
        "lwf": "holdfast.methods.lwf:LwF",
        "finetune": "holdfast.methods.finetune:FineTune",
        "joint": "holdfast.methods.joint:Joint",
        "separate": "holdfast.methods.separate:Separate",
    }
)
"""Every method by name. A registered method is tested as an optimizer and takes part in studies."""

BOUNDS = frozenset({"joint", "separate"})
"""Methods that keep all data or train a fresh model for each task: upper bounds."""
HELPERS = frozenset({"compact"})
"""Methods that make room for others and do not prevent forgetting by themselves."""


def parts_of(method: str) -> list[str]:
    """Split the name of a composed method into its parts, the outermost first: "lwf+npc" is LwF around NPC.

    >>> parts_of("lwf+npc")
    ['lwf', 'npc']
    """
    parts = method.split("+") if isinstance(method, str) else [method]
    for part in parts:
        if part not in METHODS:
            raise ValueError(f"unknown method {part!r}; available: {alternatives(part, METHODS)}")
    if len(set(parts)) < len(parts):
        raise ValueError(f"{method!r} names a method twice: leave one of them out")
    for part in parts:
        if part in BOUNDS and len(parts) > 1:
            raise ValueError(f"{part} is an upper bound and cannot be combined with other methods")
    return parts


def __getattr__(name: str) -> Any:
    """Import a method class, the base class `Method` or the function `explain` when it is first used."""
    if name == "Method":
        return import_module("holdfast.methods.method").Method
    if name == "explain":
        return import_module("holdfast.methods.explaining").explain
    if (registered := METHODS.named(name)) is not None:
        return METHODS[registered]
    raise AttributeError(f"module 'holdfast.methods' has no attribute {name!r}")


__all__ = [
    "BOUNDS",
    "HELPERS",
    "METHODS",
    "CPC",
    "Compact",
    "DPC",
    "EWC",
    "FineTune",
    "Joint",
    "KFAC",
    "LwF",
    "MAS",
    "Method",
    "NPC",
    "SI",
    "SSL",
    "Separate",
    "explain",
    "parts_of",
]
