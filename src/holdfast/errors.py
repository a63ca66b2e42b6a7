"""What can go wrong and a user can do something about."""

import sys
import warnings


class UserError(Exception):
    """Its message is one line that says what is wrong and what to do."""


def warn_in_one_line() -> None:
    """Let the warnings of this process be lines like the errors of the command."""
    warnings.showwarning = lambda message, *_: print(f"holdfast: {message}", file=sys.stderr)
