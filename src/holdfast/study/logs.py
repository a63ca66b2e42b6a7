"""What can be watched while a run goes on: CSV and JSON lines always, TensorBoard if wanted."""

import csv
import json
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import Any, Self

from holdfast.record import Point
from holdfast.study.records import StudyError


class Log:
    """Writes the points of a run's curves as they come, each at once. It begins anew, so that none comes twice.

    Args:
        folder: of the run.
        steps: of each task.
        tensorboard: whether TensorBoard is written too, into `folder/tensorboard`.
    """

    def __init__(self, folder: Path, steps: Sequence[int], *, tensorboard: bool = False) -> None:
        self._before = [0, *accumulate(steps)]
        self._files = ExitStack()
        self._csv = self._files.enter_context((folder / "curve.csv").open("w", newline="", buffering=1))
        self._lines = self._files.enter_context((folder / "curve.jsonl").open("w", buffering=1))
        self._table = csv.writer(self._csv)
        self._table.writerow(("task", "step", "time", "on_task", "accuracy"))
        self._board = _board(folder / "tensorboard") if tensorboard else None

    def __call__(self, point: Point) -> None:
        self._lines.write(json.dumps(point._asdict() | {"average": point.average}) + "\n")
        for on, accuracy in enumerate(point.accuracy):
            self._table.writerow((point.task, point.step, point.time, on, accuracy))
        if self._board is not None:
            step = self._before[point.task] + point.step
            self._board.add_scalar("accuracy/average of the tasks seen", point.average, step)
            for on, accuracy in enumerate(point.accuracy):
                self._board.add_scalar(f"accuracy/task {on + 1}", accuracy, step)
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
    """A StudyError if TensorBoard is not installed."""
    if find_spec("tensorboard") is None:
        raise StudyError("TensorBoard is not installed: pip install tensorboard, or leave out --tensorboard")
