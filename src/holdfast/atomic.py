"""Atomic writes of files."""

import os
from pathlib import Path


def write(path: Path, content: bytes, *, scratch: Path | None = None, keep: Path | None = None) -> None:
    """Write `content` to `path`. Readers see the old file or the new one, never a part of it.

    Args:
        path: the file; its folder is created.
        content: the new content.
        scratch: the temporary file; by default one of this process.
        keep: where to move the old file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = scratch or path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with fresh.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
    if keep is not None and path.exists():
        path.replace(keep)
    fresh.replace(path)
