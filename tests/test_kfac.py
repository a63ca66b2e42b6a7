"""The Kronecker-factored pull against plain loops over samples and a linear system without factors."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, AdamW

import holdfast
from helpers import assert_same_bits, mlp, parameters_of, train
from holdfast.methods.kfac import basis_of, pulled
from test_dpc import derivative_rows


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 4), st.integers(1, 5), st.floats(0, 100), st.integers(0, 2**16))
def test_the_pull_solves_the_linear_system(neurons: int, inputs: int, stiffness: float, seed: int) -> None:
    """The minimum over X satisfies (I + stiffness G x A) vec(X - M) = vec(W - M)."""
    generator = np.random.default_rng(seed)
    a, g = (generator.normal(size=(n, n)) for n in (inputs, neurons))
    a, g = a @ a.T, g @ g.T
    value, anchor = generator.normal(size=(2, neurons, inputs))
    system = np.eye(neurons * inputs) + stiffness * np.kron(g, a)  # rows of W - M one after another
    expected = anchor + np.linalg.solve(system, (value - anchor).ravel()).reshape(neurons, inputs)
    basis = basis_of(*(torch.from_numpy(factor).unsqueeze(0) for factor in (a, g)))
    ours = pulled(*(torch.from_numpy(each).unsqueeze(0) for each in (value, anchor)), basis, stiffness)
    np.testing.assert_allclose(ours[0].numpy(), expected, atol=1e-8)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 2, groups=2)
        self.relu = nn.ReLU(inplace=True)
        self.head = nn.Linear(16, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.relu(self.conv(x)).flatten(1))


def factors(net: Net, x: Tensor, y: Tensor, active: list[int]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """A and G of both layers from one backward per sample."""
    conv_in, conv_out = np.zeros((2, 5, 5)), np.zeros((2, 2, 2))
    head_in, head_out = np.zeros((16, 16)), np.zeros((5, 5))
    for sample, label in zip(x, y, strict=True):
        middle = net.conv(sample.unsqueeze(0)).detach().requires_grad_()
        hidden = torch.relu(middle).flatten(1)
        outputs = hidden @ net.head.weight.detach().T
        outputs.retain_grad()
        (-cross_entropy(outputs[:, active], label.unsqueeze(0))).backward()
        a, g = hidden.detach().numpy()[0], outputs.grad.numpy()[0]
        head_in += np.outer(a, a) / len(x)
        head_out += np.outer(g, g) / len(x)
        gradients = middle.grad[0].flatten(1).numpy()  # [neuron, position]
        for group in range(2):
            rows = derivative_rows(net.conv, 2 * group, sample.unsqueeze(0))
            conv_in[group] += rows.T @ rows / len(x)
            own = gradients[2 * group : 2 * group + 2]
            conv_out[group] += own @ own.T / (len(x) * own.shape[1])
    return {"conv": (conv_in, conv_out), "head": (head_in[None], head_out[None])}


def test_the_factors_are_those_of_single_samples() -> None:
    net = Net().double()
    method = holdfast.KFAC(net, SGD(net.parameters(), lr=0.1))
    expected: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {"conv": [], "head": []}
    for active in ([0, 1], [2, 3, 4]):
        x, y = torch.randn(6, 2, 3, 3, dtype=torch.float64), torch.randint(len(active), (6,))
        for name, found in factors(net, x, y, active).items():
            expected[name].append(found)
        method.consolidate([(x[:4], y[:4]), (x[4:], y[4:])], active)
    for name, tasks in expected.items():
        np.testing.assert_allclose(method._inputs[name].numpy(), sum(a for a, _ in tasks), atol=1e-12)
        np.testing.assert_allclose(method._outputs[name].numpy(), sum(g for _, g in tasks) / 2, atol=1e-12)
    assert all(parameter.grad is None for parameter in net.parameters())


@pytest.mark.parametrize("kind", [SGD, AdamW])
def test_a_step_is_the_optimizers_and_then_the_pull(kind: type[SGD]) -> None:
    torch.manual_seed(0)
    net, bare = mlp().double(), mlp().double()
    bare.load_state_dict(net.state_dict())
    method = holdfast.KFAC(net, kind(net.parameters(), lr=0.05), strength=7.0)
    alone = kind(bare.parameters(), lr=0.05)
    x = torch.randn(8, 4, dtype=torch.float64)
    method.consolidate([(x, torch.randint(3, (8,)))])
    anchor = parameters_of(net)
    for _ in range(3):
        train(net, method, [x])
        train(bare, alone, [x])
        for name in ("0", "2", "4"):
            layer = bare.get_submodule(name)
            value = torch.cat([layer.weight, layer.bias.unsqueeze(1)], 1).detach().numpy()
            old = torch.cat([anchor[f"{name}.weight"], anchor[f"{name}.bias"].unsqueeze(1)], 1).numpy()
            a, g = method._inputs[name][0].numpy(), method._outputs[name][0].numpy()
            system = np.eye(value.size) + 2 * 0.05 * 7.0 * np.kron(g, a)
            moved = old + np.linalg.solve(system, (value - old).ravel()).reshape(value.shape)
            with torch.no_grad():
                layer.weight.copy_(torch.from_numpy(moved[:, :-1]))
                layer.bias.copy_(torch.from_numpy(moved[:, -1]))
        for name, value in parameters_of(bare).items():
            torch.testing.assert_close(parameters_of(net)[name], value, rtol=1e-8, atol=1e-10)


def test_an_infinite_strength_freezes_what_the_task_used() -> None:
    net = nn.Sequential(nn.Linear(4, 3)).double()
    method = holdfast.KFAC(net, SGD(net.parameters(), lr=0.1), strength=1e12)
    x = torch.zeros(20, 4, dtype=torch.float64)
    x[:, :2] = torch.randn(20, 2)
    method.consolidate([(x, torch.randint(3, (20,)))])
    old = net(x).log_softmax(1).detach()
    train(net, method, [torch.randn(8, 4, dtype=torch.float64) for _ in range(5)])
    assert (net(x).log_softmax(1) - old).abs().max() < 1e-5


def test_before_the_first_task_it_is_the_bare_optimizer() -> None:
    results = []
    for wrapped in (False, True):
        torch.manual_seed(0)
        net = mlp()
        optimizer = SGD(net.parameters(), lr=0.1)
        train(net, holdfast.KFAC(net, optimizer) if wrapped else optimizer, [torch.randn(8, 4) for _ in range(3)])
        results.append(parameters_of(net))
    assert_same_bits(*results)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (torch.randn(4, 4), "KFAC needs \\(inputs, labels\\) batches"),
        ((torch.randn(4, 4), torch.tensor([0, 1, 2, 3])), "from 0 to 2 for its 3 outputs; got 0 to 3"),
        ((torch.randn(4, 4), torch.randn(4)), "one class number per sample"),
    ],
)
def test_wrong_labels(batch: object, message: str) -> None:
    net = mlp()
    with pytest.raises(ValueError, match=message):
        holdfast.KFAC(net, SGD(net.parameters(), lr=0.1)).consolidate([batch])
