"""From importance to plasticity: eq. 10 and 11 of the paper. `docs/npc.md` derives them."""

import torch
from torch import Tensor


def plasticity(importance: Tensor, *, beta: float, gain: float = 1.0) -> Tensor:
    """The share of the full learning rate that each neuron keeps, between 0 (frozen) and 1 (fully plastic).

    >>> plasticity(torch.tensor([0.0, 0.1, 0.25, 0.5, 2.0]), beta=0.5)
    tensor([1.0000, 1.0000, 0.6436, 0.0000, 0.0000])
    """
    excess = torch.sqrt(beta / importance) - 1  # infinite at importance 0, where a neuron has nothing to lose
    return (gain * torch.sqrt(excess.clamp(min=0))).clamp(max=1)  # eq. 10, 11
