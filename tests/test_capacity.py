"""The capacity of layers: recorded after each task, and drawn."""

from pathlib import Path

import pytest

from holdfast.runs.plan import Plan
from holdfast.runs.training import train
from holdfast.streams import build_stream
from holdfast.study import figures
from test_figures import comparison, record, row


def drawn(rows: list) -> dict[str, figures.Drawing]:
    return {drawing.key.split("-")[0]: drawing for drawing in figures.draw(comparison(*rows))}


def test_a_panel_for_each_method_and_a_line_for_each_layer(tmp_path: Path) -> None:
    low, high = ([{"first": a, "second": 0.5}, {"first": 2 * a, "second": 0.75}] for a in (0.2, 0.4))
    controlled = row(tmp_path, "dpc", [record(0, capacity=low), record(1, capacity=high)])
    other = row(tmp_path, "ewc", [record(0), record(1)])
    drawing = drawn([controlled, other])["capacity"]
    (axes,) = drawing.figure.axes
    assert axes.get_title(loc="left") == "dpc"
    first, second = (line.get_ydata() for line in axes.lines)
    assert list(first) == pytest.approx([0.3, 0.6])  # the means over seeds
    assert list(second) == pytest.approx([0.5, 0.75])
    assert "means over 2 seeds" in drawing.caption


def test_no_figure_without_capacity(tmp_path: Path) -> None:
    assert "capacity" not in drawn([row(tmp_path, "npc", [record()])])


@pytest.mark.parametrize("method", ["dpc", "lwf+dpc"])
def test_a_run_records_it_after_each_task(method: str) -> None:
    stream = build_stream("digits", tasks=3)
    found = train(stream, Plan(method, model="mlp", lr=0.1, batch=16, epochs=0.5, epoch="task"), device="cpu")
    assert [set(taken) for taken in found.capacity] == [{"hidden1", "hidden2", "hidden3"}] * 3
    for layer in ("hidden1", "hidden2", "hidden3"):
        values = [taken[layer] for taken in found.capacity]
        assert values == sorted(values)  # a task never frees a direction
        assert 0 < values[0] < values[-1] < 1


def test_other_methods_record_none() -> None:
    stream = build_stream("digits", tasks=1)
    plan = Plan("npc", model="mlp", batch=16, epochs=0.1, epoch="task")
    assert train(stream, plan, device="cpu").capacity == []
