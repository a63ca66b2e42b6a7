"""Throughput of a study, in steps per second, by the number of runs at once.

    python benchmarks/sharing.py --jobs 1,2,4 --data ~/datasets

Each number has its own processes and is measured for some seconds after the last of them has warmed up. Ratios are to
the first number.
"""

import argparse
import time
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from holdfast.runs.plan import Plan
from holdfast.runs.training import Progress
from holdfast.study.processes import LocalExecutor
from holdfast.study.schedule import run_all
from holdfast.study.store import Entry, Run, Study
from holdfast.study.work import Execution
from machine import hardware

WARM_UP = 250  # steps, after which everything is compiled


class Window:
    """Counts the steps of all runs once the last has warmed up, and interrupts the study after some seconds."""

    def __init__(self, runs: int, seconds: float) -> None:
        self.runs, self.seconds = runs, seconds
        self.first: dict[str, tuple[float, int]] = {}
        self.last: dict[str, tuple[float, int]] = {}

    def progressed(self, run: Run, progress: Progress) -> None:
        now = time.monotonic()
        self.last[run.id] = now, progress.task * progress.steps + progress.step
        if len(self.last) < self.runs or min(step for _, step in self.last.values()) < WARM_UP:
            return
        self.first = self.first or dict(self.last)
        if now - max(began for began, _ in self.first.values()) > self.seconds:
            raise KeyboardInterrupt

    @property
    def steps_per_second(self) -> float:
        spans = [(self.first[run], self.last[run]) for run in self.first]
        return sum((after - before) / (end - begin) for (begin, before), (end, after) in spans)

    def started(self, run: Run) -> None: ...
    def ended(self, run: Run, entry: Entry | None, reason: str) -> None: ...
    def elsewhere(self, runs: int) -> None: ...


def measure(runs: int, options: argparse.Namespace, execution: Execution) -> float:
    gpu = execution.device == "cuda"
    overrides = {"precision": "bf16", "compile": True} if gpu else {"batch": options.batch, "width": options.width}
    plans = [Plan(options.method, seed=seed, epochs=1e4, **overrides) for seed in range(runs)]
    window = Window(runs, options.seconds)
    with TemporaryDirectory() as folder, suppress(KeyboardInterrupt):
        study = Study(Path(folder))
        executor = LocalExecutor(study, execution._replace(jobs=runs))
        run_all(study, [Run.of(options.stream, plan) for plan in plans], executor, window)
    return window.steps_per_second


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", default="1,2,3,4,6,8", help="numbers of runs (default: 1,2,3,4,6,8)")
    parser.add_argument("--stream", default="icifar100")
    parser.add_argument("--method", default="npc")
    parser.add_argument("--data", type=Path, help="folder of the data sets")
    parser.add_argument("--seconds", type=float, default=5, help="duration of each measurement (default: 5)")
    parser.add_argument("--batch", type=int, default=16, help="batch size on a CPU; 512 on a GPU (default: 16)")
    parser.add_argument("--width", type=float, default=0.25, help="model width on a CPU; 1 on a GPU (default: 0.25)")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(hardware(device), torch.__version__)
    first = None
    for runs in map(int, options.jobs.split(",")):
        speed = measure(runs, options, Execution(options.data, device))
        first = first or speed
        print(f"{runs} at once: {speed:6.0f} steps per second, {speed / first:.2f} times the first", flush=True)


if __name__ == "__main__":
    main()
