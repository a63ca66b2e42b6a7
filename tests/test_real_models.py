"""Models as people write them: which layers are controlled, and that nothing else changes."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

import holdfast
from helpers import assert_same_bits, gradient_at, normalized_taylor, parameters_of


class ResidualBlock(nn.Module):
    """With one ReLU module for all, in place, and a sum in place, as in torchvision."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.downsample(x)
        return self.relu(out)


class UNet(nn.Module):
    """Transposed convolutions, concatenation, group norm, and a layer whose output is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.SiLU())
        self.bottom = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU())
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.join = nn.Conv2d(8, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.head = nn.Conv2d(4, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.down(x)
        deep = self.up(self.bottom(F.max_pool2d(skip, 2)))
        return self.head(F.silu(self.norm(self.join(torch.cat([skip, deep], 1)))))


class Language(nn.Module):
    """Embedding, pre-norm transformer layers, a recurrent layer, and a head that shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.recurrent = nn.GRU(8, 8, batch_first=True)
        self.middle = nn.Linear(8, 8)
        self.head = nn.Linear(8, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.recurrent(self.encoder(self.embedding(x)))
        return self.head(torch.tanh(self.middle(hidden)))


def resnet() -> nn.Module:
    return nn.Sequential(
        ResidualBlock(2, 4), ResidualBlock(4, 4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    )


def pictures() -> Tensor:
    return torch.randn(4, 2, 8, 8)


# model, batch, free module, layers under control and their taps, layers measured by their gradients
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], str, dict[str, str], set[str]]] = {
    "residual network": (
        resnet,
        pictures,
        "4",
        {
            f"{block}.{conv}": f"{block}.{norm}"
            for block in "01"
            for conv, norm in (("conv1", "bn1"), ("conv2", "bn2"), ("downsample.0", "downsample.1"))
        },
        set(),
    ),
    "u-net": (
        UNet,
        pictures,
        "head",
        {"down.0": "down.1", "bottom.0": "bottom.1", "up": "up", "join": "norm"},
        set(),
    ),
    "language model": (
        Language,
        lambda: torch.randint(7, (4, 5)),
        "head",
        {
            **{
                f"encoder.layers.{i}.{name}": f"encoder.layers.{i}.{name}"
                for i in "01"
                for name in ("linear1", "linear2")
            },
            "middle": "middle",
        },
        {
            "recurrent.l0",
            *(
                f"encoder.layers.{i}.{name}"
                for i in "01"
                for name in ("self_attn.in_proj", "self_attn.out_proj", "norm1", "norm2")
            ),
        },
    ),
}


@pytest.mark.parametrize("rehearsed", [False, True], ids=["in training", "by sample"])
@pytest.mark.parametrize("name", CASES)
def test_real_model(name: str, rehearsed: bool) -> None:
    build, batch, head, taps, untapped = CASES[name]
    model, x = build(), batch()
    for module in model.modules():
        if isinstance(module, nn.Dropout | nn.MultiheadAttention):
            module.p = module.dropout = 0.0  # so that two copies of the model compute the same
    twin = copy.deepcopy(model)
    sgd, free = SGD(model.parameters(), lr=0.1), [model.get_submodule(head)]
    optimizer = holdfast.NPC(model, sgd, rate=1.0, free=free, example=x if rehearsed else None)
    for _ in range(3):
        twin.load_state_dict(model.state_dict())
        expected = {
            layer: normalized_taylor(*(pair := gradient_at(twin, tap, x)), 1 if pair[0].dim() == 4 else 2)
            for layer, tap in taps.items()
        }
        optimizer.zero_grad()
        output = model(x)
        assert torch.equal(output, twin(x))
        output.square().mean().backward()
        optimizer.step()
        assert optimizer.importance.keys() == taps.keys() | untapped
        for layer, values in expected.items():
            torch.testing.assert_close(optimizer.importance[layer], values, rtol=2e-3, atol=2e-4)
        for layer in untapped:
            torch.testing.assert_close(optimizer.importance[layer].mean(), torch.tensor(1.0))


@pytest.mark.parametrize("name", CASES)
def test_a_fully_plastic_network_trains_like_the_bare_optimizer(name: str) -> None:
    build, batch, head, _, _ = CASES[name]
    model = build()
    bare = copy.deepcopy(model)
    ours = holdfast.NPC(model, SGD(model.parameters(), lr=0.1), beta=1e9, free=[model.get_submodule(head)])
    theirs = SGD(bare.parameters(), lr=0.1)
    for seed in range(4):
        x = batch()
        for m, optimizer in ((model, ours), (bare, theirs)):
            torch.manual_seed(seed)
            optimizer.zero_grad()
            m(x).square().mean().backward()
            optimizer.step()
    assert_same_bits(parameters_of(model), parameters_of(bare))
