"""The commands of a study, run as a user runs them."""

import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from holdfast.methods import METHODS
from holdfast.runs.plan import Plan
from holdfast.study.processes import LocalExecutor
from holdfast.study.store import Run as StudyRun
from holdfast.study.store import Study
from test_cli import Run, cache, failed, run
from test_sources import idx

__all__ = ["cache", "run"]

SHORT = ("--epochs", "1", "--tasks", "2", "--device", "cpu")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("command", ["demo", "run", "reproduce", "sweep", "report", "list"])
def test_help_teaches(run: Run, command: str) -> None:
    code, out, _ = run(command, "--help")
    assert code == 0
    assert re.search(r"holdfast \w+", out.replace("Usage: holdfast", "")) or command == "demo"
    assert len(out) > 400


def test_help_comes_without_torch() -> None:
    code = "import sys; from holdfast import cli; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_run_list_report(run: Run, folder: Path) -> None:
    code, out, err = run("run", "digits", "npc", "finetune", "--seeds", 2, *SHORT, "--neurons")
    assert (code, err) == (0, "")
    assert re.search(r"npc, seed 0: \d+\.\d% in \d+ s", out)
    assert re.search(r"npc +(\d+\.\d +){2}\d+\.\d\(\d+\.\d\)", out)
    assert "The page is studies/digits/index.html" in out
    page = (folder / "studies/digits/index.html").read_text()
    assert "finetune" in page
    assert len(list((folder / "studies/digits/figures").glob("*.pdf"))) == 5
    again = run("run", "digits", "npc", "finetune", "--seeds", 2, *SHORT, "--neurons")
    assert again[0] == 0
    assert "4 of 4 runs are finished already" in again[1]
    code, out, _ = run("list", "studies/digits")
    assert code == 0
    assert out.count("finished") == 5
    (folder / "studies/digits/index.html").unlink()
    assert run("report", "studies/digits")[0] == 0
    assert (folder / "studies/digits/index.html").exists()


def test_help_shows_the_defaults_of_each_stream(run: Run) -> None:
    _, out, _ = run("run", "--help")
    words = " ".join(out.replace("│", " ").split())
    assert "[default: paper_cnn; digits: mlp; folder: small_cnn]" in words
    assert "Epochs per task. [default: 30]" in words
    assert "holdfast run folder:~/photos npc" in words


def test_methods_are_explained_with_their_settings(run: Run) -> None:
    code, out, _ = run("methods")
    assert code == 0
    assert [line.partition(":")[0] for line in out.splitlines() if not line.startswith(" ")] == list(METHODS)
    code, out, _ = run("methods", "ewc", "lwf+npc")
    assert "ewc: Pulls each parameter to its old values" in out
    assert "    strength=100.0 labels=true samples=none form=proximal\n" in out
    assert "    lwf.weight=1.0 lwf.temperature=2.0 npc.beta=0.7 npc.rate=0.0005 npc.gain=1.0\n" in out


def test_a_method_or_seed_given_twice_is_one_run(run: Run) -> None:
    code, out, _ = run("run", "digits", "npc", "npc", "--seed", 1, "--seed", 1, "--name", "mine", *SHORT)
    assert code == 0
    assert "1 of 1 runs in" in out


def test_a_full_disk_is_named(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: bytes, **_: object) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("holdfast.atomic.write", full)
    message = failed(run("run", "digits", "npc", *SHORT, "--out", folder / "here"))
    assert re.search(rf"the disk of {folder}/here/runs/digits-npc-0-\w+ is full: free some space", message)


def test_the_time_between_checkpoints(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    class Executor(LocalExecutor):
        def open(self, runs: Sequence[StudyRun]) -> int:
            seen.append(self.execution.save_every)
            return super().open(runs)

    monkeypatch.setattr("holdfast.study.processes.LocalExecutor", Executor)
    assert run("run", "digits", "npc", *SHORT, "--save-every", 5)[0] == 0
    assert run("run", "digits", "ewc", *SHORT)[0] == 0
    assert seen == [5, 60]


def test_what_is_said_reaches_the_plan(run: Run, folder: Path) -> None:
    code, _, err = run(
        *(
            "run",
            "digits",
            "ewc",
            "--seed",
            5,
            "--set",
            "strength=3",
            "--set",
            "labels=exact",
            "--lr",
            0.2,
            "--batch",
            32,
        ),
        *(
            "--width",
            0.5,
            "--model",
            "small_cnn",
            "--heads",
            "growing",
            "--validation",
            "--curve",
            3,
            "--precision",
            "bf16",
        ),
        *("--epoch", "task", "--name", "mine", "--out", "here", "--deterministic", "--threads", 2, *SHORT),
    )
    assert (code, err) == (0, "")
    (entry,) = Study(folder / "here").entries
    assert (entry.run.name, entry.run.tasks) == ("mine", 2)
    assert entry.run.plan == (
        Plan("ewc", {"strength": 3, "labels": "exact"}, "small_cnn", width=0.5, seed=5, lr=0.2, batch=32, epochs=1,
             epoch="task", heads="growing", evaluate_on="validation", curve=3, precision="bf16", deterministic=True,
             threads=2)
    )  # fmt: skip


def test_a_study_file(run: Run, folder: Path) -> None:
    (folder / "small.toml").write_text(
        'stream = "digits"\ntasks = 2\nepochs = 1\n[[run]]\nmethod = ["npc", "si"]\n'
        '[[run]]\nmethod = "npc"\nname = "<b>other</b>"\nlr = 0.3\n'
    )
    code, out, err = run("run", "small.toml", "--device", "cpu", "--jobs", 1)
    assert (code, err) == (0, "")
    assert "<b>other</b>" in out
    assert len(Study(folder / "studies/small").entries) == 3


def test_composed_methods(run: Run, folder: Path) -> None:
    """One name and the same settings on the command line, in a search and in a study file."""
    settings = ("--set", "lwf.weight=0.1", "--set", "npc.beta=0.6")
    code, out, err = run("run", "digits", "lwf+npc", *settings, *SHORT, "--out", "one")
    assert (code, err) == (0, "")
    assert "lwf+npc lwf.weight=0.1 npc.beta=0.6" in out
    (entry,) = Study(folder / "one").entries
    assert entry.record is not None
    assert entry.record.settings == {
        "lwf.weight": 0.1, "lwf.temperature": 2.0, "npc.beta": 0.6, "npc.rate": 5e-4, "npc.gain": 1.0
    }  # fmt: skip
    assert set(entry.record.memory) == {"lwf.teacher", "npc.importance"}
    options = ("--over", "npc.beta", "--values", "0.5,0.6", "--coarse", "--set", "lwf.weight=0.1", *SHORT)
    code, out, err = run("sweep", "digits", "lwf+npc", *options, "--out", "search")
    assert (code, err) == (0, "")
    assert "npc.beta" in out
    assert {e.run.plan.settings["npc.beta"] for e in Study(folder / "search").entries} == {0.5, 0.6}
    (folder / "stack.toml").write_text(
        'stream = "digits"\ntasks = 2\nepochs = 1\n[[run]]\nmethod = "lwf+npc"\n'
        "settings.lwf.weight = 0.1\nsettings.npc.beta = 0.6\n"
    )
    code, out, err = run("run", "stack.toml", "--device", "cpu", "--out", "file")
    assert (code, err) == (0, "")
    (again,) = Study(folder / "file").entries
    assert again.run.id == entry.run.id
    assert again.record is not None
    assert again.record.matrix == entry.record.matrix


def test_a_mistake_in_a_study_file_points_at_its_line(run: Run, folder: Path) -> None:
    (folder / "small.toml").write_text('stream = "digits"\n[[run]]\nmethod = "npc"\n\nepochs = "many"\n')
    assert failed(run("run", "small.toml")) == "holdfast: small.toml:5: epochs must be a number, got 'many'\n"
    assert not (folder / "studies").exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("run", "digits"), "no method given; for example: holdfast run digits npc"),
        (
            ("run", "digits", "ewk"),
            "ewc, kfac, mas, si, ssl, compact, lwf, finetune, joint, separate: did you mean ewc?",
        ),
        (
            ("run", str(Path(__file__).parent), "npc"),
            f"for the images in this folder, write folder:{Path(__file__).parent}",
        ),
        (("run", "digits", "npc", "--model", "mpl"), "did you mean mlp?"),
        (("run", "digits", "npc", "--set", "bta=1"), "did you mean beta?"),
        (("methods", "npd"), "did you mean npc?"),
        (("run", "digits", "npc+cpc"), "NPC and CPC cannot be combined: both control plasticity"),
        (("run", "digits", "lwf+npc", "--set", "beta=1"), "lwf+npc has no setting 'beta'; name the part too, as in"),
        (("run", "digits", "joint+npc"), "joint is an upper bound and cannot be combined with other methods"),
        (("run", "didgits", "npc"), "folder:PATH: did you mean digits?"),
        (("run", "digits", "npc", "--set", "strength=3"), "npc has no setting 'strength'"),
        (("run", "digits", "npc", "--set", "rate"), "rate"),
        (("run", "digits", "npc", "--epochs", "-1"), "epochs must be above 0, got -1"),
        (("run", "digits", "npc", "--model", "vgg"), "unknown model 'vgg'"),
        (("run", "digits", "npc", "ewc", "--name", "x"), "--name is for one method"),
        (("run", "digits", "npc", "--name", "a\nb"), "name must be a line of text"),
        (("run", "digits", "npc", "--seed", "1", "--seeds", "2"), "use either --seeds or --seed, not both"),
        (("run", "digits", "npc", "--device", "gpu"), "unknown device 'gpu': use cpu or cuda"),
        (("run", "digits", "npc", "--tasks", "99"), "99"),
        (("run", "digits", "npc", "--out", __file__), "is a file, not a folder"),
        (("run", "nothing.toml"), "nothing.toml"),
        (("run", "digits.toml", "--seeds", "2"), "leave out all but"),
        (("run", "digits.toml", "npc"), "leave out all but"),
        (("run", "folder:nothing", "npc"), "nothing"),
        (("run", "digits", "npc", "--device", "cuda"), "torch finds no GPU"),
        (("run", "digits", "npc", "--model", "paper_cnn"), "the paper's network is for images of 32x32"),
        (("reproduce", "digits"), "the paper has no experiment 'digits'; it has imnist and icifar100"),
        (("reproduce", "imnist", "--methods", "npc,xyz"), "unknown method 'xyz'"),
        (("reproduce", "imnist", "--methods", ","), "--methods is empty"),
        (("reproduce", "imnist", "--set", "strength=3"), "name the method too"),
        (("reproduce", "imnist", "--set", "ewc.strengh=3"), "ewc has no setting 'strengh'"),
        (("reproduce", "imnist", "--set", "ewx.strength=3"), "ewx is not among the methods"),
        (("reproduce", "imnist", "--set", "lwf.weight=3"), "lwf is not among the methods"),
        (("reproduce", "imnist", "--searched", "nowhere"), "nowhere has no search on imnist: holdfast sweep imnist"),
        (("reproduce", "imnist", "--set", "npc.lr=-1"), "lr must be above 0, got -1"),
        (("reproduce", "imnist", "--set", "npc.lr=abc"), "lr must be a number, got 'abc'"),
        (("sweep", "digits", "ewc", "--values", "1,-1"), "ewc does not accept -1 as strength"),
        (("sweep", "digits", "npc", "--over", "bogus", "--values", "1"), "npc has no setting 'bogus'"),
        (("sweep", "digits", "ewc", "--values", "1,x"), "'x' is not a number"),
        (("sweep", "digits", "ewc", "--over", "beta"), "ewc has no setting 'beta'"),
        (("sweep", "digits", "finetune", "--over", "rate"), "finetune has no setting"),
        (("report", "nowhere"), "nowhere is not a study"),
        (("list", "nowhere"), "nowhere is not a study"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing_behind(run: Run, arguments: tuple[str, ...], expected: str) -> None:
    assert expected in failed(run(*arguments))
    assert not list(Path("studies").glob("*/runs/*"))


def test_reproduce_scaled_down(run: Run, folder: Path) -> None:
    rng = np.random.default_rng(0)
    (folder / "data").mkdir()
    for half, count in (("train", 600), ("t10k", 100)):
        images = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        (folder / "data" / f"{half}-images-idx3-ubyte").write_bytes(idx(images))
        (folder / "data" / f"{half}-labels-idx1-ubyte").write_bytes(idx(np.arange(count, dtype=np.uint8) % 10))
    code, out, err = run(
        *("reproduce", "imnist", "--methods", "npc,finetune,npc off", "--seeds", 2, "--epochs", 0.5, "--width", 0.05),
        *("--set", "npc.rate=0.1", "--data", "data", "--device", "cpu"),
    )
    assert (code, err) == (0, "")
    assert "Table 1: imnist, 5 tasks, test images" in out
    assert "99.63(0.02)" in out  # the paper's average for NPC
    assert "*" in out.split("  paper")[0]  # after so little training, ours is another
    entries = Study(folder / "studies/imnist").entries
    assert {(entry.run.name, entry.run.plan.lr) for entry in entries} == {
        ("npc", 0.1),
        ("finetune", 0.05),
        ("npc off", 0.1),
    }
    assert {entry.run.plan.settings.get("rate") for entry in entries if entry.run.name == "npc"} == {0.1}
    figures = {path.name.split("-")[0] for path in (folder / "studies/imnist/figures").glob("*.png")}
    assert figures == {"average", "tasks", "balance", "drift", "importance"}


def test_sweep(run: Run, folder: Path) -> None:
    arguments = ("sweep", "digits", "npc", "--set", "rate=1.0", *SHORT, "--out", "here")
    code, out, err = run(*arguments, "--values", "1e-6,1e6", "--coarse")
    assert (code, err) == (0, "")
    assert re.search(r"1e\+06 +\d+\.\d+ +best", out)
    assert "at the edge" in out
    (kept,) = (folder / "here" / "sweeps").iterdir()
    assert json.loads(kept.read_text())["best"] == 1e6
    assert {entry.run.plan.evaluate_on for entry in Study(folder / "here").entries} == {"validation"}
    assert run("report", "here")[0] == 0
    assert "Searches for settings" in (folder / "here" / "index.html").read_text()
    assert (folder / "here" / "figures" / "search-digits-1-validation.png").exists()


def test_the_demo(run: Run, folder: Path) -> None:
    code, out, err = run("demo", "--seeds", 1, "--epochs", 1)
    assert (code, err) == (0, "")
    for method in ("npc", "cpc", "ewc", "mas", "si", "ssl", "lwf", "finetune", "joint", "separate", "npc off"):
        assert re.search(rf"^ {method} +\d", out, re.MULTILINE)
    assert "The page is studies/demo/index.html" in out
    assert max(map(len, out.splitlines())) <= 200


def test_without_a_package_one_line_says_what_to_install(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast.study import logs

    monkeypatch.setattr(logs, "find_spec", lambda name: None)
    assert "pip install tensorboard" in failed(run("run", "digits", "npc", "--tensorboard", *SHORT))


def test_in_a_terminal_there_are_bars_and_ctrl_c_says_how_to_go_on(folder: Path) -> None:
    """A real terminal of 100 columns, and a real Ctrl-C."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "holdfast", "run", "digits", "npc", "ewc", "--epochs", "300", "--device", "cpu"]
    environment = {**os.environ, "COLUMNS": "100", "TERM": "xterm-256color"}
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True, close_fds=True
    )
    os.close(theirs)
    shown = b""
    interrupted = False
    while True:
        try:
            shown += os.read(ours, 4096)
        except OSError:  # the terminal is closed
            break
        if not interrupted and re.search(rb"npc, seed 0.*\d+\.\d%.*0:\d\d:\d\d", shown, re.DOTALL):
            os.killpg(process.pid, 2)
            interrupted = True
    os.close(ours)
    assert process.wait(timeout=60) == 130
    text = shown.decode(errors="replace")
    assert "2 runs" in text
    assert "left" in text
    assert "run the same command again to resume" in " ".join(text.split())
    assert "Traceback" not in text
    assert {entry.state for entry in Study(folder / "studies/digits").entries} == {"interrupted"}
