"""Metrics of an accuracy matrix `[after task i, on task j]`.

`docs/metrics.md` explains the meaning and the limits of each.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

Matrix = Sequence[Sequence[float]]


@dataclass(frozen=True)
class Summary:
    """The metrics of one run. Metrics of two or more tasks are None for a single task."""

    final: float
    average_over_time: float
    learned: float
    forgetting: float | None
    backward: float | None
    forward: float | None

    def as_dict(self) -> dict[str, float | None]:
        return dict(vars(self))


def final_average(matrix: Matrix) -> float:
    """The mean accuracy over all tasks after the last one.

    >>> final_average([[0.9, 0.5], [0.7, 0.8]])
    0.75
    """
    return fmean(matrix[-1])


def average_over_time(matrix: Matrix) -> float:
    """The mean accuracy over the tasks seen so far, averaged over the ends of tasks.

    >>> average_over_time([[0.9, 0.5], [0.7, 0.8]])  # (0.9 + 0.75) / 2
    0.825
    """
    return fmean([fmean(row[: i + 1]) for i, row in enumerate(matrix)])


def learned(matrix: Matrix) -> float:
    """The mean accuracy on each task right after learning it.

    >>> round(learned([[0.9, 0.5], [0.7, 0.8]]), 3)
    0.85
    """
    return fmean([row[i] for i, row in enumerate(matrix)])


def forgetting(matrix: Matrix) -> float | None:
    """The best accuracy minus the final one, averaged over all tasks but the last.

    >>> round(forgetting([[0.9, 0.5], [0.7, 0.8]]), 3)  # 0.9 - 0.7
    0.2
    """
    if len(matrix) < 2:
        return None
    *earlier, last = matrix
    return fmean([max([row[j] for row in earlier[j:]]) - last[j] for j in range(len(last) - 1)])


def backward_transfer(matrix: Matrix) -> float | None:
    """The final accuracy minus the one right after learning, averaged over all tasks but the last.

    >>> round(backward_transfer([[0.9, 0.5], [0.7, 0.8]]), 3)  # 0.7 - 0.9
    -0.2
    """
    if len(matrix) < 2:
        return None
    return fmean([matrix[-1][j] - matrix[j][j] for j in range(len(matrix) - 1)])


def forward_transfer(matrix: Matrix, untrained: Sequence[float]) -> float | None:
    """The accuracy just before learning minus that of an untrained model, averaged over all tasks but the first.

    >>> round(forward_transfer([[0.9, 0.6], [0.7, 0.8]], untrained=[0.5, 0.5]), 3)  # 0.6 - 0.5
    0.1
    """
    if len(matrix) < 2:
        return None
    return fmean([matrix[j - 1][j] - untrained[j] for j in range(1, len(matrix))])


def summarize(matrix: Matrix, untrained: Sequence[float]) -> Summary:
    check(matrix)
    return Summary(
        final=final_average(matrix),
        average_over_time=average_over_time(matrix),
        learned=learned(matrix),
        forgetting=forgetting(matrix),
        backward=backward_transfer(matrix),
        forward=forward_transfer(matrix, untrained),
    )


def check(matrix: Matrix) -> None:
    """Raise a ValueError unless this is a square matrix of accuracies between 0 and 1."""
    if not matrix or any(len(row) != len(matrix) for row in matrix):
        raise ValueError(f"an accuracy matrix has one row and one column per task, got rows of {[*map(len, matrix)]}")
    if not all(0 <= value <= 1 for row in matrix for value in row):
        raise ValueError("accuracies lie between 0 and 1")
