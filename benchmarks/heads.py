"""The step of LwF with many earlier tasks, over its step with two, in one run.

    python benchmarks/heads.py                               # 200 tasks of two outputs each

The model is a multilayer perceptron with an output layer for all tasks, so only the number of earlier heads differs.
Medians of interleaved steps. The output is a Markdown table.
"""

import argparse
import statistics
import time

import torch
import torch.nn.functional as F
from torch import nn

from holdfast.methods import LwF
from machine import hardware

BATCH, STEPS = 128, 50


class Training:
    """Steps of LwF after a number of finished tasks."""

    def __init__(self, outputs: int, finished: int) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, outputs))
        self.optimizer = LwF(self.model, torch.optim.SGD(self.model.parameters(), lr=0.01))
        self.x, self.y = torch.randn(BATCH, 64), torch.randint(2, (BATCH,))
        for task in range(finished):
            self.optimizer.consolidate([(self.x, self.y)], [2 * task, 2 * task + 1])

    def seconds(self) -> float:
        start = time.perf_counter()
        loss = F.cross_entropy(self.model(self.x)[:, -2:], self.y) + self.optimizer.penalty()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=200)
    tasks = parser.parse_args().tasks
    few, many = Training(2 * tasks, 2), Training(2 * tasks, tasks - 1)
    times = [(few.seconds(), many.seconds()) for _ in range(STEPS + 5)][5:]
    first, last = (1000 * statistics.median(each) for each in zip(*times, strict=True))
    print(f"{hardware('cpu')}\n\n| earlier tasks | step, ms | ratio |\n|---|---|---|")
    print(f"| 2 | {first:.2f} | 1 |\n| {tasks - 1} | {last:.2f} | {last / first:.2f} |")


if __name__ == "__main__":
    main()
