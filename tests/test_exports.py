"""The numbers of a study as files: parsed back, they are the numbers of its runs."""

import csv
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast.runs.plan import Plan
from holdfast.runs.record import Record
from holdfast.study import exports
from holdfast.study.store import Entry, Run

PLAN = Plan("npc", model="mlp", lr=0.1)
FIRST = [[0.9, 0.5], [0.7, 0.8]]
SECOND = [[0.8, 0.5], [0.6, 0.9]]


def record_of(run: Run, matrix: list[list[float]], **knobs: Any) -> Record:
    """What came out of a run, with as many tasks as the matrix has unless they are named."""
    names = knobs.pop("names", [f"task {number}" for number in range(1, len(matrix) + 1)])
    known = {"settings": {"beta": 0.7}, "device": "a CPU", "versions": {"torch": "2.8"}, "images": 1000}
    known |= {"seconds": {"training": 2.0, "consolidation": 0.5, "evaluation": 0.25}, "peak_bytes": 2**29}
    known |= {"steps": [10] * len(names), "untrained": [0.5] * len(names)}
    return Record(run.stream, names, run.plan.as_dict(), matrix=matrix, **(known | knobs))


def entry(folder: Path, name: str, seed: int, matrix: list[list[float]] | None, **knobs: Any) -> Entry:
    """A run, unfinished without a matrix; what else is given is of its stream, its plan or its record."""
    fields = {key: knobs.pop(key) for key in list(knobs) if key in vars(PLAN) and key != "settings"}
    plan = replace(PLAN, seed=seed, **fields)
    run = Run(knobs.pop("stream", "digits"), plan, None, name, f"{name}-{seed}")
    return Entry(run, folder / run.id, None if matrix is None else record_of(run, matrix, **knobs))


@pytest.fixture
def entries(tmp_path: Path) -> list[Entry]:
    failed = {"task": 1, "step": 7, "why": 'the loss was "not finite",\nsays it'}
    return [
        entry(tmp_path, "npc", 0, FIRST),
        entry(tmp_path, "npc", 1, SECOND),
        entry(tmp_path, "odd, name", 0, [[0.9, 0.5]], names=["task 1", "task 2"], failure=failed),
        entry(tmp_path, "npc", 2, None),
    ]


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_files_of_a_study(tmp_path: Path, entries: Sequence[Entry]) -> None:
    paths = exports.write(tmp_path, entries)
    assert [path.name for path in paths] == ["runs.csv", "runs.jsonl", "table.csv"]
    assert all(path.is_file() for path in paths)


def test_a_line_per_run(tmp_path: Path, entries: Sequence[Entry]) -> None:
    exports.write(tmp_path, entries)
    lines = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    assert [(line["name"], line["seed"], line["state"]) for line in lines] == [
        ("npc", 0, "finished"),
        ("npc", 1, "finished"),
        ("odd, name", 0, "failed"),
        ("npc", 2, "waiting"),
    ]
    first, _, failed, waiting = lines
    assert first["summary"]["final"] == pytest.approx(0.75)
    assert first["summary"]["forgetting"] == pytest.approx(0.2)
    assert first["accuracy"] == [0.7, 0.8]
    assert first["settings"] == {"beta": 0.7}
    assert first["plan"].items() >= {"method": "npc", "model": "mlp", "lr": 0.1, "evaluate_on": "test"}.items()
    assert not {"seed", "settings"} & set(first["plan"])
    assert first["images_per_second"] == 500
    assert failed["summary"] is None
    assert failed["failure"]["why"].endswith("\nsays it")
    assert waiting["summary"] is None
    assert waiting["device"] is None


def test_the_same_as_csv(tmp_path: Path, entries: Sequence[Entry]) -> None:
    exports.write(tmp_path, entries)
    first, second, failed, waiting = read(tmp_path / "runs.csv")
    assert first["name"] == "npc"
    assert float(first["summary.final"]) == pytest.approx(0.75)
    assert (first["accuracy.1"], second["accuracy.2"], first["plan.lr"]) == ("0.7", "0.9", "0.1")
    assert (failed["name"], failed["summary.final"]) == ("odd, name", "")
    assert failed["failure.why"] == 'the loss was "not finite",\nsays it'
    assert (waiting["state"], waiting["device"]) == ("waiting", "")


def test_means_and_standard_errors(tmp_path: Path, entries: Sequence[Entry]) -> None:
    exports.write(tmp_path, entries)
    found = {(line["method"], line["quantity"], line["task"]): line for line in read(tmp_path / "table.csv")}
    metrics = ("final", "average_over_time", "learned", "forgetting", "backward", "forward")
    tasks = [("npc", "accuracy", f"task {number}") for number in (1, 2)]
    assert list(found) == [*tasks, *(("npc", name, "") for name in metrics)]  # nothing of what has failed
    first = found["npc", "accuracy", "task 1"]
    assert float(first["mean"]) == pytest.approx((0.7 + 0.6) / 2)
    assert float(first["standard_error"]) == pytest.approx(math.sqrt(0.05**2 * 2) / math.sqrt(2))
    assert first["runs"] == "2"
    assert (first["stream"], first["tasks"], first["evaluate_on"]) == ("digits", "2", "test")
    assert float(found["npc", "forgetting", ""]["mean"]) == pytest.approx(0.2)


def test_one_seed_and_one_task_have_no_error_and_no_forgetting(tmp_path: Path) -> None:
    exports.write(tmp_path, [entry(tmp_path, "npc", 0, [[0.9]])])
    lines = read(tmp_path / "table.csv")
    assert [line["quantity"] for line in lines] == ["accuracy", "final", "average_over_time", "learned"]
    assert {line["standard_error"] for line in lines} == {""}


def test_no_runs(tmp_path: Path) -> None:
    exports.write(tmp_path, [])
    assert read(tmp_path / "runs.csv") == []
    assert (tmp_path / "runs.jsonl").read_text() == ""
    assert (tmp_path / "table.csv").read_text() == ",".join(exports.TABLE) + "\n"


def test_text_that_is_not_unicode(tmp_path: Path) -> None:
    exports.write(tmp_path, [entry(tmp_path, "half \ud83d", 0, FIRST)])
    assert read(tmp_path / "runs.csv")[0]["name"] == "half ?"
