"""Fine-tuning, joint and separate training: what the other methods are measured against."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

import holdfast
from helpers import assert_same_bits, mlp, parameters_of

Batches = list[tuple[Tensor, Tensor]]


def batches(count: int = 3) -> Batches:
    return [(torch.randn(8, 4, dtype=torch.float64), torch.randint(2, (8,))) for _ in range(count)]


def learn(model: nn.Module, optimizer: Optimizer, data: Batches, active: list[int]) -> None:
    for x, y in data:
        loss = nn.functional.cross_entropy(model(x)[:, active], y)
        if isinstance(optimizer, holdfast.methods.Method):
            loss = loss + optimizer.penalty()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.mark.parametrize("name", ["finetune", "ewc", "mas", "si", "lwf", "joint", "separate"])
def test_the_first_task_is_learned_as_by_the_bare_optimizer(name: str) -> None:
    model = mlp().double()
    bare, data = copy.deepcopy(model), batches()
    learn(model, holdfast.METHODS[name](model, Adam(model.parameters(), lr=0.1)), data, [0, 1])
    learn(bare, Adam(bare.parameters(), lr=0.1), data, [0, 1])
    assert_same_bits(parameters_of(model), parameters_of(bare))


def test_fine_tuning_is_the_bare_optimizer_for_ever() -> None:
    model = mlp().double()
    bare = copy.deepcopy(model)
    optimizer, alone = holdfast.FineTune(model, Adam(model.parameters())), Adam(bare.parameters())
    for active in ([0, 1], [1, 2]):
        data = batches()
        learn(model, optimizer, data, active)
        optimizer.consolidate(data, active)
        learn(bare, alone, data, active)
    assert_same_bits(parameters_of(model), parameters_of(bare))


def test_joint_training_learns_from_all_tasks_in_every_step() -> None:
    """As plain training on the mean loss of the tasks seen so far, whose batches come round again and again."""
    model = mlp(outputs=6).double()
    bare = copy.deepcopy(model)
    optimizer = holdfast.Joint(model, SGD(model.parameters(), lr=0.1, momentum=0.5))
    alone = SGD(bare.parameters(), lr=0.1, momentum=0.5)
    finished: list[tuple[Batches, list[int]]] = []
    for active in ([0, 1], [2, 3], [4, 5]):
        data = batches()
        learn(model, optimizer, [*data, *data], active)
        for i, (x, y) in enumerate([*data, *data]):
            losses = [nn.functional.cross_entropy(bare(x)[:, active], y)]
            for old, its_active in finished:
                old_x, old_y = old[(i + drawn(finished, old, 6)) % 3]
                losses.append(nn.functional.cross_entropy(bare(old_x)[:, its_active], old_y))
            alone.zero_grad()
            torch.stack(losses).mean().backward()
            alone.step()
        optimizer.consolidate(data, active)
        finished.append((data, active))
    for name, value in parameters_of(model).items():
        torch.testing.assert_close(value, parameters_of(bare)[name], rtol=1e-10, atol=1e-12)


def drawn(finished: list[tuple[Batches, list[int]]], task: Batches, steps: int) -> int:
    """How many batches of a task were drawn in the tasks that came after it."""
    later = len(finished) - 1 - next(i for i, (data, _) in enumerate(finished) if data is task)
    return later * steps


def test_joint_training_needs_batches_that_come_again() -> None:
    model = mlp()
    optimizer = holdfast.Joint(model, SGD(model.parameters(), lr=0.1))
    with pytest.raises(TypeError, match="reads the batches in many passes: give a list or a DataLoader"):
        optimizer.consolidate(batch for batch in batches())
    optimizer.consolidate([])
    with pytest.raises(ValueError, match="a finished task has no more batches"):
        optimizer.penalty()
    unlabelled = holdfast.Joint(model, SGD(model.parameters(), lr=0.1))
    unlabelled.consolidate([torch.randn(2, 4)])
    with pytest.raises(ValueError, match=r"needs \(inputs, labels\) batches"):
        unlabelled.penalty()


def test_joint_training_asks_for_the_data_that_no_state_dict_holds() -> None:
    model = mlp().double()
    optimizer = holdfast.Joint(model, SGD(model.parameters(), lr=0.1))
    optimizer.consolidate(batches())
    fresh = holdfast.Joint(model, SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match=r"after 1 finished tasks.*there are 0 here: call consolidate\(\)"):
        fresh.load_state_dict(optimizer.state_dict())


def test_joint_training_goes_back_to_an_earlier_state() -> None:
    model, data = mlp().double(), batches(5)
    optimizer = holdfast.Joint(model, SGD(model.parameters(), lr=0.1))
    optimizer.consolidate(data)
    losses = []
    for _ in range(7):
        state = optimizer.state_dict()
        losses.append(optimizer.penalty().item())
    assert losses[5:] == losses[:2]  # round and round
    optimizer.load_state_dict(state)
    assert optimizer.penalty().item() == losses[6]


def test_separate_training_remembers_its_first_weights() -> None:
    model, other = mlp(), mlp()
    first = parameters_of(model)
    optimizer = holdfast.Separate(model, SGD(model.parameters(), lr=0.1))
    resumed = holdfast.Separate(other, SGD(other.parameters(), lr=0.1))
    resumed.load_state_dict(optimizer.state_dict())
    resumed.consolidate([])
    assert_same_bits(parameters_of(other), first)


@pytest.mark.parametrize("kind", [SGD, Adam])
def test_separate_training_starts_every_task_afresh(kind: type[Optimizer]) -> None:
    """Each task ends with the bits of a new model and a new optimizer that never saw another one."""

    def build() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 4)).double()

    model = build()
    optimizer = holdfast.Separate(model, kind(model.parameters(), lr=0.1))
    for active in ([0, 1], [2, 3]):
        fresh, data = build(), batches()
        learn(fresh, kind(fresh.parameters(), lr=0.1), data, active)
        learn(model, optimizer, data, active)
        assert_same_bits(dict(model.state_dict()), dict(fresh.state_dict()))
        optimizer.consolidate(data, active)
