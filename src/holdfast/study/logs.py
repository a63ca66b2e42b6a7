"""The curves of a run, written while it trains: as CSV and JSON lines, and for TensorBoard on request."""

import csv
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import Any, Self, TextIO

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
        self._folder, self._first_steps = folder, [0, *accumulate(steps)]
        self._files = ExitStack()
        self._json = self._files.enter_context(_new(folder / "curve.jsonl"))
        self._rows = csv.writer(self._files.enter_context(_new(folder / "curve.csv")))
        self._board = _board(folder / "tensorboard") if tensorboard else None
        with self._naming_the_file():
            self._rows.writerow(("task", "step", "time", "on_task", "accuracy"))

    def __call__(self, point: Point) -> None:
        with self._naming_the_file():
            self._json.write(json.dumps(point._asdict() | {"average": point.average}) + "\n")
            for task, accuracy in enumerate(point.accuracy):
                self._rows.writerow((point.task, point.step, point.time, task, accuracy))
        if self._board is not None:
            step = self._first_steps[point.task] + point.step
            self._board.add_scalar("accuracy/average of the tasks seen", point.average, step)
            for task, accuracy in enumerate(point.accuracy):
                self._board.add_scalar(f"accuracy/task {task + 1}", accuracy, step)
            self._board.flush()

    @contextmanager
    def _naming_the_file(self) -> Iterator[None]:
        """Add the name of the file, which errors of `write` lack."""
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._folder / "curve.csv")) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._naming_the_file():
            self._files.close()
        if self._board is not None:
            self._board.close()


def _new(path: Path) -> TextIO:
    """Open a new file, written line by line. An old one, or a link, is removed."""
    path.unlink(missing_ok=True)
    return path.open("x", newline="", buffering=1)


def _board(folder: Path) -> Any:
    require_tensorboard()
    from torch.utils.tensorboard import SummaryWriter

    if folder.is_symlink():
        folder.unlink()
    shutil.rmtree(folder, ignore_errors=True)
    return SummaryWriter(str(folder))


def require_tensorboard() -> None:
    """Raise a StudyError if TensorBoard is not installed."""
    if find_spec("tensorboard") is None:
        raise StudyError("TensorBoard is not installed: pip install tensorboard, or leave out --tensorboard")
