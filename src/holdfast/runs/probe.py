"""The neurons of a run: their importance over time, and the drift of their activations.

Drift is the paper's Figure 3: activations before the head on the same samples, after the first and the second task.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.methods import Method
from holdfast.taps import module_inputs

SAMPLES = 256
BINS = 60
SILENT = 0.01  # spread of a silent neuron, relative to the layer's mean
MAX_SPREADS = 5.0  # the end of the histograms of relative drift


class Probe:
    """Records importance and drift while a model is trained.

    Args:
        model: the model in training. Its head is `model.head`.
        method: the method it is trained with.
        samples: inputs of the first task, on which drift is measured.
    """

    def __init__(self, model: nn.Module, method: Method, samples: Tensor) -> None:
        self.model, self.method, self.samples = model, method, samples
        self.before: Tensor | None = None
        self.importance: Tensor | None = None
        self.found: dict[str, Any] = {"importance": [], "drift": None}

    def mark(self, task: int, step: int) -> None:
        """Record the importance of the neurons."""
        if importance := self.method.neuron_importance:
            layers = {name: _rounded(values) for name, values in importance.items()}
            self.found["importance"].append({"task": task, "step": step, "layers": layers})

    def finish_task(self, task: int, step: int) -> None:
        self.mark(task, step)
        if task == 0:
            self.before = self._activations()
            self.importance = self._importance(self.before.shape[1])
        elif task == 1 and self.before is not None:
            self.found["drift"] = drift(self.before, self._activations(), self.importance)

    def _activations(self) -> Tensor:
        """Activations of the neurons before the head, `[sample, neuron]`."""
        head = self.model.head
        assert isinstance(head, nn.Module)
        (inputs,) = module_inputs(self.model, {"head": head}, [self.samples])
        return inputs["head"][0].float().cpu()

    def _importance(self, neurons: int) -> Tensor | None:
        """Importance of the neurons before the head: those of the last layer of this width."""
        fitting = [values for values in self.method.neuron_importance.values() if len(values) == neurons]
        return fitting[-1].cpu() if fitting else None

    def state_dict(self) -> dict[str, Any]:
        return {"before": self.before, "importance": self.importance, "found": self.found}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.before, self.importance, self.found = state["before"], state["importance"], state["found"]


def drift(before: Tensor, after: Tensor, importance: Tensor | None) -> dict[str, Any]:
    """Measure the drift of activations `[sample, neuron]`: absolute, and relative to each neuron's spread before.

    Silent neurons have no relative drift: their spread before is below a hundredth of the layer's mean spread.

    >>> found = drift(torch.tensor([[0.0], [2.0]]), torch.tensor([[1.0], [4.0]]), None)
    >>> found["absolute"]["means"], found["relative"]["means"]
    ({'all': 1.5}, {'all': 1.5})
    """
    moved, spread = (after - before).abs(), before.std(dim=0, correction=0)
    groups = _groups(importance, before.shape[1])
    varies = spread > SILENT * spread.mean()
    return {
        "samples": len(before),
        "importance": None if importance is None else _rounded(importance),
        "per_neuron": _rounded(moved.mean(dim=0)),
        "spread": _rounded(spread),
        "silent": int((~varies).sum()),
        "absolute": _distribution(moved, groups),
        "relative": _distribution(
            moved / spread.where(varies, torch.ones(())),
            {name: mask & varies for name, mask in groups.items()},
            MAX_SPREADS,
        ),
    }


def _groups(importance: Tensor | None, neurons: int) -> dict[str, Tensor]:
    """Masks of all neurons, of the most important tenth and of the least important tenth."""
    groups = {"all": torch.ones(neurons, dtype=torch.bool)}
    if importance is not None:
        tenth, order = max(1, neurons // 10), importance.argsort(stable=True)
        for name, chosen in (("most", order[-tenth:]), ("least", order[:tenth])):
            groups[name] = torch.zeros(neurons, dtype=torch.bool).index_fill(0, chosen, True)
    return groups


def _distribution(values: Tensor, groups: dict[str, Tensor], maximum: float = math.inf) -> dict[str, Any]:
    """Mean and histogram of each group. The last bin also counts all larger values."""
    chosen = {name: values[:, mask].flatten() for name, mask in groups.items()}
    everything = chosen["all"]
    top = float(everything.sort().values[int(0.995 * (len(everything) - 1))]) if len(everything) else 0.0
    top = min(top, maximum) or 1.0
    return {
        "means": {name: float(part.mean()) if len(part) else None for name, part in chosen.items()},
        "top": top,
        "counts": {
            name: torch.histc(part.clamp(max=top), BINS, 0, top).int().tolist() for name, part in chosen.items()
        },
    }


def _rounded(values: Tensor) -> list[float]:
    return [round(value, 4) for value in values.tolist()]
