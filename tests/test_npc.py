"""NPC inside ordinary training code."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop
from torch.utils.checkpoint import checkpoint

import holdfast
from helpers import assert_same_bits, gradient_at, mlp, normalized_taylor, parameters_of, train

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda p: SGD(p, lr=0.1),
    "sgd, maximizing": lambda p: SGD(p, lr=0.1, maximize=True),
    "sgd, weight decay": lambda p: SGD(p, lr=0.1, weight_decay=0.1),
    "sgd, momentum": lambda p: SGD(p, lr=0.1, momentum=0.9),
    "sgd, nesterov, decay": lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": lambda p: Adam(p, lr=0.01),
    "adam, foreach": lambda p: Adam(p, lr=0.01, foreach=True),
    "adamw": lambda p: AdamW(p, lr=0.01, weight_decay=0.5),
    "adamw, fused": lambda p: AdamW(p, lr=0.01, fused=True),
    "rmsprop": lambda p: RMSprop(p, lr=0.01, momentum=0.5),
}
every_optimizer = pytest.mark.parametrize("kind", OPTIMIZERS)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def batches(count: int = 5, size: int = 8) -> list[Tensor]:
    return [torch.randn(size, 4) for _ in range(count)]


# ---- what a step does ----


@every_optimizer
def test_a_step_is_plasticity_times_the_wrapped_optimizers_own(kind: str) -> None:
    model, bare = mlp(), mlp()
    optimizer = holdfast.NPC(model, OPTIMIZERS[kind](model.parameters()), rate=0.3, beta=0.9, free=[model[4]])
    alone = OPTIMIZERS[kind](bare.parameters())
    for x in batches(6):
        bare.load_state_dict(model.state_dict())
        if optimizer.state_dict()["state"]:
            alone.load_state_dict(copy.deepcopy(optimizer.wrapped.state_dict()))
        before = parameters_of(model)
        train(bare, alone, [x])
        train(model, optimizer, [x])
        for name, parameter in model.named_parameters():
            layer = name.split(".")[0]
            share = optimizer.plasticity.get(layer, torch.ones(len(parameter)))
            share = share.view(-1, *[1] * (parameter.dim() - 1))
            expected = before[name] + share * (bare.get_parameter(name).detach() - before[name])
            torch.testing.assert_close(parameter.detach(), expected, rtol=1e-5, atol=1e-7)
    assert any((s > 0).logical_and(s < 1).any() for s in optimizer.plasticity.values())
    assert any((s == 0).any() for s in optimizer.plasticity.values())


@every_optimizer
def test_a_frozen_neuron_does_not_change_by_one_bit(kind: str) -> None:
    model = mlp()
    optimizer = holdfast.NPC(model, OPTIMIZERS[kind](model.parameters()), rate=0.05, beta=0.3)
    train(model, optimizer, batches(30))
    held = parameters_of(model)
    frozen = {name: importance > 0.45 for name, importance in optimizer.importance.items()}
    assert all(f.any() for f in frozen.values())
    train(model, optimizer, batches(4))
    for name, parameter in model.named_parameters():
        rows = frozen[name.split(".")[0]] & (optimizer.importance[name.split(".")[0]] > 0.3)
        assert torch.equal(parameter[rows], held[name][rows]), name


class Wrecker(SGD):
    """An optimizer that writes nonsense everywhere."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.fill_(torch.nan)


@pytest.mark.parametrize("optimizer_class", [Wrecker, SGD])
def test_frozen_whatever_the_wrapped_optimizer_does(optimizer_class: type[SGD]) -> None:
    model, x = mlp(), torch.randn(8, 4)
    with torch.no_grad():
        model[0].weight[:, 0] = -0.0
    optimizer = holdfast.NPC(model, optimizer_class(model.parameters(), lr=0.1), rate=1.0, beta=0.5)
    held = parameters_of(model)
    loss_of(model, x).backward()
    if optimizer_class is SGD:
        for p in model.parameters():
            assert p.grad is not None
            p.grad.fill_(torch.nan)
    optimizer.step()
    for name, parameter in model.named_parameters():
        frozen = optimizer.plasticity[name.split(".")[0]] == 0
        assert frozen.any()
        assert torch.equal(parameter[frozen].view(torch.int32), held[name][frozen].view(torch.int32))
        assert parameter[~frozen].isnan().all()


def test_the_mean_importance_of_a_layer_depends_on_the_steps_alone() -> None:
    model = mlp()
    optimizer = holdfast.NPC(model, SGD(model.parameters(), lr=0.1), rate=0.1)
    for step in range(1, 30):
        train(model, optimizer, [torch.randn(16, 4)])
        for values in optimizer.importance.values():
            assert float(values.mean()) == pytest.approx(1 - 0.9**step, rel=1e-4)


def test_free_modules_keep_the_full_rate() -> None:
    model, bare = mlp(), mlp()
    bare.load_state_dict(model.state_dict())
    optimizer = holdfast.NPC(model, SGD(model.parameters(), lr=0.1), rate=1.0, beta=0.01, free=[model[4]])
    x = batches(1)
    train(model, optimizer, x)
    train(bare, SGD(bare.parameters(), lr=0.1), x)
    assert torch.equal(model[4].weight, bare[4].weight)
    assert not torch.equal(model[0].weight, bare[0].weight)


def test_parameter_groups() -> None:
    model, bare = mlp(), mlp()
    bare.load_state_dict(model.state_dict())

    def groups(m: nn.Sequential) -> list[dict[str, Any]]:
        weights = [p for n, p in m.named_parameters() if n.endswith("weight")]
        biases = [p for n, p in m.named_parameters() if n.endswith("bias")]
        return [{"params": weights, "lr": 0.2}, {"params": biases, "lr": 0.05}]

    optimizer = holdfast.NPC(model, SGD(groups(model), lr=1.0), rate=1.0, gain=0.5)
    before, x = parameters_of(model), batches(1)
    train(model, optimizer, x)
    train(bare, SGD(groups(bare), lr=1.0), x)
    for name, p in model.named_parameters():
        share = optimizer.plasticity[name.split(".")[0]].view(-1, *[1] * (p.dim() - 1))
        torch.testing.assert_close(
            p.detach() - before[name], share * (bare.get_parameter(name).detach() - before[name])
        )


# ---- clipping, precision ----


def test_gradient_clipping_acts_before_plasticity() -> None:
    model, bare = mlp(), mlp()
    bare.load_state_dict(model.state_dict())
    x = torch.randn(8, 4)
    optimizer = holdfast.NPC(model, SGD(model.parameters(), lr=0.1), rate=1.0)
    before = parameters_of(model)
    for m in (model, bare):
        loss_of(m, x).backward()
        nn.utils.clip_grad_norm_(m.parameters(), 1e-3)
    optimizer.step()
    SGD(bare.parameters(), lr=0.1).step()
    for name, p in model.named_parameters():
        share = optimizer.plasticity[name.split(".")[0]].view(-1, *[1] * (p.dim() - 1))
        expected = before[name] + share * (bare.get_parameter(name).detach() - before[name])
        torch.testing.assert_close(p.detach(), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    model = mlp(width=16)
    full = copy.deepcopy(model)
    x = torch.randn(64, 4)
    optimizer = holdfast.NPC(model, SGD(model.parameters(), lr=0.1), rate=1.0)
    with torch.autocast("cpu", dtype):
        loss = loss_of(model, x)
    loss.backward()
    optimizer.step()
    assert optimizer.importance["0"].dtype == torch.float32
    expected = normalized_taylor(*gradient_at(full, "0", x), 1)
    torch.testing.assert_close(optimizer.importance["0"], expected, rtol=0.05, atol=0.02)


def test_autocast_with_a_grad_scaler() -> None:
    model = mlp(width=16)
    full = copy.deepcopy(model)
    optimizer = holdfast.NPC(model, SGD(model.parameters(), lr=0.1), rate=1.0)
    scaler, x = torch.amp.GradScaler("cpu", init_scale=2.0**12), torch.randn(64, 4)
    with torch.autocast("cpu", torch.float16):
        loss = loss_of(model, x)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    expected = normalized_taylor(*gradient_at(full, "0", x), 1)
    torch.testing.assert_close(optimizer.importance["0"], expected, rtol=0.05, atol=0.02)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self, active: bool) -> None:
            super().__init__()
            self.active = active
            self.body = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.ReLU(inplace=True), nn.Linear(6, 6))
            self.head = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = checkpoint(self.body, x, use_reentrant=reentrant) if self.active else self.body(x)
            return self.head(y)

    model, plain = Checkpointed(True), Checkpointed(False)
    plain.load_state_dict(model.state_dict())
    ours = holdfast.NPC(model, SGD(model.parameters(), lr=0.1), rate=0.5, free=[model.head])
    theirs = holdfast.NPC(plain, SGD(plain.parameters(), lr=0.1), rate=0.5, free=[plain.head])
    for _ in range(4):
        x = torch.randn(8, 4, requires_grad=True)
        train(model, ours, [x])
        train(plain, theirs, [x])
    assert_same_bits(parameters_of(model), parameters_of(plain))
    assert_same_bits(ours.importance, theirs.importance)


def test_discarded_gradients_are_not_measured() -> None:
    model, plain = mlp(), mlp()
    plain.load_state_dict(model.state_dict())
    ours = holdfast.NPC(model, SGD(model.parameters(), lr=0.1), rate=0.5)
    theirs = holdfast.NPC(plain, SGD(plain.parameters(), lr=0.1), rate=0.5)
    for x in batches(3):
        loss_of(model, torch.randn(8, 4)).backward()
        train(model, ours, [x])
        train(plain, theirs, [x])
    assert_same_bits(ours.importance, theirs.importance)


# ---- state ----


def test_settings_come_back_with_the_state() -> None:
    model = mlp()
    optimizer = holdfast.NPC(model, SGD(model.parameters(), lr=0.1), beta=0.4, rate=0.2, gain=3.0)
    other = holdfast.NPC(model, SGD(model.parameters(), lr=0.5))
    other.load_state_dict(optimizer.state_dict())
    assert (other.beta, other.rate, other.gain, other.param_groups[0]["lr"]) == (0.4, 0.2, 3.0, 0.1)
    assert other.param_groups is other.wrapped.param_groups


def test_importance_and_plasticity_are_snapshots_per_neuron() -> None:
    model = mlp()
    optimizer = holdfast.NPC(model, SGD(model.parameters(), lr=0.1), rate=0.5)
    assert {name: v.tolist() for name, v in optimizer.plasticity.items()} == {"0": [1] * 6, "2": [1] * 6, "4": [1] * 3}
    train(model, optimizer, batches(1))
    held = optimizer.importance["0"]
    value = held.clone()
    train(model, optimizer, batches(2))
    assert torch.equal(held, value)
    for name, importance in optimizer.importance.items():
        assert importance.mean().item() == pytest.approx(1 - 0.5**3)  # each measurement has mean 1
        expected = (torch.sqrt(0.7 / importance) - 1).clamp(min=0).sqrt().clamp(max=1)
        torch.testing.assert_close(optimizer.plasticity[name], expected)


def test_per_sample_gradients_through_an_observed_model() -> None:
    from torch.func import functional_call, grad, vmap

    model, x = mlp(), torch.randn(5, 4)
    optimizer = holdfast.NPC(model, SGD(model.parameters(), lr=0.1))
    train(model, optimizer, batches(1))
    weights = parameters_of(model)

    def loss(p: dict[str, Tensor], sample: Tensor) -> Tensor:
        return functional_call(model, p, (sample[None],)).square().mean()

    per_sample = vmap(grad(loss), in_dims=(None, 0))(weights, x)
    for i in range(5):
        single = grad(loss)(weights, x[i])
        for name in weights:
            torch.testing.assert_close(per_sample[name][i], single[name])
