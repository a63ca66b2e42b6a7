"""The schedule of a study: start runs while slots are free, retry, wait for other processes, collect failures.

An `Executor` carries the runs out, for example in processes of this machine (`holdfast.study.processes`). Every run is
claimed by the process that executes it, so several schedules can share a study: each skips the runs claimed by the
others and takes over those they leave unfinished.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from holdfast.runs.training import Interrupted, Progress
from holdfast.study.store import Entry, Run, Study, StudyError
from holdfast.study.work import Ended

_POLL = 0.2  # seconds between checks of the runs claimed by other processes


class Executor(Protocol):
    """Carries out the runs that a schedule starts, each by `holdfast.study.work.attempt`."""

    def open(self, runs: Sequence[Run]) -> int:
        """Prepare for these runs, and raise an error if they cannot be executed; nothing is stored yet.

        Returns:
            The number of slots: the limit on runs in progress at once.
        """

    def start(self, run: Run) -> None:
        """Start a run. The schedule never starts more runs than there are slots."""

    def events(self, timeout: float | None) -> Iterable[tuple[Run, Progress | Ended]]:
        """Wait for events of the started runs and yield them. The last event of every run is its `Ended`.

        Args:
            timeout: seconds to wait at most, even with no run in progress. None waits until there is an event.
        """

    def interrupt(self) -> None:
        """Make every run in progress save a checkpoint and stop. Returns once all have stopped."""

    def close(self) -> None:
        """Release everything that the executor holds."""


class Display(Protocol):
    """Shows the progress of a study."""

    def started(self, run: Run) -> None: ...
    def progressed(self, run: Run, progress: Progress) -> None: ...
    def ended(self, run: Run, entry: Entry | None, reason: str) -> None:
        """Show the stored run, or the reason why there is none."""

    def elsewhere(self, runs: int) -> None:
        """Show the number of runs claimed by other processes."""


def run_all(study: Study, runs: Iterable[Run], executor: Executor, display: Display) -> list[Entry]:
    """Execute the unfinished runs, several at once, and return all runs with their records.

    A run that fails does not stop the others; a StudyError follows at the end. After Ctrl-C every run saves a
    checkpoint, and the same call resumes from there. The executor is closed in any case.
    """
    different = list({run.id: run for run in runs}.values())
    try:
        unfinished = [run for run in different if study.entry(run).record is None]
        schedule = _Schedule(study, executor, display, executor.open(unfinished))
        entries = [study.add(run) for run in different]
        schedule.go(unfinished)
    except KeyboardInterrupt:
        executor.interrupt()
        raise Interrupted(f"interrupted; run the same command again to resume {study.folder}") from None
    finally:
        executor.close()
    if schedule.failures:
        run, reason = schedule.failures[0]
        others = f", and {len(schedule.failures) - 1} more" if len(schedule.failures) > 1 else ""
        raise StudyError(f"{run.label}: {reason}{others}; finished runs are kept in {study.folder}")
    return [study.entry(entry.run) for entry in entries]


@dataclass
class _Schedule:
    study: Study
    executor: Executor
    display: Display
    slots: int
    waiting: deque[Run] = field(default_factory=deque)
    running: set[str] = field(default_factory=set)  # IDs of the runs in progress here
    elsewhere: list[Run] = field(default_factory=list)
    retried: set[str] = field(default_factory=set)  # IDs of the runs that ran out of memory once
    failures: list[tuple[Run, str]] = field(default_factory=list)

    def go(self, runs: list[Run]) -> None:
        self.waiting.extend(runs)
        while self.waiting or self.running or self.elsewhere:
            self._fill_slots()
            for run, event in self.executor.events(_POLL if self.elsewhere else None):
                if isinstance(event, Progress):
                    self.display.progressed(run, event)
                else:
                    self._end(run, event)
            self._check_elsewhere()

    def _fill_slots(self) -> None:
        while self.waiting and len(self.running) < self.slots:
            run = self.waiting.popleft()
            self.executor.start(run)
            self.running.add(run.id)
            self.display.started(run)

    def _end(self, run: Run, end: Ended) -> None:
        self.running.remove(run.id)
        if end.outcome == "claimed":
            self.elsewhere.append(run)
            self.display.elsewhere(len(self.elsewhere))
        elif end.outcome == "out of memory" and run.id not in self.retried:
            self.slots = max(1, self.slots - 1)
            self.retried.add(run.id)
            self.waiting.append(run)
        else:
            self._conclude(run, end.reason)

    def _conclude(self, run: Run, reason: str = "") -> None:
        entry = self.study.entry(run)
        if entry.record is None:
            self.failures.append((run, reason))
        self.display.ended(run, entry if entry.record is not None else None, reason)

    def _check_elsewhere(self) -> None:
        """Conclude the runs that other processes have finished and take over those they have left."""
        for run in self.elsewhere[:]:
            entry = self.study.entry(run)
            if entry.state == "running":
                continue
            self.elsewhere.remove(run)
            self.display.elsewhere(len(self.elsewhere))
            if entry.record is None:
                self.waiting.append(run)
            else:
                self._conclude(run)
