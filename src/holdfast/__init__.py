"""Continual learning by neuron-level plasticity control."""

from importlib.metadata import PackageNotFoundError, version

from holdfast.methods import CPC, EWC, MAS, METHODS, NPC, SI, SSL, FineTune, Joint, LwF, Separate

try:
    __version__ = version("holdfast")
except PackageNotFoundError:  # run from a source tree
    __version__ = "0+unknown"

__all__ = [
    "CPC",
    "EWC",
    "FineTune",
    "Joint",
    "LwF",
    "MAS",
    "METHODS",
    "NPC",
    "SI",
    "SSL",
    "Separate",
    "__version__",
]
