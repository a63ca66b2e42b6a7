"""Atomic writes of files."""

import os
import platform
import re
import time
from contextlib import suppress
from pathlib import Path

_DAY = 24 * 60 * 60
_TEMPORARY = re.compile(r"\..+\.(?P<host>[^.]*)-(?P<process>\d+)\.writing")


def write(path: Path, content: bytes, *, keep: Path | None = None) -> None:
    """Write `content` to `path`. Readers see the old file or the new one, never a part of it.

    A link at `path` is replaced, not followed. Errors name `path`.

    Args:
        path: the file; its folder is created.
        content: the new content.
        keep: where to move the old file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{_host()}-{os.getpid()}.writing")
    fresh.unlink(missing_ok=True)
    try:
        with fresh.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if keep is not None and path.exists():
            path.replace(keep)
        fresh.replace(path)
    except BaseException as error:
        fresh.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def clean(folder: Path) -> None:
    """Remove the temporary files in a folder whose processes were killed.

    Processes of other machines cannot be looked up: their files are removed after a day.
    """
    for path in folder.iterdir():
        found = _TEMPORARY.fullmatch(path.name)
        if found is None:
            continue
        with suppress(OSError):
            ended = found["host"] == _host() and not _is_running(int(found["process"]))
            if ended or time.time() - path.lstat().st_mtime > _DAY:
                path.unlink()


def _host() -> str:
    return platform.node().partition(".")[0]


def _is_running(process: int) -> bool:
    if os.name == "nt":  # where this signal would end the process
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it belongs to another user
        return True
    return True
