"""How a stream is usually learnt, where the user has not said."""

from typing import Any

PLAN: dict[str, Any] = {"curve": 10}
DIGITS = {"model": "mlp", "lr": 0.1, "batch": 16, "epochs": 30.0, "epoch": "task"}


def usual(stream: str) -> dict[str, Any]:
    """The settings of a plan for a stream that differ from the plan's own defaults.

    >>> usual("icifar100")
    {'curve': 10}
    """
    if stream.startswith("folder:"):
        return PLAN | {"model": "small_cnn", "batch": 32, "epoch": "task"}
    return PLAN | (DIGITS if stream == "digits" else {})
