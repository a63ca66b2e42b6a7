"""The networks of the studies, by name. Importing this package does not import torch."""

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from holdfast.errors import alternatives
from holdfast.registry import Registry

if TYPE_CHECKING:
    from torch import nn

    from holdfast.models.networks import GrowingHead, mlp, paper_cnn, small_cnn

Shape = tuple[int, int, int]
"""Channels, height and width of an image."""

MODELS: Registry[Callable[[Shape, int, float], "nn.Sequential"]] = Registry(
    {
        "paper_cnn": "holdfast.models.networks:build_paper_cnn",
        "small_cnn": "holdfast.models.networks:build_small_cnn",
        "mlp": "holdfast.models.networks:build_mlp",
    }
)
"""Builders of models by name: from the shape of the inputs, the number of outputs and the width."""


def check_model(name: str) -> None:
    """Raise a ValueError if there is no such model.

    >>> check_model("mpl")
    Traceback (most recent call last):
    ValueError: unknown model 'mpl'; available: paper_cnn, small_cnn, mlp: did you mean mlp?
    """
    if name not in MODELS:
        raise ValueError(f"unknown model {name!r}; available: {alternatives(name, MODELS)}")


def build_model(name: str, shape: Shape, outputs: int, width: float = 1.0) -> "nn.Sequential":
    """Build a model by name. `width` scales the number of hidden neurons."""
    return MODELS[name](shape, outputs, width)


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("holdfast.models.networks"), name)
    raise AttributeError(f"module 'holdfast.models' has no attribute {name!r}")


__all__ = ["MODELS", "GrowingHead", "Shape", "build_model", "check_model", "mlp", "paper_cnn", "small_cnn"]
