"""The demo: every method on scikit-learn's digits, which need no download."""

from typing import Any

from holdfast.methods import HELPERS, METHODS
from holdfast.runs.plan import Plan
from holdfast.study.defaults import defaults_for
from holdfast.study.paper import FULLY_PLASTIC, OFF, actual
from holdfast.study.store import Run

STREAM = "digits"

SETTINGS: dict[str, dict[str, Any]] = {
    "npc": {"beta": 0.5, "rate": 1e-3},
    "dpc": {"kappa": 1e4, "rate": 1e-3},
    "cpc": {"beta": 0.2, "rate": 1e-3},
    OFF: {"beta": FULLY_PLASTIC, "rate": 1e-3},
    "ewc": {"strength": 1e7},
    "kfac": {"strength": 1e8},
    "mas": {"strength": 1.0},
    "si": {"strength": 20.0},
    "ssl": {"strength": 2.0},
    "lwf": {"weight": 0.2},
}
"""Chosen on validation images by `holdfast sweep`; the commands are in docs/demo.md."""

PROBED = ("npc", OFF)
"""The rows whose neurons are recorded: the figures compare NPC with the same network without its control."""


def runs(seeds: int, epochs: float) -> list[Run]:
    """All methods that work alone, by seed."""
    compared = [method for method in (*METHODS, OFF) if method not in HELPERS]
    return [_run(method, seed, epochs) for seed in range(seeds) for method in compared]


def _run(method: str, seed: int, epochs: float) -> Run:
    fields = defaults_for(STREAM) | {"seed": seed, "epochs": epochs, "neurons": method in PROBED}
    return Run.of(STREAM, Plan(actual(method), settings=SETTINGS.get(method, {}), **fields), name=method)
