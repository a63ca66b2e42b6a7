import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import holdfast
from holdfast.neurons import Layer, find_layers
from holdfast.neurons.kinds import neuron_axis


class Conv1D(nn.Module):
    """A linear layer with a transposed weight, as in GPT-2 of transformers."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.randn(nf))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(3, 4), (2, 3)),
    "linear on tokens": (lambda: nn.Linear(3, 4), (2, 5, 3)),
    "linear without a batch": (lambda: nn.Linear(3, 4), (3,)),
    "transposed linear": (lambda: Conv1D(4, 3), (2, 5, 3)),
    "conv1d": (lambda: nn.Conv1d(2, 4, 2), (2, 2, 5)),
    "conv2d": (lambda: nn.Conv2d(2, 4, 2), (2, 2, 4, 5)),
    "conv2d without a batch": (lambda: nn.Conv2d(2, 4, 2), (2, 4, 5)),
    "conv3d": (lambda: nn.Conv3d(2, 4, 2), (2, 2, 3, 4, 3)),
    "conv in groups": (lambda: nn.Conv2d(4, 4, 2, groups=2), (2, 4, 4, 4)),
    "depthwise conv": (lambda: nn.Conv2d(4, 8, 2, groups=4), (2, 4, 4, 4)),
    "transposed 1d": (lambda: nn.ConvTranspose1d(2, 4, 2), (2, 2, 5)),
    "transposed 2d": (lambda: nn.ConvTranspose2d(2, 4, 2), (2, 2, 4, 5)),
    "transposed 3d": (lambda: nn.ConvTranspose3d(2, 4, 2), (2, 2, 3, 3, 3)),
    "transposed in groups": (lambda: nn.ConvTranspose2d(4, 6, 2, groups=2), (2, 4, 3, 3)),
}


def layers_of(model: nn.Module, free: tuple[nn.Module, ...] = ()) -> list[Layer]:
    return find_layers(model, set(model.parameters()), {p for module in free for p in module.parameters()})


@pytest.mark.parametrize("kind", LAYERS)
def test_a_neurons_parameters_are_those_that_its_output_depends_on(kind: str) -> None:
    """Autograd says which parameters an output channel depends on: just these must be the neuron's, no others."""
    build, shape = LAYERS[kind]
    module = build()
    (layer,) = layers_of(module)
    output = module(torch.randn(shape))
    by_neuron = output.movedim(neuron_axis(module, output), 0).reshape(layer.size, -1)
    for neuron in range(layer.size):
        module.zero_grad()
        by_neuron[neuron].sum().backward(retain_graph=True)
        mine = torch.zeros(layer.size)
        mine[neuron] = 1
        assert {id(p) for p, _ in layer.parameters} == {id(p) for p in module.parameters()}
        for parameter, spread in layer.parameters:
            assert parameter.grad is not None
            assert torch.equal(parameter.grad != 0, spread(mine).expand_as(parameter) != 0)


@pytest.mark.parametrize(
    ("norm", "shape", "axis"),
    [
        (nn.BatchNorm1d(4), (2, 4), 1),
        (nn.BatchNorm1d(4), (2, 4, 5), 1),
        (nn.BatchNorm2d(4), (2, 4, 5, 5), 1),
        (nn.InstanceNorm2d(4), (2, 4, 5, 5), 1),
        (nn.InstanceNorm2d(4), (4, 5, 5), 0),
        (nn.GroupNorm(2, 4), (2, 4, 5, 5), 1),
        (nn.LayerNorm(4), (2, 5, 4), 2),
        (nn.LayerNorm((4, 5, 5)), (2, 4, 5, 5), 1),
        (nn.RMSNorm(4), (2, 5, 4), 2),
    ],
)
def test_the_axis_of_a_normalization(norm: nn.Module, shape: tuple[int, ...], axis: int) -> None:
    assert neuron_axis(norm, norm(torch.randn(shape))) == axis


def test_modules_that_share_a_weight_are_one_layer() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    (layer,) = layers_of(model)
    assert layer.modules == [model[0], model[2]]
    assert {id(p) for p, _ in layer.parameters} == {id(p) for p in model.parameters()}


def test_a_transposed_linear_layer_is_controlled_like_a_linear_one() -> None:
    """Also by DPC, which projects its weight on the input side."""
    linear, transposed = nn.Linear(5, 4), Conv1D(4, 5)
    with torch.no_grad():
        transposed.weight.copy_(linear.weight.T)
        transposed.bias.copy_(linear.bias)
    models = [nn.Sequential(linear, nn.Tanh()), nn.Sequential(transposed, nn.Tanh())]
    batches = [torch.randn(3, 6, 5) for _ in range(4)]
    for wrapped in (torch.optim.SGD, torch.optim.AdamW):
        optimizers = [holdfast.DPC(m, wrapped(m.parameters(), lr=0.1), rate=0.5, beta=1.0) for m in models]
        for x in batches:
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                model(x).square().sum().backward()
                optimizer.step()
                optimizer.consolidate([x])
        torch.testing.assert_close(linear.weight, transposed.weight.T, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(linear.bias, transposed.bias, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(optimizers[0].importance, optimizers[1].importance, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(optimizers[0].capacity, optimizers[1].capacity)
        assert 0 < optimizers[0].plasticity["0"].max() < 1
        for optimizer in optimizers:
            optimizer.close()


@pytest.mark.parametrize(
    ("choose", "names"),
    [
        (lambda model: model[1], ["1.weight", "1.bias"]),
        (lambda model: model[0].bias, ["0.bias"]),
        (lambda model: [model[0].bias, "1"], ["0.bias", "1.weight", "1.bias"]),
        (lambda model: "*.bias", ["0.bias", "1.bias", "2.0.bias"]),
        (lambda model: "2*", ["2.0.weight", "2.0.bias"]),
    ],
)
def test_parameters_are_free_by_module_by_parameter_and_by_name(
    choose: Callable[[nn.Sequential], Any], names: list[str]
) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 2)))
    optimizer = holdfast.NPC(
        model, torch.optim.SGD(model.parameters(), lr=0.1), rate=1.0, beta=1e-9, free=choose(model)
    )
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model(torch.randn(4, 3)).square().sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer.step()  # everything but the free parameters is frozen
    assert [name for name, p in model.named_parameters() if not torch.equal(p, before[name])] == names


def test_what_is_free_is_left_out_with_all_that_is_inside() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)))
    assert [layer.name for layer in layers_of(model, free=(model[1],))] == ["0"]


def test_parameters_outside_the_optimizer_are_left_out() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    (layer,) = find_layers(model, {model[1].bias}, ())
    assert layer.name == "1"
    assert [p is model[1].bias for p, _ in layer.parameters] == [True]


def test_what_cannot_be_observed_is_no_layer() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2)
            self.embedding = nn.Embedding(5, 4)
            self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
            self.out = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            raise NotImplementedError

    assert [layer.name for layer in layers_of(Attention())] == ["out"]
