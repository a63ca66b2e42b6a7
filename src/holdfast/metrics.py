"""What is read off an accuracy matrix, `[after task i, on task j]`, as in all of Holdfast.

`docs/metrics.md` says what each number means and what it does not.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean

Matrix = Sequence[Sequence[float]]


@dataclass(frozen=True)
class Summary:
    """The numbers of one run. Those that need two tasks are None where there is only one."""

    final: float
    over_time: float
    learnt: float
    forgetting: float | None
    backward: float | None
    forward: float | None

    def as_dict(self) -> dict[str, float | None]:
        return asdict(self)


def final_average(matrix: Matrix) -> float:
    """The mean accuracy over all tasks, after the last one.

    >>> final_average([[0.9, 0.5], [0.7, 0.8]])
    0.75
    """
    return fmean(matrix[-1])


def average_over_time(matrix: Matrix) -> float:
    """The mean, over the ends of tasks, of the mean accuracy over the tasks seen by then.

    >>> average_over_time([[0.9, 0.5], [0.7, 0.8]])  # (0.9 + 0.75) / 2
    0.825
    """
    return fmean(fmean(row[: i + 1]) for i, row in enumerate(matrix))


def learnt(matrix: Matrix) -> float:
    """The mean accuracy on each task right after learning it.

    >>> round(learnt([[0.9, 0.5], [0.7, 0.8]]), 3)
    0.85
    """
    return fmean(row[i] for i, row in enumerate(matrix))


def forgetting(matrix: Matrix) -> float | None:
    """The mean, over all tasks but the last, of the best accuracy there has been less the final one.

    >>> round(forgetting([[0.9, 0.5], [0.7, 0.8]]), 3)  # 0.9 - 0.7
    0.2
    """
    if len(matrix) < 2:
        return None
    *earlier, last = matrix
    return fmean(max(row[j] for row in earlier[j:]) - last[j] for j in range(len(last) - 1))


def backward_transfer(matrix: Matrix) -> float | None:
    """The mean, over all tasks but the last, of the final accuracy less that right after learning the task.

    >>> round(backward_transfer([[0.9, 0.5], [0.7, 0.8]]), 3)  # 0.7 - 0.9
    -0.2
    """
    if len(matrix) < 2:
        return None
    return fmean(matrix[-1][j] - matrix[j][j] for j in range(len(matrix) - 1))


def forward_transfer(matrix: Matrix, untrained: Sequence[float]) -> float | None:
    """The mean, over all tasks but the first, of the accuracy just before learning it less that of an untrained model.

    >>> round(forward_transfer([[0.9, 0.6], [0.7, 0.8]], untrained=[0.5, 0.5]), 3)  # 0.6 - 0.5
    0.1
    """
    if len(matrix) < 2:
        return None
    return fmean(matrix[j - 1][j] - untrained[j] for j in range(1, len(matrix)))


def summarise(matrix: Matrix, untrained: Sequence[float]) -> Summary:
    check(matrix)
    return Summary(
        final=final_average(matrix),
        over_time=average_over_time(matrix),
        learnt=learnt(matrix),
        forgetting=forgetting(matrix),
        backward=backward_transfer(matrix),
        forward=forward_transfer(matrix, untrained),
    )


def check(matrix: Matrix) -> None:
    """Raise a ValueError if this is no square matrix of accuracies between 0 and 1."""
    if not matrix or any(len(row) != len(matrix) for row in matrix):
        raise ValueError(f"an accuracy matrix has a row and a column for each task, got rows of {[*map(len, matrix)]}")
    if not all(0 <= value <= 1 for row in matrix for value in row):
        raise ValueError("accuracies lie between 0 and 1")
