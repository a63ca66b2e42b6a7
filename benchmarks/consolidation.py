"""The cost of consolidation: 2,048 samples, over an epoch of training, in one run.

    python benchmarks/consolidation.py                                       # on the CPU, or on a GPU if there is one
    python benchmarks/consolidation.py --precision bf16 --compile

The network and the epoch are the paper's: as many samples as the whole training set, 50,000, in batches of 512. The
time of an epoch is the number of steps times the median time of a step, measured between the consolidations. Precision
and compilation apply to the training; consolidation is always eager and in float32. The output is a Markdown table.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import SGD

from holdfast.methods import EWC, MAS, SI, SSL, LwF, Method
from holdfast.models import paper_cnn
from machine import hardware, synchronize

EPOCH, BATCH, CLASSES = 50_000, 512, 100
ACTIVE = list(range(10))
METHODS: dict[str, Callable[[torch.nn.Module], Method]] = {
    "EWC, true labels": lambda model: EWC(model, SGD(model.parameters(), lr=0.05)),
    "EWC, exact (10 outputs)": lambda model: EWC(model, SGD(model.parameters(), lr=0.05), labels="exact"),
    "MAS": lambda model: MAS(model, SGD(model.parameters(), lr=0.05)),
    "SI": lambda model: SI(model, SGD(model.parameters(), lr=0.05)),
    "SSL": lambda model: SSL(model, SGD(model.parameters(), lr=0.05)),
    "LwF": lambda model: LwF(model, SGD(model.parameters(), lr=0.05)),
}


def seconds(device: str, work: Callable[[], object]) -> float:
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start


class Training:
    """Steps of the bare optimizer on one batch."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.model = paper_cnn(CLASSES).to(options.device)
        self.optimizer = SGD(self.model.parameters(), lr=0.05)
        self.x = torch.randn(BATCH, 3, 32, 32, device=options.device)
        self.y = torch.randint(10, (BATCH,), device=options.device)

        def loss(x: Tensor, y: Tensor) -> Tensor:
            with torch.autocast(options.device, torch.bfloat16, enabled=options.precision == "bf16"):
                return F.cross_entropy(self.model(x)[:, ACTIVE], y)

        self.loss = torch.compile(loss, fullgraph=True) if options.compile else loss

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.loss(self.x, self.y).backward()
        self.optimizer.step()


def consolidation(name: str, options: argparse.Namespace) -> tuple[float, float]:
    """Seconds, and the peak memory on a GPU beyond the memory in use before, in MiB."""
    device, model = options.device, paper_cnn(CLASSES).to(options.device)
    method = METHODS[name](model)
    count = options.samples // BATCH
    batches = [
        (torch.randn(BATCH, 3, 32, 32, device=device), torch.randint(10, (BATCH,), device=device)) for _ in range(count)
    ]
    (F.cross_entropy(model(batches[0][0][:16])[:, ACTIVE], batches[0][1][:16]) + method.penalty()).backward()
    method.step()
    if device == "cuda":  # the first call loads the kernels
        method.consolidate(batches[:1], ACTIVE)
        at_rest = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    taken = seconds(device, lambda: method.consolidate(batches, ACTIVE))
    return taken, (torch.cuda.max_memory_allocated() - at_rest) / 2**20 if device == "cuda" else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", choices=["float32", "bf16"], default="float32", help="of the training")
    parser.add_argument("--compile", action="store_true", help="torch.compile the training")
    parser.add_argument("--samples", type=int, default=2048, help="samples to consolidate on, a multiple of 512")
    parser.add_argument("--rounds", type=int, default=3, help="rounds")
    options = parser.parse_args()

    training = Training(options)
    for _ in range(5 if options.device == "cuda" else 1):
        training.step()
    steps, taken = [], {name: [] for name in METHODS}
    memory: dict[str, float] = {}
    for _ in range(options.rounds):
        for name in METHODS:
            steps += [seconds(options.device, training.step) for _ in range(20 if options.device == "cuda" else 1)]
            took, memory[name] = consolidation(name, options)
            taken[name].append(took)
    epoch = statistics.median(steps) * EPOCH / BATCH
    mode = "compiled" if options.compile else "eager"
    print(f"{hardware(options.device)}; torch {torch.__version__}; training in {options.precision}, {mode}: {epoch:.2f}"
          f" s per epoch; consolidation of {options.samples} samples, median of {options.rounds}\n")  # fmt: skip
    print("| method | seconds | share of an epoch | peak on the GPU, MiB |\n|---|---|---|---|")
    for name, times in taken.items():
        middle = statistics.median(times)
        print(f"| {name} | {middle:.3f} | **{middle / epoch:.3f}** | {memory[name]:.0f} |")


if __name__ == "__main__":
    main()
