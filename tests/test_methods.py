"""What holds for every method as an optimizer: a method is tested here by being registered."""

import copy
import inspect
import io
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, AdamW, Optimizer
from torch.optim import lr_scheduler as schedulers

from helpers import assert_same_bits, hooks_of, memory_in, memory_of, mlp, parameters_of, tensors_in, train
from holdfast.methods import METHODS, Joint, Method
from holdfast.methods.memory import PLAIN

every_method = pytest.mark.parametrize("name", METHODS)

Batches = list[tuple[Tensor, Tensor]]


def build(name: str, model: nn.Module, optimizer: Optimizer | None = None, **settings: Any) -> Method:
    return METHODS[name](model, optimizer or SGD(model.parameters(), lr=0.1), **settings)


def task(count: int = 3, dtype: torch.dtype = torch.float32) -> Batches:
    return [(torch.randn(8, 4, dtype=dtype), torch.randint(2, (8,))) for _ in range(count)]


def learn(model: nn.Module, optimizer: Method, batches: Batches) -> None:
    train(model, optimizer, [x for x, _ in batches])


def after_a_task(name: str, model: nn.Module, optimizer: Optimizer | None = None, **settings: Any) -> Method:
    """A method that has finished a task and remembers it."""
    method = build(name, model, optimizer, **settings)
    batches = task(dtype=next(model.parameters()).dtype)
    learn(model, method, batches)
    method.consolidate(batches, active=[0, 1])
    return method


def twins(name: str) -> tuple[nn.Module, Method, nn.Module, Method]:
    """The same model twice, each with the same method after the same task."""
    made = []
    for _ in range(2):
        torch.manual_seed(5)
        model = mlp().double()
        made += [model, after_a_task(name, model)]
    return tuple(made)  # type: ignore[return-value]


def assert_close(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        near = 1e-6 if name.startswith("/vectors") else 1e-12  # eigenvectors are as exact as eigenvalues are apart
        torch.testing.assert_close(value, theirs[name], rtol=1e-9, atol=near)


# ---- an optimizer like any other ----


@every_method
def test_it_is_an_optimizer_that_shares_what_it_wraps(name: str) -> None:
    model = mlp()
    inner = SGD(model.parameters(), lr=0.1)
    optimizer = build(name, model, inner)
    assert isinstance(optimizer, Optimizer)
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state
    assert optimizer.defaults is inner.defaults
    assert repr(optimizer).startswith(f"{METHODS[name].__name__}(SGD")
    called: list[str] = []
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    learn(model, optimizer, task(1))
    assert called == ["after"]


@every_method
def test_nothing_is_added_to_the_model(name: str) -> None:
    model = mlp()
    keys, x = list(model.state_dict()), torch.randn(3, 4)
    optimizer = after_a_task(name, model)
    assert list(model.state_dict()) == keys
    with_method = model(x)
    optimizer.close()
    assert torch.equal(with_method, model(x))


@every_method
def test_a_closure_is_called_once_and_its_loss_returned(name: str) -> None:
    model, optimizer, twin, theirs = twins(name)
    ((x, _),), calls = task(1, torch.float64), []

    def closure() -> Tensor:
        calls.append(1)
        optimizer.zero_grad()
        loss = model(x).square().mean() + optimizer.penalty()
        loss.backward()
        return loss

    before = twin(x).square().mean()
    before = before + theirs.penalty()
    if name != "joint":  # which draws other batches at every call
        assert optimizer.step(closure).item() == before.item()
        train(twin, theirs, [x])
        assert_same_bits(parameters_of(model), parameters_of(twin))
    else:
        optimizer.step(closure)
    assert len(calls) == 1


@every_method
def test_the_learning_rate_of_each_group_is_its_own(name: str) -> None:
    model = mlp()
    groups = [{"params": model[0].parameters(), "lr": 0.2}, {"params": model[2:].parameters(), "lr": 0.0}]
    optimizer = after_a_task(name, model, SGD(groups, lr=1.0))
    before = parameters_of(model)
    learn(model, optimizer, task())
    for key, value in parameters_of(model).items():
        assert torch.equal(value, before[key]) == (not key.startswith("0.")), key


@every_method
def test_an_added_group_trains(name: str) -> None:
    model, extra = mlp(), nn.Parameter(torch.ones(1))
    optimizer = build(name, model)
    optimizer.add_param_group({"params": [extra], "lr": 0.5})
    x = torch.randn(8, 4)
    (model(x).square().mean() + extra.sum() + optimizer.penalty()).backward()
    optimizer.step()
    assert extra.item() == 0.5


@every_method
def test_gradient_clipping_limits_the_step(name: str) -> None:
    model = mlp()
    optimizer = build(name, model)
    before = parameters_of(model)
    (model(torch.randn(8, 4)).square().mean() + optimizer.penalty()).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()
    moved = sum((value - before[key]).square().sum() for key, value in parameters_of(model).items())
    assert 0 < moved.sqrt() <= 0.1 * 1e-3 * 1.01


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


@every_method
@pytest.mark.parametrize("around_method", [True, False], ids=["around the method", "around the wrapped optimizer"])
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_scheduler(name: str, kind: str, around_method: bool) -> None:
    """The same learning rates as for the bare optimizer, and a model that obeys them all the same."""
    model, bare = mlp(), mlp()
    inner = SGD(model.parameters(), lr=0.1, momentum=0.5)
    optimizer = after_a_task(name, model, inner)
    alone = SGD(bare.parameters(), lr=0.1, momentum=0.5)
    ours, theirs = SCHEDULERS[kind](optimizer if around_method else inner), SCHEDULERS[kind](alone)
    for batch in task(4):
        learn(model, optimizer, [batch])
        train(bare, alone, [batch[0]])
        for scheduler in (ours, theirs):
            scheduler.step(1.0) if kind == "ReduceLROnPlateau" else scheduler.step()
        group, other = optimizer.param_groups[0], alone.param_groups[0]
        assert (group["lr"], group["momentum"]) == (other["lr"], other["momentum"])
    before = parameters_of(model)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    learn(model, optimizer, task(1))
    assert_same_bits(parameters_of(model), before)


# ---- accumulation and precision ----


OF_BATCHES = {"compact": {"weight": 0.0}}
"""Settings without the terms that are not means over samples: an effective rank is one of a whole batch."""


@every_method
@settings(max_examples=8, deadline=None)
@given(st.sampled_from([2, 4, 8]), st.integers(0, 1000))
def test_accumulation_equals_the_large_batch(name: str, parts: int, seed: int) -> None:
    torch.manual_seed(seed)
    large, small = mlp().double(), mlp().double()
    small.load_state_dict(large.state_dict())
    ours, theirs = (build(name, model, **OF_BATCHES.get(name, {})) for model in (large, small))
    batches = task(1, torch.float64)
    for _ in range(2):
        for x, _ in (*batches, *task(2, torch.float64)):
            train(large, ours, [x])
            theirs.zero_grad()
            for part in x.chunk(parts):
                ((small(part).square().mean() + theirs.penalty()) / parts).backward()
            theirs.step()
        for optimizer in (ours, theirs):
            optimizer.consolidate(batches, active=[0, 1])  # one batch, which joint training draws every time
    assert_close(parameters_of(large), parameters_of(small))
    assert_close(memory_of(ours), memory_of(theirs))


@every_method
def test_grad_scaler_and_a_skipped_step(name: str) -> None:
    model, optimizer, plain, unscaled = twins(name)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

    def scaled_step(x: Tensor, factor: float = 1.0) -> None:
        optimizer.zero_grad()
        scaler.scale((model(x).square().mean() + optimizer.penalty()) * factor).backward()
        scaler.step(optimizer)
        scaler.update()

    for x, _ in task(3, torch.float64):
        scaled_step(x)
        train(plain, unscaled, [x])
    if name == "joint":
        return  # a skipped step has drawn from the finished tasks all the same
    held, memory = parameters_of(model), memory_of(optimizer)
    scaled_step(torch.randn(8, 4, dtype=torch.float64), factor=torch.inf)  # overflows, so the scaler skips the step
    assert_same_bits(parameters_of(model), held)
    assert_same_bits(memory_of(optimizer), memory)
    assert scaler.get_scale() == 2.0**9
    for x, _ in task(3, torch.float64):
        scaled_step(x)
        train(plain, unscaled, [x])
    assert_close(parameters_of(model), parameters_of(plain))
    assert_close(memory_of(optimizer), memory_of(unscaled))


@every_method
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(name: str, dtype: torch.dtype) -> None:
    model = mlp(width=16)
    optimizer = build(name, model)
    for _ in range(2):
        batches = task()
        for x, y in batches:
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype):
                loss = nn.functional.cross_entropy(model(x)[:, :2], y) + optimizer.penalty()
            loss.backward()
            optimizer.step()
        with torch.autocast("cpu", dtype):
            optimizer.consolidate(batches, active=[0, 1])
    assert all(value.isfinite().all() for value in parameters_of(model).values())
    for value in memory_of(optimizer).values():
        assert value.dtype == torch.float32
        assert value.isfinite().all()


@every_method
def test_parameters_of_low_precision(name: str) -> None:
    model = mlp(width=16).bfloat16()
    optimizer = build(name, model)
    for _ in range(2):
        batches = task(dtype=torch.bfloat16)
        learn(model, optimizer, batches)
        optimizer.consolidate(batches, active=[0, 1])
    assert all(value.isfinite().all() for value in (*parameters_of(model).values(), *memory_of(optimizer).values()))


# ---- evaluation, copies ----


@every_method
@pytest.mark.parametrize("quiet", [torch.no_grad, torch.inference_mode])
def test_evaluation_in_between_changes_nothing(name: str, quiet: Callable[[], Any]) -> None:
    model, ours, plain, theirs = twins(name)
    for batch in task(4, torch.float64):
        model.eval()
        with quiet():
            model(torch.randn(5, 4, dtype=torch.float64))
        model.train()
        ours.zero_grad()
        loss = model(batch[0]).square().mean()
        with quiet():
            model(torch.randn(5, 4, dtype=torch.float64))
        (loss + ours.penalty()).backward()
        ours.step()
        learn(plain, theirs, [batch])
    assert_same_bits(parameters_of(model), parameters_of(plain))
    assert_same_bits(memory_of(ours), memory_of(theirs))


@every_method
def test_a_copied_or_saved_model_is_a_plain_model(name: str) -> None:
    model, x = mlp(), torch.randn(4, 4)
    optimizer = build(name, model)
    for _ in range(2):  # before and after the first steps and the first task
        twin = copy.deepcopy(model)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        saved = torch.load(file, weights_only=False)
        assert torch.equal(twin(x), model(x))
        assert torch.equal(saved(x), model(x))
        batches = task()
        learn(model, optimizer, batches)
        optimizer.consolidate(batches, active=[0, 1])
        held = memory_of(optimizer)
        twin(x).square().mean().backward()  # not measured: the method belongs to the original
        assert_same_bits(memory_of(optimizer), held)


# ---- state ----


def resume(name: str, model: nn.Module, kind: type[Optimizer], finished: Batches, tasks: int) -> Method:
    optimizer = build(name, model, kind(model.parameters(), lr=0.01))
    if isinstance(optimizer, Joint):  # the data of finished tasks are in no state_dict
        for _ in range(tasks):
            optimizer.consolidate(finished, active=[0, 1])
    return optimizer


@every_method
@pytest.mark.parametrize("kind", [SGD, AdamW])
@pytest.mark.parametrize("when", [0, 2, 3, 5, 6, 8])
def test_state_goes_on_bit_for_bit_in_a_fresh_process_of_training(name: str, kind: type[Optimizer], when: int) -> None:
    """Interrupted at the start, within a task, and at the end of one; each task is three batches."""

    def start() -> nn.Module:
        torch.manual_seed(7)
        return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(inplace=True), nn.Linear(6, 3))

    data = task(9)

    def go_on(model: nn.Module, optimizer: Method, first: int, last: int) -> None:
        for i in range(first, last):
            learn(model, optimizer, data[i : i + 1])
            if i % 3 == 2:
                optimizer.consolidate(data[:3], active=[0, 1])

    model = start()
    optimizer = resume(name, model, kind, data[:3], 0)
    go_on(model, optimizer, 0, when)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    go_on(model, optimizer, when, 9)

    resumed = start()
    again = resume(name, resumed, kind, data[:3], when // 3)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    resumed.load_state_dict(state["model"])
    again.load_state_dict(state["optimizer"])
    go_on(resumed, again, when, 9)
    assert_same_bits(dict(model.state_dict()), dict(resumed.state_dict()))
    assert_same_bits(memory_of(optimizer), memory_of(again))


@every_method
def test_a_state_dict_that_does_not_fit_changes_nothing(name: str) -> None:
    optimizer = after_a_task(name, mlp())
    held = memory_of(optimizer)
    with pytest.raises(ValueError, match="was not made by a holdfast method"):
        optimizer.load_state_dict(SGD(mlp().parameters(), lr=0.1).state_dict())
    foreign = optimizer.state_dict()
    foreign["param_groups"][0]["holdfast"] = {"method": "Unheard", "tensors": 0}
    with pytest.raises(ValueError, match=f"made by Unheard, not by {METHODS[name].__name__}"):
        optimizer.load_state_dict(foreign)
    if held:
        with pytest.raises(ValueError, match=r"of another model: it has \(\d.*\) for '.*', this model has \(\d"):
            optimizer.load_state_dict(after_a_task(name, mlp(width=7)).state_dict())
    assert_same_bits(memory_of(optimizer), held)


def assert_unchanged(optimizer: Method, before: dict[str, Any]) -> None:
    after = optimizer.state_dict()
    assert_same_bits(tensors_in(after), tensors_in(before))
    assert repr(after) == repr(before)


@every_method
def test_a_damaged_state_dict_is_refused_in_one_line_and_changes_nothing(name: str) -> None:
    """Whatever is missing or wrong: an entry, a setting, a number, a list."""
    model = mlp()
    optimizer = after_a_task(name, model, SGD(model.parameters(), lr=0.1, momentum=0.9))
    before = optimizer.state_dict()

    def refuse(damage: Callable[[dict[str, Any]], Any]) -> str:
        state = copy.deepcopy(before)
        state["param_groups"][0]["lr"] = 0.7
        damage(state)
        with pytest.raises(ValueError) as refused:
            optimizer.load_state_dict(state)
        assert_unchanged(optimizer, before)
        assert "\n" not in str(refused.value)
        return str(refused.value)

    for key, value in memory_in(before).items():
        message = refuse(lambda state, key=key: memory_in(state).pop(key))
        if not isinstance(value, dict):
            assert f"has no {key}" in message or key == "method"
        if not isinstance(value, str) or key in ("blank", "layout", "heads", "drawn"):
            refuse(lambda state, key=key: memory_in(state).update({key: "much"}))
    refuse(lambda state: state.pop("state"))
    refuse(lambda state: state["param_groups"].append(state["param_groups"][0]))  # the wrapped optimizer refuses it


def test_a_damaged_state_of_an_inner_method_changes_no_part() -> None:
    model = mlp()
    optimizer = METHODS["lwf"](model, after_a_task("npc", model, SGD(model.parameters(), lr=0.1, momentum=0.9)))
    before = optimizer.state_dict()
    state = copy.deepcopy(before)
    state["param_groups"][0]["lr"] = 0.7
    memory_in(state)["weight"] = 0.3
    memory_in(state)["wrapped"]["rate"] = 2
    with pytest.raises(ValueError, match="of NPC has a wrong setting: rate must be above 0 and at most 1, got 2"):
        optimizer.load_state_dict(state)
    assert_unchanged(optimizer, before)


@pytest.mark.parametrize("attribute", ["_weight", "weight", "method", "_wrapped", "tensors", "blank", "layout"])
def test_two_entries_of_one_name_in_a_state_dict_are_refused(attribute: str) -> None:
    with pytest.raises(TypeError, match=f"Clash has two entries '{attribute.lstrip('_')}' in its state_dict"):

        class Clash(Method):
            remembers: ClassVar = {attribute: PLAIN}

            def __init__(self, model: nn.Module, optimizer: Optimizer, *, weight: float = 1.0) -> None:
                super().__init__(model, optimizer)


def test_tensors_are_not_plain() -> None:
    class Wrong(Method):
        remembers: ClassVar = {"_kept": PLAIN}
        _kept: ClassVar = {"a": torch.zeros(3)}

    model = mlp()
    with pytest.raises(TypeError, match="'_kept' holds tensors: PLAIN is for numbers"):
        Wrong(model, SGD(model.parameters(), lr=0.1)).state_dict()


@every_method
def test_memory_counts_no_blanks(name: str) -> None:
    """Before the first step, a state_dict has entries for all that will be remembered."""
    optimizer = build(name, mlp())
    entries = memory_in(optimizer.state_dict())
    assert optimizer.memory().keys() <= entries.keys()
    assert len(tensors_in(entries)) >= entries["tensors"]
    again = after_a_task(name, mlp())
    if not isinstance(again, Joint):
        again.load_state_dict(optimizer.state_dict())
        assert again.memory() == optimizer.memory()


@every_method
def test_what_a_state_dict_holds_stays_as_it_was(name: str) -> None:
    model = mlp()
    optimizer = after_a_task(name, model)
    state = memory_of(optimizer)
    copies = {key: value.clone() for key, value in state.items()}
    learn(model, optimizer, task())
    if name != "separate":
        optimizer.consolidate(task(), active=[0, 1])
    assert_same_bits(state, copies)


@every_method
def test_a_loaded_state_dict_is_not_written_to(name: str) -> None:
    model, batches = mlp(), task()
    optimizer = after_a_task(name, model)
    again = build(name, model)
    if isinstance(again, Joint):
        again.consolidate(batches, active=[0, 1])
    learn(model, optimizer, batches)
    state = optimizer.state_dict()
    kept = copy.deepcopy(tensors_in(memory_in(state)))
    again.load_state_dict(state)
    learn(model, again, batches)
    again.consolidate(batches, active=[0, 1])
    learn(model, again, batches)
    assert_same_bits(tensors_in(memory_in(state)), kept)


@every_method
def test_it_is_not_pickled(name: str) -> None:
    with pytest.raises(TypeError, match=r"save its state_dict\(\)"):
        copy.deepcopy(build(name, mlp()))


# ---- the end of a task ----


@pytest.mark.parametrize("name", sorted(METHODS.keys() - {"separate"}))  # which starts afresh at the end of a task
def test_consolidating_changes_nothing_but_what_is_remembered(name: str) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 3))
    optimizer = build(name, model)
    batches = task()
    learn(model, optimizer, batches)
    model[1].eval()
    (model(batches[0][0]).square().mean() + optimizer.penalty()).backward()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    gradients = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    modes, random = [m.training for m in model.modules()], torch.get_rng_state()
    optimizer.consolidate(batches, active=[0, 1])
    assert_same_bits(dict(model.state_dict()), state)
    assert_same_bits({key: p.grad for key, p in model.named_parameters() if p.grad is not None}, gradients)
    assert [m.training for m in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random)


def bytes_held(thing: Any, seen: set[int]) -> int:
    """Of all tensors that can be reached from `thing`."""
    if id(thing) in seen:
        return 0
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        return thing.untyped_storage().nbytes()
    parts = [vars(thing)] if hasattr(thing, "__dict__") and not isinstance(thing, type) else []
    if isinstance(thing, dict):
        parts = list(thing.values())
    elif isinstance(thing, list | tuple | set):
        parts = list(thing)
    return sum(bytes_held(part, seen) for part in parts)


@pytest.mark.parametrize("name", sorted(METHODS.keys() - {"joint"}))  # which keeps the data of all tasks: it is a bound
def test_memory_does_not_grow_with_the_tasks(name: str) -> None:
    model, batches = mlp(width=50), task()
    optimizer = build(name, model)
    used = []
    for _ in range(20):
        learn(model, optimizer, batches)
        optimizer.consolidate(batches, active=[0, 1])
        optimizer.zero_grad()
        used.append((bytes_held(optimizer, set()), sum(value.nbytes for value in memory_of(optimizer).values())))
    assert used[-1] == used[1]
    assert used[1][0] > used[1][1]


@pytest.mark.parametrize("name", [n for n in METHODS if "strength" in inspect.signature(METHODS[n]).parameters])
def test_any_strength_stays_finite(name: str) -> None:
    model = mlp()
    optimizer = build(name, model, strength=1e6)
    for _ in range(3):
        batches = task()
        for _ in range(20):
            learn(model, optimizer, batches)
        optimizer.consolidate(batches, active=[0, 1])
    assert all(value.isfinite().all() for value in parameters_of(model).values())


@every_method
def test_leaving_the_penalty_out_is_refused_or_makes_no_difference(name: str) -> None:
    model, ours, twin, theirs = twins(name)
    ((x, _),) = task(1, torch.float64)
    ours.zero_grad()
    model(x).square().mean().backward()
    refusal = ""
    try:
        ours.step()
    except ValueError as error:
        refusal = str(error)
    if refusal:
        assert "is missing from the loss: loss = criterion(model(x), y) + optimizer.penalty()" in refusal
    else:
        train(twin, theirs, [x])
        assert_same_bits(parameters_of(model), parameters_of(twin))


# ---- closing ----


@every_method
@pytest.mark.parametrize("steps", [0, 2])
def test_close_leaves_no_hook(name: str, steps: int) -> None:
    model = mlp()
    with build(name, model) as optimizer:
        learn(model, optimizer, task(steps))
    assert hooks_of(model) == 0
    model(torch.randn(3, 4)).sum().backward()
    with pytest.raises(ValueError, match=f"this {METHODS[name].__name__} is closed"):
        optimizer.step()
    train(model, optimizer.wrapped, [torch.randn(3, 4)])


@every_method
def test_a_dropped_method_takes_its_hooks_along(name: str) -> None:
    model = mlp()
    optimizer = after_a_task(name, model)
    del optimizer
    assert hooks_of(model) == 0


# ---- bad input ----


@every_method
def test_what_is_not_a_model_or_an_optimizer(name: str) -> None:
    model = mlp()
    sgd = SGD(model.parameters(), lr=0.1)
    method = METHODS[name]
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got SGD"):
        method(sgd, model)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"optimizer must be a torch\.optim\.Optimizer, got generator"):
        method(model, model.parameters())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"{method.__name__} and {method.__name__} cannot be combined: one of them"):
        method(model, build(name, model))
    with pytest.raises(TypeError, match="LBFGS"):
        method(model, LBFGS(model.parameters()))
    with pytest.raises(TypeError, match="DistributedDataParallel"):
        method(nn.DataParallel(model), sgd)
    with pytest.raises(ValueError, match="holds none of the model's parameters"):
        method(model, SGD(mlp().parameters(), lr=0.1))


@every_method
def test_a_step_before_any_backward(name: str) -> None:
    optimizer = build(name, mlp())
    with pytest.raises(ValueError, match=r"step\(\) came before any backward\(\).*call loss.backward\(\) first"):
        optimizer.step()


@every_method
def test_numbers_out_of_range_are_named(name: str) -> None:
    """Every setting that is a number by default refuses what is none, and what is negative or infinite."""
    for key, parameter in inspect.signature(METHODS[name]).parameters.items():
        if isinstance(parameter.default, float):
            with pytest.raises(TypeError, match=f"{key} must be a number, got 'much'"):
                build(name, mlp(), **{key: "much"})
            for bad in (-1.0, float("nan"), float("inf")):
                with pytest.raises(ValueError, match=f"{key} must be .*, got {bad}"):
                    build(name, mlp(), **{key: bad})
