"""Batches as methods receive them, outputs of models, and statistics of per-sample gradients."""

from holdfast.samples.batch import Batch, device_of, read, samples_of
from holdfast.samples.gradients import Objective, Reduce, evaluating, sum_over_samples
from holdfast.samples.outputs import (
    IGNORED,
    aligned,
    following,
    log_likelihood,
    logits_of,
    loss_of,
    output_nodes,
    predicts_next,
    sampled_labels,
    select,
    without_ignored,
)

__all__ = [
    "Batch",
    "IGNORED",
    "Objective",
    "Reduce",
    "aligned",
    "device_of",
    "evaluating",
    "following",
    "log_likelihood",
    "logits_of",
    "loss_of",
    "output_nodes",
    "predicts_next",
    "read",
    "sampled_labels",
    "samples_of",
    "select",
    "sum_over_samples",
    "without_ignored",
]
