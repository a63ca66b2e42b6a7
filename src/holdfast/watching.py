"""What the neurons of a run do: how important they are over time, and how their activations change.

The second is the paper's Figure 3: the activations before the head on the same samples, after the first task and after
the second.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.methods import NPC, Method

SAMPLES = 256
BINS = 60
SILENT = 0.01
MOST_SPREADS = 5.0


class Watch:
    """Looks into a model while it learns.

    Args:
        model: whose head is `model.head`.
        method: it learns with; NPC knows how important its neurons are.
        samples: of the first task, always the same.
    """

    def __init__(self, model: nn.Module, method: Method, samples: Tensor) -> None:
        self.model, self.method, self.samples = model, method, samples
        self.before: Tensor | None = None
        self.importance: Tensor | None = None
        self.found: dict[str, Any] = {"importance": [], "change": None}

    def mark(self, task: int, step: int) -> None:
        """Note how important the neurons are."""
        if isinstance(self.method, NPC):
            layers = {name: _rounded(values) for name, values in self.method.importance.items()}
            self.found["importance"].append({"task": task, "step": step, "layers": layers})

    def finish_task(self, task: int, step: int) -> None:
        self.mark(task, step)
        if task == 0:
            self.before = self._activations()
            self.importance = self._importance(self.before.shape[1])
        elif task == 1 and self.before is not None:
            self.found["change"] = change(self.before, self._activations(), self.importance)

    def _activations(self) -> Tensor:
        """Of the neurons before the head, `[sample, neuron]`."""
        seen: list[Tensor] = []
        head = self.model.head
        assert isinstance(head, nn.Module)
        hook = head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        self.model.eval()
        try:
            with torch.no_grad():
                self.model(self.samples)
        finally:
            hook.remove()
            self.model.train()
        return seen[0].float().cpu()

    def _importance(self, neurons: int) -> Tensor | None:
        """The importance of the neurons before the head, which are the last layer's with as many."""
        if not isinstance(self.method, NPC):
            return None
        fitting = [values for values in self.method.importance.values() if len(values) == neurons]
        return fitting[-1].cpu() if fitting else None

    def state_dict(self) -> dict[str, Any]:
        return {"before": self.before, "importance": self.importance, "found": self.found}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.before, self.importance, self.found = state["before"], state["importance"], state["found"]


def change(before: Tensor, after: Tensor, importance: Tensor | None) -> dict[str, Any]:
    """How far activations `[sample, neuron]` moved: as they are, and relative to each neuron's own spread before.

    A neuron that hardly varied before, by less than a hundredth of the layer's mean spread, has no relative change;
    `silent` counts those.

    >>> found = change(torch.tensor([[0.0], [2.0]]), torch.tensor([[1.0], [4.0]]), None)
    >>> found["absolute"]["means"], found["relative"]["means"]
    ({'all': 1.5}, {'all': 1.5})
    """
    moved, spread = (after - before).abs(), before.std(dim=0, correction=0)
    groups = _groups(importance, before.shape[1])
    vary = spread > SILENT * spread.mean()
    return {
        "samples": len(before),
        "importance": None if importance is None else _rounded(importance),
        "moved": _rounded(moved.mean(dim=0)),
        "spread": _rounded(spread),
        "silent": int((~vary).sum()),
        "absolute": _distribution(moved, groups),
        "relative": _distribution(
            moved / spread.where(vary, torch.ones(())),
            {name: mask & vary for name, mask in groups.items()},
            MOST_SPREADS,
        ),
    }


def _groups(importance: Tensor | None, neurons: int) -> dict[str, Tensor]:
    """All neurons, the tenth that is most important and the tenth that is least."""
    groups = {"all": torch.ones(neurons, dtype=torch.bool)}
    if importance is not None:
        tenth, order = max(1, neurons // 10), importance.argsort(stable=True)
        for name, chosen in (("most", order[-tenth:]), ("least", order[:tenth])):
            groups[name] = torch.zeros(neurons, dtype=torch.bool).index_fill(0, chosen, True)
    return groups


def _distribution(values: Tensor, groups: dict[str, Tensor], most: float = math.inf) -> dict[str, Any]:
    """The mean of each group and its histogram, up to `most`; the last bin has all that is larger, too."""
    chosen = {name: values[:, mask].flatten() for name, mask in groups.items()}
    everything = chosen["all"]
    top = float(everything.sort().values[int(0.995 * (len(everything) - 1))]) if len(everything) else 0.0
    top = min(top, most) or 1.0
    return {
        "means": {name: float(part.mean()) if len(part) else None for name, part in chosen.items()},
        "top": top,
        "counts": {
            name: torch.histc(part.clamp(max=top), BINS, 0, top).int().tolist() for name, part in chosen.items()
        },
    }


def _rounded(values: Tensor) -> list[float]:
    return [round(value, 4) for value in values.tolist()]
