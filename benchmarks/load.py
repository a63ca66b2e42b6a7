"""The time and memory of `holdfast list` and `holdfast report` on a large study.

    python benchmarks/load.py                                # 5,000 runs in 10 rows
    python benchmarks/load.py --rows 500
    python benchmarks/load.py --profile report

The study is synthetic: records of five tasks with ten points each, stored as real runs are. Each command runs in a
process of its own. The output is a Markdown table.
"""

import argparse
import cProfile
import os
import pstats
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from holdfast.runs.plan import Plan
from holdfast.runs.record import Record
from holdfast.study.store import Run, Study

TASKS, POINTS, STEPS = 5, 10, 1000
NAMES = [f"classes {2 * task} and {2 * task + 1}" for task in range(TASKS)]


def synthetic(run: Run, accuracies: random.Random) -> Record:
    """A record with random accuracies."""

    def accuracy(count: int) -> list[float]:
        return [round(accuracies.uniform(0.5, 1), 4) for _ in range(count)]

    return Record(
        stream="pairs in 5 x 2",
        tasks=NAMES,
        plan=run.plan.as_dict(),
        settings=dict(run.plan.settings),
        device="a CPU",
        versions={"holdfast": "0.1.0", "torch": "2.13.0", "python": "3.12.3"},
        steps=[STEPS] * TASKS,
        untrained=accuracy(TASKS),
        matrix=[accuracy(TASKS) for _ in range(TASKS)],
        curves=[
            {"task": task, "step": STEPS // POINTS * point, "accuracy": accuracy(task + 1)}
            for task in range(TASKS)
            for point in range(1, POINTS)
        ],
        seconds={"training": 10.0, "consolidation": 0.5, "evaluation": 0.5},
        images=100_000,
        memory={"fisher": 100_000},
    )


def make(folder: Path, runs: int, rows: int) -> None:
    """Store a study of `runs` runs, `runs / rows` seeds of each of `rows` settings."""
    study, accuracies, fsync = Study(folder), random.Random(0), os.fsync
    os.fsync = lambda _: None  # the study is thrown away
    try:
        for number in range(runs):
            plan = Plan("ewc", {"strength": 1.0 + number % rows}, seed=number // rows, curve=POINTS)
            run = Run.of("digits", plan)
            study.add(run)
            study.finish(run, synthetic(run, accuracies))
    finally:
        os.fsync = fsync


def measure(command: str, folder: Path) -> tuple[float, float, float]:
    """The seconds of a command, those of the CPU, and the peak memory in MB."""
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "holdfast", command, str(folder)], check=True, stdout=subprocess.DEVNULL)
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, after.ru_maxrss * 1024 / 10**6


def profile(command: str, folder: Path) -> None:
    from holdfast import cli

    sys.argv = ["holdfast", command, str(folder)]
    profiler = cProfile.Profile()
    try:
        profiler.runcall(cli.main)
    except SystemExit:
        pstats.Stats(profiler, stream=sys.stderr).sort_stats("cumulative").print_stats(60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5000)
    parser.add_argument("--rows", type=int, default=10)
    parser.add_argument("--profile", choices=["list", "report"])
    parser.add_argument("--folder", type=Path, help="an existing study, or where to make and keep one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch) / "study"
        if not folder.exists():
            make(folder, options.runs, options.rows)
        if options.profile:
            profile(options.profile, folder)
            return
        print(f"{options.runs} runs in {options.rows} rows, {os.cpu_count()} CPU cores\n")
        print("| command | seconds | of the CPU | peak memory, MB |\n|---|---|---|---|")
        for command in ("list", "report"):
            seconds, of_the_cpu, megabytes = measure(command, folder)
            print(f"| `{command}` | {seconds:.1f} | {of_the_cpu:.1f} | {megabytes:.0f} |", flush=True)


if __name__ == "__main__":
    main()
