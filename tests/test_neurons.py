from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from holdfast.neurons import Layer, find_layers
from holdfast.neurons.kinds import neuron_axis

LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(3, 4), (2, 3)),
    "linear on tokens": (lambda: nn.Linear(3, 4), (2, 5, 3)),
    "linear without a batch": (lambda: nn.Linear(3, 4), (3,)),
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
