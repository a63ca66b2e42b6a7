"""Running a study: several processes, each with one run at a time, so that the machine is well used.

Each run is claimed by the process that does it. So several terminals may work on the same study: what one of
them is at, the others leave alone, and what one of them leaves unfinished, another takes up.
"""

import os
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import torch

from holdfast.errors import UserError, warn_in_one_line
from holdfast.streams import build_stream
from holdfast.streams.tasks import Stream
from holdfast.study.logs import Log
from holdfast.study.records import Entry, Run, Study, StudyError, claimed
from holdfast.training import Interrupted, Plan, Progress, choose_device, train

AT_ONCE_ON_A_GPU = 2  # benchmarks/sharing.py
MEMORY_OF_A_RUN = 6 * 2**30
_PAUSE = 0.2  # seconds between two reports of a worker, and between two looks at what other processes do


class How(NamedTuple):
    """How the runs of a study are done."""

    data: Path | None = None
    """The folder to look for data sets in first."""
    device: str | None = None
    """`cpu` or `cuda`; a GPU if there is one and none is given."""
    jobs: int | None = None
    """How many runs at once; as many as suit the machine if none is given."""
    tensorboard: bool = False
    """Whether TensorBoard's files are written too."""


class Share(NamedTuple):
    """How a machine is shared by runs: how many at once, and how many threads each."""

    jobs: int
    threads: int


def share(runs: int, how: How) -> Share:
    """How many runs go on at once: on a CPU one per core, on a GPU as many as use it best and its memory allows.

    Fewer runs than cores have several cores each.
    """
    best = cores = torch.get_num_threads()
    if on_gpu(how):
        best = min(AT_ONCE_ON_A_GPU, torch.cuda.mem_get_info(choose_device(how.device))[0] // MEMORY_OF_A_RUN)
    jobs = max(1, min(runs, how.jobs or best))
    return Share(jobs, max(1, cores // jobs))


def on_gpu(how: How) -> bool:
    return choose_device(how.device).type == "cuda"


# ---- one run ----


def perform(study: Study, run: Run, how: How, tell: Callable[[Progress], None] | None = None) -> Entry | None:
    """Do a run, or go on with it; what is finished stays as it is. None if another process is at it."""
    folder = study.add(run).folder
    with claimed(folder) as ours:
        if not ours:
            return None
        entry = study.look(run)
        if entry.record is not None:
            return entry
        stream, plan = _stream(run.stream, how.data, run.tasks), Plan(**run.plan)
        steps = [plan.steps(stream, task) for task in stream.tasks]
        with Log(folder, steps, tensorboard=how.tensorboard) as log:
            record = train(stream, plan, device=how.device, folder=folder, tell=tell, mark=log)
        if record.failure is not None:  # points after it are no part of the curves
            with Log(folder, steps, tensorboard=how.tensorboard) as log:
                for point in record.timeline:
                    log(point)
        study.finish(run, record)
        return study.look(run)


@lru_cache(maxsize=2)
def _stream(name: str, data: Path | None, tasks: int | None) -> Stream:
    return build_stream(name, data, tasks=tasks)


# ---- a worker ----

Outcome = Literal["done", "busy", "interrupted", "no memory", "failed"]


class Ended(NamedTuple):
    """What a worker says at the end of a run."""

    outcome: Outcome
    why: str = ""


def _work(pipe: Connection, folder: Path, how: How, threads: int) -> None:
    """Do the runs that come through the pipe, until it is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # but in a run, which then stops at the end of a step
    if hasattr(signal, "pthread_sigmask"):  # they have waited since the process was started
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    warn_in_one_line()
    torch.set_num_threads(threads)
    study = Study(folder)
    try:
        while True:
            run: Run = pipe.recv()
            pipe.send(_attempt(study, run, how, _Reporter(pipe)))
    except (EOFError, BrokenPipeError, ConnectionResetError):  # nobody is there any more
        return


class _Reporter:
    """Sends where a run is, not too often."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe, self.last = pipe, 0.0

    def __call__(self, progress: Progress) -> None:
        if time.monotonic() - self.last >= _PAUSE:
            self.last = time.monotonic()
            self.pipe.send(progress)


def _attempt(study: Study, run: Run, how: How, tell: Callable[[Progress], None]) -> Ended:
    try:
        return Ended("busy" if perform(study, run, how, tell) is None else "done")
    except Interrupted:
        return Ended("interrupted", "interrupted; the same command goes on where it was")
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return Ended("no memory", "the memory of the GPU is not enough: use a smaller batch or width")
    except (UserError, ValueError, OSError) as error:
        return Ended("failed", str(error))
    except Exception as error:  # a mistake in a method or a model, which its author wants to see whole
        path = study.folder_of(run) / "error.txt"
        with suppress(OSError):
            path.write_text(traceback.format_exc())
        return Ended("failed", f"{type(error).__name__}: {error}; where it happened is in {path}")


# ---- all runs ----


class Display(Protocol):
    """Shows how a study goes on."""

    def began(self, run: Run) -> None: ...
    def went_on(self, run: Run, progress: Progress) -> None: ...
    def ended(self, run: Run, entry: Entry | None, why: str) -> None:
        """With what came out, or why nothing did."""

    def waits(self, runs: int) -> None:
        """For runs that other processes are at."""


@dataclass
class _Worker:
    process: BaseProcess
    pipe: Connection
    run: Run | None = None


@dataclass
class _Crew:
    """The processes of a study and what is still to be done."""

    study: Study
    how: How
    display: Display
    waiting: deque[Run] = field(default_factory=deque)
    elsewhere: list[Run] = field(default_factory=list)
    again: set[str] = field(default_factory=set)
    failures: dict[str, str] = field(default_factory=dict)
    workers: list[_Worker] = field(default_factory=list)
    places: int = 1
    threads: int = 1

    @property
    def busy(self) -> list[_Worker]:
        return [worker for worker in self.workers if worker.run is not None]

    def go(self, runs: Iterable[Run]) -> None:
        self.waiting.extend(runs)
        self.places, self.threads = share(len(self.waiting), self.how)
        while self.waiting or self.elsewhere or self.busy:
            self._hand_out()
            if self.busy:
                for pipe in wait([worker.pipe for worker in self.busy], timeout=_PAUSE if self.elsewhere else None):
                    self._hear(next(worker for worker in self.workers if worker.pipe is pipe))
            else:
                time.sleep(_PAUSE)
            self._look_elsewhere()

    def _hand_out(self) -> None:
        while self.waiting and len(self.busy) < self.places:
            idle = next((worker for worker in self.workers if worker.run is None), None) or self._hire()
            run = self.waiting.popleft()
            try:
                idle.pipe.send(run)
            except OSError:  # it has died since
                self.workers.remove(idle)
                self.waiting.appendleft(run)
                continue
            idle.run = run
            self.display.began(run)

    def _hire(self) -> _Worker:
        context = get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(theirs, self.study.folder, self.how, self.threads), daemon=True)
        resource_tracker.ensure_running()  # now, since starting it lets interrupts through again
        with _interrupts_wait():
            process.start()
        theirs.close()  # so that ours ends when the process does
        self.workers.append(_Worker(process, ours))
        return self.workers[-1]

    def _hear(self, worker: _Worker) -> None:
        run = worker.run
        assert run is not None
        try:
            message: Progress | Ended = worker.pipe.recv()
        except (EOFError, ConnectionResetError):
            self.workers.remove(worker)
            worker.process.join()
            code = worker.process.exitcode
            message = Ended("no memory", f"its process died (exit code {code}), perhaps for want of memory")
        if isinstance(message, Progress):
            self.display.went_on(run, message)
            return
        worker.run = None
        if message.outcome == "busy":
            self.elsewhere.append(run)
            self.display.waits(len(self.elsewhere))
        elif message.outcome == "no memory" and run.id not in self.again:
            self.places = max(1, self.places - 1)
            self.again.add(run.id)
            self.waiting.append(run)
        else:
            self._note(run, message.why)

    def _note(self, run: Run, why: str = "") -> None:
        entry = self.study.look(run)
        if entry.record is None:
            self.failures[run.label] = why
        self.display.ended(run, entry if entry.record is not None else None, why)

    def _look_elsewhere(self) -> None:
        """See what became of the runs that other processes are at; what they have left is done here."""
        for run in self.elsewhere[:]:
            entry = self.study.look(run)
            if entry.state != "running":
                self.elsewhere.remove(run)
                self.display.waits(len(self.elsewhere))
                if entry.record is None:
                    self.waiting.append(run)
                else:
                    self._note(run)

    def interrupt(self) -> None:
        """Let every run save itself. One that has not begun to learn hears of it when it does."""
        while busy := self.busy:
            for worker in busy:
                with suppress(ProcessLookupError):
                    os.kill(worker.process.pid or 0, signal.SIGINT)
            for pipe in wait([worker.pipe for worker in busy], timeout=_PAUSE):
                worker = next(worker for worker in busy if worker.pipe is pipe)
                try:
                    ended = isinstance(worker.pipe.recv(), Ended)
                except (EOFError, ConnectionResetError):
                    ended = True
                worker.run = None if ended else worker.run

    def dismiss(self) -> None:
        for worker in self.workers:
            worker.pipe.close()
        for worker in self.workers:
            worker.process.join(5)
            if worker.process.is_alive():
                worker.process.kill()


@contextmanager
def _interrupts_wait() -> Iterator[None]:
    """A Ctrl-C waits until the end of the block; in a process that is started there, until that is ready for it.

    Blocking it is for the process that is started. Here that is not enough: another thread, of torch for instance, may
    take the signal, and Python would then interrupt this one.
    """
    if not hasattr(signal, "pthread_sigmask"):  # on Windows
        yield
        return
    ours = threading.current_thread() is threading.main_thread()
    asked = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: asked.set()) if ours else None
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        if before is not None:
            signal.signal(signal.SIGINT, before)
        if asked.is_set():
            signal.raise_signal(signal.SIGINT)


def prepare(runs: Iterable[Run], how: How) -> None:
    """Find out what cannot work before anything is run: the device, the streams, their data, which are fetched once."""
    choose_device(how.device)
    for stream, tasks in dict.fromkeys((run.stream, run.tasks) for run in runs):
        build_stream(stream, how.data, tasks=tasks)


def run_all(study: Study, runs: Iterable[Run], how: How, display: Display) -> list[Entry]:
    """Do all runs that are not finished, several at once, and return all of them as they then stand.

    What goes wrong with one run does not stop the others; afterwards it is a StudyError. Ctrl-C lets every run save
    itself; the same again goes on from there.
    """
    crew = _Crew(study, how, display)
    try:
        entries = [study.add(run) for run in {run.id: run for run in runs}.values()]
        crew.go(entry.run for entry in entries if entry.record is None)
    except KeyboardInterrupt:
        crew.interrupt()
        raise Interrupted(f"interrupted; the same command goes on where it was, in {study.folder}") from None
    finally:
        crew.dismiss()
    if crew.failures:
        label, why = next(iter(crew.failures.items()))
        others = f", and {len(crew.failures) - 1} more" if len(crew.failures) > 1 else ""
        raise StudyError(f"{label}: {why}{others}; what is finished is kept in {study.folder}")
    return [study.look(entry.run) for entry in entries]
