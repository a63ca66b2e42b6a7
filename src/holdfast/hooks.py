"""What all hooks on a model have in common."""

from typing import Any

import torch
from torch import Tensor


class Idle:
    """What a copied or unpickled model has in place of a hook: nothing is measured on it."""

    def __call__(self, *_: Any) -> None:
        return None


class Hook:
    def __reduce__(self) -> tuple[type[Idle], tuple[()]]:
        return Idle, ()


def needs_grad(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def inside_transform() -> bool:
    """Whether a transform of torch.func is at work, as for per-sample gradients: that is not training."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()
