"""Plasticity from importance, and parameter changes limited by plasticity.

Equation numbers are those of Paik, Oh, Kwak, Kim, "Overcoming Catastrophic Forgetting by Neuron-level Plasticity
Control". `docs/npc.md` derives them.
"""

import torch
from torch import Tensor

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def plasticity(importance: Tensor, *, beta: float, gain: float = 1.0) -> Tensor:
    """Return each neuron's share of the full learning rate, from 0 (frozen) to 1 (fully plastic).

    With importance C, the share is min(1, gain * sqrt(max(sqrt(beta / C) - 1, 0))) (eq. 10 and 11).

    >>> plasticity(torch.tensor([0.0, 0.1, 0.25, 0.5, 2.0]), beta=0.5)
    tensor([1.0000, 1.0000, 0.6436, 0.0000, 0.0000])
    """
    # One correctly rounded division: above beta, plasticity is exactly 0. The ratio is infinite at importance 0.
    ratio = torch.full((), beta, dtype=importance.dtype) / importance
    excess = torch.sqrt(ratio) - 1
    return torch.sqrt((gain**2 * excess).clamp(0, 1))  # eq. 10, 11


def plastic_bits(share: Tensor, dtype: torch.dtype) -> Tensor:
    """Return bit masks for numbers of type `dtype`: all bits set where `share` is positive, none where it is 0.

    A bitwise selection is as fast as a product, and exact: 0 times infinity is not 0.
    """
    return -(share > 0).to(_BITS[dtype.itemsize])


def scaled(change: Tensor, share: Tensor, plastic: Tensor) -> Tensor:
    """Scale a change by `share`. The result is 0 at share 0, even if the change is not finite.

    >>> change, share = torch.tensor([2.0, 2.0, torch.nan]), torch.tensor([1.0, 0.5, 0.0])
    >>> scaled(change, share, plastic_bits(share, torch.float32))
    tensor([2., 1., 0.])
    """
    product = change * share
    product.view(plastic.dtype).bitwise_and_(plastic)
    return product


def hold_back_(after: Tensor, before: Tensor, share: Tensor, plastic: Tensor) -> None:
    """Scale the change from `before` to `after` by `share`, in place. It is kept whole at 1 and undone to the bit at 0.

    >>> before, after = torch.tensor([1.0, 1.0, 1.0]), torch.tensor([2.0, 2.0, torch.nan])
    >>> share = torch.tensor([1.0, 0.5, 0.0])
    >>> hold_back_(after, before, share, plastic_bits(share, torch.float32))
    >>> after
    tensor([2.0000, 1.5000, 1.0000])
    """
    torch.lerp(before, after, share, out=after)
    old = before.view(plastic.dtype)
    after.view(plastic.dtype).bitwise_xor_(old).bitwise_and_(plastic).bitwise_xor_(old)


def limited(changing: Tensor, before: Tensor | None, share: Tensor, plastic: Tensor) -> Tensor:
    """Limit a parameter after its step, in place (`hold_back_`), or a gradient if there is no `before` (`scaled`)."""
    if before is None:
        return scaled(changing, share, plastic)
    hold_back_(changing, before, share, plastic)
    return changing
