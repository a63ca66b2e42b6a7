"""The curves of a run, written while it trains: as CSV and JSON lines, and for TensorBoard on request."""

import csv
import json
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import Any, Self

from holdfast.runs.record import Point
from holdfast.study.store import StudyError


class Log:
    """Writes the points of a run's curves, each as soon as it is measured.

    A new log replaces the files of an earlier one. A resumed run logs its earlier points again, so each appears once.

    Args:
        folder: the folder of the run.
        steps: the number of steps of each task.
        tensorboard: whether to write TensorBoard files too, into `folder/tensorboard`.
    """

    def __init__(self, folder: Path, steps: Sequence[int], *, tensorboard: bool = False) -> None:
        self._first_steps = [0, *accumulate(steps)]
        self._files = ExitStack()
        self._json = self._files.enter_context((folder / "curve.jsonl").open("w", buffering=1))
        self._rows = csv.writer(self._files.enter_context((folder / "curve.csv").open("w", newline="", buffering=1)))
        self._rows.writerow(("task", "step", "time", "on_task", "accuracy"))
        self._board = _board(folder / "tensorboard") if tensorboard else None

    def __call__(self, point: Point) -> None:
        self._json.write(json.dumps(point._asdict() | {"average": point.average}) + "\n")
        for task, accuracy in enumerate(point.accuracy):
            self._rows.writerow((point.task, point.step, point.time, task, accuracy))
        if self._board is not None:
            step = self._first_steps[point.task] + point.step
            self._board.add_scalar("accuracy/average of the tasks seen", point.average, step)
            for task, accuracy in enumerate(point.accuracy):
                self._board.add_scalar(f"accuracy/task {task + 1}", accuracy, step)
            self._board.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()
        if self._board is not None:
            self._board.close()


def _board(folder: Path) -> Any:
    require_tensorboard()
    from torch.utils.tensorboard import SummaryWriter

    shutil.rmtree(folder, ignore_errors=True)
    return SummaryWriter(str(folder))


def require_tensorboard() -> None:
    """Raise a StudyError if TensorBoard is not installed."""
    if find_spec("tensorboard") is None:
        raise StudyError("TensorBoard is not installed: pip install tensorboard, or leave out --tensorboard")
