"""The local executor: runs in processes of this machine, one run per process at a time."""

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from holdfast.errors import warn_in_one_line
from holdfast.runs.training import Progress, choose_device
from holdfast.study.store import Run, Study
from holdfast.study.work import Ended, Execution, attempt, prepare

RUNS_PER_GPU = 2  # benchmarks/sharing.py
MEMORY_PER_RUN = 6 * 2**30
_PAUSE = 0.2  # seconds between progress reports of a worker, and between repeated interrupts


def jobs_for(runs: Sequence[Run], execution: Execution) -> int:
    """The number of runs at once on this machine.

    A CPU takes as many runs as it has cores for their threads. A GPU takes as many runs as give the highest throughput
    and fit into its free memory.
    """
    if execution.on_gpu:
        best = min(RUNS_PER_GPU, torch.cuda.mem_get_info(choose_device(execution.device))[0] // MEMORY_PER_RUN)
    else:
        best = torch.get_num_threads() // max((run.plan.threads for run in runs), default=1)
    return max(1, min(len(runs), execution.jobs or best))


# ---- in the parent process ----


@dataclass
class _Worker:
    process: BaseProcess
    pipe: Connection
    run: Run | None = None


class LocalExecutor:
    """Executes the runs of a study in processes of this machine.

    Processes are spawned as needed and reused for later runs. A process that dies is replaced.

    Args:
        study: the study.
        execution: the options of its runs.
    """

    def __init__(self, study: Study, execution: Execution) -> None:
        self.study, self.execution = study, execution
        self._workers: list[_Worker] = []

    def open(self, runs: Sequence[Run]) -> int:
        prepare(runs, self.execution)
        return jobs_for(runs, self.execution)

    def start(self, run: Run) -> None:
        while True:
            worker = next((worker for worker in self._workers if worker.run is None), None) or self._spawn()
            try:
                worker.pipe.send(run)
            except OSError:  # the worker died while idle
                self._workers.remove(worker)
                continue
            worker.run = run
            return

    def events(self, timeout: float | None) -> Iterator[tuple[Run, Progress | Ended]]:
        busy = self._busy
        if not busy and timeout is not None:
            time.sleep(timeout)
        for worker in _ready(busy, timeout):
            run = worker.run
            assert run is not None
            yield run, self._receive(worker)

    def interrupt(self) -> None:
        while busy := self._busy:
            for worker in busy:  # repeatedly: a worker ignores the signal until its run trains
                with suppress(ProcessLookupError):
                    os.kill(worker.process.pid or 0, signal.SIGINT)
            for worker in _ready(busy, _PAUSE):
                self._receive(worker)

    def close(self) -> None:
        for worker in self._workers:
            worker.pipe.close()
        for worker in self._workers:
            worker.process.join(5)
            if worker.process.is_alive():
                worker.process.kill()

    @property
    def _busy(self) -> list[_Worker]:
        return [worker for worker in self._workers if worker.run is not None]

    def _spawn(self) -> _Worker:
        context = get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(theirs, self.study.folder, self.execution), daemon=True)
        resource_tracker.ensure_running()  # now, because starting it unblocks interrupts
        with _interrupts_deferred():
            process.start()
        theirs.close()  # the pipe then breaks when the process dies
        self._workers.append(_Worker(process, ours))
        return self._workers[-1]

    def _receive(self, worker: _Worker) -> Progress | Ended:
        """Receive a message. A worker whose run has ended becomes idle; one that has died is removed."""
        try:
            message: Progress | Ended = worker.pipe.recv()
        except (EOFError, ConnectionResetError):
            self._workers.remove(worker)
            worker.process.join()
            code = worker.process.exitcode
            message = Ended(
                "out of memory",
                f"its process died (exit code {code}), perhaps out of memory: try fewer --jobs or a smaller batch",
            )
        if isinstance(message, Ended):
            worker.run = None
        return message


def _ready(workers: list[_Worker], timeout: float | None) -> list[_Worker]:
    """Wait until a worker has sent a message or died. Returns all workers that have."""
    ready = wait([worker.pipe for worker in workers], timeout) if workers else []
    return [worker for worker in workers if worker.pipe in ready]


@contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Defer Ctrl-C to the end of the block; in a process started there, until that process is ready for it.

    The signal mask is inherited by the new process. In this one it is not enough: another thread, of torch for
    instance, may receive the signal, and Python would then interrupt the main thread.
    """
    if not hasattr(signal, "pthread_sigmask"):  # on Windows
        yield
        return
    in_main_thread = threading.current_thread() is threading.main_thread()
    interrupted = threading.Event()
    handler = signal.signal(signal.SIGINT, lambda *_: interrupted.set()) if in_main_thread else None
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        if handler is not None:
            signal.signal(signal.SIGINT, handler)
        if interrupted.is_set():
            signal.raise_signal(signal.SIGINT)


# ---- in a worker process ----


def _work(pipe: Connection, folder: Path, execution: Execution) -> None:
    """Execute the runs received through the pipe until it is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # except while training, which then stops after a step
    if hasattr(signal, "pthread_sigmask"):  # blocked since the process was spawned
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    warn_in_one_line()
    study = Study(folder)
    try:
        while True:
            run: Run = pipe.recv()
            pipe.send(attempt(study, run, execution, _Reporter(pipe)))
    except (EOFError, BrokenPipeError, ConnectionResetError):  # the parent process has gone
        return


class _Reporter:
    """Sends the progress of a run, at most once every `_PAUSE` seconds."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe, self.last = pipe, 0.0

    def __call__(self, progress: Progress) -> None:
        if time.monotonic() - self.last >= _PAUSE:
            self.last = time.monotonic()
            self.pipe.send(progress)
