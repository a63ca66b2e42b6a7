"""Importance and drift of a run's neurons, against hand-worked values and plain loops."""

from pathlib import Path

import pytest
import torch

from holdfast.runs.probe import BINS, drift
from holdfast.runs.training import Progress, train
from test_training import plan, stream


def test_the_drift_of_three_neurons_by_hand() -> None:
    before = torch.tensor([[0.0, 1.0, 5.0], [2.0, 1.0, 7.0]])  # spreads 1, 0 and 1
    after = torch.tensor([[1.0, 1.5, 5.0], [5.0, 1.0, 7.0]])
    found = drift(before, after, torch.tensor([0.1, 0.5, 0.9]))
    assert found["per_neuron"] == [2.0, 0.25, 0.0]
    assert found["spread"] == [1.0, 0.0, 1.0]
    assert found["silent"] == 1
    assert found["absolute"]["means"] == {"all": 0.75, "most": 0.0, "least": 2.0}
    assert found["relative"]["means"] == {"all": 1.0, "most": 0.0, "least": 2.0}  # the silent one has none


def test_every_value_is_in_the_histogram_of_its_group() -> None:
    torch.manual_seed(0)
    before, after, importance = torch.rand(64, 40), torch.rand(64, 40), torch.rand(40)
    found = drift(before, after, importance)
    for measure in ("absolute", "relative"):
        counts = found[measure]["counts"]
        assert {name: sum(count) for name, count in counts.items()} == {"all": 64 * 40, "most": 64 * 4, "least": 64 * 4}
        assert all(len(count) == BINS for count in counts.values())
    most = sorted(range(40), key=lambda i: float(importance[i]))[-4:]
    expected = sum(abs(float(after[s, i] - before[s, i])) for s in range(64) for i in most) / (64 * 4)
    assert found["absolute"]["means"]["most"] == pytest.approx(expected, rel=1e-5)


def test_without_importance_there_is_one_group() -> None:
    assert set(drift(torch.rand(4, 3), torch.rand(4, 3), None)["absolute"]["means"]) == {"all"}


def test_nothing_moves_and_nothing_varies() -> None:
    found = drift(torch.ones(4, 3), torch.ones(4, 3), torch.rand(3))
    assert found["absolute"]["means"]["all"] == 0
    assert found["relative"]["means"] == {"all": None, "most": None, "least": None}


def test_a_run_records_importance_over_time_and_drift() -> None:
    record = train(stream(), plan("npc", curve=3, neurons=True, settings={"rate": 0.05}), device="cpu")
    assert record.neurons is not None
    marks = [(mark["task"], mark["step"]) for mark in record.neurons["importance"]]
    assert marks == [(task, step) for task in range(3) for step in (4, 8, 12)]
    last = record.neurons["importance"][-1]["layers"]
    assert {name: len(values) for name, values in last.items()} == {"hidden1": 100, "hidden2": 100, "hidden3": 100}
    assert record.neurons["drift"]["importance"] == record.neurons["importance"][2]["layers"]["hidden3"]
    assert record.neurons["drift"]["samples"] == 32  # all there are of the first task


def test_neurons_that_cannot_learn_do_not_change() -> None:
    frozen = train(stream(), plan("npc", neurons=True, settings={"rate": 1.0, "beta": 1e-9}), device="cpu")
    assert frozen.neurons is not None
    free = train(stream(), plan("npc", neurons=True, settings={"beta": 1e12}), device="cpu")
    assert free.neurons is not None
    moved = [record["drift"]["absolute"]["means"]["all"] for record in (frozen.neurons, free.neurons)]
    assert moved[0] < 1e-3 * moved[1]


def test_npc_that_holds_nothing_back_is_fine_tuning() -> None:
    off = train(stream(), plan("npc", curve=4, settings={"beta": 1e12}), device="cpu")
    plain = train(stream(), plan("finetune", curve=4), device="cpu")
    assert off.matrix == plain.matrix
    assert off.curves == plain.curves


def test_a_method_without_importance_is_probed_too() -> None:
    record = train(stream(), plan("ewc", neurons=True), device="cpu")
    assert record.neurons is not None
    assert record.neurons["importance"] == []
    assert record.neurons["drift"]["absolute"]["means"]["all"] > 0


def test_probing_changes_nothing() -> None:
    how = {"model": "small_cnn", "curve": 3}  # which has dropout
    assert train(stream(), plan("npc", **how, neurons=True)).matrix == train(stream(), plan("npc", **how)).matrix


@pytest.mark.parametrize("step", [3, 13, 25])
def test_an_interrupted_run_records_the_same(tmp_path: Path, step: int) -> None:
    how = plan("npc", curve=3, neurons=True, settings={"rate": 0.05})
    steps = 0

    def stop(_: Progress) -> None:
        nonlocal steps
        steps += 1
        if steps == step:
            raise EOFError

    with pytest.raises(EOFError):
        train(stream(), how, device="cpu", folder=tmp_path, save_every=0, tell=stop)
    marks: list[tuple[int, int]] = []
    resumed = train(stream(), how, device="cpu", folder=tmp_path, mark=lambda p: marks.append((p.task, p.step)))
    whole = train(stream(), how, device="cpu")
    assert resumed.neurons == whole.neurons
    assert marks == [(p.task, p.step) for p in whole.timeline]
