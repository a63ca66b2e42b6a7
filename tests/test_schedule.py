"""The schedule of a study, with an executor in memory: no process, no training, no waiting."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from holdfast.runs.plan import Plan
from holdfast.runs.training import Interrupted, Progress
from holdfast.study.schedule import run_all
from holdfast.study.store import Entry, Run, Study, StudyError, claimed
from holdfast.study.work import Ended
from test_exports import record_of

DONE = Ended("done")
OUT_OF_MEMORY = Ended("out of memory", "too large")
HALF = Progress(task=0, tasks=1, step=1, steps=2, accuracy=0.5)


def run(seed: int) -> Run:
    return Run.of("digits", Plan("npc", seed=seed))


def finish(study: Study, run: Run) -> None:
    study.finish(run, record_of(run, [[0.9]]))


@dataclass
class Memory:
    """An executor and a display in one, with a log of everything in order.

    Each call of `events` ends the run that was started first. Its attempts end as `ends` lists by seed, then "done".
    """

    study: Study
    slots: int = 1
    ends: dict[int, list[Ended]] = field(default_factory=dict)
    idle: Callable[[], None] = lambda: pytest.fail("the schedule waits, but no run is in progress")
    log: list[str] = field(default_factory=list)
    active: list[Run] = field(default_factory=list)
    timeouts: list[float | None] = field(default_factory=list)
    reports: int = 0

    def note(self, event: str, run: Run | None = None) -> None:
        self.log.append(event if run is None else f"{event} {run.plan.seed}")

    # the executor

    def open(self, runs: Sequence[Run]) -> int:
        self.note(f"open for {len(runs)}")
        return self.slots

    def start(self, run: Run) -> None:
        self.active.append(run)
        assert len(self.active) <= self.slots

    def events(self, timeout: float | None) -> Iterator[tuple[Run, Progress | Ended]]:
        self.timeouts.append(timeout)
        if not self.active:
            self.idle()
            return
        run = self.active[0]
        yield run, HALF
        del self.active[0]
        end = next(iter(self.ends.get(run.plan.seed, [])), DONE)
        self.ends[run.plan.seed] = self.ends.get(run.plan.seed, [])[1:]
        if end.outcome == "done":
            finish(self.study, run)
        yield run, end

    def interrupt(self) -> None:
        self.note(f"interrupt {len(self.active)}")
        self.active.clear()

    def close(self) -> None:
        self.note("close")

    # the display

    def started(self, run: Run) -> None:
        self.note("start", run)

    def progressed(self, run: Run, progress: Progress) -> None:
        assert progress is HALF
        self.reports += 1

    def ended(self, run: Run, entry: Entry | None, reason: str) -> None:
        self.note(f"fail ({reason})" if entry is None else "end", run)

    def elsewhere(self, runs: int) -> None:
        self.note(f"elsewhere {runs}")


def execute(memory: Memory, seeds: range | list[int]) -> list[Entry]:
    return run_all(memory.study, [run(seed) for seed in seeds], memory, memory)


def test_runs_start_in_order_while_slots_are_free(tmp_path: Path) -> None:
    memory = Memory(Study(tmp_path), slots=2)
    entries = execute(memory, range(4))
    assert memory.log == [
        *("open for 4", "start 0", "start 1", "end 0", "start 2", "end 1", "start 3", "end 2", "end 3", "close"),
    ]
    assert [entry.run for entry in entries] == [run(seed) for seed in range(4)]
    assert {entry.state for entry in entries} == {"finished"}
    assert set(memory.timeouts) == {None}
    assert memory.reports == 4


def test_finished_and_repeated_runs_are_skipped(tmp_path: Path) -> None:
    memory = Memory(Study(tmp_path))
    finish(memory.study, run(1))
    entries = execute(memory, [0, 1, 2, 0])
    assert memory.log == ["open for 2", "start 0", "end 0", "start 2", "end 2", "close"]
    assert [entry.run for entry in entries] == [run(0), run(1), run(2)]
    assert all(entry.record is not None for entry in entries)


def test_out_of_memory_gives_up_a_slot_and_retries_last(tmp_path: Path) -> None:
    memory = Memory(Study(tmp_path), slots=2, ends={0: [OUT_OF_MEMORY]})
    execute(memory, range(3))
    assert memory.log == [
        *("open for 3", "start 0", "start 1", "end 1", "start 2", "end 2", "start 0", "end 0", "close"),
    ]


def test_the_last_slot_stays(tmp_path: Path) -> None:
    memory = Memory(Study(tmp_path), slots=2, ends={seed: [OUT_OF_MEMORY] for seed in range(3)})
    execute(memory, range(3))
    assert memory.log[-7:] == ["start 0", "end 0", "start 1", "end 1", "start 2", "end 2", "close"]


def test_out_of_memory_twice_is_a_failure(tmp_path: Path) -> None:
    memory = Memory(Study(tmp_path), ends={0: [OUT_OF_MEMORY] * 2})
    with pytest.raises(StudyError, match=r"^npc, seed 0: too large; finished runs are kept in"):
        execute(memory, range(2))
    assert memory.log == ["open for 2", "start 0", "start 1", "end 1", "start 0", "fail (too large) 0", "close"]


def test_a_failure_is_not_retried_and_stops_no_other_run(tmp_path: Path) -> None:
    memory = Memory(Study(tmp_path), ends={0: [Ended("failed", "odd")], 2: [Ended("failed", "odder")]})
    with pytest.raises(StudyError, match=r"^npc, seed 0: odd, and 1 more; finished runs are kept in"):
        execute(memory, range(3))
    assert memory.log == [
        *("open for 3", "start 0", "fail (odd) 0", "start 1", "end 1", "start 2", "fail (odder) 2", "close"),
    ]


def test_a_run_with_a_record_has_not_failed_even_if_its_attempt_did(tmp_path: Path) -> None:
    """The worker may die between storing the record and reporting it."""

    class Late(Memory):
        def start(self, run: Run) -> None:
            super().start(run)
            finish(self.study, run)

    memory = Late(Study(tmp_path), ends={0: [Ended("failed", "it died")]})
    (entry,) = execute(memory, [0])
    assert entry.state == "finished"
    assert memory.log[-2:] == ["end 0", "close"]


@pytest.mark.parametrize("finishes", [True, False])
def test_a_run_claimed_elsewhere_is_awaited_and_taken_over_if_left(tmp_path: Path, finishes: bool) -> None:
    study, other = Study(tmp_path), ExitStack()
    other.enter_context(claimed(study.add(run(0)).folder))

    def idle() -> None:
        assert memory.log[-1] == "end 1"  # own runs come first
        if finishes:
            finish(study, run(0))
        other.close()

    memory = Memory(study, ends={0: [Ended("claimed")]}, idle=idle)
    entries = execute(memory, range(2))
    assert [entry.state for entry in entries] == ["finished"] * 2
    taken_over = [] if finishes else ["start 0"]
    assert memory.log == [
        *("open for 2", "start 0", "elsewhere 1", "start 1", "end 1", "elsewhere 0", *taken_over, "end 0", "close"),
    ]
    first, *polls = memory.timeouts
    assert first is None
    assert all(timeout is not None and timeout > 0 for timeout in polls[:2])
    assert polls[2:] == ([] if finishes else [None])


@pytest.mark.parametrize("slots", [1, 2])
def test_an_interruption_saves_the_runs_in_progress_and_starts_no_other(tmp_path: Path, slots: int) -> None:
    class Impatient(Memory):
        def progressed(self, run: Run, progress: Progress) -> None:
            if run.plan.seed == 1:
                raise KeyboardInterrupt

    memory = Impatient(Study(tmp_path), slots=slots)
    with pytest.raises(Interrupted, match=f"^interrupted; run the same command again to resume {tmp_path}$"):
        execute(memory, range(4))
    started = ["start 0", "start 1", "end 0", "start 2"] if slots == 2 else ["start 0", "end 0", "start 1"]
    assert memory.log == ["open for 4", *started, f"interrupt {slots}", "close"]
    assert [entry.record is not None for entry in memory.study.entries] == [True, False, False, False]


def test_the_executor_is_closed_when_anything_else_is_raised(tmp_path: Path) -> None:
    class Broken(Memory):
        def start(self, run: Run) -> None:
            raise ZeroDivisionError

    memory = Broken(Study(tmp_path))
    with pytest.raises(ZeroDivisionError):
        execute(memory, [0])
    assert memory.log == ["open for 1", "close"]


def test_an_executor_that_cannot_open_leaves_nothing_behind(tmp_path: Path) -> None:
    class Unable(Memory):
        def open(self, runs: Sequence[Run]) -> int:
            raise ValueError("no such stream")

    memory = Unable(Study(tmp_path / "study"))
    with pytest.raises(ValueError, match="no such stream"):
        execute(memory, [0])
    assert memory.log == ["close"]
    assert not (tmp_path / "study").exists()
