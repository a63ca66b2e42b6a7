"""Importance against real ablation: silence one neuron at its layer's own output and see how the loss changes."""

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import holdfast

CHANNELS = 12


class Wired(nn.Module):
    """A network whose `body` is a given function of its modules and its input, with a linear head on the means."""

    def __init__(self, body: Callable[[nn.Module, Tensor], Tensor], width: int = CHANNELS, **modules: nn.Module):
        super().__init__()
        self.body = body
        for name, module in modules.items():
            self.add_module(name, module)
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        features = self.body(self, x)
        return self.head(features.mean((2, 3)) if features.dim() == 4 else features.mean(1))


def images(batch: int = 32) -> Tensor:
    return torch.randn(batch, 3, 6, 6)


def tokens(batch: int = 32) -> Tensor:
    return torch.randn(batch, 5, CHANNELS)


def conv(inputs: int = CHANNELS, outputs: int = CHANNELS, kernel: int = 3) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2)


def linear(inputs: int = CHANNELS, outputs: int = CHANNELS) -> nn.Linear:
    return nn.Linear(inputs, outputs)


class Attention(nn.Module):
    """One head of self-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.proj = linear(), linear(), linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(F.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x)))


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(CHANNELS), Attention()
        self.norm2, self.up, self.down = nn.LayerNorm(CHANNELS), linear(outputs=24), linear(inputs=24)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Adapted(nn.Module):
    """A frozen linear layer plus a trained pair of low rank."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.a, self.b = linear().requires_grad_(False), linear(outputs=4), linear(inputs=4)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2.0 * self.b(self.a(x))


def plain() -> nn.Module:
    return Wired(lambda m, x: F.relu(m.second(F.relu(m.first(x)))), first=conv(3), second=conv())


def normalized(norm: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        return Wired(
            lambda m, x: F.relu(m.norm2(m.second(F.relu(m.norm1(m.first(x)))))),
            first=conv(3),
            norm1=norm(),
            second=conv(),
            norm2=norm(),
        )

    return build


def preactivated(norm: Callable[[], nn.Module], cut: int = 0, skipped: int = CHANNELS) -> Callable[[], nn.Module]:
    """The stem feeds a normalization and a skip. The branch ignores the first `cut` channels, the skip those from
    `skipped` on.
    """
    channel = torch.arange(CHANNELS).view(-1, 1, 1)
    branch, skip = (channel >= cut).float(), (channel < skipped).float()

    def body(m: nn.Module, x: Tensor) -> Tensor:
        x = m.stem(x)
        return F.relu(x * skip + m.conv(F.relu(m.norm(x)) * branch))

    return lambda: Wired(body, stem=conv(3), norm=norm(), conv=conv())


def postnormed() -> nn.Module:
    def body(m: nn.Module, x: Tensor) -> Tensor:
        x = m.norm1(m.stem(x))
        return m.norm2(x + m.down(F.gelu(m.up(x))))

    return Wired(
        body,
        stem=linear(),
        norm1=nn.LayerNorm(CHANNELS),
        up=linear(outputs=24),
        down=linear(inputs=24),
        norm2=nn.LayerNorm(CHANNELS),
    )


def frozen_postnormed() -> nn.Module:
    """The skip into the normalization comes from a frozen layer."""
    model = postnormed()
    model.stem.requires_grad_(False)
    model.norm1.requires_grad_(False)
    return model


def transformer() -> nn.Module:
    return Wired(lambda m, x: m.second(m.first(m.stem(x))), stem=linear(), first=Block(), second=Block())


def half_frozen_transformer() -> nn.Module:
    model = transformer()
    model.stem.requires_grad_(False)
    model.first.requires_grad_(False)
    return model


def adapted_transformer() -> nn.Module:
    model = transformer().requires_grad_(False)
    for block in (model.first, model.second):
        block.attention.proj = Adapted()
    return model


def frozen_affine() -> nn.Module:
    model = preactivated(partial(nn.GroupNorm, 3, CHANNELS))()
    model.norm.requires_grad_(False)
    return model


def dense() -> nn.Module:
    """As in DenseNet: a transition feeds a normalization and, by concatenation, everything after it."""

    def body(m: nn.Module, x: Tensor) -> Tensor:
        x = m.transition(x)
        x = torch.cat([x, m.conv1(F.relu(m.norm1(x)))], 1)
        return torch.cat([x, m.conv2(F.relu(m.norm2(x)))], 1)

    return Wired(
        body,
        width=CHANNELS + 12,
        transition=conv(3),
        norm1=nn.BatchNorm2d(CHANNELS),
        conv1=conv(outputs=6),
        norm2=nn.BatchNorm2d(CHANNELS + 6),
        conv2=conv(CHANNELS + 6, 6),
    )


def skipped_norm() -> nn.Module:
    """The skip starts behind the normalization: all uses of the layer pass through it."""
    return Wired(
        lambda m, x: (y := m.norm(m.stem(x))) + m.conv(F.relu(y)),
        stem=conv(3),
        norm=nn.BatchNorm2d(CHANNELS),
        conv=conv(),
    )


BATCH, INSTANCE, GROUP = (
    partial(nn.BatchNorm2d, CHANNELS),
    partial(nn.InstanceNorm2d, CHANNELS, affine=True),
    partial(nn.GroupNorm, 3, CHANNELS),
)

# name: (model, batch, the least mean rank correlation of any layer)
NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], float]] = {
    "plain chain": (plain, images, 0.9),
    "batch norm": (normalized(BATCH), images, 0.5),
    "instance norm": (normalized(INSTANCE), images, 0.3),
    "group norm": (normalized(GROUP), images, 0.3),
    "pre-activation, batch norm": (preactivated(BATCH), images, 0.7),
    "pre-activation, batch norm, cut": (preactivated(BATCH, cut=6), images, 0.7),
    "pre-activation, instance norm": (preactivated(INSTANCE), images, 0.7),
    "pre-activation, instance norm, cut": (preactivated(INSTANCE, cut=6), images, 0.7),
    "pre-activation, group norm": (preactivated(GROUP), images, 0.7),
    "pre-activation, group norm, cut": (preactivated(GROUP, cut=6), images, 0.7),
    "pre-activation, frozen affine": (frozen_affine, images, 0.7),
    "skip behind the norm": (skipped_norm, images, 0.5),
    "concatenation": (dense, images, 0.5),
    "post-norm residual": (postnormed, tokens, 0.5),
    "post-norm residual, frozen skip": (frozen_postnormed, tokens, 0.8),
    "transformer": (transformer, tokens, 0.8),
    "transformer, first half frozen": (half_frozen_transformer, tokens, 0.8),
    "transformer with adapters": (adapted_transformer, tokens, 0.8),
}


def losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


def trained(model: nn.Module, x: Tensor, y: Tensor, steps: int) -> nn.Module:
    """Give the neurons different scales, so that their importance differs, and train briefly."""
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, nn.Conv2d | nn.Linear) and name != "head":
                scale = torch.exp(0.7 * torch.randn(len(module.weight)))
                module.weight.mul_(scale.view(-1, *[1] * (module.weight.dim() - 1)))
                module.bias.copy_(0.5 * scale * torch.randn_like(scale))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        losses(model, x, y).mean().backward()
        optimizer.step()
    return model


def importance(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    model = copy.deepcopy(model)
    sgd = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    optimizer = holdfast.NPC(model, sgd, rate=1.0, free=[model.head])
    losses(model, x, y).mean().backward()
    optimizer.step()
    weighted = {name for name, module in model.named_modules() if isinstance(module, nn.Conv2d | nn.Linear)}
    return {name: values for name, values in optimizer.importance.items() if name in weighted}  # without norms


@torch.no_grad()
def ablation(model: nn.Module, layer: str, x: Tensor, y: Tensor) -> Tensor:
    """The mean over samples of |change of the loss| if a neuron is silenced, bias included, for each neuron."""
    module, before = model.get_submodule(layer), losses(model, x, y)
    changes = []

    def silence(neuron: int, module: nn.Module, _args: object, output: Tensor) -> Tensor:
        output = output.clone()
        output.select(1 if isinstance(module, nn.Conv2d) else -1, neuron).zero_()
        return output

    for neuron in range(len(module.weight)):
        with module.register_forward_hook(partial(silence, neuron)):
            changes.append((losses(model, x, y) - before).abs().mean())
    return torch.stack(changes)


def rank_correlation(a: Tensor, b: Tensor) -> float:
    """Spearman's. Equal values, as of silent neurons, share the mean of their ranks."""
    return float(torch.corrcoef(torch.stack([_ranks(values) for values in (a, b)]))[0, 1])


def _ranks(values: Tensor) -> Tensor:
    column = values.unsqueeze(1)
    return (column > values).sum(1) + (column == values).double().sum(1) / 2


def correlations(name: str, seeds: int = 4, steps: int = 100) -> dict[str, float]:
    """Rank correlation of importance and ablation by layer, mean over seeds."""
    build, batch, _ = NETWORKS[name]
    found: dict[str, list[float]] = {}
    for seed in range(seeds):
        torch.manual_seed(seed)
        model, x, y = build(), batch(), torch.randint(5, (32,))
        trained(model, x, y, steps)
        for layer, values in importance(model, x, y).items():
            found.setdefault(layer, []).append(rank_correlation(values, ablation(model, layer, x, y)))
    return {layer: sum(values) / len(values) for layer, values in found.items()}


@pytest.mark.parametrize("name", NETWORKS)
def test_importance_ranks_neurons_as_ablation_does(name: str) -> None:
    found, level = correlations(name), NETWORKS[name][2]
    assert found
    assert min(found.values()) > level, found


@pytest.mark.parametrize("norm", [BATCH, INSTANCE, GROUP], ids=["batch", "instance", "group"])
@pytest.mark.parametrize("only", ["skip", "branch"])
def test_neurons_of_one_way_are_important(only: str, norm: Callable[[], nn.Module]) -> None:
    """Half of the neurons live on one way only, the others on both."""
    torch.manual_seed(0)
    model = (preactivated(norm, cut=6) if only == "skip" else preactivated(norm, skipped=6))()
    x, y = images(), torch.randint(5, (32,))
    values = importance(model, x, y)["stem"]
    single = slice(0, 6) if only == "skip" else slice(6, None)
    assert (ablation(model, "stem", x, y)[single] > 1e-4).all()
    assert (values[single] > 0.02).all(), values  # the mean of a layer is 1
