"""The runs of a study on disk: plain files, one folder per run.

    STUDY/runs/digits-npc-0-1a2b3c4d/
        run.json          the stream, the plan and the name of the run
        curve.csv         the accuracies during training, and
        curve.jsonl       the same as JSON lines
        checkpoint.pt     the state from which the run resumes, until it is finished
        record.json       the record, once the run is finished
        neurons.json      importance and drift of neurons, if recorded
        lock              held by the process that executes the run

Importing this module does not import torch, so listing a study is fast.
"""

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock, Timeout

from holdfast import atomic
from holdfast.errors import UserError, warn
from holdfast.runs.plan import Plan
from holdfast.runs.record import Record

State = Literal["finished", "failed", "running", "interrupted", "waiting"]


class StudyError(UserError):
    """An error in a study. Its message is one line: what is wrong, and what to do."""


@dataclass(frozen=True)
class Run:
    """One run of a study.

    Args:
        stream: the name of its stream.
        plan: its plan.
        tasks: the number of tasks; None for all tasks of the stream.
        name: its name in tables and figures. Runs that differ only in their seed share a name.
        id: the name of its folder, derived from stream, tasks and plan, but not from the name.
    """

    stream: str
    plan: Plan
    tasks: int | None
    name: str
    id: str

    @classmethod
    def of(cls, stream: str, plan: Plan, tasks: int | None = None, name: str | None = None) -> "Run":
        """Make the run of `plan` on the first `tasks` tasks of `stream`."""
        stream = _absolute(stream)
        identity = json.dumps(alike([stream, tasks, plan.choices]), sort_keys=True)
        digest = hashlib.sha256(identity.encode()).hexdigest()[:8]
        slug = re.sub(r"[^A-Za-z0-9]+", "-", stream).strip("-")[-40:]
        name = default_name(plan.method, plan.settings) if name is None else name
        return cls(stream, plan, tasks, name, f"{slug}-{plan.method}-{plan.seed}-{digest}")

    @property
    def label(self) -> str:
        return f"{self.name}, seed {self.plan.seed}"

    def as_dict(self) -> dict[str, Any]:
        """The run as plain data, for JSON."""
        return {"stream": self.stream, "plan": self.plan.as_dict(), "tasks": self.tasks, "name": self.name}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], run_id: str) -> "Run":
        """The inverse of `as_dict`."""
        return cls(**{**data, "plan": Plan(**data["plan"])}, id=run_id)


def alike(value: Any) -> Any:
    """Plain data in which equal numbers are identical, such as 1 and 1.0.

    >>> alike({"strength": 1, "labels": ["exact", True]})
    {'strength': 1.0, 'labels': ['exact', True]}
    """
    if isinstance(value, Mapping):
        return {key: alike(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [alike(inner) for inner in value]
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _absolute(stream: str) -> str:
    """The name of a stream with the absolute path of its folder, if it has one."""
    kind, colon, path = stream.partition(":")
    if kind != "folder" or not path:
        return stream
    folder, question, options = path.partition("?")
    return f"{kind}{colon}{Path(folder).expanduser().resolve()}{question}{options}"


def default_name(method: str, settings: Mapping[str, Any]) -> str:
    """The name of a method with settings, unless the user gives another.

    >>> default_name("ewc", {"strength": 30.0})
    'ewc strength=30.0'
    """
    return " ".join([method, *(f"{name}={value}" for name, value in settings.items())])


@dataclass(frozen=True)
class Entry:
    """The current state of a run."""

    run: Run
    folder: Path
    record: Record | None
    """The record of a finished or failed run, without its neurons: see `neurons`."""

    @property
    def state(self) -> State:
        if self.record is not None:
            return "finished" if self.record.failure is None else "failed"
        if is_locked(self.folder):
            return "running"
        return "interrupted" if (self.folder / "checkpoint.pt").exists() else "waiting"

    @cached_property
    def neurons(self) -> dict[str, Any] | None:
        """Importance and drift of neurons, if recorded."""
        path = self.folder / "neurons.json"
        return read_json(path) if path.exists() else None


class Study:
    """A folder of runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)

    def folder_of(self, run: Run) -> Path:
        return self.folder / "runs" / run.id

    def entry(self, run: Run) -> Entry:
        """Read the current state of a run."""
        folder = self.folder_of(run)
        return Entry(run, folder, _record(folder))

    def add(self, run: Run) -> Entry:
        """Create the folder of a run, or store its new name, and read its current state."""
        path = self.folder_of(run) / "run.json"
        if not path.exists() or run.name != default_name(run.plan.method, run.plan.settings):
            write_json(path, run.as_dict())
        return self.entry(run)

    def finish(self, run: Run, record: Record) -> None:
        """Store the record of a run and remove its checkpoints."""
        folder = self.folder_of(run)
        if record.neurons is not None:
            write_json(folder / "neurons.json", record.neurons)
        write_json(folder / "record.json", dataclasses.replace(record, neurons=None).as_dict())
        for name in ("checkpoint.pt", "checkpoint.previous", "error.txt"):
            (folder / name).unlink(missing_ok=True)

    @property
    def entries(self) -> list[Entry]:
        """All runs, sorted by folder. Unreadable runs are left out with a warning."""
        found = []
        for path in sorted(self.folder.glob("runs/*/run.json")):
            folder = path.parent
            try:
                run = Run.from_dict(read_json(path), folder.name)
                found.append(Entry(run, folder, _record(folder)))
            except (UserError, TypeError, ValueError, LookupError) as error:
                warn(f"{folder} is left out, and can be deleted: {error}")
        return found


def _record(folder: Path) -> Record | None:
    path = folder / "record.json"
    if not path.exists():
        return None
    data = read_json(path)
    try:
        record = Record.from_dict(data)
        _ = record.summary, record.timeline, record.images_per_second
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise StudyError(f"{path} is not the record of a run ({error}): delete {folder} to run it again") from None
    return record


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object."""
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise StudyError(f"{path} cannot be read ({error}): delete {path.parent} to start over") from None
    if not isinstance(data, dict):
        raise StudyError(f"{path} does not hold a JSON object: delete {path.parent} to start over")
    return data


def write_json(path: Path, data: Any) -> None:
    """Write data as JSON, all or nothing."""
    atomic.write(path, json.dumps(data).encode())


# ---- one process per run ----


@contextmanager
def claimed(folder: Path) -> Iterator[bool]:
    """Claim a run for this process until the end of the block. False if another process holds it.

    The lock belongs to the operating system, which releases it when the process ends, however it ends.
    """
    lock = FileLock(folder / "lock")
    try:
        lock.acquire(blocking=False)
    except Timeout:
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


def is_locked(folder: Path) -> bool:
    if not (folder / "lock").exists():
        return False
    with claimed(folder) as free:
        return not free
