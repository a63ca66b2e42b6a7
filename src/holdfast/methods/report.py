"""What a method controls, as a table: layers, neurons, where they are measured, and the bytes kept for them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from holdfast.neurons import listed, pattern_of
from holdfast.text import table


class LayerReport(NamedTuple):
    """A layer under control."""

    name: str
    neurons: int
    measured_at: str
    """The modules at whose outputs the neurons are tapped, or `"gradients"`."""
    parameters: int
    """The number of the layer's trained parameters."""
    directed: int
    """The number of those that are changed by direction of their inputs."""
    memory: int
    """The bytes remembered for the layer."""


@dataclass(frozen=True)
class Report:
    """What a method controls."""

    method: str
    layers: Sequence[LayerReport]
    uncontrolled: dict[str, int]
    """The sizes of trained parameters that are neither controlled nor free, by name."""
    free: int
    """The number of trained parameters that are free."""

    @property
    def trained(self) -> int:
        """The number of trained parameters that are not free."""
        return sum(layer.parameters for layer in self.layers) + sum(self.uncontrolled.values())

    @property
    def controlled(self) -> float:
        """The share of them that is controlled."""
        return sum(layer.parameters for layer in self.layers) / max(1, self.trained)

    @property
    def directed(self) -> float:
        """The share of them that is changed by direction of their inputs."""
        return sum(layer.directed for layer in self.layers) / max(1, self.trained)

    def __str__(self) -> str:
        lines = [
            f"{self.method} controls {self.controlled:.1%} of {self.trained:,} trained parameters; "
            f"{self.free:,} others are free"
        ]
        if self.layers:
            lines += ["", table([_HEADINGS, *self._rows()], left=(0, 2))]
        if self.uncontrolled:
            names = sorted(self.uncontrolled, key=lambda name: -self.uncontrolled[name])
            lines += ["", f"not controlled: {listed(names)}"]
        return "\n".join(lines)

    def _rows(self) -> Iterator[tuple[str, ...]]:
        """One row for all layers that differ only in the numbers of their names."""
        groups: dict[tuple[str, int, str], list[LayerReport]] = {}
        for layer in self.layers:
            at = "output" if layer.measured_at == layer.name else pattern_of(layer.measured_at)
            groups.setdefault((pattern_of(layer.name), layer.neurons, at), []).append(layer)
        for (name, neurons, at), group in groups.items():
            many = len(group) > 1
            parameters = sum(layer.parameters for layer in group)
            directed = sum(layer.directed for layer in group)
            yield (
                f"{name} ({len(group)})" if many else group[0].name,
                f"{neurons:,}",
                at if many or at == "output" else group[0].measured_at,
                f"{parameters:,}",
                f"{parameters / self.trained:.1%}",
                f"{directed / self.trained:.1%}",
                f"{sum(layer.memory for layer in group):,}",
            )


_HEADINGS = ("layer", "neurons", "measured at", "parameters", "share", "directed", "bytes")
