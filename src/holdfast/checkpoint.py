"""Checkpoints: written whole or not at all, checked when they are read, and read without executing anything.

A file is a line that says what it is, a line with the digest of the rest, and the rest, which is torch's own format.
The one before the newest is kept, so that there is always one to go back to.
"""

import hashlib
import io
import warnings
from pathlib import Path
from typing import Any

import torch

from holdfast import atomic
from holdfast.errors import UserError

_MAGIC = b"holdfast checkpoint 1\n"


class CheckpointError(UserError):
    """A checkpoint cannot be used; the message is one line that names the file and says what to do."""


def save(path: Path, state: dict[str, Any]) -> None:
    """Write `state` to `path`, so that at no moment there is neither the old nor the new one."""
    payload = io.BytesIO()
    torch.save(state, payload)
    content = payload.getvalue()
    try:
        whole = _MAGIC + hashlib.sha256(content).hexdigest().encode() + b"\n" + content
        atomic.write(path, whole, scratch=path.with_suffix(".writing"), keep=previous(path))
    except OSError as error:
        raise CheckpointError(
            f"cannot write {path}: {error.strerror or error}; make room or choose another folder. What was saved "
            "before is still there"
        ) from error


def previous(path: Path) -> Path:
    return path.with_suffix(".previous")


def load(path: Path) -> dict[str, Any] | None:
    """The newest checkpoint that is whole, or None if there never was one.

    A damaged one is named in a warning. If none is left that is whole, that is an error: what was computed may be lost,
    and to start anew is for the user to decide.
    """
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
            path.replace(path.with_suffix(".damaged"))  # out of the way of the good one
            warnings.warn(f"{damaged[0]}; going on from the one before it, {candidate}", stacklevel=3)
        return state
    if damaged:
        raise CheckpointError(f"{damaged[0]}, and there is no other: delete {path.parent} to start anew")
    return None


def _read(path: Path) -> dict[str, Any]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
    digest, _, payload = content.removeprefix(_MAGIC).partition(b"\n")
    if not content.startswith(_MAGIC) or hashlib.sha256(payload).hexdigest().encode() != digest:
        raise CheckpointError(f"{path} is damaged or no checkpoint")
    try:
        state: dict[str, Any] = torch.load(io.BytesIO(payload), weights_only=True, map_location="cpu")
    except Exception:  # whatever torch finds in a file that has the right digest and is still none of ours
        raise CheckpointError(f"{path} holds more than data, or other data, so it is none of ours") from None
    return state
