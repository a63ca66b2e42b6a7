"""NPC inside ordinary training code."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop
from torch.optim import lr_scheduler as schedulers
from torch.utils.checkpoint import checkpoint

import holdfast
from helpers import Block, assert_same_bits, gradient_at, mlp, normalised_taylor, parameters_of, train

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


def test_a_closure_is_called_once_and_its_loss_returned() -> None:
    model, twin = mlp(), mlp()
    twin.load_state_dict(model.state_dict())
    x, calls = torch.randn(8, 4), []
    optimizer = holdfast.NPC(model, SGD(model.parameters(), lr=0.1), rate=1.0)

    def closure() -> Tensor:
        calls.append(1)
        optimizer.zero_grad()
        loss = loss_of(model, x)
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == loss_of(twin, x).item()
    assert len(calls) == 1
    train(twin, holdfast.NPC(twin, SGD(twin.parameters(), lr=0.1), rate=1.0), [x])
    assert_same_bits(parameters_of(model), parameters_of(twin))


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


def test_an_added_group_trains() -> None:
    model, extra = mlp(), nn.Parameter(torch.ones(1))
    optimizer = holdfast.NPC(model, SGD(model.parameters(), lr=0.1))
    optimizer.add_param_group({"params": [extra], "lr": 0.5})
    (loss_of(model, torch.randn(8, 4)) + extra.sum()).backward()
    optimizer.step()
    assert extra.item() == 0.5


# ---- schedulers ----

SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, lambda _: 0.9),
    "StepLR": lambda o: schedulers.StepLR(o, 2),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [1, 3]),
    "ConstantLR": lambda o: schedulers.ConstantLR(o, total_iters=2),
    "LinearLR": lambda o: schedulers.LinearLR(o),
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: schedulers.PolynomialLR(o),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 4),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 0.01, 0.2, step_size_up=2, cycle_momentum=True),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, 0.2, total_steps=10),
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=0),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.ConstantLR(o), schedulers.ExponentialLR(o, 0.5)], milestones=[2]
    ),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler([schedulers.ConstantLR(o), schedulers.StepLR(o, 2)]),
}


def test_no_scheduler_is_forgotten() -> None:
    known = {
        name
        for name, value in vars(schedulers).items()
        if isinstance(value, type) and issubclass(value, schedulers.LRScheduler) and not name.startswith("_")
    }
    assert known - {"LRScheduler"} <= SCHEDULERS.keys()


@pytest.mark.parametrize("around_npc", [True, False], ids=["around NPC", "around the wrapped optimizer"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_scheduler(name: str, around_npc: bool) -> None:
    """The same learning rates as for the bare optimizer, and a frozen network that obeys them all the same."""
    model, bare = mlp(), mlp()
    inner = SGD(model.parameters(), lr=0.1, momentum=0.5)
    optimizer = holdfast.NPC(model, inner, rate=0.1)
    alone = SGD(bare.parameters(), lr=0.1, momentum=0.5)
    ours, theirs = SCHEDULERS[name](optimizer if around_npc else inner), SCHEDULERS[name](alone)
    for x in batches(6):
        train(model, optimizer, [x])
        train(bare, alone, [x])
        for scheduler in (ours, theirs):
            scheduler.step(1.0) if name == "ReduceLROnPlateau" else scheduler.step()
        group, other = optimizer.param_groups[0], alone.param_groups[0]
        assert (group["lr"], group["momentum"]) == (other["lr"], other["momentum"])
    before = parameters_of(model)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train(model, optimizer, batches(1))
    assert_same_bits(parameters_of(model), before)


# ---- clipping, accumulation, precision ----


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


@settings(max_examples=20, deadline=None)
@given(st.sampled_from([1, 2, 3, 4, 6]), st.integers(0, 1000))
def test_accumulation_equals_the_large_batch(parts: int, seed: int) -> None:
    torch.manual_seed(seed)
    large, small = mlp().double(), mlp().double()
    small.load_state_dict(large.state_dict())
    ours = holdfast.NPC(large, SGD(large.parameters(), lr=0.1), rate=0.5)
    theirs = holdfast.NPC(small, SGD(small.parameters(), lr=0.1), rate=0.5)
    for _ in range(4):
        x = torch.randn(12, 4, dtype=torch.float64)
        train(large, ours, [x])
        theirs.zero_grad()
        for part in x.chunk(parts):
            (loss_of(small, part) / parts).backward()
        theirs.step()
    for name, p in large.named_parameters():
        torch.testing.assert_close(p, small.get_parameter(name), rtol=1e-9, atol=1e-12)
    for name, values in ours.importance.items():
        torch.testing.assert_close(values, theirs.importance[name], rtol=1e-9, atol=1e-12)


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
    expected = normalised_taylor(*gradient_at(full, "0", x), 1)
    torch.testing.assert_close(optimizer.importance["0"], expected, rtol=0.05, atol=0.02)


def test_grad_scaler_and_a_skipped_step() -> None:
    model, plain = mlp(), mlp()
    plain.load_state_dict(model.state_dict())
    optimizer = holdfast.NPC(model, SGD(model.parameters(), lr=0.1), rate=0.5)
    unscaled = holdfast.NPC(plain, SGD(plain.parameters(), lr=0.1), rate=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

    def scaled_step(x: Tensor, factor: float = 1.0) -> None:
        optimizer.zero_grad()
        scaler.scale(loss_of(model, x) * factor).backward()
        scaler.step(optimizer)
        scaler.update()

    for x in batches(3):
        scaled_step(x)
        train(plain, unscaled, [x])
    held, importance = parameters_of(model), optimizer.importance
    scaled_step(torch.randn(8, 4), factor=torch.inf)  # overflows, so the scaler skips the step
    assert_same_bits(parameters_of(model), held)
    assert_same_bits(optimizer.importance, importance)
    assert scaler.get_scale() == 2.0**9
    for x in batches(3):
        scaled_step(x)
        train(plain, unscaled, [x])
    for name, p in model.named_parameters():
        torch.testing.assert_close(p, plain.get_parameter(name))
    for name, values in optimizer.importance.items():
        torch.testing.assert_close(values, unscaled.importance[name])


def test_autocast_with_a_grad_scaler() -> None:
    model = mlp(width=16)
    full = copy.deepcopy(model)
    optimizer = holdfast.NPC(model, SGD(model.parameters(), lr=0.1), rate=1.0)
    scaler, x = torch.amp.GradScaler("cpu", init_scale=2.0**12), torch.randn(64, 4)
    with torch.autocast("cpu", torch.float16):
        loss = loss_of(model, x)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    expected = normalised_taylor(*gradient_at(full, "0", x), 1)
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


@pytest.mark.parametrize("quiet", [torch.no_grad, torch.inference_mode])
def test_evaluation_in_between_changes_nothing(quiet: Callable[[], Any]) -> None:
    model, plain = Block(), Block()
    plain.load_state_dict(model.state_dict())
    ours = holdfast.NPC(model, SGD(model.parameters(), lr=0.1), rate=0.5, free=[model.head])
    theirs = holdfast.NPC(plain, SGD(plain.parameters(), lr=0.1), rate=0.5, free=[plain.head])
    for _ in range(4):
        x = torch.randn(8, 2, 8, 8)
        model.eval()
        with quiet():
            model(torch.randn(8, 2, 8, 8))
        model.train()
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


# ---- copies, state, closing ----


def test_a_copied_or_saved_model_is_a_plain_model() -> None:
    model, x = Block(), torch.randn(4, 2, 8, 8)
    keys = list(model.state_dict())
    optimizer = holdfast.NPC(model, SGD(model.parameters(), lr=0.1), rate=0.5, free=[model.head])
    for _ in range(2):  # before and after the places of observation are known
        twin = copy.deepcopy(model)
        assert list(model.state_dict()) == keys
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        Block().load_state_dict(torch.load(file, weights_only=True))
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        torch.load(file, weights_only=False)
        assert torch.equal(twin.eval()(x), model.eval()(x))
        model.train(), twin.train()
        loss_of(twin, x).backward()  # not measured: the optimizer belongs to the original
        train(model, optimizer, [x])
        held = optimizer.importance
        loss_of(twin, torch.randn(4, 2, 8, 8)).backward()
        assert_same_bits(optimizer.importance, held)


@every_optimizer
@pytest.mark.parametrize("when", [0, 3])
def test_state_goes_on_bit_for_bit_in_a_fresh_process_of_training(kind: str, when: int) -> None:
    def build() -> tuple[nn.Module, holdfast.NPC]:
        torch.manual_seed(7)
        model = nn.Sequential(
            nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(inplace=True), nn.Linear(6, 6), nn.Linear(6, 3)
        )
        return model, holdfast.NPC(model, OPTIMIZERS[kind](model.parameters()), rate=0.3, beta=0.8, free=[model[4]])

    data = batches(8)
    model, optimizer = build()
    train(model, optimizer, data[:when])
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    train(model, optimizer, data[when:])

    resumed, optimizer_resumed = build()
    file.seek(0)
    state = torch.load(file, weights_only=True)
    resumed.load_state_dict(state["model"])
    optimizer_resumed.load_state_dict(state["optimizer"])
    train(resumed, optimizer_resumed, data[when:])
    assert_same_bits(dict(model.state_dict()), dict(resumed.state_dict()))
    assert_same_bits(optimizer.importance, optimizer_resumed.importance)


def test_settings_come_back_with_the_state() -> None:
    model = mlp()
    optimizer = holdfast.NPC(model, SGD(model.parameters(), lr=0.1), beta=0.4, rate=0.2, gain=3.0)
    other = holdfast.NPC(model, SGD(model.parameters(), lr=0.5))
    other.load_state_dict(optimizer.state_dict())
    assert (other.beta, other.rate, other.gain, other.param_groups[0]["lr"]) == (0.4, 0.2, 3.0, 0.1)
    assert other.param_groups is other.wrapped.param_groups


def hooks_of(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in model.modules())


@pytest.mark.parametrize("steps", [0, 2])
def test_close_leaves_no_hook(steps: int) -> None:
    model = mlp()
    with holdfast.NPC(model, SGD(model.parameters(), lr=0.1)) as optimizer:
        assert hooks_of(model) > 0
        train(model, optimizer, batches(steps))
    assert hooks_of(model) == 0
    with pytest.raises(ValueError, match="closed"):
        optimizer.step()
    train(model, optimizer.wrapped, batches(1))


def test_a_dropped_optimizer_takes_its_hooks_along() -> None:
    model = mlp()
    optimizer = holdfast.NPC(model, SGD(model.parameters(), lr=0.1))
    train(model, optimizer, batches(1))
    del optimizer
    assert hooks_of(model) == 0


def test_it_is_an_optimizer_that_shares_what_it_wraps() -> None:
    model = mlp()
    inner = SGD(model.parameters(), lr=0.1)
    optimizer = holdfast.NPC(model, inner)
    assert isinstance(optimizer, Optimizer)
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state
    assert optimizer.defaults is inner.defaults
    assert "NPC(SGD" in repr(optimizer)
    called: list[str] = []
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    train(model, optimizer, batches(1))
    assert called == ["after"]


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


def test_other_calls_do_nothing() -> None:
    model = mlp()
    optimizer = holdfast.NPC(model, SGD(model.parameters(), lr=0.1))
    before = parameters_of(model)
    optimizer.consolidate(batches(2), active=[0, 1])
    assert optimizer.penalty().item() == 0
    assert_same_bits(parameters_of(model), before)


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
