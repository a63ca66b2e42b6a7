"""Checkpoints: written atomically, verified by a digest, loaded without executing code.

A file consists of a line that names the format, a line with the SHA-256 digest, and a payload in torch's own format.
The previous checkpoint is kept as a fallback.
"""

import hashlib
import io
from pathlib import Path
from typing import Any

import torch

from holdfast import atomic
from holdfast.errors import UserError, warn

_MAGIC = b"holdfast checkpoint 2\n"
_OLD_MAGIC = b"holdfast checkpoint 1\n"


class CheckpointError(UserError):
    """A checkpoint cannot be used. The message names the file and the remedy in one line."""


def save(path: Path, state: dict[str, Any]) -> None:
    """Write `state` to `path`. If that fails, the previous checkpoint stays intact."""
    payload = io.BytesIO()
    torch.save(state, payload)
    content = payload.getvalue()
    try:
        whole = _MAGIC + hashlib.sha256(content).hexdigest().encode() + b"\n" + content
        atomic.write(path, whole, keep=previous(path))
    except OSError as error:
        raise CheckpointError(
            f"cannot write {path}: {error.strerror or error}; free some space or choose another folder; the "
            "previous checkpoint is intact"
        ) from error


def previous(path: Path) -> Path:
    return path.with_suffix(".previous")


def load(path: Path) -> dict[str, Any] | None:
    """The newest intact checkpoint, or None if there is no checkpoint at all.

    A damaged checkpoint is named in a warning. If none is intact, that is an error: only the user can decide to start
    over. What a killed process has left of a checkpoint is removed.
    """
    if path.parent.is_dir():
        atomic.clean(path.parent)
    damaged = []
    for candidate in (path, previous(path)):
        if not candidate.exists():
            continue
        try:
            state = _read(candidate)
        except CheckpointError as error:
            damaged.append(str(error))
            continue
        if damaged:
            path.replace(path.with_suffix(".damaged"))  # else the next save would keep it in place of the intact one
            warn(f"{damaged[0]}; resuming from the previous one, {candidate}")
        return state
    if damaged:
        raise CheckpointError(f"{damaged[0]}, and there is no other: delete {path.parent} to start over")
    return None


def _read(path: Path) -> dict[str, Any]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
    if content.startswith(_OLD_MAGIC):
        raise CheckpointError(f"{path} was written by an earlier version of Holdfast and cannot be resumed")
    digest, _, payload = content.removeprefix(_MAGIC).partition(b"\n")
    if not content.startswith(_MAGIC) or hashlib.sha256(payload).hexdigest().encode() != digest:
        raise CheckpointError(f"{path} is damaged or not a checkpoint")
    try:
        state: dict[str, Any] = torch.load(io.BytesIO(payload), weights_only=True, map_location="cpu")
    except Exception:  # torch raises many types for a payload with a valid digest that is not a checkpoint
        raise CheckpointError(f"{path} is not a checkpoint of Holdfast: it contains code or other data") from None
    return state
