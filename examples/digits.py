"""A plain training loop, with SGD and with the same SGD inside holdfast.NPC.

A small network learns to tell 0 from 1, then 2 from 3, and so on up to 9, on the 8x8 images of scikit-learn. It never
sees the images of an earlier task again. `holdfast demo` does the same with all methods, several seeds and figures.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import holdfast
from holdfast.models import mlp

TASKS = ([0, 1], [2, 3], [4, 5], [6, 7], [8, 9])
IMAGES, DIGITS = (torch.tensor(values) for values in load_digits(return_X_y=True))


def part_of(task: list[int], *, test: bool) -> tuple[Tensor, Tensor]:
    """The images of a task and their labels, 0 or 1. Every fourth image is for testing."""
    chosen = torch.isin(DIGITS, torch.tensor(task)) & ((torch.arange(len(DIGITS)) % 4 == 0) == test)
    return (IMAGES[chosen] / 16).float(), DIGITS[chosen] % 2


@torch.no_grad()
def accuracy(model: nn.Module, task: list[int]) -> float:
    images, labels = part_of(task, test=True)
    return float((model(images)[:, task].argmax(dim=1) == labels).float().mean())


def learn(method: str, epochs: int) -> list[float]:
    """Learn the tasks one after another, and return the final accuracy on each."""
    torch.manual_seed(0)
    model = mlp(inputs=64, hidden=[100, 100, 100], classes=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if method == "NPC":
        optimizer = holdfast.NPC(model, optimizer, free=[model.head], rate=1e-3)  # the one new line
    for task in TASKS:
        images, labels = part_of(task, test=False)
        for _ in range(epochs):
            for batch in torch.randperm(len(labels)).split(16):
                loss = cross_entropy(model(images[batch])[:, task], labels[batch])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    return [accuracy(model, task) for task in TASKS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=30, help="epochs per task (default: 30)")
    epochs = parser.parse_args().epochs
    torch.set_num_threads(1)  # in a network this small, several threads would only wait for each other
    print("Accuracy on test images after all five tasks, %")
    for method in ("SGD", "NPC"):
        found = learn(method, epochs)
        print(method, *(f"{100 * each:6.1f}" for each in found), f"  average {100 * sum(found) / len(found):.1f}")


if __name__ == "__main__":
    main()
