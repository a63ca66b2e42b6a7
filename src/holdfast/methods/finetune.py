"""Fine-tuning: the wrapped optimizer and nothing else, which is what every other method has to beat."""

from holdfast.methods.method import Method


class FineTune(Method):
    """The bare optimizer, with the calls of a method."""
