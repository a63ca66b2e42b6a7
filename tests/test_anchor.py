"""The pull toward old values, against the textbook's sum over tasks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, Adam

import holdfast
from helpers import assert_same_bits, mlp, parameters_of, train
from holdfast.methods.anchor import Anchored, pull_, remember

finite = st.floats(-10, 10, allow_nan=False)
weights = st.one_of(st.just(0.0), st.floats(1e-6, 1e3))


class Given(Anchored):
    """A method whose importances are given, one dict per task."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, given: list[dict[str, Tensor]], **knobs):
        super().__init__(model, optimizer, **{"strength": 1.0, "form": "proximal", **knobs})
        self.given = iter(given)

    def _measure(self, batches, active):
        return next(self.given)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(weights, finite), min_size=1, max_size=6), finite, st.floats(0, 1e6))
def test_the_proximal_step_is_the_minimum_of_the_textbooks_sum(
    tasks: list[tuple[float, float]], theta: float, stiffness: float
) -> None:
    """Of (x - theta)^2 / 2 + stiffness / 2 * sum_k W_k (x - theta_k)^2, whose derivative must vanish there."""
    importance, anchor = torch.zeros(1, dtype=torch.float64), torch.tensor([theta], dtype=torch.float64)
    for weight, value in tasks:
        newest, ended = torch.tensor([[weight], [value]], dtype=torch.float64)
        importance, anchor = remember(importance, anchor, newest, ended)
    x = torch.tensor([theta], dtype=torch.float64)
    pull_([x], [importance], [anchor], stiffness)
    gradient = (x.item() - theta) + stiffness * sum(w * (x.item() - v) for w, v in tasks)
    scale = 1 + stiffness * sum(w for w, _ in tasks)
    assert abs(gradient) <= 1e-12 * scale * 20
    values = [theta, *(v for w, v in tasks if w > 0)]
    assert min(values) - 1e-9 <= x.item() <= max(values) + 1e-9  # so that nothing can diverge


@pytest.mark.parametrize("importance", [0.0, 1e-45, 1e-20, 1e20, 3e38, torch.inf])
@pytest.mark.parametrize("stiffness", [0.0, 1e-30, 1.0, 2e5, 1e30])
def test_no_importance_or_strength_is_too_large(importance: float, stiffness: float) -> None:
    x = torch.tensor([1.0, -3.0])
    pull_([x], [torch.full((2,), importance)], [torch.tensor([2.0, 2.0])], stiffness)
    if importance == torch.inf and stiffness == 0:
        return  # undefined
    assert x.isfinite().all()
    assert 1 <= x[0] <= 2
    if importance == 0 or stiffness == 0:
        assert x.tolist() == [1.0, -3.0]
    if importance * stiffness > 1e20:
        assert x.tolist() == [2.0, 2.0]


def tasks_of(model: nn.Module, count: int) -> list[dict[str, Tensor]]:
    return [{name: torch.rand_like(p) for name, p in model.named_parameters()} for _ in range(count)]


def move(model: nn.Module) -> dict[str, Tensor]:
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p))
    return parameters_of(model)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_the_loss_form_has_the_gradient_of_the_textbooks_sum(count: int) -> None:
    model = mlp().double()
    given_ = tasks_of(model, count)
    optimizer = Given(model, SGD(model.parameters(), lr=0.1), given_, strength=3.0, form="loss")
    anchors = []
    for _ in range(count):
        anchors.append(move(model))
        optimizer.consolidate([])
    move(model)
    optimizer.penalty().backward()
    for name, p in model.named_parameters():
        expected = sum(2 * 3.0 * w[name] * (p.detach() - a[name]) for w, a in zip(given_, anchors, strict=True))
        torch.testing.assert_close(p.grad, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_the_pull_of_several_tasks_is_the_textbooks_sum(count: int) -> None:
    """With a gradient of zero, the implicit step: theta' = theta - lr * gradient of the sum at theta'."""
    model = mlp().double()
    given_ = tasks_of(model, count)
    optimizer = Given(model, SGD(model.parameters(), lr=0.25), given_, strength=3.0)
    anchors = []
    for _ in range(count):
        anchors.append(move(model))
        optimizer.consolidate([])
    before = move(model)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    assert optimizer.penalty().item() == 0
    optimizer.step()
    for name, p in model.named_parameters():
        gradient = sum(2 * 3.0 * w[name] * (p.detach() - a[name]) for w, a in zip(given_, anchors, strict=True))
        assert gradient.abs().max() > 0.01
        torch.testing.assert_close(p.detach(), before[name] - 0.25 * gradient, rtol=1e-10, atol=1e-12)


def test_the_pull_comes_after_the_optimizers_own_step() -> None:
    model = mlp().double()
    (given_,) = tasks_of(model, 1)
    optimizer = Given(model, SGD(model.parameters(), lr=0.25), [given_], strength=2.0)
    anchor = move(model)
    optimizer.consolidate([])
    before = move(model)
    x = torch.randn(8, 4, dtype=torch.float64)
    gradients = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
    train(model, optimizer, [x])
    for (name, p), gradient in zip(model.named_parameters(), gradients, strict=True):
        stepped, s = before[name] - 0.25 * gradient, 2 * 0.25 * 2.0 * given_[name]
        torch.testing.assert_close(p.detach(), (stepped + s * anchor[name]) / (1 + s))


def test_parameters_of_low_precision_are_pulled_too() -> None:
    x = torch.tensor([1.0, 5.0], dtype=torch.bfloat16)
    pull_([x], [torch.tensor([1.0, 0.0])], [torch.tensor([3.0, 3.0])], stiffness=1.0)
    assert x.tolist() == [2.0, 5.0]
    assert x.dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["ewc", "mas", "si", "ssl"])
@pytest.mark.parametrize("form", ["proximal", "loss"])
def test_after_the_first_task_the_pull_is_there_and_points_at_the_anchor(name: str, form: str) -> None:
    model = mlp()
    optimizer = holdfast.METHODS[name](model, SGD(model.parameters(), lr=0.01), strength=1.0, form=form)
    batch = torch.randn(32, 4), torch.randint(3, (32,))
    for _ in range(20):
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1]) + optimizer.penalty()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    optimizer.consolidate([batch])
    anchor = parameters_of(model)
    for key, value in optimizer.anchor.items():
        assert torch.equal(value, anchor[key])
    away = move(model)
    optimizer.zero_grad()
    (model(batch[0]).sum() * 0 + optimizer.penalty()).backward()  # no task, only the pull
    optimizer.step()
    moved = {key: value - away[key] for key, value in parameters_of(model).items()}
    towards = {key: anchor[key] - away[key] for key in anchor}
    assert sum(step.abs().sum() for step in moved.values()) > 1e-6
    wanted = torch.cat([t.flatten() for t in towards.values()])
    done = torch.cat([m.flatten() for m in moved.values()])
    significant = done.abs() > 1e-6  # SSL's own term moves parameters too, by less
    assert significant.float().mean() > 0.2
    assert (done.sign() == wanted.sign())[significant].float().mean() > (0.95 if name == "ssl" else 0.9999)


def test_divergence_in_the_loss_is_said_and_its_cure_named() -> None:
    model = mlp()
    optimizer = Given(model, SGD(model.parameters(), lr=0.1), tasks_of(model, 1), strength=300.0, form="loss")
    optimizer.consolidate([])
    move(model)
    message = r"Given has diverged.*2 \* lr \* strength \* importance is 5\d.*in '.*use form=\"proximal\""
    with pytest.raises(FloatingPointError, match=message):
        train(model, optimizer, torch.randn(500, 8, 4))


def test_a_loss_that_is_not_finite_is_not_blamed_on_the_pull() -> None:
    model = mlp()
    optimizer = Given(model, SGD(model.parameters(), lr=0.1), tasks_of(model, 1), strength=1e-3, form="loss")
    optimizer.consolidate([])
    with pytest.raises(FloatingPointError, match="the parameters are not finite, and the pull is not the cause"):
        train(model, optimizer, [torch.full((8, 4), torch.nan)] * 2)


@pytest.mark.parametrize("form", ["proximal", "loss"])
def test_the_pull_is_one_also_for_an_optimizer_that_maximizes(form: str) -> None:
    model = mlp()
    optimizer = Given(
        model, SGD(model.parameters(), lr=0.01, maximize=True), tasks_of(model, 1), strength=1.0, form=form
    )
    anchor = parameters_of(model)
    optimizer.consolidate([])
    away = move(model)
    optimizer.zero_grad()
    (model(torch.randn(8, 4)).sum() * 0 + optimizer.penalty()).backward()
    optimizer.step()
    for name, value in parameters_of(model).items():
        assert (value - anchor[name]).norm() < (away[name] - anchor[name]).norm()


@pytest.mark.parametrize("lr", [torch.tensor(0.1), torch.tensor([0.1])])
def test_a_learning_rate_in_a_tensor(lr: Tensor) -> None:
    results = []
    for rate in (lr, 0.1):
        torch.manual_seed(0)
        model = mlp()
        optimizer = Given(model, Adam(model.parameters(), lr=rate, foreach=False), tasks_of(model, 1))
        optimizer.consolidate([])
        move(model)
        train(model, optimizer, torch.randn(3, 8, 4))
        results.append(parameters_of(model))
    for name, value in results[0].items():
        torch.testing.assert_close(value, results[1][name])


def test_only_what_the_optimizer_moves_is_pulled() -> None:
    model = mlp()
    optimizer = Given(model, SGD(model.parameters(), lr=0.1), tasks_of(model, 1))
    optimizer.consolidate([])
    away = move(model)
    model[0].requires_grad_(False)
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    for name, value in parameters_of(model).items():
        assert torch.equal(value, away[name]) == name.startswith("0."), name


@pytest.mark.parametrize("name", ["ewc", "mas", "si", "ssl"])
def test_parameters_that_come_later_are_anchored_from_then_on(name: str) -> None:
    def add_head(model: nn.Sequential, optimizer: holdfast.methods.Method) -> None:
        model.append(nn.Linear(3, 3))
        optimizer.add_param_group({"params": model[-1].parameters()})

    model, batch = mlp(), (torch.randn(8, 4), torch.randint(3, (8,)))
    optimizer = holdfast.METHODS[name](model, SGD(model.parameters(), lr=0.1))
    for later in (False, True):
        if later:
            add_head(model, optimizer)
        train(model, optimizer, [batch[0]])
        optimizer.consolidate([batch])
    assert optimizer.anchor.keys() == dict(model.named_parameters()).keys()
    assert torch.equal(optimizer.anchor["5.weight"], model[5].weight)
    assert optimizer.importance["5.weight"].sum() > 0
    again = mlp()
    resumed = holdfast.METHODS[name](again, SGD(again.parameters(), lr=0.1))
    add_head(again, resumed)
    resumed.load_state_dict(optimizer.state_dict())
    assert_same_bits(resumed.importance, optimizer.importance)


@pytest.mark.parametrize("name", ["ewc", "mas", "ssl"])
def test_parameters_frozen_for_a_while_are_anchored_too(name: str) -> None:
    model, batch = mlp(), (torch.randn(8, 4), torch.randint(3, (8,)))
    plain = holdfast.METHODS[name](model, SGD(model.parameters(), lr=0.1))
    plain.consolidate([batch])
    frozen = holdfast.METHODS[name](model, SGD(model.parameters(), lr=0.1))
    model[0].requires_grad_(False)
    frozen.consolidate([batch])
    assert_same_bits(frozen.importance, plain.importance)


def test_a_parameter_of_another_shape_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    optimizer = Given(model, SGD(model.parameters(), lr=0.1), tasks_of(model, 1))
    optimizer.consolidate([])
    model[0].weight.data = torch.ones(3, 2)
    model[0].weight.grad = torch.ones(3, 2)
    with pytest.raises(
        ValueError, match=r"'0.weight' had shape \(2, 2\) when it was consolidated and has \(3, 2\) now"
    ):
        optimizer.step()


def test_importance_that_is_not_finite_is_refused_and_nothing_is_lost() -> None:
    model = mlp()
    good, bad = tasks_of(model, 2)
    bad["2.bias"][1] = torch.nan
    optimizer = Given(model, SGD(model.parameters(), lr=0.1), [good, bad])
    optimizer.consolidate([])
    held = optimizer.importance
    move(model)
    with pytest.raises(FloatingPointError, match="importance of '2\\.bias' is not finite, so nothing was consolidated"):
        optimizer.consolidate([])
    assert_same_bits(optimizer.importance, held)


@pytest.mark.parametrize("name", ["ewc", "mas", "ssl"])
def test_a_task_without_samples_is_refused(name: str) -> None:
    model = mlp()
    optimizer = holdfast.METHODS[name](model, SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match=r"consolidate\(\) was given no samples"):
        optimizer.consolidate([])


def test_settings_are_checked_and_come_back_with_the_state() -> None:
    model = mlp()
    sgd = SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match='form must be "proximal" or "loss", got \'l2\''):
        holdfast.MAS(model, sgd, form="l2")
    with pytest.raises(TypeError, match=r"samples must be a whole number or None, got 1\.5"):
        holdfast.MAS(model, sgd, samples=1.5)
    with pytest.raises(ValueError, match="samples must be at least 1, got 0"):
        holdfast.EWC(model, sgd, samples=0)
    for method, knobs in (
        (holdfast.EWC, {"strength": 7.0, "form": "loss", "labels": "exact", "samples": 5}),
        (holdfast.MAS, {"strength": 7.0, "samples": 5}),
        (holdfast.SI, {"strength": 7.0, "xi": 0.5}),
        (holdfast.SSL, {"strength": 7.0, "sparsity": 0.5}),
        (holdfast.LwF, {"weight": 7.0, "temperature": 0.5}),
    ):
        other = method(model, SGD(model.parameters(), lr=0.5))
        other.load_state_dict(method(model, sgd, **knobs).state_dict())
        for name, value in knobs.items():
            assert getattr(other, "form" if name == "penalty" else name) == value


def test_with_adam_the_pull_is_the_same() -> None:
    """The pull takes the learning rate of the group and nothing of Adam's scaling."""
    model = mlp().double()
    (given_,) = tasks_of(model, 1)
    optimizer = Given(model, Adam(model.parameters(), lr=0.25), [given_], strength=2.0)
    anchor = move(model)
    optimizer.consolidate([])
    before = move(model)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for name, p in model.named_parameters():
        s = 2 * 0.25 * 2.0 * given_[name]
        torch.testing.assert_close(p.detach(), (before[name] + s * anchor[name]) / (1 + s))
