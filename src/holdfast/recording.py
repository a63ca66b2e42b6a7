"""A step of training as one CUDA graph, which the host starts with one call instead of some hundred."""

from collections.abc import Callable
from functools import cache

import torch

_WARM = 4  # steps, in which all is compiled and allocated that will be


@cache
def _side(device: torch.device) -> torch.cuda.Stream:
    """One for all that is recorded, since torch keeps some memory for each there ever was."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class Recorded:
    """A step that is always the same operations on the same tensors: taken as it is at first, then recorded once, and
    replayed from then on. All state that it changes must be changed in place.
    """

    def __init__(self, step: Callable[[], None], device: torch.device) -> None:
        self.step, self.device = step, device
        self.taken = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.stream = _side(device)

    def __call__(self) -> None:
        if self.graph is not None:
            self.graph.replay()
            return
        present = torch.cuda.current_stream(self.device)
        if self.taken < _WARM:
            self.stream.wait_stream(present)
            with torch.cuda.stream(self.stream):
                self.step()
            present.wait_stream(self.stream)
            self.taken += 1
            return
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            self.step()
        self.graph = graph
        graph.replay()
