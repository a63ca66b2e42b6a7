"""The demo: every method on scikit-learn's digits, which need no download."""

from typing import Any

from holdfast.methods import METHODS
from holdfast.study.paper import NOTHING_HELD_BACK, OFF, actual
from holdfast.study.records import Run
from holdfast.training import Plan

SETTINGS: dict[str, dict[str, Any]] = {
    "npc": {"beta": 0.5, "rate": 1e-3},
    "cpc": {"beta": 0.2, "rate": 1e-3},
    OFF: {"beta": NOTHING_HELD_BACK, "rate": 1e-3},
    "ewc": {"strength": 1e7},
    "mas": {"strength": 1.0},
    "si": {"strength": 20.0},
    "ssl": {"strength": 2.0},
    "lwf": {"weight": 0.2},
}
"""Chosen on validation images by `holdfast sweep`, as docs/demo.md tells."""


def runs(seeds: int, epochs: float) -> list[Run]:
    """All methods, seed after seed."""
    return [_run(method, seed, epochs) for seed in range(seeds) for method in (*METHODS, OFF)]


def _run(method: str, seed: int, epochs: float) -> Run:
    plan = Plan(
        actual(method),
        settings=SETTINGS.get(method, {}),
        model="mlp",
        seed=seed,
        lr=0.1,
        batch=16,
        epochs=epochs,
        epoch="task",
        curve=10,
        neurons=actual(method) == "npc",
    )
    return Run.of("digits", plan, name=method)
