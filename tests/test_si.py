"""SI against its definition in plain loops, and against the integral it stands for."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

import holdfast
from helpers import memory_in, mlp, parameters_of
from holdfast.methods.anchor import Form

STRENGTH, XI = 0.3, 0.01


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y)


def bare_gradients(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    gradients = torch.autograd.grad(loss_of(model, x, y), list(model.parameters()))
    return dict(zip(dict(model.named_parameters()), gradients, strict=True))


@pytest.mark.parametrize("form", ["proximal", "loss"])
@pytest.mark.parametrize("optimizer", [SGD, partial(SGD, lr=0.05, maximize=True)])
def test_clipping_scales_the_path_and_nothing_else(form: Form, optimizer: Callable[..., Optimizer]) -> None:
    """The path is that of the clipped gradient of the bare loss, also if the penalty is clipped with it."""
    torch.manual_seed(0)
    model = mlp().double()
    method = holdfast.SI(model, optimizer(model.parameters(), lr=0.05), strength=STRENGTH, xi=XI, form=form)
    x, y = torch.randn(16, 4, dtype=torch.float64), torch.randint(3, (16,))
    for number in range(6):
        gradients, before = bare_gradients(model, x, y), parameters_of(model)
        path = {name: value.clone() for name, value in method._path.items()}
        method.zero_grad()
        sign = -1 if method.param_groups[0]["maximize"] else 1
        (sign * loss_of(model, x, y) + method.penalty()).backward()
        whole = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        method.step()
        if number > 2:  # a task is finished, and there is a penalty
            for name, after in parameters_of(model).items():
                expected = path[name] - 0.05 / whole * gradients[name] * (after - before[name])
                torch.testing.assert_close(method._path[name], expected, rtol=1e-4, atol=1e-12)  # clipping adds 1e-6
        if number == 2:
            method.consolidate([(x, y)])


@pytest.mark.parametrize("form", ["proximal", "loss"])
@pytest.mark.parametrize("optimizer", [SGD, Adam, partial(SGD, momentum=0.9, nesterov=True, foreach=True)])
def test_as_defined_with_the_gradient_of_the_bare_loss(form: Form, optimizer: Callable[..., Optimizer]) -> None:
    """Also of an optimizer that changes the gradients themselves."""
    model = mlp().double()
    method = holdfast.SI(model, optimizer(model.parameters(), lr=0.05), strength=STRENGTH, xi=XI, form=form)
    big = {name: torch.zeros_like(p) for name, p in parameters_of(model).items()}
    for _ in range(3):
        x, y = torch.randn(16, 4, dtype=torch.float64), torch.randint(3, (16,))
        small = {name: torch.zeros_like(p) for name, p in big.items()}
        start = parameters_of(model)
        for _ in range(6):
            gradients, before = bare_gradients(model, x, y), parameters_of(model)
            method.zero_grad()
            (loss_of(model, x, y) + method.penalty()).backward()
            method.step()
            for name, after in parameters_of(model).items():
                small[name] -= gradients[name] * (after - before[name])
        for name, after in parameters_of(model).items():
            big[name] = torch.relu(big[name] + small[name] / ((after - start[name]) ** 2 + XI))
        method.consolidate([(x, y)])
        for name, value in method.importance.items():
            torch.testing.assert_close(value, big[name], rtol=1e-8, atol=1e-12)
            assert torch.equal(method.anchor[name], parameters_of(model)[name])  # the last task's end only


def test_the_path_adds_up_to_the_fall_of_the_loss() -> None:
    """In small steps, the sum over all parameters of -g * change is how much the loss has fallen."""
    model = mlp().double()
    method = holdfast.SI(model, SGD(model.parameters(), lr=1e-3))
    x, y = torch.randn(32, 4, dtype=torch.float64), torch.randint(3, (32,))
    first = loss_of(model, x, y).item()
    for _ in range(300):
        method.zero_grad()
        loss_of(model, x, y).backward()
        method.step()
    path = sum(value.sum().item() for value in memory_in(method.state_dict())["path"].values())
    assert path == pytest.approx(first - loss_of(model, x, y).item(), rel=0.01)


@pytest.mark.parametrize("form", ["proximal", "loss"])
def test_maximizing_is_the_same_as_minimizing_the_opposite(form: Form) -> None:
    found = []
    for maximize in (False, True):
        torch.manual_seed(0)
        model = mlp()
        method = holdfast.SI(model, SGD(model.parameters(), lr=0.1, maximize=maximize), form=form)
        for _ in range(2):
            x, y = torch.randn(16, 4), torch.randint(3, (16,))
            for _ in range(5):
                method.zero_grad()
                (loss_of(model, x, y) * (-1 if maximize else 1) + method.penalty()).backward()
                method.step()
            method.consolidate([])
        found.append(method.importance)
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name])
        assert value.sum() > 0


def test_sparse_gradients() -> None:
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Flatten(), nn.Linear(8, 3))
    method = holdfast.SI(model, SGD(model.parameters(), lr=0.1))
    loss_of(model, torch.tensor([[0, 1], [1, 2]]), torch.tensor([0, 1])).backward()
    method.step()
    method.consolidate([])
    assert method.importance["0.weight"][:3].sum() > 0
    assert method.importance["0.weight"][3:].sum() == 0


def test_a_task_that_was_not_learned_is_refused() -> None:
    model = mlp()
    with pytest.raises(ValueError, match=r"consolidate\(\) came before any step\(\)"):
        holdfast.SI(model, SGD(model.parameters(), lr=0.1)).consolidate([])


def test_a_step_without_gradients_changes_nothing() -> None:
    model = mlp()
    optimizer = holdfast.SI(model, SGD(model.parameters(), lr=0.1))
    loss_of(model, torch.randn(8, 4), torch.randn(8, 3)).backward()
    optimizer.step()
    before = parameters_of(model)
    optimizer.zero_grad()
    optimizer.step()
    for name, value in parameters_of(model).items():
        assert torch.equal(value, before[name])


def test_loaded_weights_are_not_a_path() -> None:
    """What changes the model before its first step is no part of the first task."""
    model, other = mlp(), mlp()
    method = holdfast.SI(model, SGD(model.parameters(), lr=0.1))
    model.load_state_dict(other.state_dict())
    loss_of(model, torch.randn(4, 4), torch.randint(3, (4,))).backward()
    method.step()
    for name, value in method.anchor.items():
        assert torch.equal(value, other.state_dict()[name])
