"""The report of what is controlled, against the model's own numbers."""

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import holdfast


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 4)
        self.sparse = nn.Embedding(9, 4, sparse=True)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU()) for _ in range(3))
        self.head = nn.Linear(4, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.sparse(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


TOKENS = torch.arange(6).view(2, 3)


def test_the_table_of_a_model() -> None:
    model = Small()
    lines = str(holdfast.explain(model, example=TOKENS, free="head")).splitlines()
    trained = 36 + 36 + 3 * (20 + 8)
    assert lines[0] == f"NPC controls {1 - 36 / trained:.1%} of {trained} trained parameters; 10 others are free"
    assert [line.split()[:2] for line in lines[3:5]] == [["blocks.*.*", "(3)"], ["embedding", "4"]]
    assert lines[3].split()[2:] == ["4", "blocks.*.*", "84", f"{84 / trained:.1%}", "0.0%", f"{3 * 4 * 4}"]
    assert lines[-1] == "not controlled: sparse.weight"
    assert len({len(line) for line in lines[2:5]}) == 1
    assert not any(module._forward_hooks for module in model.modules())


def test_the_report_of_a_method() -> None:
    model = Small()
    dpc = holdfast.DPC(model, SGD(model.parameters(), lr=0.1), free=["head"], rank=2)
    optimizer = holdfast.LwF(model, dpc)
    assert holdfast.explain(optimizer).layers[0].measured_at == "gradients"  # taps are not known yet
    model(TOKENS).sum().backward()
    with pytest.warns(UserWarning, match=f"{36 / 156:.0%} of the trained parameters are not controlled"):
        optimizer.step()
    dpc.consolidate([TOKENS])
    report = holdfast.explain(optimizer)
    assert [layer.measured_at for layer in report.layers] == ["blocks.0.1", "blocks.1.1", "blocks.2.1", "gradients"]
    assert [layer.directed for layer in report.layers] == [20, 20, 20, 36]
    unused = sum(layer.size for layer in dpc._norms) * 4  # kept for normalizations that layers adopted
    assert sum(layer.memory for layer in report.layers) + unused == sum(dpc.memory().values())
    assert report.uncontrolled == {"sparse.weight": 36}
    assert report.directed == pytest.approx(96 / 156)


def test_what_cannot_be_explained() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="EWC controls no neurons"):
        holdfast.explain(holdfast.EWC(model, SGD(model.parameters(), lr=0.1)))
    with pytest.raises(TypeError, match="explain takes a method or a model, got SGD"):
        holdfast.explain(SGD(model.parameters(), lr=0.1))
