"""Ablations: iCIFAR100 with one change at a time, to explain differences from the paper's results.

    python results/variations.py --data ~/datasets            # all variations
    python results/variations.py "npc, black border" --seeds 1

The length of an epoch is the number of images in the copy of CIFAR-100: use `--epochs 30` with all of it, 60 with only
50 classes. Each run is a file in results/variations/ with its record as JSON. Existing files are not run again.
"""

import argparse
import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from holdfast.models import MODELS, Shape, build_model
from holdfast.runs.plan import Plan
from holdfast.runs.training import train
from holdfast.streams import ICIFAR100_FRAME
from holdfast.streams.sources import load
from holdfast.streams.tasks import Frame, Stream, split
from holdfast.study.paper import COMPARED, SETTINGS, TASKS, learning_rate
from holdfast.study.store import write_json
from holdfast.study.tables import percent


@dataclass(frozen=True)
class Variation:
    method: str
    settings: dict[str, Any] = field(default_factory=dict)
    """The settings that differ from the paper's."""
    lr: float | None = None
    frame: Frame = ICIFAR100_FRAME
    model: str = "paper_cnn"

    def plan(self, seed: int, epochs: float, **others: Any) -> Plan:
        lr = self.lr or learning_rate(self.method)
        settings = SETTINGS["icifar100"].get(self.method, {}) | self.settings
        return Plan(self.method, settings, self.model, seed=seed, lr=lr, epochs=epochs, curve=10, **others)


BLACK = dataclasses.replace(ICIFAR100_FRAME, fill="black")
CHOSEN = {"ewc": {"strength": 50.0}, "ssl": {"strength": 0.1}}
"""Settings that differ from the paper's. SSL's is from the search, EWC's from an earlier search over 20, 50 and 100."""

VARIATIONS = {
    **{f"{method}, black border": Variation(method, CHOSEN.get(method, {}), frame=BLACK) for method in COMPARED},
    "npc, no crop": Variation("npc", frame=dataclasses.replace(ICIFAR100_FRAME, padding=0)),
    "npc, tapped before the norm": Variation("npc", {"observe": {name: name for name in ("conv1", "conv2", "conv3")}}),
    "npc, no dropout": Variation("npc", model="no_dropout"),
    "npc, dropout before the hidden layer": Variation("npc", model="early_dropout"),
    "npc, heads at half the rate": Variation("npc", model="slow_head"),
    "npc, largest rate 0.05": Variation("npc", {"gain": 2.0}, lr=0.05),  # half the paper's eta_max, with its alpha
    "cpc, largest rate 0.05": Variation("cpc", {"gain": 2.0}, lr=0.05),
    "cpc, measured together": Variation("cpc", {"normalize": "model"}),
    "ewc, in the loss, 300": Variation("ewc", {"form": "loss", "strength": 300.0}),
    "mas, in the loss, 1": Variation("mas", {"form": "loss", "strength": 1.0}),
    "si, in the loss, 0.1": Variation("si", {"form": "loss", "strength": 0.1}),
    "si, in the loss, 0.001": Variation("si", {"form": "loss", "strength": 0.001}),
    "ssl, in the loss, 0.1": Variation("ssl", {"form": "loss", "strength": 0.1}),
    "ewc, 300": Variation("ewc", {"strength": 300.0}),
    "ewc, frozen after the first task": Variation("ewc", {"strength": 1e12}),
}


def varied(change: Callable[[OrderedDict[str, nn.Module]], None]) -> Callable[[Shape, int, float], nn.Sequential]:
    """A builder of the paper's network with changed modules."""

    def build(shape: Shape, outputs: int, width: float) -> nn.Sequential:
        modules = OrderedDict(build_model("paper_cnn", shape, outputs, width).named_children())
        change(modules)
        return nn.Sequential(modules)

    return build


def without_dropout(modules: OrderedDict[str, nn.Module]) -> None:
    del modules["dropout"]


def with_early_dropout(modules: OrderedDict[str, nn.Module]) -> None:
    for name in ("hidden", "relu", "head"):  # all modules behind it
        modules.move_to_end(name)


def with_slow_head(modules: OrderedDict[str, nn.Module]) -> None:
    for parameter in modules["head"].parameters():
        parameter.register_hook(lambda gradient: gradient / 2)


def stream(frame: Frame, data: Path | None) -> Stream:
    return split(load("cifar100", data), frame, per_task=10, tasks=TASKS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="a variation; all by default", metavar="NAME")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=float, default=30)
    parser.add_argument("--width", type=float, default=1.0)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "variations")
    options = parser.parse_args()
    if unknown := set(options.names) - set(VARIATIONS):
        parser.error(f"unknown variation {', '.join(sorted(unknown))}; available: {'; '.join(VARIATIONS)}")
    MODELS.update(
        no_dropout=varied(without_dropout), early_dropout=varied(with_early_dropout), slow_head=varied(with_slow_head)
    )
    options.out.mkdir(parents=True, exist_ok=True)
    gpu = torch.cuda.is_available()
    how = {"precision": "bf16" if gpu else "float32", "compile": gpu, "width": options.width}
    for name in options.names or VARIATIONS:
        variation = VARIATIONS[name]
        learned = stream(variation.frame, options.data)
        for seed in range(options.seeds):
            path = options.out / f"{name.replace(',', '').replace(' ', '-')}-{seed}.json"
            if path.exists():
                continue
            record = train(learned, variation.plan(seed, options.epochs, **how))
            write_json(path, {"name": name, **dataclasses.asdict(record)})
            final = record.failure["why"] if record.failure else f"{percent(record.summary['final'])}%"
            print(f"{name}, seed {seed}: {final}", flush=True)


if __name__ == "__main__":
    main()
