"""What can go wrong and a user can do something about."""


class UserError(Exception):
    """Its message is one line that says what is wrong and what to do."""
