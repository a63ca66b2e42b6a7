"""Errors the user can fix, and warnings that point at the user's line."""

import errno
import sys
import warnings
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

_OURS = str(Path(__file__).parent)


class UserError(Exception):
    """An error the user can fix. Its message is one line: what is wrong, and what to do."""


def alternatives(name: str, known: Iterable[str]) -> str:
    """The known names, and the one that may have been meant.

    >>> alternatives("wieght", ["weight", "temperature"])
    'weight, temperature: did you mean weight?'
    """
    known = list(known)
    near = " or ".join(get_close_matches(name, known))
    return (", ".join(known) or "none") + (f": did you mean {near}?" if near else "")


def describe(error: OSError) -> str:
    """An error of the operating system in one line, with its file.

    >>> describe(OSError(13, "Permission denied", "runs/npc/record.json"))
    'runs/npc/record.json: Permission denied; check its permissions and the space left on the disk'
    >>> describe(OSError(28, "No space left on device", "runs/npc/record.json"))
    'runs/npc/record.json: No space left on device; the disk of runs/npc is full: free some space or use another folder'
    """
    location = f"{error.filename}: " if error.filename else ""
    remedy = "check its permissions and the space left on the disk"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        folder = f" of {Path(error.filename).parent}" if isinstance(error.filename, str) else ""
        remedy = f"the disk{folder} is full: free some space or use another folder"
    return f"{location}{error.strerror or error}; {remedy}"


def printable(text: str) -> str:
    r"""Text for a line of a terminal: control characters, which could move the cursor or hide text, are escaped.

    >>> printable("npc\n\x1b[2J")
    'npc\\n\\x1b[2J'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def warn(message: str) -> None:
    """Warn at the innermost line of code that belongs neither to Holdfast nor to torch.

    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     warn("the disk is nearly full")
    >>> caught[0].message, Path(caught[0].filename).name != "errors.py"
    (UserWarning('the disk is nearly full'), True)
    """
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and _is_internal(frame.f_code.co_filename):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


def _is_internal(filename: str) -> bool:
    torch = sys.modules.get("torch")
    roots = [_OURS] if torch is None or torch.__file__ is None else [_OURS, str(Path(torch.__file__).parent)]
    return any(filename.startswith(root) for root in roots)


def warn_in_one_line() -> None:
    """Print the warnings of this process as single lines, like the errors of the command."""
    warnings.showwarning = lambda message, *_: print(printable(f"holdfast: {message}"), file=sys.stderr)
