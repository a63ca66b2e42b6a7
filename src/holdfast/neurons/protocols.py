"""Protocols by which a fused module offers taps for values that never leave it."""

from typing import Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class MeasuresImportance(Protocol):
    """A module that measures the importance of its neurons in its own backward.

    While `carrier` is a tensor on the input's device and gradients are recorded, the backward adds `taylor` of the
    output (eq. 2) to the gradient of `carrier`.
    """

    carrier: Tensor | None


@runtime_checkable
class ShowsActivity(Protocol):
    """A module that applies an activation and then pools, and can show the mean activity before pooling."""

    shows: int
    """Number of users of the activity. It is computed only if this is positive."""

    def take_activity(self) -> Tensor | None:
        """Return and forget the mean over positions in the last forward, `[sample, neuron]`."""
