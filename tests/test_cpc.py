"""CPC against its rule in plain loops over connections."""

import math

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

import holdfast
from helpers import mlp, parameters_of, train


@pytest.mark.parametrize("normalize", ["parameter", "model"])
@pytest.mark.parametrize("seed", range(3))
def test_as_the_rule_in_plain_loops(seed: int, normalize: str) -> None:
    torch.manual_seed(seed)
    beta, rate, gain, lr = 0.8, 0.3, 0.9, 0.1
    model = mlp().double()
    settings = {"beta": beta, "rate": rate, "gain": gain, "normalize": normalize}
    optimizer = holdfast.CPC(model, SGD(model.parameters(), lr=lr), free=[model[4]], **settings)
    importance = {name: [0.0] * p.numel() for name, p in model.named_parameters()}
    seen = set()
    for _ in range(8):
        x = torch.randn(8, 4, dtype=torch.float64)
        gradients = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
        expected = {}
        controlled = list(zip(model.parameters(), gradients, strict=True))[:4]
        total = sum((p * g).abs().sum().item() for p, g in controlled) / sum(p.numel() for p, _ in controlled)
        for (name, p), gradient in zip(model.named_parameters(), gradients, strict=True):
            w, g = p.detach().flatten().tolist(), gradient.flatten().tolist()
            c = [abs(wi * gi) for wi, gi in zip(w, g, strict=True)]
            mean = total if normalize == "model" else sum(c) / len(c)
            moved = []
            for i in range(len(c)):
                importance[name][i] = (1 - rate) * importance[name][i] + rate * c[i] / mean
                big = importance[name][i]
                share = min(1.0, gain * math.sqrt(max(math.sqrt(beta / big) - 1, 0))) if big > 0 else 1.0
                share = 1.0 if name.startswith("4.") else share
                seen.add("frozen" if share == 0 else "full" if share == 1 else "between")
                moved.append(w[i] - lr * share * g[i])
            expected[name] = torch.tensor(moved, dtype=torch.float64).view_as(p)
        train(model, optimizer, [x])
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.detach(), expected[name], rtol=1e-9, atol=1e-12)
    assert seen == {"frozen", "full", "between"}
    assert optimizer.importance.keys() == {"0.weight", "0.bias", "2.weight", "2.bias"}
    for name, values in optimizer.importance.items():
        assert values.flatten().tolist() == pytest.approx(importance[name])


def test_a_frozen_connection_does_not_change_by_one_bit() -> None:
    model = mlp()
    optimizer = holdfast.CPC(model, AdamW(model.parameters(), lr=0.01, weight_decay=0.5), rate=0.05, beta=0.3)
    train(model, optimizer, torch.randn(30, 8, 4))
    held = parameters_of(model)
    frozen = {name: importance > 0.45 for name, importance in optimizer.importance.items()}
    train(model, optimizer, torch.randn(4, 8, 4))
    for name, parameter in model.named_parameters():
        still = frozen[name] & (optimizer.importance[name] > 0.3)
        assert still.any()
        assert torch.equal(parameter[still], held[name][still])
    assert not torch.equal(model[2].weight, held["2.weight"])


@pytest.mark.parametrize("bad", [0.0, torch.nan, torch.inf])
def test_a_gradient_without_a_measurement_leaves_importance_as_it_was(bad: float) -> None:
    model = mlp()
    optimizer = holdfast.CPC(model, SGD(model.parameters(), lr=0.1), rate=0.5)
    train(model, optimizer, [torch.randn(8, 4)])
    held = optimizer.importance
    for p in model.parameters():
        p.grad = torch.full_like(p, bad)
    optimizer.step()
    for name, values in optimizer.importance.items():
        assert torch.equal(values, held[name])


def test_nothing_left_to_control() -> None:
    model = mlp()
    with pytest.raises(ValueError, match="no connection is left to control"):
        holdfast.CPC(model, SGD(model.parameters(), lr=0.1), free=[model])


def test_sparse_gradients_are_refused_by_name() -> None:
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 3))
    optimizer = holdfast.CPC(model, SGD(model.parameters(), lr=0.1))
    model(torch.tensor([0, 1])).sum().backward()
    with pytest.raises(TypeError, match=r"dense gradients, '0.weight' has sparse ones"):
        optimizer.step()


def test_plasticity_is_one_value_per_connection() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(2, 2))
    optimizer = holdfast.CPC(model, SGD(model.parameters(), lr=0.1))
    assert {name: tuple(v.shape) for name, v in optimizer.plasticity.items()} == {
        name: tuple(p.shape) for name, p in model.named_parameters()
    }
    assert all((value == 1).all() for value in optimizer.plasticity.values())
