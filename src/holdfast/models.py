"""Models of the studies: the paper's convolutional network and a multilayer perceptron."""

from collections import OrderedDict
from collections.abc import Sequence

from torch import nn


def paper_cnn(classes: int, channels: int = 3) -> nn.Sequential:
    """The paper's network for 32x32 images. Its task head is `model.head`.

    >>> sum(p.numel() for p in paper_cnn(classes=100).parameters())
    1544932
    """
    blocks: OrderedDict[str, nn.Module] = OrderedDict()
    inputs = channels
    for number, outputs in enumerate((64, 256, 128), start=1):
        blocks[f"conv{number}"] = nn.Conv2d(inputs, outputs, 3, padding=1)
        blocks[f"norm{number}"] = nn.InstanceNorm2d(outputs)
        blocks[f"relu{number}"] = nn.ReLU()
        blocks[f"pool{number}"] = nn.MaxPool2d(2)
        inputs = outputs
    blocks["flatten"] = nn.Flatten()
    blocks["hidden"] = nn.Linear(128 * 4 * 4, 512)
    blocks["relu"] = nn.ReLU()
    blocks["dropout"] = nn.Dropout(0.2)
    blocks["head"] = nn.Linear(512, classes)
    return nn.Sequential(blocks)


def mlp(inputs: int, hidden: Sequence[int], classes: int) -> nn.Sequential:
    """A multilayer perceptron with ReLU. Its task head is `model.head`.

    >>> mlp(64, [100], classes=10)
    Sequential(
      (flatten): Flatten(start_dim=1, end_dim=-1)
      (hidden1): Linear(in_features=64, out_features=100, bias=True)
      (relu1): ReLU()
      (head): Linear(in_features=100, out_features=10, bias=True)
    )
    """
    layers: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
    for number, outputs in enumerate(hidden, start=1):
        layers[f"hidden{number}"] = nn.Linear(inputs, outputs)
        layers[f"relu{number}"] = nn.ReLU()
        inputs = outputs
    layers["head"] = nn.Linear(inputs, classes)
    return nn.Sequential(layers)
