"""Fine-tuning: the wrapped optimizer and nothing else. A method's worth is its margin over this."""

from typing import ClassVar

from holdfast.methods.method import Method


class FineTune(Method):
    """The bare optimizer, with the interface of a method."""

    alone: ClassVar = True
