"""Models of the studies: the paper's convolutional network, a smaller one, and a multilayer perceptron."""

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from holdfast.models import Shape


def paper_cnn(classes: int, channels: int = 3, width: float = 1.0) -> nn.Sequential:
    """The paper's network for 32x32 images; `width` scales its hidden neurons. Its task head is `model.head`.

    >>> sum(p.numel() for p in paper_cnn(classes=100).parameters())
    1544932
    """
    blocks: OrderedDict[str, nn.Module] = OrderedDict()
    inputs = channels
    for number, outputs in enumerate(_widths((64, 256, 128), width), start=1):
        blocks[f"conv{number}"] = nn.Conv2d(inputs, outputs, 3, padding=1)
        blocks[f"norm{number}"] = nn.InstanceNorm2d(outputs)
        blocks[f"relu{number}"] = nn.ReLU()
        blocks[f"pool{number}"] = nn.MaxPool2d(2)
        inputs = outputs
    blocks["flatten"] = nn.Flatten()
    (hidden,) = _widths((512,), width)
    blocks["hidden"] = nn.Linear(inputs * 4 * 4, hidden)
    blocks["relu"] = nn.ReLU()
    blocks["dropout"] = nn.Dropout(0.2)
    blocks["head"] = nn.Linear(hidden, classes)
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


def small_cnn(classes: int, channels: int = 1, size: int = 8, width: float = 1.0) -> nn.Sequential:
    """Two convolutions and a hidden layer, for images as small as 8x8. Its task head is `model.head`.

    >>> sum(p.numel() for p in small_cnn(classes=10).parameters())
    39656
    """
    blocks: OrderedDict[str, nn.Module] = OrderedDict()
    inputs = channels
    for number, outputs in enumerate(_widths((16, 32), width, multiple=4), start=1):
        blocks[f"conv{number}"] = nn.Conv2d(inputs, outputs, 3, padding=1)
        blocks[f"norm{number}"] = nn.GroupNorm(4, outputs)
        blocks[f"relu{number}"] = nn.ReLU()
        blocks[f"pool{number}"] = nn.MaxPool2d(2)
        inputs = outputs
    blocks["flatten"] = nn.Flatten()
    (hidden,) = _widths((250,), width)
    blocks["hidden"] = nn.Linear(inputs * (size // 4) ** 2, hidden)
    blocks["relu"] = nn.ReLU()
    blocks["dropout"] = nn.Dropout(0.2)
    blocks["head"] = nn.Linear(hidden, classes)
    return nn.Sequential(blocks)


def _widths(defaults: Sequence[int], width: float, multiple: int = 1) -> list[int]:
    """Scale numbers of neurons by `width`, rounded to positive multiples of `multiple`.

    >>> _widths((64, 256), 0.1), _widths((64, 256), 0.1, multiple=4)
    ([6, 26], [8, 24])
    """
    return [max(1, round(number * width / multiple)) * multiple for number in defaults]


class GrowingHead(nn.Module):
    """A head whose outputs are added task by task, so that their number need not be known in advance.

    >>> head = GrowingHead(5)
    >>> _ = head.grow(2), head.grow(3)
    >>> head(torch.zeros(4, 5)).shape
    torch.Size([4, 5])
    """

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.inputs = inputs
        self.parts = nn.ModuleList()

    def grow(self, outputs: int) -> nn.Linear:
        """Append outputs, and return the layer that computes them."""
        part = nn.Linear(self.inputs, outputs)
        like = next(self.parameters(), None)
        self.parts.append(part if like is None else part.to(like.device))
        return part

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], dim=1)


def build_paper_cnn(shape: Shape, outputs: int, width: float) -> nn.Sequential:
    if shape[1:] != (32, 32):
        raise ValueError(f"the paper's network is for images of 32x32, not {shape[1]}x{shape[2]}: use small_cnn or mlp")
    return paper_cnn(outputs, shape[0], width)


def build_small_cnn(shape: Shape, outputs: int, width: float) -> nn.Sequential:
    if shape[1] != shape[2] or shape[1] < 4:
        raise ValueError(f"small_cnn is for square images of at least 4x4, not {shape[1]}x{shape[2]}: use mlp")
    return small_cnn(outputs, shape[0], shape[1], width)


def build_mlp(shape: Shape, outputs: int, width: float) -> nn.Sequential:
    return mlp(shape[0] * shape[1] * shape[2], _widths((100, 100, 100), width), outputs)
