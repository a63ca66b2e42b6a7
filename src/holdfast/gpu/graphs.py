"""CUDA graphs: a whole training step launched by one call."""

from collections.abc import Callable
from functools import cache

import torch

_WARM_UP = 4  # calls


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream for all steps: torch never frees the workspaces it allocates per stream."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class GraphedStep:
    """A training step captured as a CUDA graph.

    A step launches hundreds of kernels. In a small network the host needs longer to launch them than the GPU to run
    them. A graph holds them all and is launched at once.

    The first calls run the step eagerly, so that everything is compiled and every buffer allocated. The next call
    captures the step, and every later call replays the capture. All calls before the replay use one side stream, as
    capturing requires.

    A replay repeats the same kernels on the same memory. Therefore the step must not depend on anything the host
    decides, must update all state in place, and must read its inputs from tensors that the caller refills.

    Args:
        step: the step, called without arguments.
        device: the GPU on which it runs.
    """

    def __init__(self, step: Callable[[], None], device: torch.device) -> None:
        self.step, self.device = step, device
        self.calls = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.stream = _side_stream(device)

    def __call__(self) -> None:
        if self.graph is not None:
            self.graph.replay()
        elif self.calls < _WARM_UP:
            self._warm_up()
        else:
            self.graph = self._capture()
            self.graph.replay()

    def _warm_up(self) -> None:
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            self.step()
        current.wait_stream(self.stream)
        self.calls += 1

    def _capture(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            self.step()
        return graph
