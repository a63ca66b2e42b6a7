"""What NPC costs: training steps with it over training steps without it, interleaved in one run.

    python benchmarks/overhead.py                                            # on the CPU, or on a GPU if there is one
    python benchmarks/overhead.py --precision bf16 --compile
    python benchmarks/overhead.py --only "paper CNN" --rounds 20

Every round times three copies of one model, in random order: with the bare optimizer, with NPC around it, and with the
bare optimizer once more. The last over the first is the noise: a cost smaller than its distance from 1 means nothing.
The output is a Markdown table.
"""

import argparse
import copy
import gc
import os
import platform
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
    compiled: bool
    batch: int
    rounds: int
    block: int


class Trainer:
    """A model, its optimizer with or without NPC, and one batch to step on again and again."""

    def __init__(self, model: nn.Module, case: Case, settings: Settings, npc: bool) -> None:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(settings.batch, *case.shape, generator=generator)
        y = torch.randint(10, (settings.batch,), generator=generator)
        self.batch = x.to(settings.device), y.to(settings.device)
        self.model = model
        self.optimizer = case.optimizer(model)
        before = tensors_alive()
        if npc:
            self.optimizer = holdfast.NPC(model, self.optimizer, free=[model.head], sample=self.batch[0][:2])
        self.persistent = sum(size for key, size in tensors_alive().items() if key not in before)

        def loss(x: Tensor, y: Tensor) -> Tensor:
            with torch.autocast(settings.device, torch.bfloat16, enabled=settings.precision == "bf16"):
                return F.cross_entropy(model(x), y)

        self.loss = torch.compile(loss, fullgraph=True) if settings.compiled else loss

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


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def compare(case: Case, settings: Settings) -> dict[str, float]:
    model = case.model().to(settings.device)
    trainers = {
        name: Trainer(copy.deepcopy(model), case, settings, npc=name == "npc") for name in ("bare", "npc", "again")
    }
    for trainer in trainers.values():
        trainer.steps(5 if settings.device == "cuda" else 1)
    seconds: dict[str, list[float]] = {name: [] for name in trainers}
    for _ in range(settings.rounds):
        for name in random.sample(list(trainers), len(trainers)):
            synchronize(settings.device)
            start = time.perf_counter()
            trainers[name].steps(settings.block)
            synchronize(settings.device)
            seconds[name].append((time.perf_counter() - start) / settings.block)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    neurons = sum(len(values) for values in trainers["npc"].optimizer.importance.values())
    return {
        "milliseconds": 1e3 * median["bare"],
        "ratio": median["npc"] / median["bare"],
        "noise": median["again"] / median["bare"],
        "neurons": neurons,
        "bytes per neuron": trainers["npc"].persistent / neurons,
    }


def peak_bytes(name: str, settings: Settings, npc: bool) -> float:
    """The most memory in use during a step, beyond what is in use between steps (CPU: of the whole process)."""
    torch.manual_seed(0)
    trainer = Trainer(CASES[name].model().to(settings.device), CASES[name], settings, npc)
    trainer.steps(1 if settings.device == "cpu" else 3)
    if settings.device == "cpu":
        trainer.steps(2)
        status = Path("/proc/self/status").read_text()  # resource's ru_maxrss would include the parent process
        return 1024 * float(status.split("VmHWM:")[1].split()[0])
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    trainer.steps(1)
    if npc:
        forbid_synchronization(trainer)
    return torch.cuda.max_memory_allocated()


def forbid_synchronization(trainer: Trainer) -> None:
    """Fail if NPC's step makes the host wait for the GPU."""
    trainer.loss(*trainer.batch).backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        trainer.optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def peak_added(name: str, settings: Settings) -> tuple[float, float]:
    """Each side in a process of its own, so that one's memory is not reused by the other."""
    peaks = []
    for npc in (False, True):
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            peaks.append(pool.submit(peak_bytes, name, settings, npc).result())
    return peaks[0], peaks[1] - peaks[0]


def hardware(settings: Settings) -> str:
    if settings.device == "cuda":
        return torch.cuda.get_device_name()
    model = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return f"{model}, {torch.get_num_threads()} of {os.cpu_count()} cores"


def main() -> None:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if gpu else "cpu")
    parser.add_argument("--precision", choices=["float32", "tf32", "bf16"], default="float32")
    parser.add_argument("--compile", action="store_true", help="torch.compile the model and the loss")
    parser.add_argument("--batch", type=int, default=512, help="samples in a batch (the paper's: 512)")
    parser.add_argument("--rounds", type=int, default=50 if gpu else 12, help="how often each copy is timed")
    parser.add_argument(
        "--block", type=int, default=10 if gpu else 1, help="steps timed together, without waiting between"
    )
    parser.add_argument("--only", default="", help="only the cases that have this in their names")
    parser.add_argument("--no-memory", action="store_true", help="leave out the peak of memory")
    options = parser.parse_args()
    settings = Settings(
        options.device, options.precision, options.compile, options.batch, options.rounds, options.block
    )
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = options.precision == "tf32"

    way = "compiled" if settings.compiled else "eager"
    print(f"{hardware(settings)}; torch {torch.__version__}; batch {settings.batch}, {settings.precision}, {way}; "
          f"{settings.rounds} rounds of {settings.block} steps\n")  # fmt: skip
    print("| model | bare step, ms | NPC / bare | bare / bare | bytes per neuron | peak, MiB | added by NPC, MiB |")
    print("|---|---|---|---|---|---|---|")
    for name, case in CASES.items():
        if options.only not in name:
            continue
        result = compare(case, settings)
        peak, added = (float("nan"),) * 2 if options.no_memory else peak_added(name, settings)
        times = f"{result['milliseconds']:.2f} | **{result['ratio']:.3f}** | {result['noise']:.3f}"
        memory = f"{result['bytes per neuron']:.1f} | {peak / 2**20:.0f} | {added / 2**20:+.0f}"
        print(f"| {name} | {times} | {memory} |", flush=True)


if __name__ == "__main__":
    main()
