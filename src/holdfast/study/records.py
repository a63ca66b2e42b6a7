"""Where the runs of a study are kept: plain files, one folder per run.

    STUDY/runs/digits-npc-0-1a2b3c4d/
        run.json          what is run, and how it is called in tables
        curve.csv         the accuracies while it runs, and
        curve.jsonl       the same as JSON lines
        checkpoint.pt     where it can go on, until it is finished
        record.json       what came out, when it is finished
        neurons.json      what its neurons did, if that was asked for
        lock              held by the process that runs it

Nothing here needs torch, so that a study is listed at once.
"""

import dataclasses
import hashlib
import json
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from filelock import FileLock, Timeout

from holdfast import atomic
from holdfast.errors import UserError
from holdfast.record import Record

if TYPE_CHECKING:
    from holdfast.training import Plan

State = Literal["finished", "failed", "running", "interrupted", "waiting"]


class StudyError(UserError):
    """Something is wrong with a study; the message is one line that says what, and what to do."""


@dataclass(frozen=True)
class Run:
    """One run of a study.

    Args:
        stream: the name of its stream.
        plan: how it is learnt, as plain data.
        tasks: how many of the stream's tasks; all if None.
        name: how it is called in tables and figures. Runs that differ in their seed alone share it.
        id: the name of its folder: the same for the same stream, tasks and plan, whatever it is called.
    """

    stream: str
    plan: Mapping[str, Any]
    tasks: int | None
    name: str
    id: str

    @classmethod
    def of(cls, stream: str, plan: "Plan", tasks: int | None = None, name: str | None = None) -> "Run":
        """The run of `plan` on the first `tasks` of `stream`."""
        chosen = {
            item.name: getattr(plan, item.name)
            for item in dataclasses.fields(plan)
            if item.name in ("method", "seed") or getattr(plan, item.name) != _default(item)
        }
        stream = _absolute(stream)
        identity = json.dumps(alike([stream, tasks, chosen]), sort_keys=True)
        digest = hashlib.sha256(identity.encode()).hexdigest()[:8]
        slug = re.sub(r"[^A-Za-z0-9]+", "-", stream).strip("-")[-40:]
        return cls(
            stream,
            dataclasses.asdict(plan),
            tasks,
            name if name is not None else default_name(plan.method, plan.settings),
            f"{slug}-{plan.method}-{plan.seed}-{digest}",
        )

    @property
    def label(self) -> str:
        return f"{self.name}, seed {self.plan['seed']}"


def alike(value: Any) -> Any:
    """Plain data in which numbers that are equal are the same: 1 and 1.0, for instance.

    >>> alike({"strength": 1, "labels": ["exact", True]})
    {'strength': 1.0, 'labels': ['exact', True]}
    """
    if isinstance(value, Mapping):
        return {key: alike(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [alike(inner) for inner in value]
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _absolute(stream: str) -> str:
    """A folder's images by where they are, so that the same name in another place is another stream."""
    kind, colon, path = stream.partition(":")
    if kind != "folder" or not path:
        return stream
    place, question, options = path.partition("?")
    return f"{kind}{colon}{Path(place).expanduser().resolve()}{question}{options}"


def _default(item: "dataclasses.Field[Any]") -> Any:
    return item.default_factory() if item.default_factory is not dataclasses.MISSING else item.default


def default_name(method: str, settings: Mapping[str, Any]) -> str:
    """How a method with settings is called where the user has not said.

    >>> default_name("ewc", {"strength": 30.0})
    'ewc strength=30.0'
    """
    return " ".join([method, *(f"{name}={value}" for name, value in settings.items())])


@dataclass(frozen=True)
class Entry:
    """A run of a study as it stands."""

    run: Run
    folder: Path
    record: Record | None
    """What came out of it, if it is finished or has failed; without what its neurons did, which `neurons` has."""

    @property
    def state(self) -> State:
        if self.record is not None:
            return "finished" if self.record.failure is None else "failed"
        if is_locked(self.folder):
            return "running"
        return "interrupted" if (self.folder / "checkpoint.pt").exists() else "waiting"

    @cached_property
    def neurons(self) -> dict[str, Any] | None:
        """What the neurons of the run did, if that was recorded."""
        path = self.folder / "neurons.json"
        return read_json(path) if path.exists() else None


class Study:
    """A folder of runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)

    def folder_of(self, run: Run) -> Path:
        return self.folder / "runs" / run.id

    def look(self, run: Run) -> Entry:
        """How a run stands."""
        folder = self.folder_of(run)
        return Entry(run, folder, _record(folder))

    def add(self, run: Run) -> Entry:
        """Make the folder of a run, or give it the name that the user has given it now, and look how it stands."""
        known = self.folder_of(run) / "run.json"
        if not known.exists() or run.name != default_name(run.plan["method"], run.plan["settings"]):
            write_json(known, {name: value for name, value in dataclasses.asdict(run).items() if name != "id"})
        return self.look(run)

    def finish(self, run: Run, record: Record) -> None:
        """Keep what came out of a run, and remove the checkpoints that it no longer needs."""
        folder = self.folder_of(run)
        if record.neurons is not None:
            write_json(folder / "neurons.json", record.neurons)
        write_json(folder / "record.json", dataclasses.replace(record, neurons=None).as_dict())
        for name in ("checkpoint.pt", "checkpoint.previous", "error.txt"):
            (folder / name).unlink(missing_ok=True)

    @property
    def entries(self) -> list[Entry]:
        """All runs, in the order of their names."""
        found = []
        for known in sorted(self.folder.glob("runs/*/run.json")):
            folder = known.parent
            try:
                run = Run(**read_json(known), id=folder.name)
                _ = [run.plan[key] for key in ("method", "settings", "seed", "judged_on")]
                found.append(Entry(run, folder, _record(folder)))
            except (UserError, TypeError, LookupError) as error:
                warnings.warn(f"{folder} is left out, and can be deleted: {error}", stacklevel=2)
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
        raise StudyError(f"{path} is no record of a run ({error}): delete {folder} to run it again") from None
    return record


def read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise StudyError(f"{path} cannot be read ({error}): delete {path.parent} to start anew") from None
    if not isinstance(data, dict):
        raise StudyError(f"{path} has something else in it: delete {path.parent} to start anew")
    return data


def write_json(path: Path, data: Any) -> None:
    atomic.write(path, json.dumps(data).encode())


# ---- one process per run ----


@contextmanager
def claimed(folder: Path) -> Iterator[bool]:
    """Whether this process may work on a run: no other does, and none will until the end of the block.

    The lock is the operating system's: it ends with the process, however that ends.
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
