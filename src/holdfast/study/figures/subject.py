"""The subject of most figures: a comparison, with the styles of its methods and the probed neurons of its runs."""

from dataclasses import dataclass
from functools import cached_property

from holdfast.study.figures.neurons import Probed, probed_runs
from holdfast.study.figures.style import MethodStyle, method_style
from holdfast.study.tables import Comparison


@dataclass(frozen=True)
class Subject:
    """A comparison with the data shared by several of its figures."""

    comparison: Comparison

    @cached_property
    def styles(self) -> dict[str, MethodStyle]:
        """The style of each method, the same in all figures."""
        return {row.name: method_style(number, row.name) for number, row in enumerate(self.comparison.rows)}

    @cached_property
    def probed(self) -> dict[str, list[Probed]]:
        """The runs with probed neurons, by method."""
        return {row.name: probed_runs(row) for row in self.comparison.rows}
