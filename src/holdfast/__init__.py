"""Continual learning by neuron-level plasticity control."""

from importlib.metadata import PackageNotFoundError, version

from holdfast.methods import NPC

try:
    __version__ = version("holdfast")
except PackageNotFoundError:  # run from a source tree
    __version__ = "0+unknown"

__all__ = ["NPC", "__version__"]
