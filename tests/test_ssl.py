"""SSL's term in the loss and its importance of neurons, in plain loops."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import vmap
from torch.optim import SGD

import holdfast
from helpers import Block, assert_same_bits, memory_in, mlp
from holdfast.methods.ssl import crowding, neighborhood


def double_loop(neurons: Tensor, importance: Tensor) -> float:
    samples, width = neurons.shape
    sigma = width / 6
    total = 0.0
    for i in range(width):
        for j in range(width):
            if i != j:
                near = math.exp(-((i - j) ** 2) / (2 * sigma**2))
                fresh = math.exp(-(importance[i] + importance[j]))
                together = sum((neurons[m, i] * neurons[m, j]).item() for m in range(samples)) / samples
                total += near * fresh * together
    return total


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 5), st.integers(1, 9), st.integers(0, 1000))
def test_crowding_is_the_double_sum(samples: int, width: int, seed: int) -> None:
    torch.manual_seed(seed)
    neurons, importance = torch.rand(samples, width, dtype=torch.float64), torch.rand(width, dtype=torch.float64)
    near = neighborhood(width, neurons.device)
    assert crowding(neurons, importance, near).item() == pytest.approx(double_loop(neurons, importance), rel=1e-6)
    bare = crowding(neurons, None, near).item()
    assert bare == pytest.approx(double_loop(neurons, torch.zeros(width)), rel=1e-6)
    torch.autograd.gradcheck(lambda n: crowding(n, importance, near.double()), neurons.requires_grad_())


def ssl(model: nn.Module, **settings) -> holdfast.SSL:
    return holdfast.SSL(model, SGD(model.parameters(), lr=0.1), **{"sparsity": 0.5, **settings})


class Conv(nn.Module):
    """Two kinds of layers with one and the same activation module, a normalization between, and functional pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5, 3)
        self.relu = nn.ReLU(inplace=True)
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.InstanceNorm2d(4)
        self.hidden = nn.Linear(4, 5)

    def activations(self, x: Tensor) -> dict[str, Tensor]:
        conv = torch.relu(self.norm(self.conv(x)))
        return {"conv": conv, "hidden": torch.relu(self.hidden(conv.mean((2, 3))))}

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.norm(self.conv(x)))
        return self.head(self.relu(self.hidden(x.mean((2, 3)))))


def test_the_term_is_summed_over_hidden_layers_and_positions_are_averaged() -> None:
    model = Conv().double()
    optimizer = ssl(model)
    x = torch.randn(6, 1, 6, 6, dtype=torch.float64)
    expected = 0.0
    for activation in model.activations(x).values():
        neurons = activation.mean((2, 3)) if activation.dim() == 4 else activation
        expected += double_loop(neurons, torch.zeros(neurons.shape[1]))
    model(x)
    assert optimizer.penalty().item() == pytest.approx(0.5 * expected, rel=1e-6)  # the head is no hidden layer


def test_the_term_is_learned_from() -> None:
    """Alone in the loss, it makes neurons that are active together rarer."""
    model = mlp(width=20)
    optimizer = ssl(model, sparsity=0.1)
    x = torch.randn(64, 4)
    terms = []
    for _ in range(30):
        optimizer.zero_grad()
        model(x)
        term = optimizer.penalty()
        term.backward()
        optimizer.step()
        terms.append(term.item())
    assert terms[-1] < 0.2 * terms[0]


def test_importance_of_neurons_sums_over_tasks_and_lowers_the_term() -> None:
    model = Conv().double()
    optimizer = ssl(model)
    expected = {"conv": torch.zeros(4, dtype=torch.float64), "hidden": torch.zeros(5, dtype=torch.float64)}
    for active in ([0, 1], [2]):
        batches = [(torch.randn(n, 1, 6, 6, dtype=torch.float64), torch.zeros(n)) for n in (3, 2)]
        for x in torch.cat([inputs for inputs, _ in batches]):
            for name in expected:
                expected[name] += shift_gradient(model, x[None], name, active).abs() / 5
        optimizer.consolidate(batches, active)
    for name, value in optimizer.neurons.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-10)
    x = torch.randn(4, 1, 6, 6, dtype=torch.float64)
    acts = model.activations(x)
    model(x)
    term = double_loop(acts["conv"].mean((2, 3)), expected["conv"]) + double_loop(acts["hidden"], expected["hidden"])
    assert optimizer.penalty().item() == pytest.approx(0.5 * term, rel=1e-6)


def shift_gradient(model: Conv, x: Tensor, name: str, active: list[int]) -> Tensor:
    """By finite differences: how ||f||^2 changes when a neuron is shifted at all its positions."""
    gradients = []
    for i in range(4 if name == "conv" else 5):
        values = []
        for shift in (1e-6, -1e-6):
            with torch.no_grad():
                conv = torch.relu(model.norm(model.conv(x)))
                if name == "conv":
                    conv[:, i] += shift
                hidden = torch.relu(model.hidden(conv.mean((2, 3))))
                if name == "hidden":
                    hidden[:, i] += shift
                values.append(model.head(hidden)[:, active].square().sum())
        gradients.append((values[0] - values[1]) / 2e-6)
    return torch.stack(gradients)


def test_it_pulls_as_mas_does() -> None:
    model = mlp()
    batches = [(torch.randn(5, 4), torch.zeros(5))]
    ours, mas = ssl(model), holdfast.MAS(model, SGD(model.parameters(), lr=0.1))
    for method in (ours, mas):
        method.consolidate(batches, [0, 1])
    for name, value in ours.importance.items():
        torch.testing.assert_close(value, mas.importance[name])


def test_neurons_of_another_width_are_refused() -> None:
    model = mlp()
    optimizer = ssl(model)
    optimizer.consolidate([(torch.randn(5, 4), torch.zeros(5))])
    state = optimizer.state_dict()
    neurons = memory_in(state)["neurons"]
    neurons["0"] = torch.ones(7)
    with pytest.raises(ValueError, match=r"it has \(7,\) for '0', this model has \(6,\)"):
        optimizer.load_state_dict(state)
    neurons["0"], neurons["none"] = torch.ones(6), torch.ones(6)
    with pytest.raises(ValueError, match=r"it has \(6,\) for 'none', this model has nothing"):
        optimizer.load_state_dict(state)


def test_batches_may_be_a_generator() -> None:
    model = mlp()
    batches = [(torch.randn(5, 4), torch.zeros(5)) for _ in range(3)]
    once, again = ssl(model), ssl(model)
    once.consolidate(batch for batch in batches)
    again.consolidate(batches)
    for name, value in once.neurons.items():
        torch.testing.assert_close(value, again.neurons[name])


def test_without_sparsity_it_is_mas() -> None:
    model = Block()  # whose activations are functional, so none is seen
    optimizer = ssl(model, sparsity=0.0)
    model(torch.randn(2, 2, 8, 8)).sum().backward()
    optimizer.step()
    assert optimizer.penalty().item() == 0
    batches = [(torch.randn(2, 2, 8, 8), torch.zeros(2))]
    optimizer.consolidate(batches)
    mas = holdfast.MAS(model, SGD(model.parameters(), lr=0.1))
    mas.consolidate(batches)
    assert_same_bits(optimizer.importance, mas.importance)


def test_evaluation_and_other_passes_between_forward_and_penalty_change_nothing() -> None:
    model, x = mlp(), torch.randn(8, 4)
    optimizer = ssl(model)
    model(x)
    expected = optimizer.penalty().item()
    model(x)
    with torch.no_grad():
        model(torch.randn(8, 4))
    vmap(model)(torch.randn(5, 4))
    with torch.autocast("cpu", torch.float16):  # in which sums overflow: the term is taken in full precision
        assert optimizer.penalty().item() == expected


def test_what_happens_to_an_activation_later_is_not_part_of_it() -> None:
    model, x = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Dropout(0.9, inplace=True)), torch.randn(8, 4)
    optimizer = ssl(model)
    model(x)
    expected = 0.5 * double_loop(nn.functional.gelu(model[0](x)), torch.zeros(6))
    term = optimizer.penalty()
    assert term.item() == pytest.approx(expected, rel=1e-5)
    term.backward()


def test_only_the_first_activation_behind_a_layer_counts() -> None:
    model, x = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Sigmoid(), nn.Linear(6, 3)), torch.randn(8, 4)
    optimizer = ssl(model)
    model(x)
    expected = 0.5 * double_loop(torch.relu(model[0](x)), torch.zeros(6))
    assert optimizer.penalty().item() == pytest.approx(expected, rel=1e-5)


def test_an_activation_that_the_outputs_do_not_depend_on() -> None:
    class Aside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused, self.relu = nn.Linear(4, 3), nn.Linear(4, 3), nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            self.relu(self.unused(x))
            return self.relu(self.used(x)) @ torch.ones(3, 2)

    model = Aside()
    optimizer = ssl(model)
    optimizer.consolidate([torch.randn(5, 4)])
    assert optimizer.neurons["unused"].sum() == 0
    assert optimizer.neurons["used"].sum() > 0


@pytest.mark.parametrize(
    "between", [nn.Flatten(), nn.Unflatten(1, (2, 3))], ids=["positions among the neurons", "neurons on two axes"]
)
def test_activations_in_another_layout_are_refused_by_name(between: nn.Module) -> None:
    first, x = (
        (nn.Conv2d(1, 6, 3), torch.randn(2, 1, 5, 5))
        if isinstance(between, nn.Flatten)
        else (nn.Linear(4, 6), torch.randn(2, 4))
    )
    model = nn.Sequential(first, between, nn.ReLU())
    optimizer = ssl(model)
    model(x)
    with pytest.raises(ValueError, match="layer '0' has 6 neurons, but the activation behind it has"):
        optimizer.penalty()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_observed_layers_are_read_at_the_modules_named(compiled: bool) -> None:
    """And all others as ever, even at the same module."""
    model, x = Conv().double(), torch.randn(6, 1, 6, 6, dtype=torch.float64)
    optimizer = ssl(model, observe={"conv": "norm", "head": "head"})
    hidden = model.activations(x)["hidden"]
    expected = [model.norm(model.conv(x)).mean((2, 3)), hidden, model.head(hidden)]
    torch.compiler.reset()
    (torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model)(x)
    total = sum(double_loop(neurons, torch.zeros(neurons.shape[1])) for neurons in expected)
    assert optimizer.penalty().item() == pytest.approx(0.5 * total, rel=1e-6)
    optimizer.close()
    shared = ssl(model, observe={"conv": "relu"})  # which `hidden` uses, too
    model(x)
    assert [activation.layer for activation in shared._taps.take()] == ["conv", "hidden"]


def test_two_layers_may_be_observed_at_their_sum() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.norm = nn.Linear(4, 6), nn.Linear(4, 6), nn.LayerNorm(6)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.a(x) + self.b(x)).relu()

    model, x = Sum().double(), torch.randn(5, 4, dtype=torch.float64)
    expected = 2 * double_loop(model.norm(model.a(x) + model.b(x)), torch.zeros(6))
    optimizer = ssl(model, observe={"a": "norm", "b": "norm"})
    model(x)
    assert optimizer.penalty().item() == pytest.approx(0.5 * expected, rel=1e-6)
    optimizer.consolidate([x])
    assert optimizer.neurons.keys() == {"a", "b"}


def test_a_module_observed_that_does_not_show_the_neurons() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.GLU(), nn.Linear(3, 2))
    optimizer = ssl(model, observe={"0": "1"})
    with pytest.raises(ValueError, match=r"'0' has 6 neurons, but the output of '1' has shape \(5, 3\)"):
        model(torch.randn(5, 4))
    optimizer.close()


def test_the_next_forward_may_come_before_the_step() -> None:
    model, x = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)), torch.randn(8, 4)
    optimizer = ssl(model)
    (model(x).square().mean() + optimizer.penalty()).backward()
    model(x)
    optimizer.step()
    assert optimizer.penalty().item() > 0


def test_a_model_without_activation_modules_is_named_and_helped() -> None:
    model = Block()
    x = torch.randn(4, 2, 8, 8)
    optimizer = ssl(model)
    model(x)
    with pytest.raises(ValueError, match=r"SSL found no hidden activations.*observe="):
        optimizer.penalty()
    optimizer.close()
    observed = ssl(model, observe={"conv": "norm"})
    model(x)
    assert observed.penalty().item() != 0
    with pytest.raises(ValueError, match="SSL found no hidden activations"):
        observed.penalty()  # a second time without a forward
    with pytest.raises(TypeError, match=r"observe takes names, \{layer: module\}.*; got \['norm'\]"):
        ssl(model, observe=["norm"])
