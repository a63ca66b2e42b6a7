"""Compact's effective rank by hand, its term in the loss against numpy, and the room it leaves for DPC."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import vmap
from torch.nn.functional import cross_entropy
from torch.optim import SGD

import holdfast
from helpers import mlp, parameters_of
from holdfast.methods.building import build
from holdfast.methods.compact import log_rank, log_rank_of_all, participation_ratio


def compact(model: nn.Module, **settings: Any) -> holdfast.Compact:
    return holdfast.Compact(model, SGD(model.parameters(), lr=0.1), **{"weight": 0.5, **settings})


# ---- the effective rank ----


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([[1.0, 0.0], [0.0, 1.0]], 2.0),
        ([[3.0, 4.0]], 1.0),
        ([[1.0, 2.0], [2.0, 4.0], [-1.0, -2.0]], 1.0),
        ([[2.0, 0.0], [0.0, 1.0]], 25 / 17),  # M = diag(4, 1) / 2: 5^2 / (4^2 + 1^2)
        ([[1.0, 1.0], [1.0, 0.0]], 9 / 7),  # M = [[2, 1], [1, 1]] / 2: 3^2 / (4 + 1 + 1 + 1)
        ([[1.0, 0.0, 1.0], [0.0, 1.0, 0.0]], 9 / 5),  # fewer rows than inputs: 3^2 / (2^2 + 1^2)
        ([[0.0, 0.0], [0.0, 0.0]], 1.0),
    ],
)
def test_the_effective_rank_by_hand(rows: list[list[float]], expected: float) -> None:
    assert participation_ratio(torch.tensor(rows)).item() == pytest.approx(expected)
    assert participation_ratio(torch.tensor(rows) * 1e30).item() == pytest.approx(expected)  # its powers overflow
    assert participation_ratio(torch.tensor(rows) * 1e-30).item() == pytest.approx(expected)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 7), st.integers(1, 7), st.integers(0, 1000), st.floats(-20, 20))
def test_its_limits_and_symmetries(n: int, d: int, seed: int, exponent: float) -> None:
    torch.manual_seed(seed)
    rows = torch.randn(n, d, dtype=torch.float64) * torch.rand(d, dtype=torch.float64).square()
    ratio = participation_ratio(rows).item()
    assert 1 - 1e-12 <= ratio <= min(n, d) + 1e-12
    turn, _ = torch.linalg.qr(torch.randn(d, d, dtype=torch.float64))
    for same in (10**exponent * rows, rows @ turn, rows.mT, rows.flip(0), torch.cat([rows, rows])):
        assert participation_ratio(same).item() == pytest.approx(ratio, rel=1e-9)
    assert participation_ratio(turn).item() == pytest.approx(d)


@pytest.mark.parametrize("shape", [(5, 3), (3, 5), (2, 4, 3, 3)])
def test_its_gradient(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: log_rank(x, 1), inputs)
    other = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, y: log_rank_of_all([(x, 1), (y, 1)], 0.3), (inputs, other))


def test_inputs_that_are_all_zero_have_no_gradient() -> None:
    dead = torch.zeros(4, 3, requires_grad=True)
    log_rank(dead, 1).backward()
    assert torch.equal(dead.grad, torch.zeros(4, 3))


# ---- the term in the loss ----


def reference(inputs: list[Tensor], weight: float) -> float:
    """By eigenvalues of the second moment, channels along axis 1."""
    terms = []
    for x in inputs:
        a = np.moveaxis(x.detach().double().numpy(), 1, -1).reshape(-1, x.shape[1])
        eigenvalues = np.linalg.eigvalsh(a.T @ a / len(a))
        terms.append(math.log(eigenvalues.sum() ** 2 / (eigenvalues**2).sum()) / math.log(x.shape[1]))
    return weight * float(np.mean(terms))


class Net(nn.Module):
    """Every kind of layer: one on the images, one behind a single channel, a grouped one, a transposed one, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5, 3)
        self.narrow = nn.Conv2d(2, 1, 1)
        self.wide = nn.Conv2d(1, 4, 3)
        self.grouped = nn.Conv2d(4, 6, 3, groups=2)
        self.up = nn.ConvTranspose2d(6, 5, 2)

    def activations(self, x: Tensor) -> list[Tensor]:
        """The inputs of the last three layers."""
        wide = torch.relu(self.wide(torch.tanh(self.narrow(x))))
        grouped = torch.relu(self.grouped(wide))
        return [wide, grouped, torch.relu(self.up(grouped)).mean((2, 3))]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.activations(x)[-1])


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("samples", [None, 4, 64])
@pytest.mark.filterwarnings("ignore")
def test_the_term_of_a_convolutional_network(samples: int | None, compiled: bool) -> None:
    torch.manual_seed(0)
    model, x = Net().double(), torch.randn(6, 2, 7, 7, dtype=torch.float64)
    with torch.no_grad():
        expected = reference([a[:samples] for a in model.activations(x)], 0.5)
    optimizer = compact(model, samples=samples)
    torch.compiler.reset()
    (torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model)(x)
    term = optimizer.penalty()
    assert term.item() == pytest.approx(expected, rel=1e-9)
    term.backward()
    assert model.narrow.weight.grad.abs().sum() > 0
    head = model.head.weight.grad  # which has no part in any input
    assert head is None or head.abs().sum() == 0


def test_the_term_of_a_perceptron_and_of_sequences() -> None:
    torch.manual_seed(0)
    for shape in ((7, 4), (7, 3, 4)):  # features are last
        model, x = mlp().double(), torch.randn(shape, dtype=torch.float64)
        optimizer = compact(model)
        inputs = [model[:2](x), model[:4](x)]
        model(x)
        assert optimizer.penalty().item() == pytest.approx(reference([a.flatten(0, -2) for a in inputs], 0.5), rel=1e-9)


def test_the_term_is_exact_under_autocast() -> None:
    torch.manual_seed(0)
    model, x = mlp(width=50), torch.randn(40, 4)
    optimizer = compact(model)
    with torch.autocast("cpu", torch.bfloat16):
        inputs = [model[:2](x), model[:4](x)]
        model(x)
        term = optimizer.penalty()
    assert term.dtype == torch.float32
    assert term.item() == pytest.approx(reference(inputs, 0.5), rel=1e-5)


def test_evaluation_and_other_passes_between_forward_and_penalty_change_nothing() -> None:
    model, x = mlp(), torch.randn(8, 4)
    optimizer = compact(model)
    model(x)
    expected = optimizer.penalty().item()
    model(x)
    with torch.no_grad():
        model(torch.randn(8, 4))
    vmap(model)(torch.randn(5, 4))
    assert optimizer.penalty().item() == expected


def test_what_happens_to_an_input_later_is_not_part_of_it() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.frozen = nn.Linear(4, 6), nn.Linear(6, 6).requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x) + 1
            later = self.frozen(hidden)
            return hidden.add_(later)

    model, x = Scaled().double(), torch.randn(8, 4, dtype=torch.float64)
    optimizer = compact(model)
    model(x)
    term = optimizer.penalty()
    assert term.item() == pytest.approx(reference([model.first(x) + 1], 0.5), rel=1e-9)
    term.backward()


def test_misuse_is_named_in_one_line() -> None:
    model, x = mlp(), torch.randn(8, 4)
    optimizer = compact(model)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^Compact found no inputs.*penalty\(\) needs a forward before it.*$"):
            optimizer.penalty()
        model(x)
        optimizer.penalty()  # and a second time without a forward
    single = nn.Linear(4, 2)
    alone = compact(single)
    single(x)
    with pytest.raises(ValueError, match="at least two layers"):
        alone.penalty()
    for wrong in ({"weight": -1}, {"samples": 0}):
        with pytest.raises(ValueError, match="must be at least"):
            compact(mlp(), **wrong)


def test_without_weight_it_is_the_wrapped_optimizer() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(4, 2), torch.randn(8, 4)
    optimizer = compact(model, weight=0.0)
    before = parameters_of(model)
    model(x).square().mean().backward()
    optimizer.step()
    assert optimizer.penalty().item() == 0
    assert not optimizer.has_penalty
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), before[name] - 0.1 * parameter.grad)


def test_the_number_of_samples_is_restored() -> None:
    model, x = mlp(), torch.randn(8, 4)
    optimizer = compact(model, samples=3)
    model(x)
    expected = optimizer.penalty().item()
    state = optimizer.state_dict()
    optimizer.close()
    again = compact(model, samples=None)
    again.load_state_dict(state)
    model(x)
    assert again.samples == 3
    assert again.penalty().item() == expected


def test_the_next_forward_may_come_before_the_step() -> None:
    model, x = mlp(), torch.randn(8, 4)
    optimizer = compact(model)
    (model(x).square().mean() + optimizer.penalty()).backward()
    model(x)
    optimizer.step()
    assert optimizer.penalty().item() > 0


# ---- room for later tasks ----


def learned(name: str, **settings: Any) -> tuple[float, float]:
    """The accuracy on a task, and the share of the hidden layers' input directions that it takes."""
    torch.manual_seed(0)
    model = mlp(inputs=10, width=30, outputs=2)
    x = torch.randn(200, 10)
    y = (x[:, 0] * x[:, 1] > 0).long()
    method = build(name, model, SGD(model.parameters(), lr=0.2), settings, heads=[model[4]])
    for _ in range(300):
        loss = cross_entropy(model(x), y) + method.penalty()
        method.zero_grad()
        loss.backward()
        method.step()
    method.consolidate([x])
    accuracy = (model(x).argmax(1) == y).float().mean().item()
    return accuracy, method.capacity["2"]


@pytest.mark.parametrize("name", ["compact+dpc", "lwf+compact+dpc"])
def test_a_task_takes_less_of_the_capacity(name: str) -> None:
    plain, taken = learned("dpc", kappa=10)
    pressed, left = learned(name, **{"compact.weight": 0.5, "dpc.kappa": 10})
    assert plain > 0.95
    assert pressed > 0.95
    assert left < 0.9 * taken
