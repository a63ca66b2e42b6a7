"""The memory of every method where torch's own tools for optimizer states look."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.functional import cross_entropy
from torch.optim import SGD, AdamW, Optimizer

from helpers import assert_same_bits, memory_in, memory_of, mlp, parameters_of
from holdfast.methods import METHODS, Method
from holdfast.methods.building import build

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

NAMES = [*METHODS, "lwf+npc", "ewc+cpc", "lwf+si+npc"]
OPTIMIZERS = {
    "plain SGD": lambda parameters: SGD(parameters, lr=0.1),
    "momentum": lambda parameters: SGD(parameters, lr=0.1, momentum=0.9),
    "AdamW": lambda parameters: AdamW(parameters, lr=0.01),
}
OPTIONS = {
    "default": None,
    "full": StateDictOptions(full_state_dict=True, cpu_offload=True),
    "flat": StateDictOptions(flatten_optimizer_state_dict=True),
}

torch.manual_seed(0)
BATCHES = [(torch.randn(8, 4), torch.randint(3, (8,))) for _ in range(3)]


def start(name: str, optimizer: str) -> tuple[nn.Module, Method]:
    torch.manual_seed(1)
    model = mlp()
    return model, build(name, model, OPTIMIZERS[optimizer](model.parameters()))


def learn(model: nn.Module, method: Method) -> None:
    for x, y in BATCHES:
        loss = cross_entropy(model(x), y) + method.penalty()
        method.zero_grad()
        loss.backward()
        method.step()
    method.zero_grad()


def after_a_task(name: str, optimizer: str) -> tuple[nn.Module, Method]:
    model, method = start(name, optimizer)
    learn(model, method)
    method.consolidate(BATCHES)
    learn(model, method)
    return model, method


def resumed(name: str, optimizer: str, trained: nn.Module) -> tuple[nn.Module, Method]:
    """A new model with the trained parameters, and a new method, before its state is loaded."""
    model, method = start(name, optimizer)
    if method.needs.old_data:
        method.consolidate(BATCHES)
    model.load_state_dict(trained.state_dict())
    return model, method


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", NAMES)
def test_a_method_goes_on_bit_for_bit(name: str, optimizer: str, options: StateDictOptions | None) -> None:
    model, method = after_a_task(name, optimizer)
    before = parameters_of(model)
    state = copy.deepcopy(get_optimizer_state_dict(model, method, options=options))  # torch hands out its own tensors
    assert_same_bits(parameters_of(model), before)  # torch takes a step at rate zero to initialize a state
    again, loaded = resumed(name, optimizer, model)
    set_optimizer_state_dict(again, loaded, state)
    assert_same_bits(memory_of(loaded), memory_of(method))
    for each, of in ((model, method), (again, loaded)):
        learn(each, of)
        of.consolidate(BATCHES)
    assert_same_bits(parameters_of(again), parameters_of(model))
    assert_same_bits(memory_of(loaded), memory_of(method))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("name", NAMES)
def test_a_memory_goes_through_files(name: str, options: StateDictOptions | None, tmp_path: Path) -> None:
    """`dcp.load` fills only the entries that a new optimizer has."""
    model, method = after_a_task(name, "momentum")
    dcp.save({"optimizer": get_optimizer_state_dict(model, method, options=options)}, checkpoint_id=tmp_path)
    again, loaded = resumed(name, "momentum", model)
    state = {"optimizer": get_optimizer_state_dict(again, loaded, options=options)}
    dcp.load(state, checkpoint_id=tmp_path)
    set_optimizer_state_dict(again, loaded, state["optimizer"], options=options)
    assert loaded.memory() == method.memory()
    assert_same_bits(memory_of(loaded), memory_of(method))
    for each, of in ((model, method), (again, loaded)):
        learn(each, of)
        of.consolidate(BATCHES)
    assert_same_bits(parameters_of(again), parameters_of(model))
    assert_same_bits(memory_of(loaded), memory_of(method))


@pytest.mark.parametrize("name", ["ewc", "si"])
def test_a_state_is_contiguous_and_a_memory_keeps_its_layout(name: str) -> None:
    """Tensors are broadcast as if they were contiguous; the bits of a step may depend on the layout."""

    def started() -> tuple[nn.Module, Method]:
        model = nn.Sequential(nn.Conv2d(2, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(24, 3))
        model = model.to(memory_format=torch.channels_last)
        return model, build(name, model, SGD(model.parameters(), lr=0.1))

    batches = [(torch.randn(8, 2, 4, 4), torch.randint(3, (8,)))]
    model, method = started()
    cross_entropy(model(batches[0][0]), batches[0][1]).backward()
    method.step()
    method.consolidate(batches)
    state = method.state_dict()
    assert all(tensor.is_contiguous() for tensor in memory_of(method).values())
    _, again = started()
    again.load_state_dict(state)
    layouts = {key: value.stride() for key, value in method.anchor.items()}
    assert {key: value.stride() for key, value in again.anchor.items()} == layouts
    assert not all(value.is_contiguous() for value in again.anchor.values())


class Heads(nn.Module):
    """A trunk with one head per task, side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(4, 6), nn.ReLU())
        self.heads = nn.ModuleList([nn.Linear(6, 3)])

    def forward(self, x: Tensor) -> Tensor:
        trunk = self.trunk(x)
        return torch.cat([head(trunk) for head in self.heads], 1)


def growing(name: str) -> tuple[Heads, Method]:
    torch.manual_seed(1)
    model = Heads()
    return model, build(name, model, SGD(model.parameters(), lr=0.1, momentum=0.9))


def grow(model: Heads, method: Method) -> None:
    model.heads.append(nn.Linear(6, 3))
    method.add_param_group({"params": model.heads[-1].parameters()})


@pytest.mark.parametrize("name", ["ewc", "mas", "si", "ssl", "lwf"])
def test_a_model_that_grew_goes_through_files(name: str, tmp_path: Path) -> None:
    """What is not remembered yet is blank in the files, and absent after loading."""
    model, method = growing(name)
    learn(model, method)
    method.consolidate(BATCHES, active=[0, 1, 2])
    grow(model, method)
    learn(model, method)
    dcp.save({"optimizer": get_optimizer_state_dict(model, method)}, checkpoint_id=tmp_path)
    again, loaded = growing(name)
    grow(again, loaded)
    again.load_state_dict(model.state_dict())
    state = {"optimizer": get_optimizer_state_dict(again, loaded)}
    dcp.load(state, checkpoint_id=tmp_path)
    set_optimizer_state_dict(again, loaded, state["optimizer"])
    assert_same_bits(loaded.importance, method.importance)
    for each, of in ((model, method), (again, loaded)):
        learn(each, of)
        of.consolidate(BATCHES, active=[3, 4, 5])
        learn(each, of)
    assert_same_bits(parameters_of(again), parameters_of(model))
    assert_same_bits(memory_of(loaded), memory_of(method))


@pytest.mark.parametrize("name", ["ewc", "mas", "si", "ssl", "lwf"])
def test_a_memory_that_was_loaded_in_part_is_refused(name: str, tmp_path: Path) -> None:
    model, method = growing(name)
    grow(model, method)
    learn(model, method)
    method.consolidate(BATCHES)
    dcp.save({"optimizer": get_optimizer_state_dict(model, method)}, checkpoint_id=tmp_path)
    again, loaded = growing(name)  # has one head only
    state = {"optimizer": get_optimizer_state_dict(again, loaded)}
    dcp.load(state, checkpoint_id=tmp_path)
    with pytest.raises(ValueError, match=r"has \d+ of the \d+ tensors it was saved with: load all of it"):
        set_optimizer_state_dict(again, loaded, state["optimizer"])
    assert loaded.memory() == {}


def test_the_step_at_rate_zero_counts_for_nothing(recwarn: Any) -> None:
    """It neither starts a method nor hides that a penalty is missing from the loss."""
    model, method = start("lwf+npc", "momentum")
    get_optimizer_state_dict(model, method)
    assert not recwarn.list
    with pytest.raises(ValueError, match="came before any backward"):
        method.step()
    assert not any(values.any() for values in method.importance.values())


def test_a_state_of_another_optimizer_is_refused() -> None:
    model, method = after_a_task("npc", "momentum")
    plain: Optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    held: dict[str, Tensor] = memory_of(method)
    with pytest.raises(ValueError, match="not made by a holdfast method"):
        set_optimizer_state_dict(model, method, get_optimizer_state_dict(model, plain))
    assert_same_bits(memory_of(method), held)


def test_the_memory_lies_in_the_first_parameter_group() -> None:
    _, method = after_a_task("npc", "AdamW")
    memory = memory_in(method.state_dict())
    assert memory["method"] == "NPC"
    assert memory["importance"].keys() == method.importance.keys()
    live = method.param_groups[0]["holdfast"]  # not in the groups that optimizers and schedulers work on
    assert live == "the memory is in the state_dict() of the method"
