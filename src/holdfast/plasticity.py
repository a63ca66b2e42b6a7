"""From importance to plasticity, eq. 10 and 11 of the paper, and from plasticity to a change of parameters.

`docs/npc.md` derives the equations.
"""

import torch
from torch import Tensor

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def plasticity(importance: Tensor, *, beta: float, gain: float = 1.0) -> Tensor:
    """The share of the full learning rate that each neuron keeps, between 0 (frozen) and 1 (fully plastic).

    >>> plasticity(torch.tensor([0.0, 0.1, 0.25, 0.5, 2.0]), beta=0.5)
    tensor([1.0000, 1.0000, 0.6436, 0.0000, 0.0000])
    """
    # One correctly rounded division, so that an importance above beta never leaves a trace of plasticity. It is
    # infinite at importance 0, where a neuron has nothing to lose.
    ratio = torch.full((), beta, dtype=importance.dtype) / importance
    excess = torch.sqrt(ratio) - 1
    return torch.sqrt((gain**2 * excess).clamp(0, 1))  # eq. 10, 11


def plastic_bits(share: Tensor, dtype: torch.dtype) -> Tensor:
    """For numbers of type `dtype`: all bits set where `share` is above 0, none where it is 0.

    Selecting by bits rather than by a product or a boolean mask is exact, since 0 times infinity is not 0, and fast.
    """
    return -(share > 0).to(_BITS[dtype.itemsize])


def scale_(change: Tensor, share: Tensor, plastic: Tensor) -> None:
    """Leave, in place, only `share` of a change: 0 where nothing is plastic, even of a change that is not finite.

    >>> change, share = torch.tensor([2.0, 2.0, torch.nan]), torch.tensor([1.0, 0.5, 0.0])
    >>> scale_(change, share, plastic_bits(share, torch.float32))
    >>> change
    tensor([2., 1., 0.])
    """
    change.mul_(share).view(plastic.dtype).bitwise_and_(plastic)


def hold_back_(after: Tensor, before: Tensor, share: Tensor, plastic: Tensor) -> None:
    """Leave, in place, only `share` of the change from `before` to `after`: all of it at 1, not one bit of it at 0.

    >>> before, after = torch.tensor([1.0, 1.0, 1.0]), torch.tensor([2.0, 2.0, torch.nan])
    >>> share = torch.tensor([1.0, 0.5, 0.0])
    >>> hold_back_(after, before, share, plastic_bits(share, torch.float32))
    >>> after
    tensor([2.0000, 1.5000, 1.0000])
    """
    torch.lerp(before, after, share, out=after)
    old = before.view(plastic.dtype)
    after.view(plastic.dtype).bitwise_xor_(old).bitwise_and_(plastic).bitwise_xor_(old)


def limit_(changing: Tensor, before: Tensor | None, share: Tensor, plastic: Tensor) -> None:
    """`hold_back_` for a parameter after its step, `scale_` for a gradient, which has no `before`."""
    if before is None:
        scale_(changing, share, plastic)
    else:
        hold_back_(changing, before, share, plastic)
