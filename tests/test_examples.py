"""What a newcomer runs first: the code of the README and of the documentation, and the example."""

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from helpers import Block, mlp, parameters_of
from holdfast.study import studyfile
from holdfast.study.store import StudyError

ROOT = Path(__file__).parent.parent


def test_the_readmes_training_loop_runs() -> None:
    code = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[0]
    model = Block()
    batches = [(torch.randn(4, 2, 8, 8), torch.randint(3, (4,))) for _ in range(3)]
    names = {"model": model, "batches": batches, "criterion": nn.CrossEntropyLoss()}
    exec(code, names)
    assert names["optimizer"].importance["conv"].sum() > 0


@pytest.mark.parametrize(("page", "number"), [("README.md", 1), ("docs/dpc.md", 0)])
def test_the_loop_of_dpc(page: str, number: int) -> None:
    code = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)[number]
    tasks: list[Any] = [[(torch.randn(4, 2, 8, 8), torch.randint(3, (4,)))] for _ in range(2)]
    if "active" in code:
        tasks = [(batches, [0, 1, 2]) for batches in tasks]
    names = {"torch": torch, "holdfast": holdfast, "F": nn.functional, "criterion": nn.CrossEntropyLoss()}
    exec(code, names := names | {"model": Block(), "tasks": tasks})
    assert names["optimizer"].capacity["conv"] > 0


def test_the_example(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    example = runpy.run_path(str(ROOT / "examples" / "digits.py"))
    monkeypatch.setattr("sys.argv", ["digits.py", "--epochs", "10"])
    example["main"]()
    averages = dict(re.findall(r"(SGD|NPC) .* average (\d+\.\d)", capsys.readouterr().out))
    assert float(averages["SGD"]) < 88 < 94 < float(averages["NPC"])


def test_the_readmes_loop_for_all_methods() -> None:
    code = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[2]
    model = mlp()
    tasks = [([(torch.randn(8, 4), torch.randint(2, (8,)))], active) for active in ([0, 1], [1, 2])]
    names = {"model": model, "tasks": tasks, "criterion": nn.CrossEntropyLoss(), "holdfast": holdfast}
    exec(code, names | {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1)})


@pytest.mark.parametrize(("page", "number"), [("README.md", 3), ("docs/training.md", 0)])
def test_the_run_of_the_documentation(page: str, number: int, capsys: pytest.CaptureFixture[str]) -> None:
    code = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)[number]
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["record"].summary["learned"] > 0.85
    assert "forgetting" in capsys.readouterr().out


def test_the_study_file_of_the_documentation() -> None:
    page = (ROOT / "docs" / "studies.md").read_text()
    text = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)[0]
    runs = studyfile.parse(text, "study.toml")
    assert len(runs) == 3 * (1 + 3 + 1)
    assert {run.plan.epochs for run in runs if run.name == "EWC, weak"} == {20}
    with pytest.raises(StudyError) as caught:
        studyfile.parse(text.replace("1e-3", "2"), "study.toml")
    assert f"`{caught.value}`" in page


def test_the_method_of_the_documentation() -> None:
    code = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "methods.md").read_text(), re.DOTALL)[-1]
    names: dict[str, Any] = {}
    exec(code, names)
    model = mlp()
    method = names["L2"](model, torch.optim.SGD(model.parameters(), lr=0.5), strength=1.0)
    method.consolidate([])
    anchor = parameters_of(model)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)
            p.grad = torch.zeros_like(p)
    method.step()
    for name, value in parameters_of(model).items():
        torch.testing.assert_close(value, anchor[name] + 0.5)  # 2 * lr * strength = 1: half of the way back


def test_the_loop_of_the_documentation() -> None:
    code = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "methods.md").read_text(), re.DOTALL)[0]
    tasks = [([(torch.randn(8, 4), torch.randint(2, (8,)))], active) for active in ([0, 1], [1, 2])]
    names = {"model": mlp(), "tasks": tasks, "torch": torch, "F": nn.functional, "holdfast": holdfast}
    exec(code, names)
    assert all(value.sum() > 0 for value in names["method"].importance.values())
