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
import gc
import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypedDict

import msgspec
from filelock import FileLock, Timeout

from holdfast import atomic
from holdfast.errors import UserError, warn
from holdfast.runs.plan import Plan
from holdfast.runs.record import Record

State = Literal["finished", "failed", "running", "interrupted", "waiting"]
_CHECKPOINTS = ("checkpoint.pt", "checkpoint.previous", "checkpoint.damaged", "error.txt")
"""Files of a run that are removed once it has ended."""


class StudyError(UserError):
    """An error in a study. Its message is one line: what is wrong, and what to do."""


class UnreadableError(StudyError):
    """A file or folder exists, and the operating system does not permit or manage to read it."""


class DamagedError(StudyError):
    """The content of a file is not what was written, or never was what it should be."""


class _StoredRun(TypedDict):
    """The schema of `run.json`."""

    stream: str
    plan: dict[str, Any]
    tasks: int | None
    name: str


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
        stored = msgspec.convert(data, _StoredRun)
        return cls(stored["stream"], Plan(**stored["plan"]), stored["tasks"], stored["name"], run_id)


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
    def summary(self) -> dict[str, float | None] | None:
        """The metrics of the record, if the run is complete."""
        return None if self.record is None else self.record.summary

    @cached_property
    def neurons(self) -> dict[str, Any] | None:
        """Importance and drift of neurons, if recorded."""
        return _read_if_there(self.folder / "neurons.json")


class LeftOut(NamedTuple):
    """A run that cannot be read."""

    folder: Path
    state: Literal["damaged", "unreadable"]
    reason: str

    def __str__(self) -> str:
        remedy = ", and can be deleted" if self.state == "damaged" else ""
        return f"{self.folder} is left out{remedy}: {self.reason}"


class Study:
    """A folder of runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)

    def folder_of(self, run: Run) -> Path:
        return self.folder / "runs" / run.id

    def inside(self, folder: Path) -> Path:
        """A folder of this study to write to. A link that leads out of the study is an error."""
        if not folder.resolve().is_relative_to(self.folder.resolve()):
            raise StudyError(f"{folder} is a link out of the study, to {folder.resolve()}: remove it")
        return folder

    def entry(self, run: Run) -> Entry:
        """Read the current state of a run."""
        folder = self.folder_of(run)
        try:
            return _with_record(run, folder)
        except DamagedError as error:
            raise StudyError(f"{error}: delete {folder} to run it again") from None

    def add(self, run: Run) -> Entry:
        """Create the folder of a run, or store its new name, and read its current state."""
        path = self.inside(self.folder_of(run)) / "run.json"
        if not path.exists() or run.name != default_name(run.plan.method, run.plan.settings):
            write_json(path, run.as_dict())
        return self.entry(run)

    def finish(self, run: Run, record: Record) -> None:
        """Store the record of a run and remove its checkpoints."""
        folder = self.folder_of(run)
        if record.neurons is not None:
            write_json(folder / "neurons.json", record.neurons)
        write_json(folder / "record.json", dataclasses.replace(record, neurons=None).as_dict())
        _remove_checkpoints(folder)

    def clean(self) -> None:
        """Remove what killed processes have left: temporary files, and the checkpoints of ended runs."""
        for folder in (self.folder, self.folder / "figures", self.folder / "sweeps", *files_in(self.folder / "runs")):
            with suppress(OSError):  # read-only, or not there
                atomic.clean(folder)
                if (folder / "record.json").exists() and any((folder / name).exists() for name in _CHECKPOINTS):
                    with claimed(folder) as ours:
                        if ours:
                            _remove_checkpoints(folder)

    @property
    def entries(self) -> list[Entry]:
        """All runs, sorted by folder. Runs that cannot be read are left out with a warning."""
        found, left_out = self.scan()
        for each in left_out:
            warn(str(each))
        return found

    def scan(self) -> tuple[list[Entry], list[LeftOut]]:
        """Read all runs, sorted by folder: those that can be read, and the others with the reasons."""
        found: list[Entry] = []
        left_out: list[LeftOut] = []
        numbers: dict[float, float] = {}
        with _collection_paused():
            for folder in files_in(self.folder / "runs"):
                try:
                    entry = _entry(folder)
                except DamagedError as error:
                    left_out.append(LeftOut(folder, "damaged", str(error)))
                except UnreadableError as error:
                    left_out.append(LeftOut(folder, "unreadable", str(error)))
                else:
                    if entry is not None:
                        _share_numbers(entry.record, numbers)
                        found.append(entry)
        return found, left_out


@contextmanager
def _collection_paused() -> Iterator[None]:
    """Pause the garbage collector, which would traverse everything read so far again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _share_numbers(record: Record | None, numbers: dict[float, float]) -> None:
    """Share equal accuracies between curves, which take most of the memory and have few distinct values."""
    for mark in record.curves if record is not None else ():
        mark["accuracy"] = [numbers.setdefault(value, value) for value in mark["accuracy"]]


def _remove_checkpoints(folder: Path) -> None:
    for name in _CHECKPOINTS:
        (folder / name).unlink(missing_ok=True)


def _entry(folder: Path) -> Entry | None:
    path = folder / "run.json"
    data = _read_if_there(path)
    if data is None:
        return None
    with parsing(path, "a run"):
        run = Run.from_dict(data, folder.name)
    return _with_record(run, folder)


def _with_record(run: Run, folder: Path) -> Entry:
    path = folder / "record.json"
    data = _read_if_there(path)
    if data is None:
        return Entry(run, folder, None)
    with parsing(path, "the record of a run"):
        record = msgspec.convert(data, Record)
        record.check()
        entry = Entry(run, folder, record)
        if "summary" in data and not _agree(data["summary"], entry.summary):
            raise ValueError("its summary does not match its matrix")
    return entry


def _agree(stored: Any, summary: Mapping[str, float | None] | None) -> bool:
    """Whether the summary in a file is that of its matrix. Metrics may have been added since it was written."""
    if stored is None or summary is None:
        return stored is summary
    known = msgspec.convert(stored, dict[str, float | None])
    return known.keys() <= summary.keys() and all(_close(value, summary[name]) for name, value in known.items())


def _close(one: float | None, other: float | None) -> bool:
    return one is other if one is None or other is None else math.isclose(one, other, abs_tol=1e-12)


# ---- files ----


def files_in(folder: Path) -> list[Path]:
    """The files and folders in a folder, sorted by name; none if there is no such folder."""
    try:
        return sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise UnreadableError(f"{folder} cannot be read ({error.strerror}): check its permissions") from None


_SEAL = re.compile(r'\{"digest": "([0-9a-f]{64})", ')


_LONG = re.compile(r"\d{21}")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. If it was written with a digest, a file that has changed since is refused."""
    try:
        text = path.read_text()
        data = _parsed(text)
    except OSError as error:
        raise UnreadableError(f"{path} cannot be read ({error.strerror or error}): check its permissions") from None
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{path} cannot be read ({error})") from None
    if not isinstance(data, dict):
        raise DamagedError(f"{path} does not hold a JSON object")
    if "digest" in data:
        seal = _SEAL.match(text)
        if seal is None or _digest("{" + text[seal.end() :]) != data.pop("digest"):
            raise DamagedError(f"{path} has changed since it was written: its digest does not match")
    return data


def _parsed(text: str) -> Any:
    """Parse JSON: fast, with shared memory for equal keys, or with the infinities and NaN that Python writes."""
    if _LONG.search(text) is None:
        with suppress(msgspec.DecodeError, RecursionError):
            return msgspec.json.decode(text)
    return json.loads(text, parse_int=_integer)


def _integer(text: str) -> int:
    if len(text) > 20:
        raise ValueError(f"an integer of {len(text)} digits")
    return int(text)


def write_json(path: Path, data: Any) -> None:
    """Write data as JSON, all or nothing. An object begins with the digest of the rest."""
    text = json.dumps(data)
    if isinstance(data, Mapping) and data:
        text = f'{{"digest": "{_digest(text)}", {text[1:]}'
    atomic.write(path, text.encode())


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _read_if_there(path: Path) -> dict[str, Any] | None:
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError:  # the folder is unreadable, and so is the file
        pass
    return read_json(path)


@contextmanager
def parsing(path: Path, what: str) -> Iterator[None]:
    """Name the file if its data are not those of `what`."""
    try:
        yield
    except (msgspec.ValidationError, ArithmeticError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise DamagedError(f"{path} is not {what} ({error})") from None


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
    try:
        with claimed(folder) as free:
            return not free
    except OSError:  # the study is read-only
        return _is_held(folder / "lock")


def _is_held(lock: Path) -> bool:
    """Whether a process holds a lock, tested without permission to write."""
    with suppress(ImportError, OSError):
        import fcntl

        with lock.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
    return False
