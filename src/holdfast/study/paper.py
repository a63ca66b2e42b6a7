"""The paper's experiments: its protocol, its settings and its Table 1."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from holdfast.methods import METHODS, parts_of
from holdfast.methods.building import joined_settings
from holdfast.runs.plan import Plan
from holdfast.study.store import Run
from holdfast.study.tables import Estimate, Row

TASKS = 5
SGD_LR = 0.05
PLASTIC_LR = 0.1
OFF = "npc off"
"""The name of NPC with fully plastic neurons: SGD at NPC's learning rate, with the importance of neurons measured."""
FULLY_PLASTIC = 1e12
"""A beta at which every neuron is fully plastic."""

COMPARED = ("npc", "ewc", "mas", "si", "ssl", "cpc", "finetune")
"""The methods of the paper's Table 1, in its order."""
FURTHER = ("lwf", "joint", "separate")
"""Methods that are not in the paper's table."""


def actual(name: str) -> str:
    """The method behind the name of a row."""
    return "npc" if name == OFF else name


def learning_rate(name: str) -> float:
    """The paper's learning rate for a row: its eta_max for methods that control plasticity.

    >>> learning_rate("npc"), learning_rate("lwf+npc"), learning_rate("lwf")
    (0.1, 0.1, 0.05)
    """
    plastic = any(METHODS[part].role == "plasticity" for part in parts_of(actual(name)))
    return PLASTIC_LR if plastic else SGD_LR


SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "imnist": {
        "npc": {"beta": 0.7, "rate": 1e-3},
        "cpc": {"beta": 0.7, "rate": 1e-3},
        OFF: {"beta": FULLY_PLASTIC, "rate": 1e-3},
        "ewc": {"strength": 100.0},
        "mas": {"strength": 1.0},
        "si": {"strength": 0.1},
        "ssl": {"sparsity": 1e-6},
    },
    "icifar100": {
        "npc": {"beta": 0.7, "rate": 5e-4},
        "cpc": {"beta": 0.7, "rate": 5e-4},
        OFF: {"beta": FULLY_PLASTIC, "rate": 5e-4},
        "ewc": {"strength": 300.0},
        "mas": {"strength": 1.0},
        "si": {"strength": 0.1},
        "ssl": {"sparsity": 1e-5},
    },
}
"""The paper's hyperparameters. Settings not listed here have their defaults."""


def settings_of(stream: str, name: str) -> dict[str, Any]:
    """The paper's settings of a row. A composed method has those of its parts.

    >>> settings_of("icifar100", "lwf+npc")
    {'npc.beta': 0.7, 'npc.rate': 0.0005}
    """
    known = SETTINGS[stream]
    return dict(known[name]) if name in known else joined_settings({p: known.get(p, {}) for p in parts_of(name)})


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
    """The row of a method in the paper's Table 1.

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
    """Whether two means differ by more than two standard errors of their difference; None without standard errors.

    >>> differ(Estimate(0.70, 0.01, 3), Estimate(0.7187, 0.0065, 3))
    False
    """
    if ours.error is None or theirs.error is None:
        return None
    return abs(ours.mean - theirs.mean) > 2 * math.hypot(ours.error, theirs.error)


class Pair(NamedTuple):
    """A result of this study and the paper's."""

    ours: Estimate
    theirs: Estimate

    @property
    def differ(self) -> bool:
        return bool(differ(self.ours, self.theirs))


def beside(stream: str, row: Row) -> list[Pair]:
    """Pair a row's accuracies, on each task and on average, with the paper's. Empty if the paper has no such row."""
    printed, average = table1(stream, row.name), row.metric("final")
    if printed is None or average is None or len(printed.tasks) != len(row.tasks):
        return []
    return [Pair(*pair) for pair in zip([*row.tasks, average], [*printed.tasks, printed.average], strict=True)]


def runs(
    stream: str,
    methods: Iterable[str],
    seeds: int,
    plan: Plan,
    *,
    tasks: int = TASKS,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[Run]:
    """The runs of the paper's experiment, by seed and method, with the paper's learning rates and settings.

    Args:
        stream: "imnist" or "icifar100".
        methods: the names of the rows: methods, or `OFF`.
        seeds: the number of seeds.
        plan: the plan that all runs share.
        tasks: the number of tasks.
        settings: settings that replace the paper's, by row.
    """
    chosen = []
    for seed in range(seeds):
        for method in methods:
            own = settings_of(stream, method) | dict((settings or {}).get(method, {}))
            made = replace(
                plan, method=actual(method), settings=own, lr=own.pop("lr", learning_rate(method)), seed=seed
            )
            chosen.append(Run.of(stream, made, tasks, method))
    return chosen
