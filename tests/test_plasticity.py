import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar

from holdfast.plasticity import plasticity

positive = st.floats(0.05, 20)


def one(importance: float, beta: float, gain: float = 1.0) -> float:
    return plasticity(torch.tensor([importance], dtype=torch.float64), beta=beta, gain=gain).item()


def test_by_hand() -> None:
    # beta = 0.9, C = 0.4: sqrt(0.9 / 0.4) = 1.5, sqrt(1.5 - 1) = 0.7071
    assert one(0.4, beta=0.9) == pytest.approx(math.sqrt(0.5))
    assert one(0.4, beta=0.9, gain=0.5) == pytest.approx(0.5 * math.sqrt(0.5))
    assert one(0.0, beta=0.9) == 1
    assert one(0.9 / 4, beta=0.9) == 1  # sqrt(4) - 1 = 1: from here on down the neuron is fully plastic
    assert one(0.9, beta=0.9) == 0
    assert one(1e9, beta=0.9) == 0


@given(positive, positive, positive, positive)
def test_bounded_and_falling(low: float, high: float, beta: float, gain: float) -> None:
    low, high = sorted((low, high))
    assert 0 <= one(high, beta, gain) <= one(low, beta, gain) <= 1


@given(positive, positive, st.sampled_from([torch.float32, torch.float64]), st.integers(1, 3))
def test_frozen_from_the_first_number_above_beta(beta: float, gain: float, dtype: torch.dtype, steps: int) -> None:
    importance = torch.full((1,), beta, dtype=dtype)
    while importance.item() <= beta or (steps := steps - 1) >= 0:
        importance = torch.nextafter(importance, torch.full_like(importance, torch.inf))
    assert plasticity(importance, beta=beta, gain=gain).item() == 0


@given(positive, positive, st.floats(0.1, 0.8), positive, st.floats(1e-3, 0.02))
def test_closed_form_is_the_minimum_of_the_combined_loss(
    a1: float, a2: float, ratio: float, b2: float, excess: float
) -> None:
    """Eq. 5 minimized numerically, against eq. 9 with the factor 2 that eq. 8 lost (docs/npc.md).

    The closed form drops terms of fourth order, so the two agree to the relative size of the excess sqrt(beta/C) - 1.
    """
    b1 = ratio * b2
    beta = a2 * b2 / (a1 * b1)
    importance = beta / (1 + excess) ** 2
    alpha = math.sqrt(2 / (b2**2 - b1**2))

    def combined_loss(eta: float) -> float:
        return a1 * importance * math.tanh(b1 * eta) + a2 * (1 - math.tanh(b2 * eta))

    found = minimize_scalar(combined_loss, bounds=(0, 4 * alpha * math.sqrt(excess)), options={"xatol": 1e-12}).x
    closed = alpha * one(importance, beta)
    squared = ratio**2
    next_term = abs(1 - 5 * squared) / (12 * (1 - squared))  # the fourth-order term's share of eta, per excess
    assert found == pytest.approx(closed, rel=1.1 * next_term * excess + 2 * excess**2 + 1e-4)


@given(positive, positive, st.floats(0.1, 0.9), positive, st.floats(1.001, 50))
def test_beyond_beta_the_combined_loss_has_its_minimum_at_zero(
    a1: float, a2: float, ratio: float, b2: float, times: float
) -> None:
    b1 = ratio * b2
    importance = times * a2 * b2 / (a1 * b1)
    etas = [k / (50 * b2) for k in range(200)]
    losses = [a1 * importance * math.tanh(b1 * eta) + a2 * (1 - math.tanh(b2 * eta)) for eta in etas]
    assert min(losses) == losses[0]
