"""Files that are written whole or not at all."""

import os
from pathlib import Path


def write(path: Path, content: bytes, *, scratch: Path | None = None, keep: Path | None = None) -> None:
    """Write `content` to `path`, so that whoever reads it finds the old file or the new one, never a part.

    Args:
        path: of the file; its folder is made.
        content: of the file.
        scratch: where it is written first; one of this process's own if not given.
        keep: where the old file is moved.
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
