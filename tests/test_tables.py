"""Means, standard errors, comparisons and the paper's table, against values worked out by hand."""

import io
import re
import statistics
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from holdfast.runs.plan import Plan
from holdfast.study import paper, terminal
from holdfast.study.store import Entry
from holdfast.study.tables import Comparison, Estimate, compare, estimate, names
from test_exports import FIRST, SECOND, entry

HERE = Path()


def printed(table: Any) -> str:
    out = io.StringIO()
    Console(file=out, width=160).print(table)
    return out.getvalue()


def five(average: float) -> list[list[float]]:
    """A matrix of five tasks with this accuracy on each in the end."""
    return [[average] * 5] * 5


@given(st.lists(st.floats(0, 1), min_size=2, max_size=9))
def test_the_standard_error(values: list[float]) -> None:
    found = estimate(values)
    assert found.mean == pytest.approx(statistics.mean(values), abs=1e-9)
    assert found.error == pytest.approx((statistics.variance(values) / len(values)) ** 0.5, abs=1e-9)


def test_one_run_has_no_standard_error() -> None:
    assert estimate([0.5]) == Estimate(0.5, None, 1)


def test_seeds_of_a_method_are_a_row_and_the_best_is_first() -> None:
    entries = [entry(HERE, "a", 0, FIRST), entry(HERE, "b", 0, [[0.9, 0.5], [0.9, 0.9]]), entry(HERE, "a", 1, SECOND)]
    (found,) = compare(entries)
    assert [(row.name, len(row.records)) for row in found.rows] == [("b", 1), ("a", 2)]
    assert [cell.mean for cell in found.rows[1].tasks] == [pytest.approx(0.65), pytest.approx(0.85)]
    assert found.rows[1].metric("forgetting") == pytest.approx((0.2, 0, 2))
    assert found.rows[0].metric("final") == pytest.approx((0.9, None, 1))


def test_a_run_that_is_there_twice_counts_once() -> None:
    (found,) = compare([entry(HERE, "a", 0, FIRST), entry(HERE, "a", 1, SECOND), entry(HERE, "a", 0, FIRST)])
    final = found.rows[0].metric("final")
    assert final is not None
    assert final.runs == 2


def test_what_cannot_be_compared_stands_apart() -> None:
    entries = [
        entry(HERE, "a", 0, FIRST),
        entry(HERE, "a", 0, FIRST, evaluate_on="validation"),
        entry(HERE, "a", 0, FIRST, stream="imnist"),
        entry(HERE, "a", 0, FIRST, names=["other", "tasks"]),
        entry(HERE, "a", 0, None),
    ]
    assert [len(each.rows) for each in compare(entries)] == [1, 1, 1, 1]


def test_different_settings_under_one_name_are_told_apart() -> None:
    entries = [
        entry(HERE, "a", 0, FIRST, lr=0.1),
        entry(HERE, "a", 1, SECOND, lr=0.1),
        entry(HERE, "a", 0, FIRST, lr=1),
    ]
    (found,) = compare(entries)
    assert sorted((row.name, len(row.records)) for row in found.rows) == [("a (lr=0.1)", 2), ("a (lr=1)", 1)]
    listed = [*entries[:2], entry(HERE, "a", 2, None, lr=1), entry(HERE, "b", 0, None)]
    assert names(listed) == {"a-0": "a (lr=0.1)", "a-1": "a (lr=0.1)", "a-2": "a (lr=1)", "b-0": "b"}
    assert re.search(r"a-2 +a \(lr=1\) +2 +waiting", terminal.runs(listed))


def test_a_method_whose_runs_failed_is_last_and_says_so() -> None:
    failure = {"task": 0, "step": 3, "why": "the loss was not finite"}
    failed = entry(HERE, "a", 0, [], names=["1", "2"], failure=failure)
    (found,) = compare([failed, entry(HERE, "b", 0, FIRST, names=["1", "2"])])
    assert [row.name for row in found.rows] == ["b", "a"]
    assert found.rows[1].metric("final") is None
    assert "failed" in printed(terminal.results(found))
    assert "failed" in printed(terminal.beside_the_paper(found))


def test_the_table_in_the_terminal() -> None:
    (found,) = compare([entry(HERE, "[bold]x", 0, FIRST), entry(HERE, "[bold]x", 1, SECOND)])
    out = printed(terminal.results(found))
    assert "[bold]x" in out
    assert "75.0(0.0)" in out  # the average of 0.75 and 0.75
    assert "20.0(0.0)" in out  # what was forgotten
    assert "65.0" in out


CLASSES = [f"apple {n}, aquarium_fish, baby, bear, beaver" for n in range(12)]


@pytest.mark.parametrize(("tasks", "width"), [(2, 80), (5, 80), (12, 80), (5, 60)])
def test_the_table_fits_the_terminal_with_all_its_numbers(tasks: int, width: int) -> None:
    matrix = [[0.5 + 0.01 * (after + on) for on in range(tasks)] for after in range(tasks)]
    entries = [
        entry(HERE, f"lwf+npc lwf.weight=1 npc.beta=7 number {n}", 0, matrix, names=CLASSES[:tasks]) for n in "12"
    ]
    (found,) = compare(entries)
    out = io.StringIO()
    Console(file=out, width=width).print(terminal.results(found, width))
    shown = out.getvalue()
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= width
    numbers = re.findall(r"\b\d+\.\d\b", "".join(line for line in shown.splitlines() if "lwf+npc" in line))
    if tasks <= 5 and width == 80:
        assert len(numbers) == 2 * (3 + tasks)
        assert all(name in " ".join(shown.split()) for name in CLASSES[:tasks])
    if tasks == 12:
        assert len(numbers) == 2 * 3
        assert "no room for the accuracies on each task" in shown


# ---- the paper ----


def rows(stream: str, *entries: Entry) -> Comparison:
    (found,) = compare(entries)
    return found


@pytest.mark.parametrize("stream", paper.SETTINGS)
@pytest.mark.parametrize("method", ["npc", "ewc", "mas", "si", "ssl", "cpc"])
def test_the_papers_averages_are_those_of_its_tasks(stream: str, method: str) -> None:
    """So that a slip in copying them shows. The paper has rounded them, one of them down."""
    row = paper.table1(stream, method)
    assert row is not None
    assert len(row.tasks) == 5
    assert statistics.mean(task.mean for task in row.tasks) == pytest.approx(row.average.mean, abs=1e-4)


def test_there_is_no_row_for_what_the_paper_does_not_have() -> None:
    assert paper.table1("imnist", "finetune") is None
    assert paper.table1("digits", "npc") is None


@pytest.mark.parametrize(
    ("ours", "expected"),
    [
        (Estimate(0.70, 0.0080, 3), False),  # 2 * sqrt(0.8^2 + 0.65^2) is 2.06, and the difference 1.87
        (Estimate(0.70, 0.0060, 3), True),  # 2 * sqrt(0.6^2 + 0.65^2) is 1.77
        (Estimate(0.7187, 0.0, 3), False),
        (Estimate(0.5, None, 1), None),
    ],
)
def test_what_differs_by_more_than_two_standard_errors(ours: Estimate, expected: bool | None) -> None:
    assert paper.differ(ours, Estimate(0.7187, 0.0065, 3)) is expected


def test_table_1_beside_the_papers_with_stars() -> None:
    matrix = [five(0.7187), five(0.7187)]
    found = rows(
        "icifar100",
        *(entry(HERE, "npc", seed, each, stream="icifar100") for seed, each in enumerate(matrix)),
        *(entry(HERE, "ewc", seed, five(0.9 + seed / 1000), stream="icifar100", method="ewc") for seed in range(2)),
        entry(HERE, "finetune", 0, five(0.5), stream="icifar100", method="finetune"),
    )
    lines = printed(terminal.beside_the_paper(found)).splitlines()
    at = {
        name: next(i for i, line in enumerate(lines) if line.startswith(f" {name} "))
        for name in ("npc", "ewc", "finetune")
    }
    assert lines[at["npc"]].count("*") == 4  # task 1 is 2 of its standard errors away; the average is the same
    assert "71.87(0.00)" in lines[at["npc"]]
    assert "71.87(0.65)" in lines[at["npc"] + 1]
    assert lines[at["ewc"]].count("*") == 6
    assert "90.05(0.05)" in lines[at["ewc"]]
    assert "64.57(0.94)" in lines[at["ewc"] + 1]
    assert "*" not in lines[at["finetune"]]


@pytest.mark.parametrize("stream", ["imnist", "icifar100"])
def test_the_papers_protocol(stream: str) -> None:
    names = [*paper.COMPARED, *paper.FURTHER, paper.OFF]
    runs = paper.runs(stream, names, 3, Plan("npc"))
    assert len(runs) == len({run.id for run in runs}) == 33
    plans = {run.name: run.plan for run in runs}
    assert {plans[name].lr for name in ("npc", "cpc", paper.OFF)} == {0.1}
    assert {plans[name].lr for name in ("ewc", "mas", "si", "ssl", "finetune", "lwf", "joint", "separate")} == {0.05}
    assert {(p.batch, p.epochs, p.epoch, p.model) for p in plans.values()} == {(512, 30.0, "paper", "paper_cnn")}
    assert plans["npc"].settings == {"beta": 0.7, "rate": 1e-3 if stream == "imnist" else 5e-4}
    assert plans["ewc"].settings == {"strength": 100.0 if stream == "imnist" else 300.0}
    assert {run.tasks for run in runs} == {5}


def test_other_settings_than_the_papers() -> None:
    (run,) = paper.runs("imnist", ["ewc"], 1, Plan("npc"), settings={"ewc": {"strength": 3.0, "lr": 0.2}})
    assert (run.plan.settings, run.plan.lr) == ({"strength": 3.0}, 0.2)
    assert paper.SETTINGS["imnist"]["ewc"] == {"strength": 100.0}
