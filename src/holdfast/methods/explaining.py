"""Explain what a method controls in a model."""

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import SGD

from holdfast.methods.method import Method
from holdfast.methods.npc import NPC
from holdfast.methods.report import Report
from holdfast.neurons import Choice


def explain(subject: Method | nn.Module, *, example: Any = None, free: Choice | Iterable[Choice] = ()) -> Report:
    """Report what a method controls, or what `NPC` would control in a model. Print it for a table.

    A layer is measured at its `output`, at the output of a module behind it, or by its `gradients`. Until the first
    step of a method, or without an example, the modules behind layers are not known.

    Args:
        subject: a method, or a model.
        example: one batch of inputs of the model, as in `NPC`.
        free: what is to be free in the model, as in `NPC`.

    >>> import torch
    >>> model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    >>> print(explain(model, example=torch.zeros(1, 5, dtype=torch.long), free=[model[3]]))
    NPC controls 100.0% of 92 trained parameters; 18 others are free
    <BLANKLINE>
    layer  neurons  measured at  parameters  share  directed  bytes
    1            8  2                    56  60.9%      0.0%     32
    0            4  gradients            36  39.1%      0.0%     16
    """
    if isinstance(subject, Method):
        report = subject.report()
        if report is None:
            raise ValueError(f"{type(subject).__name__} controls no neurons: explain NPC, DPC, or the model itself")
        return report
    if not isinstance(subject, nn.Module):
        raise TypeError(f"explain takes a method or a model, got {type(subject).__name__}")
    trained = [p for p in subject.parameters() if p.requires_grad]
    with NPC(subject, SGD(trained, lr=0.0), free=free, example=example) as method:
        return method.report()
