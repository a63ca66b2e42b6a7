"""Default plans by stream."""

from typing import Any

COMMON: dict[str, Any] = {"curve": 10}
DIGITS = {"model": "mlp", "lr": 0.1, "batch": 16, "epoch": "task"}
FOLDER = {"model": "small_cnn", "batch": 32, "epoch": "task"}


def defaults_for(stream: str) -> dict[str, Any]:
    """The fields of a plan whose defaults for a stream differ from the plan's own.

    >>> defaults_for("icifar100")
    {'curve': 10}
    """
    if stream.startswith("folder:"):
        return COMMON | FOLDER
    return COMMON | (DIGITS if stream == "digits" else {})
