"""The paper's experiments: its protocol, its settings and its Table 1."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.study.records import Run
from holdfast.study.tables import Estimate, Row

if TYPE_CHECKING:
    from holdfast.training import Plan

TASKS = 5
SGD_LR = 0.05
PLASTIC_LR = 0.1
OFF = "npc off"
"""NPC that holds nothing back: plain SGD at NPC's learning rate, with the importance of its neurons measured."""
NOTHING_HELD_BACK = 1e12
"""A beta so large that every neuron is fully plastic."""

METHODS = ("npc", "ewc", "mas", "si", "ssl", "cpc", "finetune")
"""The seven that the paper compares, in the order of its Table 1."""
FURTHER = ("lwf", "joint", "separate")
"""Rows that the paper does not have."""


def actual(name: str) -> str:
    """The method behind the name of a row."""
    return "npc" if name == OFF else name


def learning_rate(name: str) -> float:
    """The paper's, of a row: eta_max where the rate is controlled."""
    return PLASTIC_LR if actual(name) in ("npc", "cpc") else SGD_LR


SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "imnist": {
        "npc": {"beta": 0.7, "rate": 1e-3},
        "cpc": {"beta": 0.7, "rate": 1e-3},
        OFF: {"beta": NOTHING_HELD_BACK, "rate": 1e-3},
        "ewc": {"strength": 100.0},
        "mas": {"strength": 1.0},
        "si": {"strength": 0.1},
        "ssl": {"sparsity": 1e-6},
    },
    "icifar100": {
        "npc": {"beta": 0.7, "rate": 5e-4},
        "cpc": {"beta": 0.7, "rate": 5e-4},
        OFF: {"beta": NOTHING_HELD_BACK, "rate": 5e-4},
        "ewc": {"strength": 300.0},
        "mas": {"strength": 1.0},
        "si": {"strength": 0.1},
        "ssl": {"sparsity": 1e-5},
    },
}
"""The paper's hyperparameters. What is not here is at its default."""

_PERCENT = {
    "imnist": {
        "npc": "98.45(0.13) 99.87(0.12) 100.0(0.00) 99.85(0.06) 100.0(0.00) 99.63(0.02)",
        "ewc": "87.60(8.70) 99.14(0.49) 99.52(0.22) 90.84(8.69) 100.0(0.00) 95.42(3.55)",
        "mas": "98.03(0.60) 99.96(0.04) 99.95(0.05) 95.88(2.41) 100.0(0.00) 98.76(0.38)",
        "si": "94.65(0.88) 99.48(0.14) 92.41(6.23) 99.67(0.12) 100.0(0.00) 97.24(1.39)",
        "ssl": "93.01(1.84) 95.85(3.88) 99.02(0.39) 96.49(2.12) 100.0(0.00) 96.87(1.08)",
        "cpc": "96.95(0.69) 92.70(0.39) 99.07(0.43) 93.72(0.59) 100.0(0.00) 96.49(0.65)",
    },
    "icifar100": {
        "npc": "69.20(1.35) 70.27(0.35) 74.33(0.15) 67.90(1.63) 77.67(0.24) 71.87(0.65)",
        "ewc": "54.70(5.70) 61.87(0.98) 67.37(2.13) 60.17(2.10) 78.73(0.74) 64.57(0.94)",
        "mas": "67.37(2.49) 64.23(2.30) 61.70(1.38) 57.77(0.70) 76.67(1.22) 65.54(0.73)",
        "si": "48.47(2.24) 48.90(1.85) 53.47(0.84) 58.27(2.83) 80.47(0.52) 57.91(1.16)",
        "ssl": "58.47(6.20) 66.27(2.32) 61.90(1.86) 61.43(0.62) 77.70(1.23) 65.16(1.37)",
        "cpc": "25.97(4.13) 42.33(1.87) 52.60(1.40) 53.97(0.64) 78.60(1.10) 50.70(1.27)",
    },
}


class Printed(NamedTuple):
    """A row of the paper's Table 1."""

    tasks: list[Estimate]
    average: Estimate


def table1(stream: str, method: str) -> Printed | None:
    """What the paper's Table 1 says of a method.

    >>> table1("icifar100", "npc").average.percent()
    '71.87(0.65)'
    """
    row = _PERCENT.get(stream, {}).get(method)
    if row is None:
        return None
    *tasks, average = (_estimate(cell) for cell in row.split())
    return Printed(tasks, average)


def _estimate(cell: str) -> Estimate:
    mean, _, error = cell.rstrip(")").partition("(")
    return Estimate(float(mean) / 100, float(error) / 100, 3)


def differ(ours: Estimate, theirs: Estimate) -> bool | None:
    """Whether two means differ by more than two standard errors of their difference; None if that is unknown.

    >>> differ(Estimate(0.70, 0.01, 3), Estimate(0.7187, 0.0065, 3))
    False
    """
    if ours.error is None or theirs.error is None:
        return None
    return abs(ours.mean - theirs.mean) > 2 * math.hypot(ours.error, theirs.error)


class Pair(NamedTuple):
    """What came out here, and what the paper printed."""

    ours: Estimate
    theirs: Estimate

    @property
    def differ(self) -> bool:
        return bool(differ(self.ours, self.theirs))


def beside(stream: str, row: Row) -> list[Pair]:
    """A method's accuracy on each task and on average, beside the paper's; empty if there is nothing to compare."""
    printed, average = table1(stream, row.name), row.metric("final")
    if printed is None or average is None or len(printed.tasks) != len(row.tasks):
        return []
    return [Pair(*pair) for pair in zip([*row.tasks, average], [*printed.tasks, printed.average], strict=True)]


def runs(
    stream: str,
    methods: Iterable[str],
    seeds: int,
    plan: "Plan",
    *,
    tasks: int = TASKS,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[Run]:
    """The paper's experiment, seed after seed: `plan` with each method, its learning rate and its settings.

    Args:
        stream: "imnist" or "icifar100".
        methods: by name; `OFF` is one of them.
        seeds: how many.
        plan: what all runs have in common.
        tasks: of the stream.
        settings: over the paper's, by method.
    """
    chosen = []
    for seed in range(seeds):
        for method in methods:
            own = SETTINGS[stream].get(method, {}) | dict((settings or {}).get(method, {}))
            made = replace(
                plan, method=actual(method), settings=own, lr=own.pop("lr", learning_rate(method)), seed=seed
            )
            chosen.append(Run.of(stream, made, tasks, method))
    return chosen
