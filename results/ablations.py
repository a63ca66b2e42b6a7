"""Ablations of DPC: iCIFAR100, five tasks, with one change at a time, evaluated on validation images.

    python results/ablations.py --data ~/datasets             # all of them
    python results/ablations.py "product form" --seeds 3

The length of an epoch is the number of images in the copy of CIFAR-100: use `--epochs 30` with all of it, 60 with only
50 classes. Each run is a file in results/ablations/ with its record as JSON. Existing files are not run again.
"""

import argparse
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.directions import Directions, capacity, dense, leading
from holdfast.methods import DPC, METHODS
from holdfast.methods.dpc import Moment, Side
from holdfast.plasticity import plasticity
from holdfast.runs.plan import Plan
from holdfast.runs.training import train
from holdfast.streams import build_stream
from holdfast.study.paper import TASKS
from holdfast.study.store import write_json
from holdfast.study.tables import percent

# ---- other forms of the update ----


class ProductForm(DPC):
    """dW = s G P. A frozen neuron does not change at all."""

    def _change(self, shares: Tensor) -> None:
        if self.tasks == 0:
            super()._change(shares)
            return
        split = torch.split(shares, self._widths)
        for parameter, number, spread in self._moving():
            assert parameter.grad is not None
            parameter.grad.mul_(spread(split[number].to(parameter.grad)))
        super()._change(torch.zeros_like(shares))


class Sharp(DPC):
    """P = (I + (kappa A)^2)^-1: weak directions are freer, strong ones are held faster."""

    def _sides(self, indices: Mapping[nn.Parameter, int]) -> list[Side]:
        sides = super()._sides(indices)
        return [side._replace(moment=self._squared(side.moment)) for side in sides]

    def _squared(self, moment: Moment) -> Moment:
        assert isinstance(moment, Directions)
        return Directions(moment.vectors, self.kappa * moment.values**2, self.kappa * moment.rest**2)


class FinishedTasks(DPC):
    """Plasticity from the importance on finished tasks only: its maximum over tasks, measured afresh in each."""

    def _kept(self) -> Tensor:
        if not hasattr(self, "_maximum"):
            self._maximum = torch.zeros_like(self._row)
        return self._maximum

    def _change(self, shares: Tensor) -> None:
        shares = plasticity(self._kept(), beta=self.beta, gain=self.gain) if self.tasks else torch.ones_like(shares)
        super()._change(shares)

    def _remember(self, found: Mapping[str, Moment], unread: list[str]) -> None:
        super()._remember(found, unread)
        torch.maximum(self._kept(), self._row, out=self._kept())
        self._row.zero_()


class WarmHead(DPC):
    """Only the head learns in the first steps of a new task."""

    steps_of_head = 146  # a twentieth of a task

    def _change(self, shares: Tensor) -> None:
        if self.tasks:
            if not hasattr(self, "_count"):
                self._count = torch.zeros((), device=shares.device)
            self._count += 1
            moves = (self._count > self.steps_of_head).to(shares)
            for parameter, _, _ in self._moving():
                parameter.grad.mul_(moves)  # type: ignore[union-attr]
        super()._change(shares)

    def _remember(self, found: Mapping[str, Moment], unread: list[str]) -> None:
        super()._remember(found, unread)
        if hasattr(self, "_count"):
            self._count.zero_()


class TwoPhases(DPC):
    """Learns each task in two phases of equal length, with the Fisher information of each parameter in the second.

    It is the sum of squared gradients of batches, and `old` is its sum over finished tasks.
    """

    length = 2929  # the steps of a task of 30 of the paper's epochs

    def _begin(self, parameters: list[nn.Parameter]) -> None:
        if not hasattr(self, "_count"):
            self._count = torch.zeros((), device=parameters[0].device)
            self._old, self._fisher, self._kept = ([torch.zeros_like(p) for p in parameters] for _ in range(3))
        self._count += 1

    def _snapshot(self, kept: list[Tensor], parameters: list[nn.Parameter], now: Tensor) -> None:
        for tensor, parameter in zip(kept, parameters, strict=True):
            tensor.copy_(torch.where(now, parameter.detach(), tensor))

    def _measure(self, parameters: list[nn.Parameter], now: Tensor) -> None:
        for tensor, parameter in zip(self._fisher, parameters, strict=True):
            assert parameter.grad is not None
            tensor.add_(parameter.grad.square() * now)

    def _remember(self, found: Mapping[str, Moment], unread: list[str]) -> None:
        super()._remember(found, unread)
        if hasattr(self, "_count"):
            self._count.zero_()
            torch._foreach_add_(self._old, self._fisher)
            torch._foreach_zero_(self._fisher)


class Merged(TwoPhases):
    """Learns a task under protection (w_1), then freely (w_2), and merges both at its end, neuron by neuron.

        w = w_1 + m (w_2 - w_1),   m = sum F (w_2 - w_1)^2 / sum (F + F_old) (w_2 - w_1)^2

    Like BECAME (Li et al., 2025), which merges whole networks.
    """

    def _change(self, shares: Tensor) -> None:
        moving = self._moving()
        parameters = [parameter for parameter, _, _ in moving]
        self._begin(parameters)
        free = self._count > self.length // 2
        self._measure(parameters, free)
        self._snapshot(self._kept, parameters, self._count == self.length // 2 + 1)
        super()._change(torch.where(free, torch.ones_like(shares), shares) if self.tasks else shares)
        if self.tasks:
            self._merge(moving, self._count == self.length)

    def _merge(self, moving: list[Any], now: Tensor) -> None:
        for (parameter, _, spread), kept, new, old in zip(moving, self._kept, self._fisher, self._old, strict=True):
            way = parameter.detach() - kept
            gained, lost = spread.sum(new * way**2), spread.sum(old * way**2)
            merged = kept + spread(gained / (gained + lost).clamp(min=1e-30)) * way
            parameter.detach().copy_(torch.where(now, merged, parameter.detach()))


class Attracted(TwoPhases):
    """Learns a task freely, starts again, and learns it under protection and with a pull toward the free weights.

    The pull is that of EWC, with the Fisher information of the free weights relative to its mean. Like AFEC (Wang et
    al., NeurIPS 2021).
    """

    pull = 0.01

    def _change(self, shares: Tensor) -> None:
        parameters = [parameter for parameter, _, _ in self._moving()]
        if self.tasks == 0:
            super()._change(shares)
            return
        self._begin(parameters)
        if not hasattr(self, "_origin"):
            self._origin = [torch.zeros_like(p) for p in parameters]
        self._snapshot(self._origin, parameters, self._count == 1)
        again, free = self._count == self.length // 2 + 1, self._count <= self.length // 2
        self._measure(parameters, free)
        self._snapshot(self._kept, parameters, again)
        for parameter, start, kept, fisher in zip(parameters, self._origin, self._kept, self._fisher, strict=True):
            assert parameter.grad is not None
            parameter.detach().copy_(torch.where(again, start, parameter.detach()))
            strength = (self.pull * fisher / fisher.mean().clamp(min=1e-30)).clamp(max=1.0)
            parameter.grad.add_(torch.where(free | again, 0.0, strength * (parameter.detach() - kept)))
        super()._change(torch.where(free, torch.ones_like(shares), shares))


# ---- other ways to sum A over tasks ----


def scaled(moment: Moment, factor: float) -> Directions:
    """A second moment times a number."""
    assert isinstance(moment, Directions)
    return Directions(moment.vectors, moment.values * factor, moment.rest * factor)


class Mean(DPC):
    """A is the mean over finished tasks, not the sum."""

    def _sum(self, before: Moment, moment: Tensor) -> Moment:
        share = self.tasks / (self.tasks + 1)
        return super()._sum(scaled(before, share), moment / (self.tasks + 1))


class Maximum(DPC):
    """A is the least upper bound of two tasks: a direction needed by both counts once."""

    def _sum(self, before: Moment, moment: Tensor) -> Moment:
        assert isinstance(before, Directions)
        old = dense(Directions(*(each.double() for each in before)))
        values, vectors = torch.linalg.eigh(moment - old)
        return super()._sum(before, (vectors * values.clamp(min=0).unsqueeze(1)) @ vectors.mT)


class Decaying(DPC):
    """Earlier tasks count half as much with each task."""

    def _sum(self, before: Moment, moment: Tensor) -> Moment:
        return super()._sum(scaled(before, 0.5), moment)


class Kronecker(DPC):
    """A as channels x positions, for convolutions and for the layer behind the flatten: one small matrix each."""

    positions: Mapping[str, int] = {"conv1": 9, "conv2": 9, "conv3": 9, "hidden": 16}
    """The positions of the paper's network: those of a kernel, or of the flattened map."""

    def _measured(self, batches: Any, samples: int | None) -> dict[str, Tensor]:
        return {name: self._factored(name, moment) for name, moment in super()._measured(batches, samples).items()}

    def _factored(self, name: str, moment: Tensor) -> Tensor:
        inputs, p = moment.shape[1] - 1, self.positions.get(name, 1)  # the bias, the last, is kept apart
        blocks = moment[0, :inputs, :inputs].view(inputs // p, p, inputs // p, p)
        channels, positions = blocks.diagonal(dim1=1, dim2=3).sum(-1), blocks.diagonal(dim1=0, dim2=2).sum(-1)
        result = torch.zeros_like(moment)
        result[0, :inputs, :inputs] = torch.kron(channels, positions) / channels.trace()
        result[0, inputs, inputs] = moment[0, inputs, inputs]
        return result


class LayerKappa(DPC):
    """kappa by layer, such that the first task takes the same share of every layer."""

    share = 0.7

    def _with_share(self, directions: Directions) -> Directions:
        low, high = 1e-4, 1e4
        for _ in range(40):
            middle = (low * high) ** 0.5
            low, high = (low, middle) if float(capacity(directions, middle)) > self.share else (middle, high)
        return scaled(directions, low / self.kappa)

    def _measured(self, batches: Any, samples: int | None) -> dict[str, Tensor]:
        """Each A scaled, which is the same as another kappa for its layer."""
        return {
            name: dense(self._with_share(leading(moment, None)))
            for name, moment in super()._measured(batches, samples).items()
        }


class FullerLayers(LayerKappa):
    """The same with a larger share."""

    share = 0.85


for _kind in (
    ProductForm,
    Sharp,
    FinishedTasks,
    WarmHead,
    Merged,
    Attracted,
    Mean,
    Maximum,
    Decaying,
    Kronecker,
    LayerKappa,
    FullerLayers,
):
    METHODS[_kind.__name__.lower()] = _kind

# ---- the rows ----


@dataclass(frozen=True)
class Ablation:
    method: str
    settings: dict[str, Any] = field(default_factory=dict)
    lr: float = 0.1
    decay: float = 1.0

    def plan(self, seed: int, epochs: float, **others: Any) -> Plan:
        others = {"evaluate_on": "validation", **others}
        return Plan(self.method, self.settings, seed=seed, lr=self.lr, decay=self.decay, epochs=epochs, **others)


CHOSEN: dict[str, Any] = {"beta": 0.4, "kappa": 100.0, "rank": 128}


def around(weight: float = 0.1, temperature: float = 2.0, form: str = "dpc", **settings: Any) -> dict[str, Any]:
    """Settings of LwF around DPC, or around another form of it."""
    inner = {f"{form}.{name}": value for name, value in {**CHOSEN, "beta": 0.5, "kappa": 10.0, **settings}.items()}
    return {"lwf.weight": weight, "lwf.temperature": temperature, **inner}


ABLATIONS = {
    "dpc": Ablation("dpc", CHOSEN),
    "dpc, 1024 samples": Ablation("dpc", {**CHOSEN, "samples": 1024}),
    "dpc, without boundaries": Ablation("dpc", {**CHOSEN, "every": 100}),
    "dpc, without boundaries, kappa 30": Ablation("dpc", {**CHOSEN, "every": 100, "kappa": 30.0}),
    "input side alone": Ablation("dpc", {**CHOSEN, "kappa": 30.0, "sides": "inputs"}, lr=0.05),
    "product form": Ablation("productform", {**CHOSEN, "beta": 1.0, "kappa": 10.0}),
    "sharper P, kappa 10": Ablation("sharp", {**CHOSEN, "kappa": 10.0}),
    "sharper P, kappa 30": Ablation("sharp", {**CHOSEN, "kappa": 30.0}),
    "kronecker": Ablation("kronecker", {**CHOSEN, "rank": None}),
    "mean over tasks": Ablation("mean", CHOSEN),
    "maximum over tasks": Ablation("maximum", CHOSEN),
    "earlier tasks count less": Ablation("decaying", CHOSEN),
    "kappa by layer": Ablation("layerkappa", CHOSEN),
    "kappa by layer, fuller": Ablation("fullerlayers", CHOSEN),
    "plasticity from finished tasks": Ablation("finishedtasks", CHOSEN),
    "head warmed up": Ablation("warmhead", CHOSEN),
    "merged with free weights": Ablation("merged", CHOSEN),
    "pulled to free weights": Ablation("attracted", CHOSEN),
    "dpc, rate decays to 0.1": Ablation("dpc", CHOSEN, decay=0.1),
    "dpc, rate 0.2 decays to 0.03": Ablation("dpc", CHOSEN, lr=0.2, decay=0.03),
    "dpc, rate decays to 0.01": Ablation("dpc", CHOSEN, decay=0.01),
    "dpc, rate decays to 0.1, kappa 30": Ablation("dpc", {**CHOSEN, "kappa": 30.0}, decay=0.1),
    "lwf+dpc": Ablation("lwf+dpc", around()),
    "lwf+dpc, rate decays to 0.1": Ablation("lwf+dpc", around(), decay=0.1),
    "lwf+dpc, rate 0.2 decays to 0.03": Ablation("lwf+dpc", around(), lr=0.2, decay=0.03),
    "lwf+dpc, rate decays to 0.01": Ablation("lwf+dpc", around(), decay=0.01),
    "lwf+dpc, rate decays to 0.1, kappa 30": Ablation("lwf+dpc", around(kappa=30.0), decay=0.1),
    "lwf+dpc, rate decays to 0.1, weight 0.2": Ablation("lwf+dpc", around(weight=0.2), decay=0.1),
    "lwf+dpc, weight 0.2": Ablation("lwf+dpc", around(weight=0.2)),
    "lwf+dpc, temperature 1": Ablation("lwf+dpc", around(temperature=1.0)),
    "lwf+dpc, temperature 4": Ablation("lwf+dpc", around(temperature=4.0)),
    "lwf+dpc, earlier tasks count less": Ablation("lwf+decaying", around(form="decaying")),
    "lwf+dpc, kappa by layer": Ablation("lwf+layerkappa", around(form="layerkappa")),
    "lwf+dpc, without boundaries": Ablation("lwf+dpc", around(every=100)),
    "fine-tuning, rate decays to 0.1": Ablation("finetune", lr=0.05, decay=0.1),
    "npc, rate decays to 0.1": Ablation("npc", {"beta": 0.7, "rate": 5e-4}, decay=0.1),
    "ewc, rate decays to 0.1": Ablation("ewc", {"strength": 300.0}, lr=0.05, decay=0.1),
    "lwf, rate decays to 0.1": Ablation("lwf", {"weight": 0.1}, lr=0.05, decay=0.1),
    "lwf, rate 0.1 decays to 0.01": Ablation("lwf", {"weight": 0.1}, decay=0.1),
    "kfac, rate decays to 0.1": Ablation("kfac", {"strength": 100.0}, lr=0.05, decay=0.1),
    "joint, rate decays to 0.1": Ablation("joint", lr=0.05, decay=0.1),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="an ablation; all by default", metavar="NAME")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--epochs", type=float, default=30)
    parser.add_argument("--test", action="store_true", help="evaluate on test images")
    parser.add_argument("--width", type=float, default=1.0)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "ablations")
    options = parser.parse_args()
    if unknown := set(options.names) - set(ABLATIONS):
        parser.error(f"unknown ablation {', '.join(sorted(unknown))}; available: {'; '.join(ABLATIONS)}")
    options.out.mkdir(parents=True, exist_ok=True)
    gpu = torch.cuda.is_available()
    how = {"precision": "bf16" if gpu else "float32", "compile": gpu, "width": options.width}
    if options.test:
        how["evaluate_on"] = "test"
    stream = build_stream("icifar100", options.data, tasks=TASKS)
    for name in options.names or ABLATIONS:
        for seed in range(options.seeds):
            path = options.out / f"{file_name(name)}-{'test-' if options.test else ''}{seed}.json"
            if path.exists():
                continue
            record = train(stream, ABLATIONS[name].plan(seed, options.epochs, **how))
            write_json(path, {"name": name, **dataclasses.asdict(record)})
            final = record.failure["why"] if record.failure else f"{percent(record.summary['final'])}%"
            print(f"{name}, seed {seed}: {final}", flush=True)


def file_name(name: str) -> str:
    """The start of the name of a row's files.

    >>> file_name("lwf+dpc, weight 0.2")
    'lwf+dpc-weight-0.2'
    """
    return name.replace(",", "").replace(" ", "-")


if __name__ == "__main__":
    main()
