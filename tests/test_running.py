"""Studies that are run: several processes, interruptions, kills, and what goes wrong with one run."""

import csv
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.errors import UserError
from holdfast.study import logs, running
from holdfast.study.records import Entry, Run, Study, StudyError, claimed
from holdfast.study.running import How, Share, perform, prepare, run_all, share
from holdfast.training import Plan, Progress, train
from test_training import outcome

CPU = How(device="cpu")


def plan(method: str = "npc", **knobs: Any) -> Plan:
    usual = {"model": "mlp", "lr": 0.1, "batch": 16, "epochs": 1, "epoch": "task", "curve": 2}
    return Plan(method, **{**usual, **knobs})


def run(method: str = "npc", **knobs: Any) -> Run:
    return Run.of("digits", plan(method, **knobs), tasks=2)


@dataclass
class Seen:
    """A display that remembers."""

    begun: list[str] = field(default_factory=list)
    told: list[Progress] = field(default_factory=list)
    over: dict[str, tuple[Entry | None, str]] = field(default_factory=dict)
    waited: list[int] = field(default_factory=list)

    def began(self, run: Run) -> None:
        self.begun.append(run.label)

    def went_on(self, run: Run, progress: Progress) -> None:
        self.told.append(progress)

    def ended(self, run: Run, entry: Entry | None, why: str) -> None:
        self.over[run.label] = entry, why

    def waits(self, runs: int) -> None:
        self.waited.append(runs)


# ---- one run ----


def test_a_run_is_done_once_and_leaves_plain_files(tmp_path: Path) -> None:
    study = Study(tmp_path)
    told: list[Progress] = []
    entry = perform(study, run(), CPU, told.append)
    assert entry is not None
    assert entry.record is not None
    alone = train(running._stream("digits", None, 2), plan(), device="cpu")
    assert outcome(entry.record) == outcome(alone)
    assert sorted(path.name for path in entry.folder.iterdir() if path.name != "lock") == [
        *("curve.csv", "curve.jsonl", "record.json", "run.json"),
    ]
    steps = len(told)
    assert steps > 0
    again = perform(study, run(), CPU, told.append)
    assert again is not None
    assert again.record == entry.record
    assert len(told) == steps


def test_the_logs_are_the_curves(tmp_path: Path) -> None:
    entry = perform(Study(tmp_path), run(), CPU)
    assert entry is not None
    assert entry.record is not None
    points = [json.loads(line) for line in (entry.folder / "curve.jsonl").read_text().splitlines()]
    assert [(p["task"], p["step"], p["accuracy"]) for p in points] == [
        (p.task, p.step, p.accuracy) for p in entry.record.timeline
    ]
    with (entry.folder / "curve.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 1 + 2 * 2  # two points in each task: of one task, then of two
    last = entry.record.matrix[-1]
    assert [float(row["accuracy"]) for row in rows[-2:]] == last
    assert [row["on_task"] for row in rows[-2:]] == ["0", "1"]


def test_tensorboard_has_the_same_curves(tmp_path: Path) -> None:
    code = (
        "import sys, json; from tensorboard.backend.event_processing.event_accumulator import EventAccumulator as E\n"
        "e = E(sys.argv[1]); e.Reload()\n"
        "print(json.dumps({t: [(s.step, s.value) for s in e.Scalars(t)] for t in e.Tags()['scalars']}))"
    )
    study = Study(tmp_path)
    work = "from test_running import *; perform(Study(Path(sys.argv[1])), run(), How(device='cpu', tensorboard=True))"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    subprocess.run([sys.executable, "-c", work, str(tmp_path)], check=True, env=environment, capture_output=True)
    (entry,) = study.entries
    assert entry.record is not None
    shown = subprocess.run(
        [sys.executable, "-c", code, str(entry.folder / "tensorboard")], check=True, capture_output=True, text=True
    )
    curves = json.loads(shown.stdout.splitlines()[-1])
    steps = entry.record.steps
    expected = [[p.step + (steps[0] if p.task else 0), p.average] for p in entry.record.timeline]
    assert [step for step, _ in curves["accuracy/average of the tasks seen"]] == [step for step, _ in expected]
    values = [value for _, value in curves["accuracy/average of the tasks seen"]]
    assert values == pytest.approx([value for _, value in expected], rel=1e-5)
    assert len(curves["accuracy/task 1"]) == 4
    assert len(curves["accuracy/task 2"]) == 2


def test_the_logs_of_a_run_that_diverges_end_where_its_curves_do(tmp_path: Path) -> None:
    entry = perform(Study(tmp_path), run(lr=1e30, epochs=10, curve=150), CPU)
    assert entry is not None
    assert entry.state == "failed"
    assert entry.record is not None
    points = [json.loads(line) for line in (entry.folder / "curve.jsonl").read_text().splitlines()]
    assert [(p["task"], p["step"]) for p in points] == [(p.task, p.step) for p in entry.record.timeline]


def test_without_tensorboard_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "find_spec", lambda name: None)
    with pytest.raises(StudyError, match="pip install tensorboard"):
        logs.require_tensorboard()


def test_what_another_process_is_at_is_left_alone(tmp_path: Path) -> None:
    study = Study(tmp_path)
    with claimed(study.add(run()).folder):
        assert perform(study, run(), CPU) is None


# ---- many ----


def test_a_study_in_two_processes_gives_what_each_run_gives_alone(tmp_path: Path) -> None:
    study, seen = Study(tmp_path), Seen()
    runs = [run(method, seed=seed) for seed in range(2) for method in ("npc", "ewc", "finetune")]
    perform(study, runs[0], CPU)
    entries = run_all(study, runs, CPU._replace(jobs=2), seen)
    assert [entry.run for entry in entries] == runs
    assert {entry.state for entry in entries} == {"finished"}
    assert seen.begun == [each.label for each in runs[1:]]
    assert set(seen.over) == {each.label for each in runs[1:]}
    assert seen.told
    for entry in entries[:4]:
        assert entry.record is not None
        alone = train(running._stream("digits", None, 2), Plan(**entry.run.plan), device="cpu")
        assert alone.matrix == entry.record.matrix


def test_what_goes_wrong_with_one_run_does_not_stop_the_others(tmp_path: Path) -> None:
    study, seen = Study(tmp_path), Seen()
    bad, worse, good = run(model="paper_cnn"), run(lr=1e30), run("finetune")
    with pytest.raises(StudyError, match=r"npc, seed 0: the paper's network is for images of 32x32.*kept in"):
        run_all(study, [bad, worse, good], CPU._replace(jobs=1), seen)
    states = {entry.run.id: entry.state for entry in study.entries}
    assert states == {bad.id: "waiting", worse.id: "failed", good.id: "finished"}


def test_what_cannot_work_is_said_before_anything_is_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nothing"):
        prepare([Run.of(f"folder:{tmp_path}/nothing", plan())], CPU)
    with pytest.raises(ValueError, match="there is no stream 'didgits'"):
        prepare([Run.of("didgits", plan())], CPU)
    with pytest.raises(ValueError, match="there is no device 'gpu': use cpu or cuda"):
        prepare([], CPU._replace(device="gpu"))


def test_a_process_that_dies_costs_one_attempt(tmp_path: Path) -> None:
    """All workers are killed at the first sign of life; their runs are tried again, one at a time."""
    study = Study(tmp_path)

    class Killer(Seen):
        def went_on(self, run: Run, progress: Progress) -> None:
            if not self.told:
                for child in multiprocessing.active_children():
                    assert child.pid is not None
                    os.kill(child.pid, signal.SIGKILL)
            super().went_on(run, progress)

    runs = [run(seed=seed, epochs=10) for seed in range(3)]
    seen = Killer()
    entries = run_all(study, runs, CPU._replace(jobs=2), seen)
    assert {entry.state for entry in entries} == {"finished"}
    assert len(seen.begun) > len(runs)


def test_an_idle_process_that_dies_is_replaced(tmp_path: Path) -> None:
    """Whenever a run has ended its worker is killed, before it gets the next."""

    class Killer(Seen):
        def ended(self, run: Run, entry: Entry | None, why: str) -> None:
            super().ended(run, entry, why)
            for child in multiprocessing.active_children():
                child.kill()
                child.join()

    seen = Killer()
    entries = run_all(Study(tmp_path), [run(seed=seed) for seed in range(3)], CPU._replace(jobs=1), seen)
    assert [entry.state for entry in entries] == ["finished"] * 3


def test_a_run_that_is_asked_for_twice_is_done_once(tmp_path: Path) -> None:
    seen = Seen()
    assert len(run_all(Study(tmp_path), [run(), run()], CPU._replace(jobs=2), seen)) == 1
    assert len(seen.begun) == 1


@pytest.mark.parametrize("after", [0.0, 1.0, 2.0])
def test_an_interruption_is_heard_at_every_moment(tmp_path: Path, after: float) -> None:
    """While processes start, while they load their data, while they learn."""
    process = start(tmp_path, tmp_path / "study", 100)
    while not (tmp_path / "study" / "runs").exists():
        time.sleep(0.01)
    time.sleep(after)
    os.killpg(process.pid, signal.SIGINT)
    said = process.communicate(timeout=40)[0]
    assert process.returncode == 130
    assert "goes on where it was" in said
    assert "Traceback" not in said


def test_an_interrupt_that_another_thread_takes_waits_too() -> None:
    done, reached = threading.Event(), False
    other = threading.Thread(target=done.wait)
    other.start()
    try:
        with pytest.raises(KeyboardInterrupt), running._interrupts_wait():  # noqa: PT012
            assert other.ident is not None
            signal.pthread_kill(other.ident, signal.SIGINT)
            time.sleep(0.1)
            reached = True
    finally:
        done.set()
        other.join()
    assert reached
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_process_that_dies_every_time_is_a_failure_of_its_run(tmp_path: Path) -> None:
    class Killer(Seen):
        def went_on(self, run: Run, progress: Progress) -> None:
            for child in multiprocessing.active_children():
                assert child.pid is not None
                os.kill(child.pid, signal.SIGKILL)

    with pytest.raises(StudyError, match=r"npc, seed 0: its process died \(exit code -9\), perhaps for want of memory"):
        run_all(Study(tmp_path), [run(epochs=100)], CPU, Killer())


# ---- two processes, interruptions ----

SCRIPT = """
import sys
from pathlib import Path
from test_running import *
if __name__ == "__main__":
    runs = [run(method, seed=seed, epochs=float(sys.argv[2])) for seed in range(2) for method in ("npc", "ewc", "si")]
    try:
        run_all(Study(Path(sys.argv[1])), runs, CPU._replace(jobs=2), Seen())
    except KeyboardInterrupt as error:
        print(error)
        sys.exit(130)
"""


def start(tmp_path: Path, folder: Path, epochs: float) -> "subprocess.Popen[str]":
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    return subprocess.Popen(
        [sys.executable, str(script), str(folder), str(epochs)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def logged(folder: Path) -> int:
    return sum(len(path.read_text().splitlines()) for path in folder.glob("runs/*/curve.jsonl"))


def test_two_processes_share_a_study(tmp_path: Path) -> None:
    folder = tmp_path / "study"
    both = [start(tmp_path, folder, 10) for _ in range(2)]
    assert [process.wait(timeout=120) for process in both] == [0, 0]
    for process in both:
        assert process.stdout is not None
        process.stdout.close()
    entries = Study(folder).entries
    assert [entry.state for entry in entries] == ["finished"] * 6
    for entry in entries:  # each was done once: the log has each point once
        assert entry.record is not None
        assert len((entry.folder / "curve.jsonl").read_text().splitlines()) == len(entry.record.timeline)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_what_was_interrupted_goes_on(tmp_path: Path, how: signal.Signals) -> None:
    folder = tmp_path / "study"
    process = start(tmp_path, folder, 15)
    while logged(folder) < 5:
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(how)
    said = process.communicate(timeout=60)[0]
    finished = {entry.run.id: entry.record for entry in Study(folder).entries if entry.record is not None}
    assert len(finished) < 6
    if how == signal.SIGINT:
        assert process.returncode == 130
        assert f"goes on where it was, in {folder}" in said
        assert "interrupted" in {entry.state for entry in Study(folder).entries}
    runs = [run(method, seed=seed, epochs=15.0) for seed in range(2) for method in ("npc", "ewc", "si")]
    while any(entry.state == "running" for entry in Study(folder).entries):  # a worker whose parent was killed
        time.sleep(0.05)
    entries = run_all(Study(folder), runs, CPU._replace(jobs=2), Seen())
    assert {entry.state for entry in entries} == {"finished"}
    for entry in entries:
        if entry.run.id in finished:
            assert entry.record == finished[entry.run.id]
        else:
            assert entry.record is not None
            alone = train(running._stream("digits", None, 2), Plan(**entry.run.plan), device="cpu")
            assert outcome(alone) == outcome(entry.record)


# ---- sharing ----


@pytest.mark.parametrize(
    ("cores", "runs", "jobs", "expected"),
    [(8, 20, None, (8, 1)), (8, 3, None, (3, 2)), (8, 1, None, (1, 8)), (8, 20, 2, (2, 4)), (2, 20, 5, (5, 1))],
)
def test_a_cpu_is_shared_by_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, runs: int, jobs: int | None, expected: tuple[int, int]
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: cores)
    assert share(runs, How(device="cpu", jobs=jobs)) == Share(*expected)


@pytest.mark.parametrize(("free", "expected"), [(100, running.AT_ONCE_ON_A_GPU), (13, 2), (3, 1)])
def test_a_gpu_is_shared_while_its_memory_allows(monkeypatch: pytest.MonkeyPatch, free: int, expected: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free * 2**30, 200 * 2**30))
    assert share(20, How()).jobs == expected


def test_the_memory_of_a_gpu_that_is_not_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(running, "train", full)
    ended = running._attempt(Study(tmp_path), run(), CPU, lambda _: None)
    assert ended.outcome == "no memory"
    assert "smaller batch" in ended.why


def test_a_mistake_in_a_method_is_kept_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(running, "train", broken)
    ended = running._attempt(Study(tmp_path), run(), CPU, lambda _: None)
    assert ended.outcome == "failed"
    where = Study(tmp_path).folder_of(run()) / "error.txt"
    assert ended.why == f"ZeroDivisionError: oops; where it happened is in {where}"
    assert "in broken" in where.read_text()
