"""Training throughput of each method beside a bare loop and the hardware's limit, with the paper's network and batches.

    python benchmarks/throughput.py
    python benchmarks/throughput.py --methods npc,dpc,dpc:rank=128      # with settings behind a colon

The bare loop is written by hand and optimized like the runs: resident images, batches from the same kernels, bf16, the
same fused and compiled model, plain SGD, the whole step as one CUDA graph. The methods are measured in their second
task, when they have something to protect. Rounds of all candidates are interleaved; a ratio is the median over rounds.

The floor is a lower bound on the time of a step, the larger of two times. Operations: the multiplications and additions
of all convolutions and linear layers, forward and twice backward (once for the first layer, which passes no gradient
on), over the measured rate of a large bf16 matrix product. Bytes: every layer's output written once and read twice (by
the next layer and backward), its gradient written once and read twice, in bf16, over the measured rate of a large copy.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from holdfast.compiling import many_variants
from holdfast.methods import METHODS
from holdfast.models import build_model
from holdfast.runs.environment import numerics
from holdfast.runs.plan import Plan
from holdfast.runs.training import _Training
from holdfast.streams.batches import DeviceImages, Shuffled, make_batch
from holdfast.streams.sources import from_arrays
from holdfast.streams.tasks import Frame, Stream, split
from holdfast.study.studyfile import setting
from holdfast.taps import Taps
from machine import hardware, synchronize

Step = Callable[[], None]


def noise(classes: int, each: int) -> Stream:
    """Random images of the size of CIFAR-100's."""
    generator = torch.Generator().manual_seed(0)

    def part(count: int) -> tuple[Tensor, Tensor]:
        pixels = torch.randint(256, (classes * count, 3, 32, 32), dtype=torch.uint8, generator=generator)
        return pixels, torch.arange(classes).repeat_interleave(count)

    source = from_arrays("noise", part(each), part(10))
    return split(source, Frame(32, padding=4, mirror=True, fill="mean"), per_task=10)


def bare(stream: Stream, options: argparse.Namespace) -> Step:
    """A training step written by hand, without any method."""
    device = torch.device(options.device)
    compile_all = options.compile and device.type == "cuda"
    task, images = stream.tasks[1], DeviceImages(stream, device, compile=compile_all)
    batches = Shuffled(images, task, options.batch, torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    model = build_model("paper_cnn", stream.shape, stream.outputs, options.width).to(device)
    active = torch.tensor(task.active, device=device)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16) if options.bf16 else nullcontext():
            outputs = model(x)
        return cross_entropy(outputs.float().index_select(1, active), y)

    if device.type == "cuda":
        from holdfast.gpu import fuse_modules

        fuse_modules(model)
    loss_of = torch.compile(loss_of) if options.compile else loss_of
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    part = batches.draw().clone()

    def step() -> None:
        loss = loss_of(*make_batch(images, task, part))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    if compile_all:
        from holdfast.gpu import GraphedStep

        step = GraphedStep(step, device)

    def next_step() -> None:
        part.copy_(batches.draw())
        step()

    return next_step


def method(given: str, stream: Stream, options: argparse.Namespace) -> Step:
    """The steps of a run in its second task."""
    name, *settings = given.split(":")
    epochs = 6 * options.batch / len(stream.tasks[0].train)
    plan = Plan(
        name,
        dict(map(setting, settings)),
        batch=options.batch,
        width=options.width,
        epochs=epochs,
        epoch="task",
        precision="bf16" if options.bf16 else "float32",
        compile=options.compile,
        lr=1e-3,
    )
    run = _Training(stream, plan, torch.device(options.device))
    steps = iter(run)
    while run.task == 0:
        next(steps)
    return lambda: run._learn(last=False)


def measure(stream: Stream, options: argparse.Namespace) -> dict[str, list[float]]:
    """Images per second in every round, by name."""
    built = {"bare loop": bare(stream, options), **{name: method(name, stream, options) for name in options.methods}}
    for step in built.values():
        for _ in range(10):
            step()
    speeds: dict[str, list[float]] = {name: [] for name in built}
    for _ in range(options.rounds):
        for name, step in built.items():
            synchronize(options.device)
            began = time.perf_counter()
            for _ in range(options.steps):
                step()
            synchronize(options.device)
            speeds[name].append(options.steps * options.batch / (time.perf_counter() - began))
    return speeds


# ---- the floor ----


def best_time(work: Step, device: str, repeats: int = 10) -> float:
    times = []
    for _ in range(repeats):
        synchronize(device)
        began = time.perf_counter()
        work()
        synchronize(device)
        times.append(time.perf_counter() - began)
    return min(times)


def rates(device: str) -> tuple[float, float]:
    """Operations per second of a matrix product, and bytes per second of a copy, which reads and writes."""
    size, count = (8192, 2**30) if device == "cuda" else (1024, 2**27)
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    source = torch.empty(count, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * size**3 / best_time(lambda: a @ a, device), 2 * count / best_time(lambda: target.copy_(source), device)


def counts(stream: Stream, options: argparse.Namespace) -> tuple[float, float]:
    """Operations and bytes of a step, counted as described above."""
    model = build_model("paper_cnn", stream.shape, stream.outputs, options.width)
    operations = elements = 0
    first = True

    def count(module: nn.Module, args: object, kwargs: object, output: Tensor) -> None:
        nonlocal operations, elements, first
        if isinstance(module, nn.Conv2d | nn.Linear):
            per_output = module.weight[0].numel()
            operations += 2 * output.numel() * per_output * (2 if first else 3)
            elements += 6 * output.numel()
            first = False

    with Taps() as taps:
        for module in model.modules():
            taps.on_output(module, count)
        model(torch.zeros(options.batch, *stream.shape))
    return operations, 2 * elements


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    captured = [name for name, kind in METHODS.items() if not kind.needs.old_data]  # as the bare loop is
    parser.add_argument("--methods", type=lambda text: text.split(","), default=captured)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--width", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=100, help="steps in a round (default: 100)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--float32", dest="bf16", action="store_false", help="instead of bf16")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    stream = noise(20, 5000 if options.device == "cuda" else 200)
    with many_variants(), numerics(Plan("finetune", precision="bf16" if options.bf16 else "float32")):
        speeds = measure(stream, options)
    (operations, size), (rate, copied) = counts(stream, options), rates(options.device)
    floor = max(operations / rate, size / copied)
    print(f"{hardware(options.device)}, torch {torch.__version__}, batches of {options.batch}")
    work = (
        f"{operations / 1e9:.0f} G operations at {rate / 1e12:.1f} T/s, {size / 1e6:.0f} MB at {copied / 1e9:.0f} GB/s"
    )
    print(f"one step: {work}")
    print(f"floor: {1e3 * floor:.3f} ms per step, {options.batch / floor:,.0f} images per second")
    print(f"{'':14} {'images/s':>10} {'ms/step':>10} {'of bare loop':>13} {'of floor':>9}")
    for name, rounds in speeds.items():
        ratio = statistics.median(a / b for a, b in zip(rounds, speeds["bare loop"], strict=True))
        speed = statistics.median(rounds)
        share = speed * floor / options.batch
        print(f"{name:14} {speed:10,.0f} {1e3 * options.batch / speed:10.3f} {ratio:13.3f} {share:9.2f}")


if __name__ == "__main__":
    main()
