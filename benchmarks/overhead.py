"""The cost of NPC: training steps with it over training steps without it, interleaved in one run.

    python benchmarks/overhead.py                                            # on the CPU, or on a GPU if there is one
    python benchmarks/overhead.py --precision bf16 --compile
    python benchmarks/overhead.py --only "paper CNN" --rounds 20

Every round times three copies of one model, in random order: with the bare optimizer, with NPC around it, and with the
bare optimizer again. The last over the first is the noise: a cost smaller than its distance from 1 is not significant.
On a GPU there are two times: wall time, which for small models is the host's time to launch the kernels, and GPU time,
measured while the host is far ahead. The output is a Markdown table.
"""

import argparse
import copy
import gc
import random
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import holdfast
from holdfast.models import mlp, paper_cnn
from machine import hardware, synchronize


class Encoder(nn.Module):
    """A transformer encoder over 64 tokens of 256 features, with a free head."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(256, 8, 1024, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x).mean(1))


class Case(NamedTuple):
    model: Callable[[], nn.Module]
    shape: tuple[int, ...]
    optimizer: Callable[[nn.Module], Optimizer]


def sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.01)


def adamw(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=1e-4)


CASES = {
    "paper CNN, SGD": Case(lambda: paper_cnn(10), (3, 32, 32), sgd),
    "paper CNN, AdamW": Case(lambda: paper_cnn(10), (3, 32, 32), adamw),
    "MLP 784-1024-1024-10, SGD": Case(lambda: mlp(784, [1024, 1024], 10), (784,), sgd),
    "transformer encoder, SGD": Case(Encoder, (64, 256), sgd),
    "transformer encoder, AdamW": Case(Encoder, (64, 256), adamw),
}


class Settings(NamedTuple):
    device: str
    precision: str
    compile: bool
    batch: int
    rounds: int
    block: int


class Trainer:
    """A model, its optimizer with or without NPC, and one batch for all steps."""

    def __init__(self, model: nn.Module, case: Case, settings: Settings, npc: bool) -> None:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(settings.batch, *case.shape, generator=generator)
        y = torch.randint(10, (settings.batch,), generator=generator)
        self.batch = x.to(settings.device), y.to(settings.device)
        self.model = model
        self.optimizer = case.optimizer(model)
        before = tensors_alive()
        if npc:
            self.optimizer = holdfast.NPC(model, self.optimizer, free=[model.head], example=self.batch[0][:2])
        self.persistent = sum(size for key, size in tensors_alive().items() if key not in before)

        def loss(x: Tensor, y: Tensor) -> Tensor:
            with torch.autocast(settings.device, torch.bfloat16, enabled=settings.precision == "bf16"):
                return F.cross_entropy(model(x), y)

        self.loss = torch.compile(loss, fullgraph=True) if settings.compile else loss

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.optimizer.zero_grad()
            self.loss(*self.batch).backward()
            self.optimizer.step()


def tensors_alive() -> dict[int, int]:
    """The memory of all tensors, by address."""
    gc.collect()
    storages = [t.untyped_storage() for t in gc.get_objects() if type(t) in (Tensor, nn.Parameter)]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def clock_time(trainer: Trainer, settings: Settings) -> float:
    synchronize(settings.device)
    start = time.perf_counter()
    trainer.steps(settings.block)
    synchronize(settings.device)
    return (time.perf_counter() - start) / settings.block


def gpu_time(trainer: Trainer) -> float:
    """GPU time per step, with the queue filled first so that the GPU never waits for the host."""
    steps = 3
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    filler = torch.ones(8192, 8192, device="cuda")
    for _ in range(6):
        filler @ filler
    start.record()
    trainer.steps(steps)
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / steps / 1000


def peak_on_gpu(trainer: Trainer) -> float:
    """The peak memory of a step beyond the memory in use between steps."""
    torch.cuda.synchronize()
    at_rest = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    trainer.steps(1)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - at_rest


def peak_of_process(name: str, settings: Settings, npc: bool) -> float:
    torch.manual_seed(0)
    Trainer(CASES[name].model(), CASES[name], settings, npc).steps(3)
    status = Path("/proc/self/status").read_text()  # resource's ru_maxrss would include the parent process
    return 1024 * float(status.split("VmHWM:")[1].split()[0])


def peak_on_cpu(name: str, settings: Settings, npc: bool) -> float:
    """The peak memory of a separate process, so that one side does not reuse the other's memory."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(peak_of_process, name, settings, npc).result()


def forbid_synchronization(trainer: Trainer) -> None:
    """Fail if NPC's step synchronizes host and GPU."""
    trainer.loss(*trainer.batch).backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        trainer.optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def compare(name: str, settings: Settings) -> list[str]:
    case, on_gpu = CASES[name], settings.device == "cuda"
    model = case.model().to(settings.device)
    trainers = {
        kind: Trainer(copy.deepcopy(model), case, settings, npc=kind == "npc") for kind in ("bare", "npc", "again")
    }
    for trainer in trainers.values():
        trainer.steps(5 if on_gpu else 1)
    clock: dict[str, list[float]] = {kind: [] for kind in trainers}
    gpu: dict[str, list[float]] = {kind: [] for kind in trainers}
    for _ in range(settings.rounds):
        for kind in random.sample(list(trainers), len(trainers)):
            clock[kind].append(clock_time(trainers[kind], settings))
            if on_gpu:
                gpu[kind].append(gpu_time(trainers[kind]))
    if on_gpu:
        forbid_synchronization(trainers["npc"])
        peaks = [peak_on_gpu(trainers[kind]) for kind in ("bare", "npc")]
    else:
        peaks = [peak_on_cpu(name, settings, npc) for npc in (False, True)]
    neurons = sum(len(values) for values in trainers["npc"].optimizer.importance.values())
    memory = [f"{trainers['npc'].persistent / neurons:.1f}", f"{peaks[0] / 2**20:.0f}"]
    return [*ratios(clock), *(ratios(gpu) if on_gpu else []), *memory, f"{(peaks[1] - peaks[0]) / 2**20:+.0f}"]


def ratios(seconds: dict[str, list[float]]) -> list[str]:
    bare, npc, again = (statistics.median(seconds[kind]) for kind in ("bare", "npc", "again"))
    return [f"{1e3 * bare:.2f}", f"**{npc / bare:.3f}**", f"{again / bare:.3f}"]


def main() -> None:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if gpu else "cpu")
    parser.add_argument("--precision", choices=["float32", "tf32", "bf16"], default="float32")
    parser.add_argument("--compile", action="store_true", help="torch.compile the model and the loss")
    parser.add_argument("--batch", type=int, default=512, help="samples per batch (the paper: 512)")
    parser.add_argument("--rounds", type=int, default=50 if gpu else 12, help="rounds")
    parser.add_argument(
        "--block", type=int, default=10 if gpu else 1, help="steps timed together, without synchronizing"
    )
    parser.add_argument("--only", default="", help="only cases whose name contains this text")
    options = parser.parse_args()
    settings = Settings(
        options.device, options.precision, options.compile, options.batch, options.rounds, options.block
    )
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = options.precision == "tf32"

    mode = "compiled" if settings.compile else "eager"
    print(f"{hardware(settings.device)}; torch {torch.__version__}; batch {settings.batch}, {settings.precision}, "
          f"{mode}; {settings.rounds} rounds of {settings.block} steps\n")  # fmt: skip
    times = ["bare ms", "NPC/bare", "bare/bare"]
    columns = ["model", *times, *([f"GPU {column}" for column in times] if settings.device == "cuda" else [])]
    columns += ["B/neuron", "peak MiB", "NPC MiB"]
    print(f"| {' | '.join(columns)} |")
    print("|---" * len(columns) + "|")
    for name in CASES:
        if options.only in name:
            print(f"| {' | '.join([name, *compare(name, settings)])} |", flush=True)


if __name__ == "__main__":
    main()
