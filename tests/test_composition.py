"""Methods around methods: penalties add, all parts consolidate, states nest."""

from collections.abc import Iterator
from itertools import permutations
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div, log_softmax
from torch.optim import SGD, AdamW, Optimizer

import holdfast
from helpers import assert_same_bits, hooks_of, memory_in, memory_of, mlp, parameters_of, tensors_in
from holdfast.methods import METHODS, Method, parts_of
from holdfast.methods.building import build, check, defaults_of, joined_settings, searched_setting, split_settings

Batches = list[tuple[Tensor, Tensor]]

ALONE = ("finetune", "joint", "separate")
STACKS = [
    *("lwf+npc", "npc+lwf", "ewc+npc", "npc+ewc", "si+cpc", "lwf+ewc+npc", "ewc+mas", "ssl+npc", "lwf+si"),
    *("compact+npc", "compact+dpc", "lwf+compact+dpc"),
]


def task(seed: int, count: int = 4) -> Batches:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(8, 4, generator=generator), torch.randint(3, (8,), generator=generator)) for _ in range(count)]


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return mlp()


def learn(model: nn.Module, method: Method, batches: Batches) -> None:
    for x, y in batches:
        loss = cross_entropy(model(x), y) + method.penalty()
        method.zero_grad()
        loss.backward()
        method.step()


def made(name: str, model: nn.Sequential, optimizer: Optimizer | None = None, **settings: Any) -> Method:
    optimizer = optimizer or SGD(model.parameters(), lr=0.1)
    return build(name, model, optimizer, settings, heads=[model[4]])


# ---- names ----


def test_left_wraps_right() -> None:
    model = network()
    method = made("lwf+ewc+npc", model)
    assert [type(part).__name__ for part in method.parts.values()] == ["LwF", "EWC", "NPC"]
    assert list(method.parts) == parts_of("lwf+ewc+npc")
    assert isinstance(method.wrapped.wrapped.wrapped, SGD)
    assert repr(method).startswith("LwF(EWC(NPC(SGD")


def test_settings_are_named_by_part() -> None:
    settings = {"lwf.weight": 0.1, "npc.beta": 0.5}
    assert split_settings("lwf+npc", settings) == {"lwf": {"weight": 0.1}, "npc": {"beta": 0.5}}
    assert joined_settings(split_settings("lwf+npc", settings)) == settings
    method = made("lwf+npc", network(), **settings)
    assert method.parts["lwf"].weight == 0.1
    assert method.parts["npc"].beta == 0.5
    assert defaults_of("lwf+npc")["npc.beta"] == 0.7
    assert searched_setting("lwf+npc") == "lwf.weight"
    assert searched_setting("npc+lwf") == "npc.beta"


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("lwf+npx", {}, "unknown method 'npx'; available: npc, dpc"),
        ("npc+npc", {}, "'npc\\+npc' names a method twice"),
        ("npc+", {}, "unknown method ''"),
        ("joint+npc", {}, "joint is an upper bound and cannot be combined with other methods"),
        ("lwf+separate", {}, "separate is an upper bound and cannot be combined with other methods"),
        ("npc+cpc", {}, "NPC and CPC cannot be combined: both control plasticity"),
        ("lwf+cpc+npc", {}, "CPC and NPC cannot be combined: both control plasticity"),
        ("ssl+mas", {}, "SSL and MAS cannot be combined: SSL already includes MAS"),
        ("npc+si", {}, "NPC cannot wrap SI: SI measures the step, which NPC alters afterwards; use si\\+npc"),
        ("cpc+lwf+si", {}, "CPC cannot wrap SI: SI measures the step, which CPC alters afterwards; use si\\+cpc"),
        ("lwf+dpc+si", {}, "DPC cannot wrap SI: SI measures the step, which DPC alters afterwards; use si\\+dpc"),
        ("ewc+si", {"ewc.form": "loss"}, "EWC cannot wrap SI"),
        ("mas+si", {}, "MAS cannot wrap SI"),
        ("ssl+si", {}, "SSL cannot wrap SI"),
        ("finetune+npc", {}, "FineTune and NPC cannot be combined: FineTune works alone"),
        ("ewc+finetune", {}, "EWC and FineTune cannot be combined: FineTune works alone"),
        ("lwf+npc", {"beta": 0.5}, "lwf\\+npc has no setting 'beta'; name the part too, as in npc.beta"),
        ("lwf+npc", {"bta": 0.5}, "lwf\\+npc has no setting 'bta'; name the part too, as in lwf.weight"),
        ("lwf+npc", {"ewc.strength": 0.5}, "lwf\\+npc has no setting 'ewc.strength'"),
        ("lwf+npc", {"npc.bta": 0.5}, "npc has no setting 'bta'; it has beta, rate, gain: did you mean beta\\?"),
        ("lwf+npc", {"npc.rate": 2}, "rate must be above 0 and at most 1, got 2"),
    ],
)
def test_nonsense_is_refused_in_one_line(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        check(name, settings)
    assert "\n" not in str(refused.value)


def test_every_pair_of_registered_methods_is_built_or_refused_alike() -> None:
    """`check`, which builds nothing, and the constructors agree about which methods go together."""
    for outer, inner in permutations(METHODS, 2):
        try:
            check(f"{outer}+{inner}", {})
        except ValueError:
            model = network()
            with pytest.raises(ValueError, match=r"cannot (be combined|wrap)"):
                METHODS[outer](model, METHODS[inner](model, SGD(model.parameters(), lr=0.1)))
        else:
            made(f"{outer}+{inner}", network()).close()


def test_methods_of_different_models_and_closed_ones_are_refused() -> None:
    model, other = network(), network()
    inner = holdfast.NPC(other, SGD([*other.parameters(), *model.parameters()], lr=0.1))
    with pytest.raises(ValueError, match="the inner NPC belongs to another model"):
        holdfast.LwF(model, inner)
    inner.close()
    with pytest.raises(ValueError, match="the inner NPC is closed"):
        holdfast.LwF(other, inner)


def test_a_method_has_one_outer_method() -> None:
    model = network()
    inner = holdfast.NPC(model, SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="weight must be at least 0") as refused:
        holdfast.LwF(model, inner, weight=-1.0)
    outer = holdfast.LwF(model, inner)  # the refused one does not count, though its traceback keeps it
    assert refused.tb is not None
    with pytest.raises(ValueError, match="the inner NPC is already wrapped by LwF: build a new one, or use that stack"):
        holdfast.EWC(model, inner)
    learn(model, outer, task(1))
    del outer
    learn(model, holdfast.EWC(model, inner), task(1))


def test_parts_with_the_same_name_are_refused() -> None:
    class lwf(Method):  # noqa: N801
        pass

    model = network()
    inner = lwf(model, SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="LwF and lwf cannot be combined: both would be the part 'lwf'; rename one"):
        holdfast.LwF(model, inner)


# ---- what a stack computes ----


def test_lwf_around_npc_is_npc_on_the_sum_of_the_losses() -> None:
    """Against NPC alone, with the distillation written out in the loss."""
    first, second = task(1), task(2)
    model = network()
    method = made("lwf+npc", model, **{"lwf.weight": 0.3, "npc.rate": 0.2})
    learn(model, method, first)
    method.consolidate(first)
    learn(model, method, second)

    twin = network()
    alone = holdfast.NPC(twin, SGD(twin.parameters(), lr=0.1), rate=0.2, free=[twin[4]])
    learn(twin, alone, first)
    teacher = network()
    teacher.load_state_dict(twin.state_dict())
    for x, y in second:
        outputs = twin(x)
        old, new = log_softmax(teacher(x).detach() / 2, 1), log_softmax(outputs / 2, 1)
        term = 4 * kl_div(new, old, reduction="batchmean", log_target=True)
        loss = cross_entropy(outputs, y) + 0.3 * term
        alone.zero_grad()
        loss.backward()
        alone.step()
    for name, value in parameters_of(model).items():
        torch.testing.assert_close(value, parameters_of(twin)[name])
    torch.testing.assert_close(method.importance["0"], alone.importance["0"])


@pytest.mark.parametrize("form", ["proximal", "loss"])
@pytest.mark.parametrize("inner", ["npc", "cpc", "dpc"])
def test_si_around_plasticity_measures_the_gradient_of_the_loss(inner: str, form: str) -> None:
    """Not the gradient that the inner method has scaled: omega and Omega in a plain loop."""
    model, twin = network().double(), network().double()
    settings = {f"{inner}.rate": 0.5, f"{inner}.beta": 0.5, "si.strength": 0.3, "si.xi": 0.01, "si.form": form}
    method = made(f"si+{inner}", model, **settings)
    big = {name: torch.zeros_like(p) for name, p in parameters_of(model).items()}
    for seed in (1, 2):
        batches = [(x.double(), y) for x, y in task(seed)]
        small, start = {name: torch.zeros_like(p) for name, p in big.items()}, parameters_of(model)
        for x, y in batches:
            twin.load_state_dict(before := parameters_of(model))
            gradients = torch.autograd.grad(cross_entropy(twin(x), y), list(twin.parameters()))
            learn(model, method, [(x, y)])
            for (name, after), gradient in zip(parameters_of(model).items(), gradients, strict=True):
                small[name] -= gradient * (after - before[name])
        assert any((shares < 1).any() for shares in method.plasticity.values())
        for name, value in memory_in(method.state_dict())["path"].items():
            torch.testing.assert_close(value, small[name], rtol=1e-8, atol=1e-12)
        for name, end in parameters_of(model).items():
            big[name] = torch.relu(big[name] + small[name] / ((end - start[name]) ** 2 + 0.01))
        method.consolidate(batches)
        for name, value in method.importance.items():
            torch.testing.assert_close(value, big[name], rtol=1e-8, atol=1e-12)


def test_penalties_add_up() -> None:
    model, batches = network(), task(1)
    settings = {"ewc.form": "loss", "ewc.strength": 3.0, "mas.form": "loss", "mas.strength": 0.5, "lwf.weight": 0.2}
    method = made("lwf+ewc+mas", model, **settings)
    learn(model, method, batches)
    method.consolidate(batches)
    learn(model, method, task(2, count=1))
    x, _ = task(4)[0]
    model(x)
    total = method.penalty()
    model(x)
    parts = [part._penalty() for part in method.parts.values()]
    assert all(part > 0 for part in parts)
    torch.testing.assert_close(total, torch.stack(parts).sum())


def test_maximizing_turns_the_sign_of_every_part_once() -> None:
    model, batches = network(), task(1)
    settings = {"ewc.form": "loss", "ewc.strength": 3.0, "mas.form": "loss", "mas.strength": 0.5}
    method = made("ewc+mas", model, SGD(model.parameters(), lr=0.1, maximize=True), **settings)
    learn(model, method, batches)
    method.consolidate(batches)
    with torch.no_grad():
        model[0].weight.add_(0.1)
    torch.testing.assert_close(method.penalty(), -sum(part._penalty() for part in method.parts.values()))


def test_the_outer_method_acts_on_the_whole_step_of_the_inner_one() -> None:
    """NPC around EWC freezes the pull too; EWC around NPC pulls frozen neurons back."""
    moved = {}
    for name in ("npc+ewc", "ewc+npc"):
        model, batches = network(), task(1)
        method = made(name, model, **{"npc.rate": 0.5, "npc.beta": 1e-6, "ewc.strength": 1e3})
        learn(model, method, batches)
        method.consolidate(batches)
        with torch.no_grad():
            model[0].weight.add_(0.01)
        before = model[0].weight.detach().clone()
        learn(model, method, task(2))
        frozen = method.plasticity["0"] == 0
        assert frozen.sum() >= 5  # one neuron is silent
        moved[name] = not torch.equal(before[frozen], model[0].weight[frozen])
    assert moved == {"npc+ewc": False, "ewc+npc": True}


def test_all_parts_consolidate_the_same_task() -> None:
    model, batches = network(), task(1)
    method = made("lwf+ewc+mas", model)
    learn(model, method, batches)
    method.consolidate(batches, active=[0, 1, 2])
    held = parameters_of(model)
    assert_same_bits(method.parts["ewc"].anchor, held)
    assert_same_bits(method.parts["mas"].anchor, held)
    assert_same_bits(parameters_of(method.parts["lwf"]._old), held)


@pytest.mark.parametrize("name", ["lwf+ewc", "ewc+mas", "mas+ewc", "lwf+si", "ssl+dpc", "lwf+ewc+dpc", "dpc+ewc"])
def test_all_parts_consolidate_a_task_or_none(name: str) -> None:
    """Parameters that have diverged leave every part as it was, and the next task goes on from there."""
    model, batches = network(), task(1)
    method = made(name, model, **({"ssl.form": "loss"} if name.startswith("ssl") else {}))
    for finished in (0, 1):
        learn(model, method, batches)
        state, before = model.state_dict(), method.state_dict()
        kept = {key: value.clone() for key, value in state.items()}
        with torch.no_grad():
            model[2].weight.fill_(torch.nan)
        with pytest.raises((FloatingPointError, RuntimeError)):
            method.consolidate(batches, active=[0, 1, 2])
        model.load_state_dict(kept)
        assert_same_bits(memory_of(method), tensors_in(memory_in(before)))
        assert repr(method.state_dict()) == repr(before)
        assert all(part.tasks == finished for part in method.parts.values() if hasattr(part, "tasks"))
        method.consolidate(batches, active=[0, 1, 2])


def test_an_iterator_serves_one_reader_only() -> None:
    model, batches = network(), task(1)

    def once() -> Iterator[tuple[Tensor, Tensor]]:
        yield from batches

    method = made("lwf+ewc", model)
    learn(model, method, batches)
    method.consolidate(once())  # LwF does not read it
    model = network()
    method = made("ewc+mas", model)
    learn(model, method, batches)
    with pytest.raises(TypeError, match="EWC and MAS each read all batches: give a list or a DataLoader"):
        method.consolidate(once())
    assert method.importance == {}


# ---- what a user sees ----


def test_importance_and_plasticity_of_the_inner_method_are_reachable() -> None:
    model = network()
    method = made("lwf+npc", model, **{"npc.rate": 0.5})
    learn(model, method, task(1))
    npc = method.parts["npc"]
    assert_same_bits(method.importance, npc.importance)
    assert_same_bits(method.plasticity, npc.plasticity)
    assert_same_bits(method.neuron_importance, npc.importance)
    both = made("ewc+npc", model)
    learn(model, both, task(1))
    both.consolidate(task(1))
    assert both.importance.keys() == dict(model.named_parameters()).keys()  # that of the outermost
    assert list(both.neuron_importance) == ["0", "2"]
    assert list(both.plasticity) == ["0", "2"]


def test_memory_is_counted_by_part() -> None:
    """By hand: 4 -> 6 -> 6 -> 3 has 93 parameters and, outside the head, 12 neurons; floats of 4 bytes."""
    model, batches = network(), task(1)
    counted = {
        "npc": {"importance": 4 * 12},
        "cpc": {"importance": 4 * (93 - 21)},
        "ewc": {"importance": 4 * 93, "anchor": 4 * 93},
        "si": {"importance": 4 * 93, "anchor": 4 * 93, "path": 4 * 93},
        "lwf": {"teacher": 4 * 93},
        "finetune": {},
        "separate": {"first": 4 * 93},
        "lwf+npc": {"lwf.teacher": 4 * 93, "npc.importance": 4 * 12},
    }
    for name, expected in counted.items():
        model = network()
        method = made(name, model)
        learn(model, method, batches)
        method.consolidate(batches)
        assert method.memory() == expected, name
        method.close()


def test_a_missing_penalty_of_any_part_is_named() -> None:
    model, batches = network(), task(1)
    method = made("ewc+lwf", model)
    learn(model, method, batches)
    assert not method.has_penalty
    method.consolidate(batches)
    assert method.has_penalty
    method.zero_grad()
    cross_entropy(model(batches[0][0]), batches[0][1]).backward()
    with pytest.raises(ValueError, match="the penalty of LwF is missing from the loss"):
        method.step()


@pytest.mark.parametrize("name", STACKS)
def test_closing_removes_the_hooks_of_all_parts(name: str) -> None:
    model = network()
    method = made(name, model)
    learn(model, method, task(1))
    method.close()
    assert hooks_of(model) == 0
    with pytest.raises(ValueError, match="is closed"):
        method.step()


def test_steps_are_recordable_where_each_part_allows_it() -> None:
    assert made("lwf+npc", network()).recordable
    assert made("ewc+npc", network()).recordable
    assert not made("npc+ewc", network(), **{"ewc.form": "loss"}).recordable
    assert not made("ewc+npc", network(), **{"ewc.form": "loss"}).recordable


# ---- state ----


@pytest.mark.parametrize("kind", [SGD, AdamW])
@pytest.mark.parametrize("name", STACKS)
def test_a_nested_state_goes_on_bit_for_bit(name: str, kind: type[Optimizer], tmp_path: Any) -> None:
    tasks = [task(seed) for seed in range(3)]

    def go_on(model: nn.Module, method: Method, first: int) -> None:
        for batches in tasks[first:]:
            learn(model, method, batches)
            method.consolidate(batches, active=[0, 1, 2])

    model = network()
    method = made(name, model, kind(model.parameters(), lr=0.05))
    learn(model, method, tasks[0])
    method.consolidate(tasks[0], active=[0, 1, 2])
    torch.save({"model": model.state_dict(), "method": method.state_dict()}, tmp_path / "state.pt")
    go_on(model, method, 1)

    resumed = network()
    again = made(name, resumed, kind(resumed.parameters(), lr=0.05))
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    resumed.load_state_dict(state["model"])
    again.load_state_dict(state["method"])
    go_on(resumed, again, 1)
    assert_same_bits(parameters_of(model), parameters_of(resumed))
    assert_same_bits(memory_of(method), memory_of(again))
    inner = memory_of(list(method.parts.values())[-1])
    assert len(memory_of(method)) > len(inner) or not method.remembers


def test_a_nested_state_of_another_stack_changes_nothing() -> None:
    model = network()
    method = made("lwf+npc", model)
    learn(model, method, task(1))
    held, groups = memory_of(method), [dict(group) for group in method.param_groups]
    other = network()
    foreign = made("lwf+cpc", other, SGD(other.parameters(), lr=0.7))
    learn(other, foreign, task(1))
    with pytest.raises(ValueError, match="made by CPC, not by NPC"):
        method.load_state_dict(foreign.state_dict())
    alone = holdfast.LwF(other, SGD(other.parameters(), lr=0.7))
    with pytest.raises(ValueError, match="made by LwF alone, not by LwF around NPC"):
        method.load_state_dict(alone.state_dict())
    with pytest.raises(ValueError, match="made by LwF around another method, not by LwF alone"):
        alone.load_state_dict(foreign.state_dict())
    assert_same_bits(memory_of(method), held)
    assert [group["lr"] for group in method.param_groups] == [group["lr"] for group in groups]


def test_settings_come_back_with_the_state_and_are_checked() -> None:
    model = network()
    method = made("lwf+npc", model, **{"lwf.weight": 0.25, "npc.beta": 0.4})
    learn(model, method, task(1))
    state = method.state_dict()
    again = made("lwf+npc", network())
    again.load_state_dict(state)
    assert (again.parts["lwf"].weight, again.parts["npc"].beta) == (0.25, 0.4)
    memory_in(state)["tensors"] += 1
    with pytest.raises(ValueError, match="this state_dict of LwF has 0 of the 1 tensors it was saved with"):
        again.load_state_dict(state)
