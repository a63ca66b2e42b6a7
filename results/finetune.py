"""Fine-tuning a network that was trained without Holdfast: what it forgets, and what `holdfast.measure` saves.

    python results/finetune.py            # the search on validation images, then the test; one CPU core, 15 minutes
    python results/finetune.py --table    # the tables of docs/finetune.md, from results/finetune/runs.json

A network learns the digits 0 to 4 of scikit-learn's 8x8 images by SGD, and is then fine-tuned on 5 to 9, turned by 90
degrees or upright, with one output for each digit. Of every four images, two are for training, one for validation and
one for testing. Runs that are in results/finetune/runs.json are not repeated.
"""

import argparse
import copy
import json
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits, load_sample_images
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD

import holdfast
from holdfast.models import mlp

RUNS = Path(__file__).parent / "finetune" / "runs.json"
OLD, NEW = [0, 1, 2, 3, 4], [5, 6, 7, 8, 9]
SEARCHED, TESTED = range(3), range(10, 15)
"""Seeds of the search and of the test."""
LR, MOMENTUM, BATCH, EPOCHS = 0.05, 0.9, 16, 30

Batches = list[tuple[Tensor, Tensor | None]]


# ---- images ----


def images(task: list[int], part: str, *, turned: bool = True) -> tuple[Tensor, Tensor]:
    """The images of a task, and their labels within it. Those of the new task may be turned."""
    pixels, digits = (torch.tensor(values) for values in load_digits(return_X_y=True))
    quarter = torch.arange(len(digits)) % 4
    chosen = {"test": quarter == 0, "validation": quarter == 1, "training": quarter > 1}[part]
    chosen &= torch.isin(digits, torch.tensor(task))
    found = (pixels[chosen] / 16).float().view(-1, 8, 8)
    return (found.rot90(1, (1, 2)) if task == NEW and turned else found).flatten(1), digits[chosen] - task[0]


def photographs(count: int) -> Tensor:
    """Gray patches of 8x8 pixels, from the two photographs that come with scikit-learn, at a quarter of their size."""
    found = []
    for photograph in load_sample_images().images:
        gray = torch.tensor(photograph).float().mean(2)[None, None] / 255
        small = nn.functional.avg_pool2d(gray, 4)
        found.append(nn.functional.unfold(small, 8, stride=8)[0].T)
    patches = torch.cat(found)
    return patches[torch.randperm(len(patches))[:count]]


def batches_of(x: Tensor, y: Tensor | None) -> Batches:
    order = torch.randperm(len(x)).split(BATCH)
    return [(x[rows], None if y is None else y[rows]) for rows in order]


SAMPLES: dict[str, Callable[[], Batches]] = {
    "old images": lambda: batches_of(*images(OLD, "training")),
    "old images, no labels": lambda: batches_of(images(OLD, "training")[0], None),
    "32 old images": lambda: batches_of(*(each[:32] for each in images(OLD, "training"))),
    "new images, no labels": lambda: batches_of(images(NEW, "training")[0], None),
    "photographs": lambda: batches_of(photographs(450), None),
    "noise": lambda: batches_of(torch.rand(450, 64), None),
}


# ---- training ----


def epochs_of(task: list[int], turned: bool) -> Iterator[tuple[Tensor, Tensor]]:
    x, y = images(task, "training", turned=turned)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(x)).split(BATCH):
            yield x[rows], y[rows]


def learn(model: nn.Module, optimizer: torch.optim.Optimizer, task: list[int], *, turned: bool = True) -> None:
    for x, y in epochs_of(task, turned):
        optimizer.zero_grad()
        cross_entropy(model(x)[:, task], y).backward()
        optimizer.step()


@cache
def _pretrained(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = mlp(inputs=64, hidden=[100, 100], classes=10)
    learn(model, SGD(model.parameters(), lr=LR, momentum=MOMENTUM), OLD)
    return model


@torch.no_grad()
def accuracy(model: nn.Module, task: list[int], part: str, *, turned: bool = True) -> float:
    x, y = images(task, part, turned=turned)
    return 100 * float((model(x)[:, task].argmax(1) == y).float().mean())


@dataclass(frozen=True)
class Contender:
    """One way to fine-tune, and the grid of its search."""

    kind: str = "sgd"
    sample: str | None = None
    grid: dict[str, list[float]] = field(default_factory=dict)
    turned: bool = True

    def settings(self) -> Iterator[dict[str, float]]:
        for values in product(*self.grid.values()):
            yield dict(zip(self.grid, values, strict=True))

    def run(self, seed: int, settings: dict[str, float], part: str) -> tuple[float, float]:
        """The accuracy on old and new digits after fine-tuning."""
        model = copy.deepcopy(_pretrained(seed))
        torch.manual_seed(seed)
        learn(model, self._optimizer(model, dict(settings)), NEW, turned=self.turned)
        return accuracy(model, OLD, part), accuracy(model, NEW, part, turned=self.turned)

    def _optimizer(self, model: nn.Module, settings: dict[str, Any]) -> torch.optim.Optimizer:
        trained = model.head if self.kind == "head" else model
        sgd = SGD(trained.parameters(), lr=settings.pop("lr", LR), momentum=MOMENTUM)
        if self.kind in ("sgd", "head"):
            return sgd
        if self.kind == "ewc":
            ewc = holdfast.EWC(model, sgd, **settings)
            ewc.consolidate(SAMPLES["old images"](), OLD)
            return ewc
        measured = None
        if self.sample is not None:
            measured = holdfast.measure(model, SAMPLES[self.sample](), OLD, free=[model.head])
        kind = {"npc": holdfast.NPC, "dpc": holdfast.DPC}[self.kind]
        optimizer = kind(model, sgd, rate=1e-3, free=[model.head], **settings)
        if measured is not None:
            optimizer.remember(measured)
        return optimizer


BETAS = {"beta": [0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0, 1.5]}
DIRECTIONS = {"beta": [0.05, 0.2, 0.7, 1.5], "kappa": [1.0, 10.0, 100.0, 1e3, 1e4, 1e5]}
CONTENDERS = {
    "fine-tuning": Contender(),
    "the head only": Contender("head"),
    "smaller learning rate": Contender(grid={"lr": [0.02, 0.01, 0.005, 0.002, 0.001, 0.0005]}),
    "EWC, old images": Contender("ewc", grid={"strength": [1e2, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8]}),
    "NPC, not measured": Contender("npc", grid=BETAS),
    **{f"NPC, {sample}": Contender("npc", sample, BETAS) for sample in SAMPLES},
    **{f"DPC, {sample}": Contender("dpc", sample, DIRECTIONS) for sample in SAMPLES},
}

UPRIGHT = {
    name: replace(contender, turned=False)
    for name, contender in CONTENDERS.items()
    if contender.sample in (None, "old images")
}
"""The same with the new digits upright, which need fewer new features."""


# ---- the search, the test and the table ----


def searched(contender: Contender, known: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The mean accuracies on validation images of every setting, computed where they are not yet known."""
    found = []
    for settings in contender.settings():
        entry = next((each for each in known if each["settings"] == settings), None)
        if entry is None:
            pairs = [contender.run(seed, settings, "validation") for seed in SEARCHED]
            old, new = (statistics.mean(each) for each in zip(*pairs, strict=True))
            entry = {"settings": settings, "old": old, "new": new}
        found.append(entry)
    return found


def report(name: str, contender: Contender, known: dict[str, Any]) -> dict[str, Any]:
    search = searched(contender, known.get("search", []))
    best = max(search, key=lambda each: each["old"] + each["new"])["settings"]
    tested = known["test"] if known.get("settings") == best else [contender.run(seed, best, "test") for seed in TESTED]
    print(name, best, [f"{old:.1f} {new:.1f}" for old, new in tested], flush=True)
    return {"name": name, "settings": best, "test": tested, "search": search}


def table(runs: Iterable[dict[str, Any]]) -> str:
    """A table of docs/finetune.md: means over seeds (standard errors)."""
    lines = ["| | settings | old digits | new digits | average |", "|---|---|---|---|---|"]
    for run in runs:
        columns = [*zip(*run["test"], strict=True), [sum(pair) / 2 for pair in run["test"]]]
        cells = [f"{statistics.mean(each):.1f}({statistics.stdev(each) / len(each) ** 0.5:.1f})" for each in columns]
        settings = ", ".join(f"{name} {value:g}" for name, value in run["settings"].items())
        lines.append(f"| {run['name']} | {settings} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="only print the tables of the stored runs")
    torch.set_num_threads(1)
    stored = json.loads(RUNS.read_text()) if RUNS.exists() else {}
    if not parser.parse_args().table:
        stored["before"] = [accuracy(_pretrained(seed), OLD, "test") for seed in TESTED]
        for key, contenders in (("turned", CONTENDERS), ("upright", UPRIGHT)):
            known = {run["name"]: run for run in stored.get(key, [])}
            stored[key] = [report(name, each, known.get(name, {})) for name, each in contenders.items()]
        RUNS.write_text(json.dumps(stored, indent=1) + "\n")
    for key in ("turned", "upright"):
        print(key, table(stored[key]), sep="\n\n")


if __name__ == "__main__":
    main()
