"""The structure of a model: its layers, their neurons, and the taps at which neurons are measured.

These modules only describe a model. Hooks are registered by `holdfast.taps`.
"""

from holdfast.neurons.layers import Layer, Spread, find_layers, weight_layers
from holdfast.neurons.observe import resolve_observe
from holdfast.neurons.products import Product
from holdfast.neurons.protocols import MeasuresImportance, ShowsActivity
from holdfast.neurons.rows import input_rows
from holdfast.neurons.selection import Choice, Selection, listed, pattern_of
from holdfast.neurons.untapped import find_norms, find_untapped

__all__ = [
    "Choice",
    "Layer",
    "MeasuresImportance",
    "Product",
    "Selection",
    "ShowsActivity",
    "Spread",
    "find_layers",
    "find_norms",
    "find_untapped",
    "input_rows",
    "listed",
    "pattern_of",
    "resolve_observe",
    "weight_layers",
]
