"""The search for a setting, on made-up outcomes and on real runs."""

import json
from collections.abc import Sequence
from math import log10
from pathlib import Path

import pytest

from holdfast.runs.plan import Plan
from holdfast.study.store import Entry, Run, Study, StudyError
from holdfast.study.sweep import DECADES, Execute, Sweep, acceptable, best, chosen, read, search
from holdfast.study.work import Execution, run_one
from test_exports import entry

TEXT = {"value": 1.0, "final": {"mean": "high", "error": None, "runs": 1}}


def outcomes(peak: float, seen: list[Run]) -> Execute:
    """Runs that are the better the closer the setting is to `peak`, in decades; none comes to its end above 100."""

    def execute(runs: Sequence[Run]) -> list[Entry]:
        seen.extend(runs)
        found = []
        for run in runs:
            value = run.plan.settings["strength"]
            final = 0.9 - 0.1 * abs(log10(value / peak)) + 0.001 * run.plan.seed
            failure = {"task": 0, "step": 1, "why": "it diverged"} if value > 100 else None
            made = entry(Path(), run.name, 0, [[final]], failure=failure)
            found.append(Entry(run, Path(), made.record))
        return found

    return execute


def test_decades_and_then_finer_around_the_best() -> None:
    seen: list[Run] = []
    found = search("digits", Plan("ewc"), "strength", 2, outcomes(4, seen), tasks=3)
    assert DECADES == (0.001, 0.01, 0.1, 1.0, 10.0, 100.0, 1000.0)
    assert [tried.value for tried in found.curve] == [0.001, 0.01, 0.1, 1, 2, 5, 10, 20, 50, 100, 1000]  # 10 is best
    assert found.best == 5  # closest to 4 on a scale of decades
    assert not found.at_the_edge
    assert {run.plan.evaluate_on for run in seen} == {"validation"}
    assert {run.tasks for run in seen} == {3}
    assert len({run.id for run in seen}) == len(seen) == 2 * 11
    at_5 = next(tried for tried in found.curve if tried.value == 5)
    assert at_5.final is not None
    assert at_5.final.mean == pytest.approx(0.9 - 0.1 * 0.09691 + 0.0005, abs=1e-5)
    assert found.curve[-1].final is None  # 1000 failed


def test_a_best_value_at_the_edge_is_said() -> None:
    found = search("digits", Plan("ewc"), "strength", 1, outcomes(1e-5, []), finer=())
    assert found.best == 0.001
    assert found.at_the_edge


def test_the_whole_curve_is_kept(tmp_path: Path) -> None:
    found = search("digits", Plan("ewc"), "strength", 2, outcomes(4, []))
    kept = json.loads(found.save(tmp_path).read_text())
    assert kept["best"] == 5
    assert kept["plan"]["evaluate_on"] == "validation"
    assert len(kept["curve"]) == 11
    assert kept["curve"][-1] == {"value": 1000.0, "final": None}
    assert kept["curve"][0]["final"]["runs"] == 2


def test_a_second_search_adds_to_the_first(tmp_path: Path) -> None:
    search("digits", Plan("ewc"), "strength", 2, outcomes(4, [])).save(tmp_path)
    more = search("digits", Plan("ewc"), "strength", 2, outcomes(4, []), values=[4.0, 10.0], finer=())
    both = more.with_earlier(tmp_path)
    assert [tried.value for tried in both.curve] == [0.001, 0.01, 0.1, 1, 2, 4, 5, 10, 20, 50, 100, 1000]
    assert both.best == 4
    runs = {tried.value: tried.final.runs for tried in both.curve if tried.final is not None}
    assert set(runs.values()) == {2}
    fewer = search("digits", Plan("ewc"), "strength", 1, outcomes(4, []), values=[4.0], finer=())
    assert fewer.with_earlier(tmp_path) == fewer  # means over other seeds cannot be compared
    other = search("digits", Plan("ewc", lr=0.2), "strength", 1, outcomes(4, []), values=[4.0], finer=())
    assert other.with_earlier(tmp_path) == other
    more.path(tmp_path).write_text("{}")
    with pytest.warns(UserWarning, match="is not a search"):
        assert more.with_earlier(tmp_path) == more


def test_what_was_saved_is_read_again(tmp_path: Path) -> None:
    found = search("digits", Plan("ewc", lr=0.2), "strength", 2, outcomes(4, []), tasks=3)
    found.save(tmp_path)
    damaged = tmp_path / "sweeps" / "zzz.json"
    for change in (
        {"curve": 3},
        {"curve": []},
        {"plan": {"method": "none"}},
        {"plan": {"method": "ewc", "lr": "fast"}},
        {"curve": [TEXT]},
    ):
        damaged.write_text(json.dumps(found.as_dict() | change))
        with pytest.warns(UserWarning, match=r"zzz\.json is not a search"):
            (again,) = read(tmp_path)
    assert again.as_dict() == found.as_dict()
    assert again.best == found.best
    assert read(tmp_path / "elsewhere") == []


def test_the_best_settings_of_all_searches_on_a_stream(tmp_path: Path) -> None:
    search("digits", Plan("ewc"), "strength", 1, outcomes(10, [])).save(tmp_path)
    search("digits", Plan("mas", {"samples": 8}), "strength", 1, outcomes(1, []), values=[0.1, 10.0], finer=()).save(
        tmp_path
    )
    search("digits", Plan("mas", {"samples": 9}), "strength", 1, outcomes(1, []), values=[2.0], finer=()).save(tmp_path)
    search("imnist", Plan("si"), "strength", 1, outcomes(1, [])).save(tmp_path)
    assert chosen(tmp_path, "digits", ["ewc", "mas", "npc"]) == {
        "ewc": {"strength": 10},
        "mas": {"samples": 9, "strength": 2},
    }
    search("digits", Plan("si"), "strength", 1, outcomes(1, []), values=[0.1, 10.0], finer=()).save(tmp_path)
    assert chosen(tmp_path, "digits", ["si"])["si"] == {"strength": 0.1}  # the smaller one if several are the best
    search("digits", Plan("si"), "strength", 3, outcomes(1, []), values=[100.0], finer=()).save(tmp_path)
    assert chosen(tmp_path, "digits", ["si"])["si"] == {"strength": 100}  # worse, but more seeds say so
    search("digits", Plan("si", epochs=9), "strength", 1, outcomes(1, []), values=[1.0], finer=()).save(tmp_path)
    with pytest.raises(StudyError, match=r"for si in .*: all tasks, 30 epochs, width 1; all tasks, 9 epochs"):
        chosen(tmp_path, "digits", ["si"])
    assert chosen(tmp_path, "digits", ["ewc"]) == {"ewc": {"strength": 10}}
    with pytest.raises(StudyError, match="has no search on icifar100: holdfast sweep icifar100 ewc --out"):
        chosen(tmp_path, "icifar100", ["ewc"])


def test_if_every_run_fails_that_is_an_error() -> None:
    with pytest.raises(StudyError, match="every value had a failed run"):
        search("digits", Plan("ewc"), "strength", 1, outcomes(4, []), values=[1000.0])
    with pytest.raises(StudyError):
        best([])


@pytest.mark.parametrize(
    ("method", "over", "value", "expected"),
    [
        ("npc", "rate", 1e-3, True),
        ("npc", "rate", 10.0, False),
        ("npc", "strength", 1.0, False),
        ("ewc", "lr", 0.1, True),
    ],
)
def test_which_values_a_method_takes(method: str, over: str, value: float, expected: bool) -> None:
    assert acceptable(Plan(method), over, value) is expected


def test_a_search_on_real_runs(tmp_path: Path) -> None:
    """Frozen from the first step on, nothing is learned; the search finds that out, without a look at test images."""
    study, plan = Study(tmp_path), Plan("npc", {"rate": 1.0}, model="mlp", lr=0.1, batch=16, epochs=2, epoch="task")

    def execute(runs: Sequence[Run]) -> list[Entry]:
        done = [run_one(study, run, Execution(device="cpu")) for run in runs]
        return [each for each in done if each is not None]

    found: Sweep = search("digits", plan, "beta", 1, execute, tasks=2, values=[1e-6, 1e6], finer=())
    assert found.best == 1e6
    assert all(e.record is not None and e.record.plan["evaluate_on"] == "validation" for e in study.entries)
