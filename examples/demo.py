"""See a network forget, and see neuron-level plasticity control (NPC) cure it, in half a minute on a CPU.

A small network learns five tasks one after the other: to tell 0 from 1, then 2 from 3, and so on up to 9, from the
8x8 images of handwritten digits that come with scikit-learn. It never sees the images of an earlier task again.
Trained with plain SGD, it learns each task and loses the ones before. Trained with the same SGD inside holdfast.NPC,
from the same weights and on the same batches, it learns them too, but the neurons that earlier tasks need hold still.

All that changes in the training loop is one line:

    optimizer = holdfast.NPC(model, optimizer, free=[model.head], rate=1e-3)
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

import holdfast
from holdfast.models import mlp

METHODS = ("SGD", "NPC")
PAIRS = ([0, 1], [2, 3], [4, 5], [6, 7], [8, 9])
PAIR_NAMES = [f"{a} or {b}" for a, b in PAIRS]
EPOCHS = 40  # per task

Curves = NDArray[np.float64]
"""Accuracy in percent, [seed, after epoch, on task] or [seed, after epoch]."""


class Settings(NamedTuple):
    lr: float
    beta: float
    rate: float
    validate: bool


class Task(NamedTuple):
    digits: list[int]
    train: TensorDataset
    test: TensorDataset


def load_tasks(seed: int, validate: bool) -> list[Task]:
    """The five tasks. A label says which of the task's two digits an image shows.

    The test images are the same for every seed. To choose settings, a part of the training images takes their place.
    """
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(np.arange(len(labels)), test_size=0.25, stratify=labels, random_state=0)
    if validate:
        parts = train_test_split(parts[0], test_size=0.25, stratify=labels[parts[0]], random_state=seed)

    def images_of(digits: list[int], part: NDArray[np.int64]) -> TensorDataset:
        chosen = part[np.isin(labels[part], digits)]
        return TensorDataset(torch.tensor(images[chosen] / 16).float(), torch.tensor(labels[chosen] % 2))

    return [Task(digits, *(images_of(digits, part) for part in parts)) for digits in PAIRS]


def learn(method: str, seed: int, settings: Settings) -> Iterator[list[float]]:
    """Learn the tasks one after the other. After every epoch, yield the accuracy on each of them."""
    tasks = load_tasks(seed, settings.validate)
    torch.manual_seed(seed)
    model = mlp(inputs=64, hidden=[100, 100, 100], classes=10)  # with one hidden layer SGD hardly forgets these tasks
    optimizer: Optimizer = torch.optim.SGD(model.parameters(), lr=settings.lr)
    if method == "NPC":  # the one new line
        optimizer = holdfast.NPC(model, optimizer, free=[model.head], beta=settings.beta, rate=settings.rate)

    for task in tasks:
        for _ in range(EPOCHS):
            for images, labels in DataLoader(task.train, batch_size=16, shuffle=True):
                loss = F.cross_entropy(model(images)[:, task.digits], labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            yield [accuracy(model, each) for each in tasks]


@torch.no_grad()
def accuracy(model: nn.Module, task: Task) -> float:
    images, labels = task.test.tensors
    answers = model(images)[:, task.digits].argmax(dim=1)
    return 100 * float((answers == labels).double().mean())


def learn_with_all_methods(seeds: int, settings: Settings, console: Console) -> dict[str, Curves]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), "epochs,", TimeRemainingColumn())
    rows: dict[str, list[list[float]]] = {method: [] for method in METHODS}
    with Progress(*columns, "left", console=console) as progress:
        bar = progress.add_task("", total=seeds * len(METHODS) * len(PAIRS) * EPOCHS)
        for seed in range(seeds):
            for method in METHODS:
                progress.update(bar, description=f"{method}, seed {seed}")
                for accuracies in learn(method, seed, settings):
                    rows[method].append(accuracies)
                    progress.advance(bar)
    return {method: np.array(rows[method]).reshape(seeds, -1, len(PAIRS)) for method in METHODS}


def tabulate(curves: dict[str, Curves], images: str) -> Table:
    headers = [Column(name, justify="right") for name in (*PAIR_NAMES, "average")]
    table = Table("", *headers, title=f"Accuracy on {images} images after all five tasks, %")
    for method in METHODS:
        final = curves[method][:, -1]
        averages = final.mean(axis=1)
        error = f" ± {averages.std(ddof=1) / len(averages) ** 0.5:.1f}" if len(averages) > 1 else ""
        table.add_row(method, *(f"{on_task:.1f}" for on_task in final.mean(axis=0)), f"{averages.mean():.1f}{error}")
    return table


def say_what_is_seen(curves: dict[str, Curves]) -> str:
    learnt, left = {}, {}
    for method in METHODS:
        after_task = curves[method][:, EPOCHS - 1 :: EPOCHS]  # [seed, after task, on task]
        learnt[method] = after_task.diagonal(axis1=1, axis2=2).mean()
        left[method] = after_task[:, -1].mean(axis=1)
    gains = left["NPC"] - left["SGD"]
    return (
        f"SGD learns the tasks to {learnt['SGD']:.1f}% and has {left['SGD'].mean():.1f}% left at the end; "
        f"NPC learns them to {learnt['NPC']:.1f}% and has {left['NPC'].mean():.1f}% left. "
        f"NPC {'helps' if gains.mean() > 0 else 'does not help here'}: {gains.mean():+.1f} points at the end, "
        f"ahead with {(gains > 0).sum()} of {len(gains)} seeds."
    )


def draw(curves: dict[str, Curves], path: Path) -> None:
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    seen = np.repeat(np.tri(len(PAIRS)), EPOCHS, axis=0)  # [after epoch, task]: 1 if the task has come by then
    for method, colour, line in (("SGD", "#c2410c", "--"), ("NPC", "#1d4ed8", "-")):
        on_first = curves[method][:, :, 0]
        on_seen = (curves[method] * seen).sum(axis=2) / seen.sum(axis=1)
        for axes, values in ((left, on_first), (right, on_seen)):
            draw_curve(axes, values, method, colour, line)
    draw_tasks(left, "Accuracy on the first task (0 or 1), %")
    draw_tasks(right, "Average accuracy on the tasks so far, %")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def draw_curve(axes: Axes, values: Curves, name: str, colour: str, line: str) -> None:
    """The mean over seeds, and a band from the lowest to the highest."""
    epochs, mean = np.arange(1, values.shape[1] + 1), values.mean(axis=0)
    axes.fill_between(epochs, values.min(axis=0), values.max(axis=0), color=colour, alpha=0.15, linewidth=0)
    axes.plot(epochs, mean, line, color=colour, linewidth=2, clip_on=False)
    axes.text(epochs[-1] + 4, mean[-1], name, color=colour, weight="bold", va="center")


def draw_tasks(axes: Axes, title: str) -> None:
    starts = np.arange(len(PAIRS)) * EPOCHS
    for start in starts[1::2]:
        axes.axvspan(start, start + EPOCHS, color="0.95", zorder=0)
    axes.axhline(50, color="0.5", linewidth=0.8, linestyle=":")
    axes.text(3, 50.5, "guessing", color="0.4", fontsize="small")
    axes.set_xticks(starts + EPOCHS / 2, PAIR_NAMES)
    axes.tick_params(length=0)
    axes.set(xlabel="task being learnt", xlim=(0, len(PAIRS) * EPOCHS), ylim=(45, 102))
    axes.set_title(title, loc="left", fontsize="medium", pad=8)
    axes.spines[["top", "right", "left"]].set_visible(False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="repeat N times, show the mean (default: 3)")
    parser.add_argument("--figure", type=Path, default="demo.png", metavar="PATH", help="picture (default: demo.png)")
    parser.add_argument("--lr", type=float, default=0.1, help="learning rate of both (default: 0.1)")
    parser.add_argument("--beta", type=float, default=0.7, help="NPC: importance that freezes a neuron (default: 0.7)")
    parser.add_argument("--rate", type=float, default=1e-3, help="NPC: weight of the newest batch (default: 0.001)")
    parser.add_argument("--validate", action="store_true", help="to choose settings: leave the test images alone")
    arguments = parser.parse_args()
    if arguments.seeds < 1:
        parser.error("--seeds must be at least 1")

    torch.set_num_threads(1)  # in so small a network, several threads would only wait for each other
    console = Console()
    settings = Settings(arguments.lr, arguments.beta, arguments.rate, arguments.validate)
    curves = learn_with_all_methods(arguments.seeds, settings, console)
    images = "validation" if arguments.validate else "test"
    console.print(tabulate(curves, images), say_what_is_seen(curves), sep="\n")
    draw(curves, arguments.figure)
    print(f"See it in {arguments.figure}")


if __name__ == "__main__":
    main()
