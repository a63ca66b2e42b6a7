"""NPC against the plain-loop reference, over random layers, shapes, settings and steps."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import holdfast
from reference import Index, Parameters, ReferenceNPC

CONVOLUTION = {1: (nn.Conv1d, F.conv1d), 2: (nn.Conv2d, F.conv2d), 3: (nn.Conv3d, F.conv3d)}
TRANSPOSED = {
    1: (nn.ConvTranspose1d, F.conv_transpose1d),
    2: (nn.ConvTranspose2d, F.conv_transpose2d),
    3: (nn.ConvTranspose3d, F.conv_transpose3d),
}
BATCH_NORM = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
INSTANCE_NORM = {1: nn.InstanceNorm1d, 2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}
WIDTH, INPUTS = 4, 2


class Net(nn.Module):
    """One layer, perhaps a normalization, a functional activation, a mean over positions, a free head."""

    def __init__(self, kind: str, dims: int, norm: str, bias: bool, affine: bool, groups: int) -> None:
        super().__init__()
        self.kind, self.dims, self.norm_kind, self.groups = kind, dims, norm, groups
        if kind == "linear":
            self.layer: nn.Module = nn.Linear(INPUTS, WIDTH, bias=bias)
        else:
            module = (CONVOLUTION if kind == "convolution" else TRANSPOSED)[dims][0]
            self.layer = module(INPUTS, WIDTH, 2, bias=bias, groups=groups)
        if norm == "batch":
            self.norm: nn.Module | None = BATCH_NORM[dims](WIDTH, affine=affine)
        elif norm == "instance":
            self.norm = INSTANCE_NORM[dims](WIDTH, affine=affine)
        elif norm == "group":
            self.norm = nn.GroupNorm(2, WIDTH, affine=affine)
        elif norm == "layer":
            self.norm = nn.LayerNorm(WIDTH, elementwise_affine=affine)
        else:
            self.norm = None
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        if self.norm is not None:
            x = self.norm(x)
        return self.head(self.pool(F.softplus(x)))

    def pool(self, x: Tensor) -> Tensor:
        if self.kind == "linear":
            return x.flatten(1, -2).mean(1) if x.dim() > 2 else x
        return x.flatten(2).mean(2)

    def reference_forward(self, p: Parameters, batch: Tensor) -> tuple[list[Tensor], Tensor]:
        bias = p.get("layer.bias")
        if self.kind == "linear":
            x = F.linear(batch, p["layer.weight"], bias)
        else:
            function = (CONVOLUTION if self.kind == "convolution" else TRANSPOSED)[self.dims][1]
            x = function(batch, p["layer.weight"], bias, groups=self.groups)
        weight, shift = p.get("norm.weight"), p.get("norm.bias")
        if self.norm_kind == "batch":
            x = F.batch_norm(x, None, None, weight, shift, training=True)
        elif self.norm_kind == "instance":
            x = F.instance_norm(x, weight=weight, bias=shift)
        elif self.norm_kind == "group":
            x = F.group_norm(x, 2, weight, shift)
        elif self.norm_kind == "layer":
            x = F.layer_norm(x, (WIDTH,), weight, shift)
        tokens = self.kind == "linear"
        neurons = (x.movedim(-1, 1) if tokens else x).reshape(len(batch), WIDTH, -1)
        rest = neurons.reshape(x.movedim(-1, 1).shape).movedim(1, -1) if tokens else neurons.reshape(x.shape)
        output = F.linear(self.pool(F.softplus(rest)), p["head.weight"], p["head.bias"])
        return [neurons], output.square().mean()

    def neurons(self) -> list[list[tuple[str, Index]]]:
        shape = self.layer.weight.shape
        owned: list[list[tuple[str, Index]]] = [[] for _ in range(WIDTH)]
        for index in torch.cartesian_prod(*[torch.arange(n) for n in shape]).tolist():
            neuron = index[0]
            if self.kind == "transposed":
                group = index[0] // (INPUTS // self.groups)
                neuron = group * (WIDTH // self.groups) + index[1]
            owned[neuron].append(("layer.weight", tuple(index)))
        for name in ("layer.bias", "norm.weight", "norm.bias"):
            if name in dict(self.named_parameters()):
                for i in range(WIDTH):
                    owned[i].append((name, (i,)))
        return owned


@st.composite
def networks(draw: st.DrawFn) -> tuple[Net, list[Tensor], dict[str, float]]:
    kind = draw(st.sampled_from(["linear", "convolution", "transposed"]))
    dims = draw(st.integers(0, 2)) if kind == "linear" else draw(st.integers(1, 3))
    norms = ["none", "batch", "layer"] if kind == "linear" and dims == 0 else ["none", "layer"]
    if kind != "linear":
        norms = ["none", "batch", "instance", "group"]
    torch.manual_seed(draw(st.integers(0, 2**16)))
    net = Net(
        kind,
        dims,
        draw(st.sampled_from(norms)),
        bias=draw(st.booleans()),
        affine=draw(st.booleans()),
        groups=draw(st.sampled_from([1, 2])),
    ).double()
    for parameter in net.parameters():
        nn.init.normal_(parameter)
    channels_last = kind != "linear" and dims in (2, 3) and draw(st.booleans())
    if channels_last:
        net.to(memory_format=torch.channels_last if dims == 2 else torch.channels_last_3d)
    size = draw(st.integers(3, 4)) + 2 * (dims == 1)
    shape = (*[size] * dims, INPUTS) if kind == "linear" else (INPUTS, *[size] * dims)
    batches = [torch.randn(draw(st.integers(2, 4)), *shape, dtype=torch.float64) for _ in range(12)]
    knobs = {
        "beta": draw(st.floats(0.1, 2)),
        "rate": draw(st.floats(0.01, 1)),
        "gain": draw(st.floats(0.1, 3)),
        "lr": draw(st.floats(1e-3, 0.05)),
    }
    return net, batches, knobs


@settings(max_examples=150, deadline=None)
@given(networks())
def test_npc_is_algorithm_1(case: tuple[Net, list[Tensor], dict[str, float]]) -> None:
    net, batches, knobs = case
    lr = knobs.pop("lr")
    start = {name: p.detach().clone() for name, p in net.named_parameters()}
    alpha = knobs["gain"] * lr
    reference = ReferenceNPC(start, [net.neurons()], knobs["beta"], knobs["rate"], alpha, eta_max=lr)
    optimizer = holdfast.NPC(net, torch.optim.SGD(net.parameters(), lr=lr), free=[net.head], **knobs)
    for batch in batches:
        reference.step(net.reference_forward, batch)
        optimizer.zero_grad()
        net(batch).square().mean().backward()
        optimizer.step()
        measured = optimizer.importance["layer"].tolist()
        assert measured == pytest.approx(reference.importance[0], rel=1e-6, abs=1e-9)
        for name, parameter in net.named_parameters():
            torch.testing.assert_close(parameter.detach(), reference.parameters[name], rtol=1e-6, atol=1e-9)


def test_two_layers_and_paper_settings() -> None:
    """Two layers that influence each other, with the paper's beta, delta and alpha / eta_max, for a hundred steps."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2)).double()

    def forward(p: Parameters, x: Tensor) -> tuple[list[Tensor], Tensor]:
        first = F.linear(x, p["0.weight"], p["0.bias"]).unsqueeze(-1)
        second = F.linear(F.relu(first.squeeze(-1)), p["2.weight"], p["2.bias"]).unsqueeze(-1)
        output = F.linear(F.relu(second.squeeze(-1)), p["4.weight"], p["4.bias"])
        return [first, second], (output - x[:, :2]).square().mean()

    def rows(name: str, inputs: int, outputs: int) -> list[list[tuple[str, Index]]]:
        return [[*((f"{name}.weight", (i, j)) for j in range(inputs)), (f"{name}.bias", (i,))] for i in range(outputs)]

    start = {name: p.detach().clone() for name, p in net.named_parameters()}
    layers = [rows("0", 3, 5), rows("2", 5, 4)]
    reference = ReferenceNPC(start, layers, beta=0.7, delta=1e-2, alpha=0.1, eta_max=0.1)
    optimizer = holdfast.NPC(net, torch.optim.SGD(net.parameters(), lr=0.1), rate=1e-2, free=[net[4]])
    for _ in range(100):
        x = torch.randn(8, 3, dtype=torch.float64)
        reference.step(forward, x)
        optimizer.zero_grad()
        (net(x) - x[:, :2]).square().mean().backward()
        optimizer.step()
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(parameter.detach(), reference.parameters[name], rtol=1e-9, atol=1e-12)
    assert any(rate == 0 for rate in optimizer.plasticity["0"].tolist()), "the test never froze a neuron"


def test_reference_by_hand() -> None:
    """The reference itself against a value worked out on paper.

    One sample, two neurons n = (2, -1), loss n1 + 3 n2: c = (2, 3), normalized (0.8, 1.2).
    delta 0.5: C = (0.4, 0.6). beta 0.9: sqrt(0.9 / 0.4) = 1.5 and sqrt(0.5) = 0.7071 for neuron 1.
    """
    reference = ReferenceNPC(
        {"w": torch.tensor([2.0, -1.0], dtype=torch.float64)},
        [[[("w", (0,))], [("w", (1,))]]],
        beta=0.9,
        delta=0.5,
        alpha=0.1,
        eta_max=1.0,
    )

    def forward(p: Parameters, _: Tensor) -> tuple[list[Tensor], Tensor]:
        n = p["w"].reshape(1, 2, 1)
        return [n], n[0, 0, 0] + 3 * n[0, 1, 0]

    reference.step(forward, torch.empty(0))
    assert reference.importance[0] == pytest.approx([0.4, 0.6])
    moved = [2 - 0.1 * math.sqrt(0.5), -1 - 0.1 * math.sqrt(math.sqrt(1.5) - 1) * 3]
    assert reference.parameters["w"].tolist() == pytest.approx(moved)
