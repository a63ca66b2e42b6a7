"""Outputs of normalizations, computed again from their inputs, which autograd keeps in any case."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def renormalization(norm: nn.Module, x: Tensor) -> Callable[[Tensor], Tensor] | None:
    """Return a function that computes the output of `norm` again for its input `x`, without side effects.

    None if there is no such function: for other normalizations than batch norm and group norm, and under autocast,
    where the types of the first computation are unknown.

    >>> norm, x = nn.BatchNorm2d(3), torch.randn(2, 3, 4, 4)
    >>> again = renormalization(norm, x)
    >>> torch.equal(norm(x), again(x)), int(norm.num_batches_tracked)
    (True, 1)
    """
    if torch.is_autocast_enabled(x.device.type):
        return None
    if isinstance(norm, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d) and _is_torchs(norm):
        own = norm.training or norm.running_mean is None  # the statistics of the batch itself
        statistics = (None, None) if own else (norm.running_mean, norm.running_var)
        return partial(_batch_norm, norm.weight, norm.bias, statistics, norm.eps)
    if isinstance(norm, nn.GroupNorm) and _is_torchs(norm):
        return partial(F.group_norm, num_groups=norm.num_groups, weight=norm.weight, bias=norm.bias, eps=norm.eps)
    return None


def _is_torchs(norm: nn.Module) -> bool:
    """Whether `norm` is a class of torch itself: a subclass may compute something else."""
    return type(norm).__module__.startswith("torch.nn.")


def _batch_norm(
    weight: Tensor | None,
    bias: Tensor | None,
    statistics: tuple[Tensor | None, Tensor | None],
    eps: float,
    x: Tensor,
) -> Tensor:
    return F.batch_norm(x, *statistics, weight, bias, training=statistics[0] is None, eps=eps)
