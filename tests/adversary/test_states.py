"""Damaged state_dicts: each is refused in one line, without a change, or harmless."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD

from helpers import mlp
from holdfast.methods import METHODS, Method
from holdfast.methods.method import KEY


def not_finite(value: Any) -> Any:
    return torch.full_like(value, torch.nan) if isinstance(value, torch.Tensor) else float("nan")


def negative(value: Any) -> Any:
    return torch.full_like(value, -1) if isinstance(value, torch.Tensor) else -5


DAMAGES: dict[str, Callable[[Any], Any]] = {
    "not finite": not_finite,
    "negative": negative,
    "none": lambda _: None,
    "text": lambda _: "much",
    "other shape": lambda _: torch.zeros(7),
    "list": lambda _: [1, 2],
    "dictionary": lambda _: {"a": 1},
    "infinite": lambda _: float("inf"),
}


def paths(state: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths to all entries of the memory, and to the entries that lead to it."""
    entries = state.items() if isinstance(state, dict) else enumerate(state)
    for key, value in entries:
        if path in ((), ("param_groups",)) or KEY in (*path, key):
            yield (*path, key)
            if isinstance(value, dict | list):
                yield from paths(value, (*path, key))


def learn(model: nn.Module, method: Method) -> list[Any]:
    batches = [(torch.randn(8, 4), torch.randint(3, (8,))) for _ in range(2)]
    for x, y in batches:
        loss = cross_entropy(model(x), y) + method.penalty()
        method.zero_grad()
        loss.backward()
        method.step()
    return batches


def made(name: str) -> tuple[nn.Module, Method]:
    model = mlp()
    return model, METHODS[name](model, SGD(model.parameters(), lr=0.1, momentum=0.9))


def state_after_a_task(name: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model, method = made(name)
    method.consolidate(learn(model, method))
    learn(model, method)
    return method.state_dict()


STATES = {name: state_after_a_task(name) for name in METHODS}


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(METHODS)), st.data())
def test_a_damaged_memory_is_refused_or_harmless(name: str, data: st.DataObject) -> None:
    state = copy.deepcopy(STATES[name])
    path = data.draw(st.sampled_from(list(paths(state))))
    damage = data.draw(st.sampled_from([*DAMAGES, "missing"]))
    holder = state
    for key in path[:-1]:
        holder = holder[key]
    if damage == "missing":
        del holder[path[-1]]
    else:
        holder[path[-1]] = DAMAGES[damage](holder[path[-1]])
    model, method = made(name)
    before, refusal = repr(method.state_dict()), None
    try:
        method.load_state_dict(state)
    except ValueError as error:
        refusal = str(error)
    if refusal is None:
        learn(model, method)
        assert all(parameter.isfinite().all() for parameter in model.parameters())
    else:
        assert "\n" not in refusal
        assert repr(method.state_dict()) == before


@pytest.mark.parametrize("name", ["npc", "dpc", "cpc", "ewc", "mas", "si", "ssl"])
@pytest.mark.parametrize(("damage", "message"), [(not_finite, "not finite"), (negative, "below 0")])
def test_a_wrong_importance_is_named(name: str, damage: Callable[[Any], Any], message: str) -> None:
    state = copy.deepcopy(STATES[name])
    importance = state["param_groups"][0][KEY]["importance"]
    first = next(iter(importance))
    importance[first] = damage(importance[first])
    _, method = made(name)
    with pytest.raises(ValueError, match=f"{message} as the importance of '{first}': load an earlier one"):
        method.load_state_dict(state)
