"""Batches as methods receive them, and statistics of per-sample gradients."""

from holdfast.samples.batch import Batch, device_of, output_nodes, read, samples_of, select
from holdfast.samples.gradients import Objective, Reduce, evaluating, sum_over_samples

__all__ = [
    "Batch",
    "Objective",
    "Reduce",
    "device_of",
    "evaluating",
    "output_nodes",
    "read",
    "samples_of",
    "select",
    "sum_over_samples",
]
