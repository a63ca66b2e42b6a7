"""Without the GPU package, everything else works on a CPU. `test_architecture.py` checks who imports it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast

PACKAGE = Path(holdfast.__file__).parent
OTHERS = [path.relative_to(PACKAGE) for path in sorted(PACKAGE.rglob("*.py")) if path.parent != PACKAGE / "gpu"]

IMPORT_EVERYTHING = """
import importlib, pkgutil, holdfast
for module in pkgutil.walk_packages(holdfast.__path__, "holdfast."):
    if module.name != "holdfast.__main__":
        importlib.import_module(module.name)
        print(module.name)
"""


@pytest.fixture(scope="module")
def without_gpu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources without the GPU package."""
    sources = tmp_path_factory.mktemp("sources")
    shutil.copytree(PACKAGE, sources / "holdfast", ignore=shutil.ignore_patterns("gpu", "__pycache__"))
    return sources


def run(sources: Path, *arguments: str) -> str:
    """The output of a Python process that imports Holdfast from `sources`."""
    environment = os.environ | {"PYTHONPATH": str(sources), "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200"}
    command = [sys.executable, *arguments]
    result = subprocess.run(command, env=environment, cwd=sources, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_every_other_module_can_be_imported(without_gpu: Path) -> None:
    imported = set(run(without_gpu, "-c", IMPORT_EVERYTHING).split())
    others = {".".join(("holdfast", *path.with_suffix("").parts)).removesuffix(".__init__") for path in OTHERS}
    assert imported == others - {"holdfast", "holdfast.__main__"}


def test_a_study_runs(without_gpu: Path) -> None:
    methods = ["npc", "ssl", "lwf", "ewc"]
    options = ["--epochs", "1", "--tasks", "2", "--jobs", "1", "--out", str(without_gpu / "study")]
    location = run(without_gpu, "-c", "import holdfast; print(holdfast.__file__)").strip()
    assert Path(location).is_relative_to(without_gpu)
    output = run(without_gpu, "-m", "holdfast", "run", "digits", *methods, *options)
    assert all(method in output.lower() for method in methods)
