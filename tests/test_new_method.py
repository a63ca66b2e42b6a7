"""A new method is one file and one line of the registry. The examples of docs/methods.md are added here, and used."""

import copy
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from test_sources import idx

ROOT = Path(__file__).parent.parent
LINE = '        "separate": "holdfast.methods.separate:Separate",\n'
NEW_LINE = '        "projection": "holdfast.methods.projection:Projection",\n'


def example(opening: str = '"""Gradient projection') -> str:
    """An example of docs/methods.md, by its first words."""
    text = (ROOT / "docs" / "methods.md").read_text()
    opening = f"```python\n{opening}"
    assert text.count(opening) == 1
    return text[text.index(opening) + len("```python\n") :].partition("```")[0]


def projection(model: nn.Module, optimizer: Optimizer | None = None, **settings: Any) -> Any:
    space: dict[str, Any] = {"__name__": "projection"}
    exec(compile(example(), "projection.py", "exec"), space)
    return space["Projection"](model, optimizer or SGD(model.parameters(), lr=0.5, momentum=0.9), **settings)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package with the new file and the new line, and nothing else changed."""
    src = tmp_path_factory.mktemp("copy") / "src"
    shutil.copytree(ROOT / "src" / "holdfast", src / "holdfast", ignore=shutil.ignore_patterns("__pycache__"))
    (src / "holdfast" / "methods" / "projection.py").write_text(example())
    registry = src / "holdfast" / "methods" / "__init__.py"
    text = registry.read_text()
    assert LINE in text
    registry.write_text(text.replace(LINE, LINE + NEW_LINE))
    return src


def run(package: Path, *command: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(package), "COLUMNS": "200", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# ---- one file ----


def test_it_is_short() -> None:
    assert len(example().splitlines()) <= 80


@pytest.mark.parametrize(
    ("name", "opening"),
    [
        ("projection", '"""Gradient projection'),
        ("l2", "from collections.abc import Iterable\nfrom typing import Any\n"),
    ],
)
def test_it_is_typed_and_formatted(package: Path, tmp_path: Path, name: str, opening: str) -> None:
    path = package / "holdfast" / "methods" / f"{name}.py"
    path.write_text(example(opening))
    run(package, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache"), str(path), folder=package)
    for check in (["check"], ["format", "--check"]):
        run(package, "-m", "ruff", *check, "--config", str(ROOT / "pyproject.toml"), str(path), folder=package)


# ---- everywhere ----


def write_mnist(folder: Path) -> None:
    """Random images in the files of MNIST, enough of each class."""
    folder.mkdir()
    random = np.random.default_rng(0)
    for part, count in (("train", 200), ("t10k", 50)):
        images = random.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        (folder / f"{part}-images-idx3-ubyte").write_bytes(idx(images))
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(idx(np.arange(count, dtype=np.uint8) % 10))


def test_it_is_in_every_command_and_on_the_page(package: Path, tmp_path: Path) -> None:
    def holdfast(command: str) -> str:
        return run(package, "-m", "holdfast", *command.split(), folder=tmp_path)

    short = "--epochs 1 --tasks 2 --device cpu --jobs 1"
    assert "projection" in holdfast("run --help")
    table = holdfast(f"run digits projection lwf+projection {short}")
    assert "projection" in table
    assert "lwf+projection" in table
    page = (tmp_path / "studies" / "digits" / "index.html").read_text()
    assert "lwf+projection" in page
    assert "kappa" in page
    assert "kappa" in holdfast(f"sweep digits projection --values 1,100 --coarse --out search {short}")
    (tmp_path / "study.toml").write_text(
        'stream = "digits"\ntasks = 2\nepochs = 1\n[[run]]\nmethod = "projection"\nsettings.kappa = 10\n'
    )
    assert "projection" in holdfast("run study.toml --device cpu")
    write_mnist(tmp_path / "data")
    tiny = "--epochs 0.001 --width 0.05 --tasks 1 --seeds 1 --data data --device cpu"
    assert "projection" in holdfast(f"reproduce imnist --methods projection {tiny}")


def test_the_tests_of_the_registry_run_on_it(package: Path, tmp_path: Path) -> None:
    tests = [str(ROOT / "tests" / f"{name}.py") for name in ("test_methods", "test_torch_checkpoint")]
    options = "-q", "-k", "projection", "-p", "no:cacheprovider", "--rootdir", ROOT, "-c", ROOT / "pyproject.toml"
    out = run(package, "-m", "pytest", *map(str, options), *tests, folder=tmp_path)
    assert int(out.rpartition(" passed")[0].split()[-1]) > 60


# ---- its mathematics ----


def step(model: nn.Module, method: Optimizer, x: Tensor) -> None:
    loss = (model(x) - 3).square().mean()
    method.zero_grad()
    loss.backward()
    method.step()


def test_it_keeps_the_outputs_on_old_inputs() -> None:
    """With a large kappa, outputs on old inputs stay, and outputs in new directions change."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5, dtype=torch.float64))
    old, new = (torch.zeros(50, 6, dtype=torch.float64) for _ in range(2))
    old[:, :3], new[:, 3:] = torch.randn(50, 3), torch.randn(50, 3)
    method = projection(model, kappa=1e8)
    method.consolidate([old])
    before = model(old).detach(), model(new).detach()
    for _ in range(20):
        step(model, method, new)
    assert (model(old) - before[0]).abs().max() < 1e-4
    assert (model(new) - before[1]).abs().mean() > 0.1


def flat(conv: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(len(p), -1) for p in conv.parameters()], dim=1)


@pytest.mark.parametrize("bias", [True, False])
def test_the_change_is_projected(bias: bool) -> None:
    """W <- W + G P after two tasks, for a convolution whose patches are cut out by hand. The head is free."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 2, bias=bias), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2)).double()
    method = projection(model, kappa=10.0, free=[model[3]])
    moments = torch.zeros(8 + bias, 8 + bias, dtype=torch.float64)
    for _ in range(2):
        images = torch.randn(10, 2, 3, 3, dtype=torch.float64)
        method.consolidate(images.split(5))
        corners = [(i, j) for i in (0, 1) for j in (0, 1)]
        patches = torch.stack([x[:, i : i + 2, j : j + 2].flatten() for x in images for i, j in corners])
        inputs = torch.cat([patches, torch.ones(40, bias)], dim=1)
        moment = inputs.T @ inputs / 40
        moments += moment / moment.diagonal().mean()
    bare, before = copy.deepcopy(model), flat(model[0])
    x = torch.randn(5, 2, 3, 3, dtype=torch.float64)
    step(model, method, x)
    step(bare, SGD(bare.parameters(), lr=0.5, momentum=0.9), x)
    change = (flat(bare[0]) - before) @ torch.linalg.inv(torch.eye(8 + bias) + 10 * moments)
    torch.testing.assert_close(flat(model[0]), before + change)
    torch.testing.assert_close(flat(model[3]), flat(bare[3]), rtol=0, atol=0)


def test_before_the_first_task_it_is_the_wrapped_optimizer() -> None:
    model = nn.Linear(3, 2)
    bare, x = copy.deepcopy(model), torch.randn(4, 3)
    method, optimizer = projection(model), SGD(bare.parameters(), lr=0.5, momentum=0.9)
    for _ in range(3):
        step(model, method, x)
        step(bare, optimizer, x)
    assert torch.equal(flat(model), flat(bare))


def test_a_layer_that_is_trained_in_part_is_left_alone() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2), nn.Conv1d(2, 2, 1, groups=2))
    optimizer = SGD([model[0].weight, *model[1].parameters()], lr=0.1)
    assert projection(model, optimizer).memory().keys() == {"moments", "used"}
    assert projection(model, optimizer).state_dict()["param_groups"][0]["holdfast"]["moments"].keys() == {"1"}
