"""How many runs at once use a machine best: steps a second of a whole study, by the number of runs.

    python benchmarks/sharing.py --jobs 1,2,4 --data ~/datasets

Each number is measured in its own set of processes, over some seconds, when all of them have warmed up. The ratio is to
one run alone.
"""

import argparse
import time
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from holdfast.study.records import Entry, Run, Study
from holdfast.study.running import How, run_all
from holdfast.training import Plan, Progress
from machine import hardware

WARM = 250  # steps, after which all is compiled


class Window:
    """Counts the steps of all runs from when the last has warmed up, and ends the study after some seconds."""

    def __init__(self, runs: int, seconds: float) -> None:
        self.runs, self.seconds = runs, seconds
        self.first: dict[str, tuple[float, int]] = {}
        self.last: dict[str, tuple[float, int]] = {}

    def went_on(self, run: Run, progress: Progress) -> None:
        now = time.monotonic()
        self.last[run.id] = now, progress.task * progress.steps + progress.step
        if len(self.last) < self.runs or min(step for _, step in self.last.values()) < WARM:
            return
        self.first = self.first or dict(self.last)
        if now - max(began for began, _ in self.first.values()) > self.seconds:
            raise KeyboardInterrupt

    @property
    def steps_per_second(self) -> float:
        spans = [(self.first[run], self.last[run]) for run in self.first]
        return sum((after - before) / (end - begin) for (begin, before), (end, after) in spans)

    def began(self, run: Run) -> None: ...
    def ended(self, run: Run, entry: Entry | None, why: str) -> None: ...
    def waits(self, runs: int) -> None: ...


def measure(runs: int, options: argparse.Namespace, how: How) -> float:
    gpu = how.device == "cuda"
    plan = {"precision": "bf16", "compile": True} if gpu else {"batch": options.batch, "width": options.width}
    made = [Run.of(options.stream, Plan(options.method, seed=seed, epochs=1e4, **plan)) for seed in range(runs)]
    window = Window(runs, options.seconds)
    with TemporaryDirectory() as folder, suppress(KeyboardInterrupt):
        run_all(Study(Path(folder)), made, how._replace(jobs=runs), window)
    return window.steps_per_second


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", default="1,2,3,4,6,8", help="numbers of runs (default: 1,2,3,4,6,8)")
    parser.add_argument("--stream", default="icifar100")
    parser.add_argument("--method", default="npc")
    parser.add_argument("--data", type=Path, help="the folder of the data sets")
    parser.add_argument("--seconds", type=float, default=5, help="of measuring, for each number (default: 5)")
    parser.add_argument("--batch", type=int, default=16, help="images in a batch on a CPU; 512 on a GPU (default: 16)")
    parser.add_argument("--width", type=float, default=0.25, help="of the network on a CPU; 1 on a GPU (default: 0.25)")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(hardware(device), torch.__version__)
    alone = None
    for runs in map(int, options.jobs.split(",")):
        found = measure(runs, options, How(options.data, device))
        alone = alone or found
        print(f"{runs} at once: {found:6.0f} steps a second, {found / alone:.2f} times the first", flush=True)


if __name__ == "__main__":
    main()
