"""How much of real architectures is controlled, and that the table in the documentation tells it."""

import logging
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.optim import SGD, AdamW

import holdfast
from architectures import CASES, Case, loss_of

DOCS = Path(__file__).parent.parent / "docs" / "architectures.md"


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Leave out what the other libraries say about small configurations."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="transformers|peft")
        yield


def trained(case: Case) -> list[torch.nn.Parameter]:
    return [p for p in case.model.parameters() if p.requires_grad]


def documented() -> dict[str, list[str]]:
    rows = re.findall(r"^\| ([^|]+) \| (\d+)% \| (\d+)% \|$", DOCS.read_text(), re.MULTILINE)
    return {name: shares for name, *shares in rows}


def test_every_architecture_is_in_the_table() -> None:
    assert list(documented()) == list(CASES)


@pytest.mark.parametrize("name", CASES)
def test_frozen_architectures_stand_still(name: str) -> None:
    """With every neuron frozen, at most 5% of the parameters outside of free= move."""
    case = CASES[name]()
    optimizer = holdfast.NPC(case.model, SGD(trained(case), lr=0.01), rate=1.0, beta=1e-30, free=case.free)
    before = {p: p.detach().clone() for p in trained(case)}
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(case).backward()
        optimizer.step()
    inside = {p for p in trained(case) if p not in optimizer._free}
    moved = sum((p != before[p]).sum().item() for p in inside)
    assert moved <= 0.05 * sum(p.numel() for p in inside)
    if case.free:
        assert any((p != before[p]).any() for p in before if p not in inside)


@pytest.mark.parametrize("name", CASES)
def test_architectures_learn_with_dpc_as_the_table_says(name: str) -> None:
    case = CASES[name]()
    optimizer = holdfast.DPC(case.model, AdamW(trained(case), lr=1e-3), free=case.free, rank=8)
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(case).backward()
        optimizer.step()
        optimizer.consolidate([(case.batch, None)])
    assert all(p.isfinite().all() for p in case.model.parameters())
    report = holdfast.explain(optimizer)
    assert report.controlled >= 0.95
    assert report.trained + report.free == sum(p.numel() for p in trained(case))
    assert [f"{100 * share:.0f}" for share in (report.controlled, report.directed)] == documented()[name]
