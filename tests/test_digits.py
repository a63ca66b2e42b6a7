"""On a small real stream, five pairs of handwritten digits, every method forgets less than fine-tuning.

Compact does not by itself: it makes room for a method that does.
"""

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.optim import SGD

from holdfast.methods import HELPERS, METHODS
from holdfast.models import mlp

SEEDS, EPOCHS, BATCH = 3, 12, 16
PAIRS = ([0, 1], [2, 3], [4, 5], [6, 7], [8, 9])
SETTINGS: dict[str, dict[str, Any]] = {  # what differs from the defaults: tasks are short here, and gradients small
    "npc": {"rate": 3e-3},
    "cpc": {"rate": 3e-3},
    "ewc": {"strength": 1000.0},
    "si": {"strength": 1.0},
}
BOUNDS = {"finetune", "joint", "separate"}


@cache
def images() -> tuple[Tensor, Tensor]:
    x, y = load_digits(return_X_y=True)
    return torch.tensor(x / 16).float(), torch.tensor(y)


def part(pair: list[int], test: bool) -> tuple[Tensor, Tensor]:
    """Every fourth image is for the test."""
    x, y = images()
    chosen = ((torch.arange(len(y)) % 4 == 3) == test) & ((y == pair[0]) | (y == pair[1]))
    return x[chosen], y[chosen] - pair[0]


def accuracy(model: nn.Module, pair: list[int]) -> float:
    x, y = part(pair, test=True)
    with torch.no_grad():
        return float((model(x)[:, pair].argmax(1) == y).double().mean())


@cache
def matrix(name: str, seed: int) -> NDArray[np.float64]:
    """Accuracy, [after task, on task]."""
    torch.manual_seed(seed)
    model = mlp(64, [100, 100, 100], 10)
    settings = SETTINGS.get(name, {}) | ({"free": [model.head]} if METHODS[name].needs.heads else {})
    optimizer = METHODS[name](model, SGD(model.parameters(), lr=0.05), **settings)
    rows = []
    for pair in PAIRS:
        x, y = part(pair, test=False)
        for _ in range(EPOCHS):
            for chosen in torch.randperm(len(y)).split(BATCH):
                loss = nn.functional.cross_entropy(model(x[chosen])[:, pair], y[chosen]) + optimizer.penalty()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        rows.append([accuracy(model, each) for each in PAIRS])
        optimizer.consolidate([(x[i], y[i]) for i in torch.arange(len(y)).split(BATCH)], active=pair)
    return np.array(rows)


def forgetting(name: str) -> float:
    """How much of each task's accuracy is gone at the end, the mean over tasks and seeds."""
    each = [matrix(name, seed) for seed in range(SEEDS)]
    return float(np.mean([(m.diagonal() - m[-1])[:-1].mean() for m in each]))


def learned(name: str) -> float:
    return float(np.mean([matrix(name, seed).diagonal().mean() for seed in range(SEEDS)]))


def test_fine_tuning_forgets() -> None:
    assert learned("finetune") > 0.95
    assert forgetting("finetune") > 0.08


@pytest.mark.parametrize("name", sorted(METHODS.keys() - BOUNDS - HELPERS))
def test_a_method_forgets_less_and_still_learns(name: str) -> None:
    assert forgetting(name) < 0.5 * forgetting("finetune")
    assert learned(name) > 0.9


def test_the_bounds_are_bounds() -> None:
    assert forgetting("joint") < 0.2 * forgetting("finetune")
    assert learned("separate") > 0.97
