"""The ablations of DPC: they train, and the forms of the update are their formulas."""

import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD

from holdfast.methods import METHODS
from holdfast.runs.training import train
from test_training import stream

SCRIPT = Path(__file__).parents[1] / "results" / "ablations.py"

pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="the results are not part of this copy")


@pytest.fixture(scope="module")
def script() -> Iterator[dict[str, Any]]:
    before = set(METHODS)
    yield runpy.run_path(str(SCRIPT))
    for name in set(METHODS) - before:
        del METHODS[name]


def test_every_ablation_trains(script: dict[str, Any]) -> None:
    made = stream()
    for name, ablation in script["ABLATIONS"].items():
        plan = ablation.plan(seed=0, epochs=2, epoch="task", batch=8, model="mlp")
        record = train(made, plan, device="cpu")
        assert record.failure is None, name
        assert len(record.matrix) == 3, name


@pytest.mark.parametrize("name", ["dpc", "productform", "sharp"])
def test_a_form_of_the_update_is_its_formula(script: dict[str, Any], name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4, bias=False), nn.Linear(4, 2)).double()
    settings: dict[str, Any] = {"kappa": 3.0, "beta": 0.9, "rate": 0.2, "free": [model[1]]}
    settings |= {"sides": "inputs"} if name == "dpc" else {}
    method = METHODS[name](model, SGD(model.parameters(), lr=0.1), **settings)
    old, new = torch.randn(2, 20, 5, dtype=torch.float64)

    def step(x: torch.Tensor) -> np.ndarray:
        method.zero_grad()
        model(x).square().mean().backward()
        gradient = model[0].weight.grad.numpy().copy()
        method.step()
        return gradient

    for _ in range(9):
        step(old)
    method.consolidate([old])
    moment = (old.T @ old).numpy()
    a = moment / np.mean(np.diag(moment))
    before = model[0].weight.detach().numpy().copy()
    g = step(new)
    s = method.plasticity["0"].numpy()[:, None]
    assert s.min() == 0 <= s.max() < 1
    assert (s.max() > 0) == (name != "dpc")
    powered = 3.0 * a if name != "sharp" else 9.0 * a @ a
    p = np.linalg.inv(np.eye(5) + powered)
    change = {"dpc": g @ p, "productform": s * (g @ p), "sharp": s * g + (1 - s) * (g @ p)}[name]
    np.testing.assert_allclose(model[0].weight.detach().numpy() - before, -0.1 * change, atol=1e-12)


def test_protected_and_free_weights_are_merged_by_fisher_information(
    script: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(METHODS["merged"], "length", 4)
    model = nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(2, 2)).double()
    method = METHODS["merged"](model, SGD(model.parameters(), lr=0.1), kappa=3.0, beta=0.9, rate=0.2, free=[model[1]])
    old, new = torch.randn(2, 20, 3, dtype=torch.float64)
    gradients, weights = [], []
    for x in (old, new):
        for _ in range(4):
            weights.append(model[0].weight.detach().numpy().copy())
            method.zero_grad()
            model(x).square().mean().backward()
            gradients.append(model[0].weight.grad.numpy().copy())
            method.step()
        if x is old:
            method.consolidate([old])
    fisher_old, fisher = (sum(g**2 for g in gradients[at : at + 2]) for at in (2, 6))
    protected, free = weights[6], weights[7] - 0.1 * gradients[7]
    way = free - protected
    gained, lost = ((f * way**2).sum(1, keepdims=True) for f in (fisher, fisher_old))
    np.testing.assert_allclose(model[0].weight.detach(), protected + gained / (gained + lost) * way, rtol=1e-10)


def test_the_task_starts_again_after_the_free_weights(script: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(METHODS["attracted"], "length", 4)
    model = nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(2, 2)).double()
    method = METHODS["attracted"](model, SGD(model.parameters(), lr=0.1), kappa=1e9, beta=1e-9, free=[model[1]])
    old, new = torch.randn(2, 20, 3, dtype=torch.float64)

    def step(x: torch.Tensor) -> None:
        method.zero_grad()
        model(x).square().mean().backward()
        method.step()

    step(old)
    method.consolidate([old])
    before = model[0].weight.detach().clone()
    for _ in range(2):
        step(new)
    assert (model[0].weight - before).abs().max() > 1e-3  # free
    step(new)
    torch.testing.assert_close(model[0].weight.detach(), before, atol=1e-6, rtol=0)  # frozen by beta and kappa
