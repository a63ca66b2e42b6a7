"""What a newcomer runs first: the README's code and the demo."""

import re
import runpy
from pathlib import Path

import pytest
import torch
from torch import nn

from helpers import Block

ROOT = Path(__file__).parent.parent


def test_the_readmes_training_loop_runs() -> None:
    code = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[0]
    model = Block()
    batches = [(torch.randn(4, 2, 8, 8), torch.randint(3, (4,))) for _ in range(3)]
    names = {"model": model, "batches": batches, "criterion": nn.CrossEntropyLoss()}
    exec(code, names)
    assert names["optimizer"].importance["conv"].sum() > 0


def test_the_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    demo = runpy.run_path(str(ROOT / "examples" / "demo.py"))
    monkeypatch.setitem(demo["main"].__globals__, "EPOCHS", 2)
    picture = tmp_path / "new folder" / "demo.png"
    monkeypatch.setattr("sys.argv", ["demo.py", "--seeds", "1", "--figure", str(picture)])
    demo["main"]()
    printed = capsys.readouterr().out
    assert "Accuracy on test images after all five tasks" in printed
    assert re.search(r"SGD learns the tasks to \d+\.\d%", printed)
    assert picture.read_bytes().startswith(b"\x89PNG")
