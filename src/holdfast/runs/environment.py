"""The process of a run: its device, numerics, interrupts and resources."""

import os
import platform
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from holdfast.runs.plan import Plan
from holdfast.version import __version__

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_one_run = threading.Lock()


def choose_device(device: str | torch.device | None) -> torch.device:
    """Check the given device. None selects a GPU if there is one, else the CPU."""
    try:
        chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise ValueError(f"unknown device {str(device)!r}: use cpu or cuda") from None
    if chosen.type not in ("cpu", "cuda"):
        raise ValueError(f"device {str(device)!r} is not supported: use cpu or cuda")
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {str(device)!r} is not available: torch finds no GPU; use cpu")
    return chosen


@contextmanager
def exclusive() -> Iterator[None]:
    """Refuse a second run in this process: random numbers and precision are global."""
    if not _one_run.acquire(blocking=False):
        raise RuntimeError("another run is active in this process: start each run in its own process")
    try:
        yield
    finally:
        _one_run.release()


@contextmanager
def numerics(plan: Plan) -> Iterator[None]:
    """Set the precision, determinism and threads of a plan; restore the previous settings on exit."""
    matmul = torch.get_float32_matmul_precision()
    convolutions = torch.backends.cudnn.allow_tf32
    deterministic = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark, workspace = torch.backends.cudnn.benchmark, os.environ.get(_WORKSPACE)
    threads = torch.get_num_threads()
    torch.set_float32_matmul_precision("highest" if plan.precision == "float32" else "high")
    torch.backends.cudnn.allow_tf32 = plan.precision == "tf32"
    torch.set_num_threads(plan.threads)
    if plan.deterministic:
        os.environ.setdefault(_WORKSPACE, ":4096:8")  # cuBLAS requires it
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(matmul)
        torch.backends.cudnn.allow_tf32 = convolutions
        torch.use_deterministic_algorithms(deterministic[0], warn_only=deterministic[1])
        torch.backends.cudnn.benchmark = benchmark
        torch.set_num_threads(threads)
        if workspace is None:
            os.environ.pop(_WORKSPACE, None)


def autocast(plan: Plan, device: torch.device) -> AbstractContextManager[Any]:
    """The context of a forward in the plan's precision."""
    return torch.autocast(device.type, torch.bfloat16) if plan.precision == "bf16" else nullcontext()


@contextmanager
def interrupt_event() -> Iterator[threading.Event]:
    """Defer the first Ctrl-C: it sets the event instead of raising. The second one raises at once."""
    interrupted = threading.Event()
    if threading.current_thread() is not threading.main_thread():  # only the main thread receives signals
        yield interrupted
        return

    def defer(*_: Any) -> None:
        interrupted.set()
        signal.signal(signal.SIGINT, previous)

    previous = signal.signal(signal.SIGINT, defer)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, previous)


def peak_memory(device: torch.device) -> int:
    """The peak memory of this process in bytes: on the GPU, or on the host for a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # on Windows
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"


def versions() -> dict[str, str]:
    return {"holdfast": __version__, "torch": str(torch.__version__), "python": platform.python_version()}
