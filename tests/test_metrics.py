"""Metrics on a matrix that was worked out by hand, and on ones that say what the answer must be."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.runs import metrics

MATRIX = [  # [after task i, on task j]
    [0.9, 0.4, 0.5],
    [0.95, 0.8, 0.6],
    [0.6, 0.7, 1.0],
]
UNTRAINED = [0.5, 0.5, 0.25]


def test_by_hand() -> None:
    summary = metrics.summarize(MATRIX, UNTRAINED)
    assert summary.final == pytest.approx((0.6 + 0.7 + 1.0) / 3)
    assert summary.average_over_time == pytest.approx((0.9 + (0.95 + 0.8) / 2 + (0.6 + 0.7 + 1.0) / 3) / 3)
    assert summary.learned == pytest.approx((0.9 + 0.8 + 1.0) / 3)
    assert summary.forgetting == pytest.approx(((0.95 - 0.6) + (0.8 - 0.7)) / 2)  # from the best there has been
    assert summary.backward == pytest.approx(((0.6 - 0.9) + (0.7 - 0.8)) / 2)
    assert summary.forward == pytest.approx(((0.4 - 0.5) + (0.6 - 0.25)) / 2)


def test_what_was_guessed_before_a_task_came_cannot_be_forgotten() -> None:
    assert metrics.forgetting([[0.9, 0.99, 0.5], [0.9, 0.8, 0.5], [0.9, 0.7, 0.5]]) == pytest.approx((0.0 + 0.1) / 2)


def test_one_task_has_nothing_to_forget() -> None:
    summary = metrics.summarize([[0.7]], [0.1])
    assert (summary.final, summary.average_over_time, summary.learned) == (0.7, 0.7, 0.7)
    assert (summary.forgetting, summary.backward, summary.forward) == (None, None, None)


@given(st.floats(0, 1), st.integers(2, 6))
def test_a_model_that_never_changes(value: float, tasks: int) -> None:
    summary = metrics.summarize([[value] * tasks] * tasks, [value] * tasks)
    assert summary.final == pytest.approx(value)
    assert summary.forgetting == pytest.approx(0)
    assert summary.backward == pytest.approx(0)
    assert summary.forward == pytest.approx(0)


@given(st.integers(2, 6))
def test_learning_all_and_keeping_nothing(tasks: int) -> None:
    matrix = [[float(i == j) for j in range(tasks)] for i in range(tasks)]
    summary = metrics.summarize(matrix, [0.0] * tasks)
    assert summary.learned == 1
    assert summary.forgetting == 1
    assert summary.backward == -1
    assert summary.final == pytest.approx(1 / tasks)


@pytest.mark.parametrize("bad", [[], [[0.5, 0.5]], [[0.5], [0.5, 0.5]], [[1.5]], [[float("nan")]]])
def test_what_is_no_matrix_of_accuracies(bad: list[list[float]]) -> None:
    with pytest.raises(ValueError, match="accurac"):
        metrics.summarize(bad, [0.0])
