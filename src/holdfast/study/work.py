"""One run of a study: claim it, train, log the curves, store the record. Shared by all executors."""

import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from holdfast import atomic
from holdfast.errors import UserError, describe
from holdfast.models import build_model
from holdfast.runs.training import Interrupted, Progress, choose_device, train
from holdfast.streams import build_stream
from holdfast.streams.tasks import Stream
from holdfast.study.logs import Log
from holdfast.study.store import Entry, Run, Study, StudyError, claimed


class Execution(NamedTuple):
    """Options for executing the runs of a study."""

    data: Path | None = None
    """The folder searched first for data sets."""
    device: str | None = None
    """`cpu` or `cuda`. None selects a GPU if one is available."""
    jobs: int | None = None
    """The number of runs at once. None selects a number that suits the hardware."""
    tensorboard: bool = False
    """Whether to write TensorBoard files."""
    save_every: float = 60.0
    """Seconds between two checkpoints of a run."""

    @property
    def on_gpu(self) -> bool:
        return choose_device(self.device).type == "cuda"


Outcome = Literal["done", "claimed", "interrupted", "out of memory", "failed"]


class Ended(NamedTuple):
    """The end of one attempt at a run."""

    outcome: Outcome
    """"done" if the run has a record, "claimed" if another process is executing it."""
    reason: str = ""
    """The reason why the run has no record."""


def prepare(runs: Iterable[Run], execution: Execution) -> None:
    """Check the device and build every stream and model once.

    So errors appear and downloads finish before the first run. A model has no memory here.
    """
    choose_device(execution.device)
    models: dict[tuple[str, int | None], dict[tuple[str, float], Run]] = {}
    for run in runs:
        models.setdefault((run.stream, run.tasks), {}).setdefault((run.plan.model, run.plan.width), run)
    for (name, tasks), shapes in models.items():
        stream = build_stream(name, execution.data, tasks=tasks)
        for (model, width), run in shapes.items():
            with torch.device("meta"), _named(run):
                build_model(model, stream.shape, stream.outputs, width)


@contextmanager
def _named(run: Run) -> Iterator[None]:
    """Add the label and the stream of a run to errors."""
    try:
        yield
    except ValueError as error:
        raise StudyError(f"{run.label} on {run.stream}: {error}") from None


def attempt(study: Study, run: Run, execution: Execution, tell: Callable[[Progress], None]) -> Ended:
    """Execute a run and report how it ended. Errors become outcomes; `tell` receives the progress."""
    try:
        return Ended("claimed" if run_one(study, run, execution, tell) is None else "done")
    except Interrupted:
        return Ended("interrupted", "interrupted; run the same command again to resume")
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return Ended("out of memory", "the GPU ran out of memory: use a smaller batch or width")
    except OSError as error:
        return Ended("failed", describe(error))
    except (UserError, ValueError) as error:
        return Ended("failed", str(error))
    except Exception as error:  # a bug in a method or a model: its author needs the traceback
        path = study.folder_of(run) / "error.txt"
        with suppress(OSError):
            atomic.write(path, traceback.format_exc().encode(errors="replace"))
        return Ended("failed", f"{type(error).__name__}: {error}; the traceback is in {path}")


def run_one(
    study: Study, run: Run, execution: Execution, tell: Callable[[Progress], None] | None = None
) -> Entry | None:
    """Start or resume a run in this process. A finished run is returned as stored.

    Returns:
        The run with its record, or None if another process has claimed the run.
    """
    folder = study.add(run).folder
    with claimed(folder) as ours:
        if not ours:
            return None
        entry = study.entry(run)
        if entry.record is not None:
            return entry
        stream, plan = _stream(run.stream, execution.data, run.tasks), run.plan
        steps = [plan.steps(stream, task) for task in stream.tasks]
        with Log(folder, steps, tensorboard=execution.tensorboard) as log:
            record = train(
                *(stream, plan),
                device=execution.device,
                folder=folder,
                save_every=execution.save_every,
                tell=tell,
                mark=log,
            )
        if record.failure is not None:  # drop the points logged after the failure
            with Log(folder, steps, tensorboard=execution.tensorboard) as log:
                for point in record.timeline:
                    log(point)
        study.finish(run, record)
        return study.entry(run)


@lru_cache(maxsize=2)
def _stream(name: str, data: Path | None, tasks: int | None) -> Stream:
    return build_stream(name, data, tasks=tasks)
