"""Runs executed in real processes: their records and logs, interruptions, kills, failures."""

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
from holdfast.runs.plan import Plan
from holdfast.runs.training import Progress, train
from holdfast.study import logs, processes, schedule, work
from holdfast.study.processes import LocalExecutor, jobs_for
from holdfast.study.store import Entry, Run, Study, StudyError, claimed
from holdfast.study.work import Execution, run_one
from test_training import outcome

CPU = Execution(device="cpu")
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}  # subprocesses import what the tests do


def plan(method: str = "npc", **options: Any) -> Plan:
    defaults = {"model": "mlp", "lr": 0.1, "batch": 16, "epochs": 1, "epoch": "task", "curve": 2}
    return Plan(method, **{**defaults, **options})


def run(method: str = "npc", **options: Any) -> Run:
    return Run.of("digits", plan(method, **options), tasks=2)


@dataclass
class Recorder:
    """A display that records what it is shown."""

    runs: list[str] = field(default_factory=list)
    progress: list[Progress] = field(default_factory=list)
    ends: dict[str, tuple[Entry | None, str]] = field(default_factory=dict)
    counts: list[int] = field(default_factory=list)

    def started(self, run: Run) -> None:
        self.runs.append(run.label)

    def progressed(self, run: Run, progress: Progress) -> None:
        self.progress.append(progress)

    def ended(self, run: Run, entry: Entry | None, reason: str) -> None:
        self.ends[run.label] = entry, reason

    def elsewhere(self, runs: int) -> None:
        self.counts.append(runs)


def run_all(study: Study, runs: list[Run], execution: Execution, display: Recorder) -> list[Entry]:
    return schedule.run_all(study, runs, LocalExecutor(study, execution), display)


# ---- one run ----


def test_a_run_is_done_once_and_leaves_plain_files(tmp_path: Path) -> None:
    study = Study(tmp_path)
    progress: list[Progress] = []
    entry = run_one(study, run(), CPU, progress.append)
    assert entry is not None
    assert entry.record is not None
    alone = train(work._stream("digits", None, 2), plan(), device="cpu")
    assert outcome(entry.record) == outcome(alone)
    assert sorted(path.name for path in entry.folder.iterdir() if path.name != "lock") == [
        *("curve.csv", "curve.jsonl", "record.json", "run.json"),
    ]
    steps = len(progress)
    assert steps > 0
    again = run_one(study, run(), CPU, progress.append)
    assert again is not None
    assert again.record == entry.record
    assert len(progress) == steps


def test_the_logs_are_the_curves(tmp_path: Path) -> None:
    entry = run_one(Study(tmp_path), run(), CPU)
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
    script = (
        "from test_running import *\n"
        "run_one(Study(Path(sys.argv[1])), run(), Execution(device='cpu', tensorboard=True))"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, env=ENVIRONMENT, capture_output=True)
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
    entry = run_one(Study(tmp_path), run(lr=1e30, epochs=10, curve=150), CPU)
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
        assert run_one(study, run(), CPU) is None


# ---- several runs ----


def test_a_study_in_two_processes_gives_what_each_run_gives_alone(tmp_path: Path) -> None:
    study, display = Study(tmp_path), Recorder()
    runs = [run(method, seed=seed) for seed in range(2) for method in ("npc", "ewc", "finetune")]
    run_one(study, runs[0], CPU)
    entries = run_all(study, runs, CPU._replace(jobs=2), display)
    assert [entry.run for entry in entries] == runs
    assert {entry.state for entry in entries} == {"finished"}
    assert display.runs == [each.label for each in runs[1:]]
    assert set(display.ends) == {each.label for each in runs[1:]}
    assert display.progress
    for entry in entries[:4]:
        assert entry.record is not None
        alone = train(work._stream("digits", None, 2), entry.run.plan, device="cpu")
        assert alone.matrix == entry.record.matrix


def test_what_goes_wrong_with_one_run_does_not_stop_the_others(tmp_path: Path) -> None:
    study, display = Study(tmp_path), Recorder()
    bad, worse, good = run(settings={"rate": 2}), run(lr=1e30), run("finetune")
    with pytest.raises(StudyError, match=r"npc rate=2, seed 0: rate must be above 0 and at most 1, got 2; .*kept in"):
        run_all(study, [bad, worse, good], CPU._replace(jobs=1), display)
    states = {entry.run.id: entry.state for entry in study.entries}
    assert states == {bad.id: "waiting", worse.id: "failed", good.id: "finished"}


def test_errors_are_raised_before_the_first_run(tmp_path: Path) -> None:
    study = Study(tmp_path)
    with pytest.raises(UserError, match="nothing"):
        LocalExecutor(study, CPU).open([Run.of(f"folder:{tmp_path}/nothing", plan())])
    with pytest.raises(ValueError, match="unknown stream 'didgits'"):
        LocalExecutor(study, CPU).open([Run.of("didgits", plan())])
    with pytest.raises(UserError, match="npc, seed 0 on digits: the paper's network is for images of 32x32, not 8x8"):
        LocalExecutor(study, CPU).open([run(), run(model="paper_cnn")])
    with pytest.raises(ValueError, match="unknown device 'gpu': use cpu or cuda"):
        LocalExecutor(study, CPU._replace(device="gpu")).open([])


def test_a_process_that_dies_costs_one_attempt(tmp_path: Path) -> None:
    """All workers are killed at the first progress report; their runs are retried one at a time."""
    study = Study(tmp_path)

    class Killer(Recorder):
        def progressed(self, run: Run, progress: Progress) -> None:
            if not self.progress:
                for child in multiprocessing.active_children():
                    assert child.pid is not None
                    os.kill(child.pid, signal.SIGKILL)
            super().progressed(run, progress)

    runs = [run(seed=seed, epochs=10) for seed in range(3)]
    display = Killer()
    entries = run_all(study, runs, CPU._replace(jobs=2), display)
    assert {entry.state for entry in entries} == {"finished"}
    assert len(display.runs) > len(runs)


def test_an_idle_process_that_dies_is_replaced(tmp_path: Path) -> None:
    """The worker is killed after every run, before it receives the next."""

    class Killer(Recorder):
        def ended(self, run: Run, entry: Entry | None, reason: str) -> None:
            super().ended(run, entry, reason)
            for child in multiprocessing.active_children():
                child.kill()
                child.join()

    display = Killer()
    entries = run_all(Study(tmp_path), [run(seed=seed) for seed in range(3)], CPU._replace(jobs=1), display)
    assert [entry.state for entry in entries] == ["finished"] * 3


def test_a_run_that_is_asked_for_twice_is_done_once(tmp_path: Path) -> None:
    display = Recorder()
    assert len(run_all(Study(tmp_path), [run(), run()], CPU._replace(jobs=2), display)) == 1
    assert len(display.runs) == 1


@pytest.mark.parametrize("after", [0.0, 1.0, 2.0])
def test_an_interruption_is_heard_at_every_moment(tmp_path: Path, after: float) -> None:
    """While processes start, load their data, and train."""
    process = start(tmp_path, tmp_path / "study", 100)
    while not (tmp_path / "study" / "runs").exists():
        time.sleep(0.01)
    time.sleep(after)
    os.killpg(process.pid, signal.SIGINT)
    printed = process.communicate(timeout=40)[0]
    assert process.returncode == 130
    assert "run the same command again to resume" in printed
    assert "Traceback" not in printed


def test_an_interrupt_that_another_thread_takes_waits_too() -> None:
    done, reached = threading.Event(), False
    other = threading.Thread(target=done.wait)
    other.start()
    try:
        with pytest.raises(KeyboardInterrupt), processes._interrupts_deferred():  # noqa: PT012
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
    class Killer(Recorder):
        def progressed(self, run: Run, progress: Progress) -> None:
            for child in multiprocessing.active_children():
                assert child.pid is not None
                os.kill(child.pid, signal.SIGKILL)

    with pytest.raises(StudyError, match=r"npc, seed 0: its process died \(exit code -9\), perhaps out of memory"):
        run_all(Study(tmp_path), [run(epochs=100)], CPU, Killer())


# ---- two processes, interruptions ----

SCRIPT = """
import sys
from pathlib import Path
from test_running import *
if __name__ == "__main__":
    runs = [run(method, seed=seed, epochs=float(sys.argv[2])) for seed in range(2) for method in ("npc", "ewc", "si")]
    try:
        run_all(Study(Path(sys.argv[1])), runs, CPU._replace(jobs=2), Recorder())
    except KeyboardInterrupt as error:
        print(error)
        sys.exit(130)
"""


def start(tmp_path: Path, folder: Path, epochs: float) -> "subprocess.Popen[str]":
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    return subprocess.Popen(
        [sys.executable, str(script), str(folder), str(epochs)],
        env=ENVIRONMENT,
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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_what_was_interrupted_goes_on(tmp_path: Path, number: signal.Signals) -> None:
    folder = tmp_path / "study"
    process = start(tmp_path, folder, 15)
    while logged(folder) < 5:
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(number)
    printed = process.communicate(timeout=60)[0]
    finished = {entry.run.id: entry.record for entry in Study(folder).entries if entry.record is not None}
    assert len(finished) < 6
    if number == signal.SIGINT:
        assert process.returncode == 130
        assert f"run the same command again to resume {folder}" in printed
        assert "interrupted" in {entry.state for entry in Study(folder).entries}
    runs = [run(method, seed=seed, epochs=15.0) for seed in range(2) for method in ("npc", "ewc", "si")]
    while any(entry.state == "running" for entry in Study(folder).entries):  # a worker whose parent was killed
        time.sleep(0.05)
    entries = run_all(Study(folder), runs, CPU._replace(jobs=2), Recorder())
    assert {entry.state for entry in entries} == {"finished"}
    for entry in entries:
        if entry.run.id in finished:
            assert entry.record == finished[entry.run.id]
        else:
            assert entry.record is not None
            alone = train(work._stream("digits", None, 2), entry.run.plan, device="cpu")
            assert outcome(alone) == outcome(entry.record)


# ---- sharing ----


@pytest.mark.parametrize(
    ("cores", "threads", "jobs", "expected"),
    [
        (8, [1] * 20, None, 8),
        (8, [1] * 3, None, 3),
        (8, [1, 3, 2], None, 2),
        (2, [4], None, 1),
        (2, [1] * 20, 5, 5),
        (2, [], None, 1),
    ],
)
def test_a_cpu_is_shared_by_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, threads: list[int], jobs: int | None, expected: int
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: cores)
    runs = [run(seed=seed, threads=each) for seed, each in enumerate(threads)]
    assert jobs_for(runs, Execution(device="cpu", jobs=jobs)) == expected


@pytest.mark.parametrize(("free", "expected"), [(100, processes.RUNS_PER_GPU), (13, 2), (3, 1)])
def test_a_gpu_is_shared_while_its_memory_allows(monkeypatch: pytest.MonkeyPatch, free: int, expected: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free * 2**30, 200 * 2**30))
    assert jobs_for([run(seed=seed) for seed in range(20)], Execution()) == expected


def test_the_memory_of_a_gpu_that_is_not_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(work, "train", full)
    ended = work.attempt(Study(tmp_path), run(), CPU, lambda _: None)
    assert ended.outcome == "out of memory"
    assert "smaller batch" in ended.reason


def test_a_mistake_in_a_method_is_kept_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(work, "train", broken)
    ended = work.attempt(Study(tmp_path), run(), CPU, lambda _: None)
    assert ended.outcome == "failed"
    where = Study(tmp_path).folder_of(run()) / "error.txt"
    assert ended.reason == f"ZeroDivisionError: oops; the traceback is in {where}"
    assert "in broken" in where.read_text()
