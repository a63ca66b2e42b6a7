"""What the tries of this folder attack: a small study with every kind of file."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from holdfast.runs.plan import Plan
from holdfast.runs.record import Record
from holdfast.study.store import Run, Study
from holdfast.study.sweep import Sweep, Tried
from holdfast.study.tables import Estimate


def a_run(method: str = "npc", seed: int = 0, name: str | None = None, stream: str = "digits") -> Run:
    return Run.of(stream, Plan(method, {"beta": 0.7} if method == "npc" else {}, seed=seed, curve=2), name=name)


def a_record(run: Run, **changes: Any) -> Record:
    values: dict[str, Any] = {
        "stream": run.stream,
        "tasks": ["0, 1", "2, 3"],
        "plan": run.plan.as_dict(),
        "settings": {"beta": 0.7, "rate": 0.001},
        "device": "a CPU",
        "versions": {"torch": "2.13.0"},
        "steps": [10, 10],
        "untrained": [0.5, 0.5],
        "matrix": [[0.9, 0.5], [0.7 + run.plan.seed / 100, 0.8]],
        "curves": [{"task": 0, "step": 5, "accuracy": [0.7]}, {"task": 1, "step": 5, "accuracy": [0.8, 0.6]}],
        "seconds": {"training": 2.0, "consolidation": 0.1, "evaluation": 0.1},
        "images": 640,
        "memory": {"importance": 128},
        "capacity": [{"0": 0.1, "2": 0.2}, {"0": 0.3, "2": 0.4}],
        "neurons": neurons(),
    }
    return Record(**(values | changes))


def neurons() -> dict[str, Any]:
    drift = {"means": {"all": 0.5, "most": 0.2, "least": 0.7}, "top": 2.0}
    drift["counts"] = {group: [3, 2, 1] for group in ("all", "most", "least")}
    marks = [{"task": task, "step": step, "layers": {"0": [0.1, 1.2]}} for task in (0, 1) for step in (5, 10)]
    return {"importance": marks, "drift": {"importance": [0.1, 1.2], "absolute": drift, "relative": drift}}


def a_study(folder: Path) -> Study:
    """Two finished runs of NPC, one of EWC, and a search."""
    study = Study(folder)
    for run in (a_run(), a_run(seed=1), a_run("ewc")):
        study.add(run)
        study.finish(run, a_record(run))
    tried = [Tried(0.1, Estimate(0.7, 0.1, 2)), Tried(1.0, Estimate(0.8, None, 1)), Tried(10.0, None)]
    Sweep(Run.of("digits", Plan("ewc", evaluate_on="validation")), "strength", 2, tried).save(folder)
    return study


def holdfast(*arguments: object, prefix: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own."""
    command = [*prefix, sys.executable, "-m", "holdfast", *map(str, arguments)]
    environment = os.environ | {"COLUMNS": "200"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
