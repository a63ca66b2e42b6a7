"""What kills, links, full disks and hostile names leave behind."""

import csv
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from holdfast import atomic
from holdfast.runs import checkpoint
from holdfast.study import exports, page, terminal
from holdfast.study.logs import Log
from holdfast.study.store import Run, Study, StudyError
from holdfast.study.sweep import Sweep, Tried
from holdfast.study.tables import compare
from victims import a_record, a_run, a_study, holdfast

# ---- kills ----

SLOW = """
import os, pathlib, sys, time
from holdfast import atomic
os.fsync = lambda _: (print("writing", flush=True), time.sleep(60))
atomic.write(pathlib.Path(sys.argv[1]), b"x" * 1000)
"""


def kill_while_writing(path: Path) -> None:
    writer = subprocess.Popen([sys.executable, "-c", SLOW, str(path)], stdout=subprocess.PIPE)
    assert writer.stdout is not None
    assert writer.stdout.readline() == b"writing\n"
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    writer.stdout.close()


def temporary(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob("*.writing")]


def test_temporary_files_of_killed_processes_are_removed(tmp_path: Path) -> None:
    study = a_study(tmp_path)
    run = study.folder_of(a_run())
    for path in (tmp_path / "index.html", tmp_path / "sweeps" / "x.json", run / "record.json"):
        kill_while_writing(path)
    assert len(temporary(tmp_path)) == 3
    study.clean()  # as every command that writes does
    assert temporary(tmp_path) == []


def test_a_resumed_run_removes_the_rest_of_a_checkpoint(tmp_path: Path) -> None:
    kill_while_writing(tmp_path / "checkpoint.pt")
    assert len(temporary(tmp_path)) == 1
    assert checkpoint.load(tmp_path / "checkpoint.pt") is None
    assert temporary(tmp_path) == []


def test_files_that_are_being_written_stay(tmp_path: Path) -> None:
    ours = tmp_path / f".a.{atomic._host()}-{os.getpid()}.writing"
    elsewhere = tmp_path / ".a.another-machine-1.writing"
    old = tmp_path / ".b.another-machine-1.writing"
    for path in (ours, elsewhere, old, tmp_path / ".writing", tmp_path / "a.writing"):
        path.touch()
    os.utime(old, (time.time() - 100_000,) * 2)
    atomic.clean(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {ours.name, elsewhere.name, ".writing", "a.writing"}


def test_checkpoints_of_a_run_killed_just_after_its_end_are_removed(tmp_path: Path) -> None:
    study = a_study(tmp_path)
    ended, waiting = study.folder_of(a_run()), study.add(a_run(seed=9)).folder
    for folder in (ended, waiting):
        for name in ("checkpoint.pt", "checkpoint.previous"):
            (folder / name).touch()
    study.clean()
    assert not list(ended.glob("checkpoint.*"))
    assert len(list(waiting.glob("checkpoint.*"))) == 2


# ---- links ----


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A file that nothing may touch."""
    path = tmp_path / "outside" / "precious"
    path.parent.mkdir()
    path.write_text("precious")
    return path


def test_a_file_that_is_a_link_is_replaced_and_not_followed(tmp_path: Path, outside: Path) -> None:
    study = Study(tmp_path / "study")
    run = a_run()
    folder = study.add(run).folder
    (folder / "run.json").unlink()
    names = ["run.json", "record.json", "neurons.json", "curve.csv", "curve.jsonl"]
    for path in [*(folder / name for name in names), tmp_path / "study" / "index.html"]:
        path.symlink_to(outside)
    (folder / f".record.json.{atomic._host()}-{os.getpid()}.writing").symlink_to(outside)
    with Log(folder, [10, 10]) as log:
        for point in a_record(run).timeline:
            log(point)
    study.finish(run, a_record(run))
    study.add(a_run(name="another name"))
    page.write(study)
    assert outside.read_text() == "precious"
    assert not any((folder / name).is_symlink() for name in names)


def test_a_folder_that_is_a_link_out_of_the_study_is_refused(tmp_path: Path, outside: Path) -> None:
    study = a_study(tmp_path / "study")
    (outside.parent / "average-digits-2-test.pdf").touch()
    (tmp_path / "study" / "figures").symlink_to(outside.parent)
    with pytest.raises(StudyError, match="is a link out of the study"):
        page.write(study)
    study.folder_of(a_run(seed=5)).symlink_to(outside.parent)
    with pytest.raises(StudyError, match="is a link out of the study"):
        study.add(a_run(seed=5))
    other = tmp_path / "other"
    other.mkdir()
    (other / "sweeps").symlink_to(outside.parent)
    with pytest.raises(StudyError, match="is a link out of the study"):
        Sweep(a_run("ewc"), "strength", 1, [Tried(1.0, None)]).save(other)
    assert {path.name for path in outside.parent.iterdir()} == {"precious", "average-digits-2-test.pdf"}


def test_a_study_may_be_a_link_itself(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    assert len(a_study(tmp_path / "link").entries) == 3


# ---- names ----

HOSTILE = "\x1b[2J\x1b]0;owned\x07\x9b31m\r\u202enpc\n=1+1"


def test_control_characters_do_not_reach_the_terminal(tmp_path: Path) -> None:
    study = Study(tmp_path)
    for seed, name in enumerate([HOSTILE, "[bold]npc"]):
        run = a_run(seed=seed, name=name, stream=HOSTILE)
        study.add(run)
        study.finish(run, a_record(run, tasks=[HOSTILE, "2, 3"]))
    damaged = tmp_path / "runs" / "\x1b[2Jdamaged"
    damaged.mkdir()
    (damaged / "run.json").write_text('{"stream": "\\u001b[2J"}')
    done = holdfast("list", tmp_path)
    assert done.returncode == 0
    assert all(line.isprintable() for line in (done.stdout + done.stderr).split("\n"))
    assert "\\x1b[2Jdamaged" in done.stderr
    with pytest.warns(UserWarning, match="left out"):
        (comparison, *_) = compare(study.entries)
    console = Console(file=io.StringIO(), width=200)
    console.print(terminal.results(comparison))
    assert all(line.isprintable() for line in console.file.getvalue().split("\n"))  # type: ignore[attr-defined]


def test_cells_of_tables_are_no_formulas(tmp_path: Path) -> None:
    study = Study(tmp_path)
    for seed, name in enumerate(["=1+1", "+1+1", "-1+1", "@SUM(1)", "\t=1", "\r=1", "-0.5"]):
        run = Run.of("digits", a_run(seed=seed).plan, name=name)
        study.add(run)
        study.finish(run, a_record(run, matrix=[[0.5, 0.5], [0.7, 0.8]], tasks=["=0", "1"]))
    paths = [path for path in exports.write(tmp_path, study.entries) if path.suffix == ".csv"]
    for path in paths:
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
        cells = [cell for row in rows for cell in (*row, *row.values())]
        assert not [cell for cell in cells if cell[:1] in "=+@\t\r" and cell]
        assert all(float(cell) < 0 for cell in cells if cell.startswith("-"))
    (backward,) = {row["mean"] for row in rows if row["quantity"] == "backward" and row["method"] == "'=1+1"}
    assert float(backward) > 0


# ---- failures ----


def test_a_study_whose_runs_all_failed_exits_with_1(tmp_path: Path) -> None:
    arguments = ("digits", "finetune", "--lr", "1e30", "--epochs", "1", "--tasks", "2", "--device", "cpu")
    done = holdfast("run", *arguments, "--out", tmp_path / "study")
    assert done.returncode == 1
    assert done.stderr == "holdfast: every run failed: the reasons are above and on the page\n"
    assert (tmp_path / "study" / "index.html").exists()


# ---- a full disk ----


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("a small disk needs an administrator")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_names_the_file_and_keeps_what_was_there(small_disk: Path) -> None:
    path = small_disk / "record.json"
    atomic.write(path, b"old")
    with pytest.raises(OSError, match=r"No space left on device: .*record\.json'"):
        atomic.write(path, b"x" * 100_000)
    assert [each.name for each in small_disk.iterdir()] == ["record.json"]
    assert path.read_bytes() == b"old"
    done = holdfast("run", "digits", "npc", "--epochs", "1", "--tasks", "2", "--device", "cpu", "--out", small_disk)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "checkpoint.pt: No space left on device" in done.stderr


def test_a_full_disk_while_logging_names_the_file(small_disk: Path) -> None:
    (small_disk / "filler").write_bytes(b"x" * 15 * 4096)
    points = a_record(a_run()).timeline

    def fill() -> None:
        with Log(small_disk, [10, 10]) as log:
            for point in points * 1000:
                log(point)

    with pytest.raises(OSError, match=r"No space left on device: .*curve\.csv"):
        fill()
