"""LwF: the old answers, worked out by hand and with a copy of the model."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.optim import SGD
from torch.utils._python_dispatch import TorchDispatchMode

import holdfast
from helpers import assert_same_bits, mlp, parameters_of, train
from holdfast.methods.lwf import distillation


def test_distillation_by_hand() -> None:
    """T = 2 and outputs 2 log 3, 0: softened probabilities 3/4 and 1/4, against 1/2 and 1/2."""
    old, new = torch.tensor([[2 * math.log(3), 0.0]]), torch.zeros(1, 2)
    expected = 4 * (0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5))
    assert distillation(new, old, 2.0).item() == pytest.approx(expected)
    twice = distillation(torch.cat([new, old]), torch.cat([old, old]), 2.0)  # a second sample that agrees
    assert twice.item() == pytest.approx(expected / 2)


def lwf(model: nn.Module, **settings) -> holdfast.LwF:
    return holdfast.LwF(model, SGD(model.parameters(), lr=0.1), **settings)


def old_answers_term(new: Tensor, old: Tensor, heads: list[list[int]]) -> Tensor:
    total = torch.zeros(())
    for head in heads:
        p, q = (old[:, head] / 2).softmax(1), (new[:, head] / 2).softmax(1)
        total = total + 4 * (p * (p.log() - q.log())).sum(1).mean()
    return total


def test_each_earlier_head_is_held_to_the_model_before_the_task() -> None:
    model = mlp(outputs=6)
    optimizer = lwf(model, weight=3.0)
    heads: list[list[int]] = []
    for active in ([0, 1], [2, 3], [4, 5]):
        before = copy.deepcopy(model)
        for _ in range(3):
            x = torch.randn(8, 4)
            new = model(x)
            term = optimizer.penalty()
            torch.testing.assert_close(term, 3 * old_answers_term(new, before(x), heads), atol=1e-6, rtol=1e-5)
            optimizer.zero_grad()
            (nn.functional.cross_entropy(new[:, active], torch.randint(2, (8,))) + term).backward()
            optimizer.step()
        assert term.item() > 0 or not heads
        optimizer.consolidate([], active)
        heads.append(active)


def test_its_gradient_is_that_of_the_new_answers_alone() -> None:
    model = mlp()
    optimizer = lwf(model)
    train(model, optimizer, [torch.randn(8, 4)])
    old = copy.deepcopy(model)
    optimizer.consolidate([])
    train(model, optimizer, [torch.randn(8, 4)])
    x = torch.randn(8, 4)
    expected = torch.autograd.grad(old_answers_term(model(x), old(x).detach(), [[0, 1, 2]]), list(model.parameters()))
    optimizer.zero_grad()
    model(x)
    optimizer.penalty().backward()
    for p, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, gradient, atol=1e-7, rtol=1e-4)


def test_the_copy_answers_without_dropout_and_never_learns() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 2))
    optimizer = lwf(model)
    train(model, optimizer, [torch.randn(8, 4)])
    optimizer.consolidate([])
    assert optimizer._old is not None
    held, x = parameters_of(optimizer._old), torch.randn(8, 4)
    assert torch.equal(optimizer._old(x), optimizer._old(x))
    train(model, optimizer, [x] * 5)
    assert_same_bits(parameters_of(optimizer._old), held)
    assert all(p.grad is None for p in optimizer._old.parameters())


def test_tasks_that_share_a_head_count_it_once() -> None:
    model, x = mlp(), torch.randn(8, 4)
    terms = []
    for tasks in (1, 3):
        twin = copy.deepcopy(model)
        optimizer = lwf(twin)
        for _ in range(tasks):
            optimizer.consolidate([], active=[0, 1])
        with torch.no_grad():
            twin[0].weight.mul_(2)
        twin(x)
        terms.append(optimizer.penalty().item())
    assert terms[0] == terms[1] > 0


def test_the_inputs_are_those_of_the_models_own_forward() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 3)

        def forward(self, x: Tensor, *, shift: Tensor) -> Tensor:
            return self.head(x + shift)

    model, x, shift = Two(), torch.randn(8, 4), torch.randn(8, 4)
    optimizer = lwf(model)
    optimizer.consolidate([])
    old = copy.deepcopy(model)
    with torch.no_grad():
        model.head.weight.mul_(3)
    new = model(x, shift=shift)
    with torch.no_grad():
        model(torch.randn(8, 4), shift=shift)  # an evaluation in between
    vmap(lambda x: model(x, shift=shift[0]))(torch.randn(8, 4))  # and a pass that is no training
    term = optimizer.penalty()
    torch.testing.assert_close(term, old_answers_term(new, old(x, shift=shift), [[0, 1, 2]]))


def test_a_penalty_without_a_forward_is_refused() -> None:
    optimizer = lwf(mlp())
    assert optimizer.penalty().item() == 0
    optimizer.consolidate([])
    with pytest.raises(ValueError, match=r"penalty\(\) needs a forward before it"):
        optimizer.penalty()


def test_the_next_forward_may_come_before_the_step() -> None:
    model, x = mlp(), torch.randn(8, 4)
    optimizer = lwf(model)
    optimizer.consolidate([])
    (model(x).square().mean() + optimizer.penalty()).backward()
    model(x)
    optimizer.step()
    optimizer.penalty()


def test_a_model_that_keeps_what_it_computed() -> None:
    class Keeping(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.kept = super().forward(x)
            return self.kept

    model = Keeping(4, 3)
    optimizer = lwf(model)
    train(model, optimizer, [torch.randn(8, 4)])
    optimizer.consolidate([])
    train(model, optimizer, [torch.randn(8, 4)])


def test_outputs_of_another_shape_are_refused() -> None:
    model = nn.Conv2d(4, 3, 1)
    optimizer = lwf(model)
    optimizer.consolidate([])
    model(torch.randn(2, 4, 5, 5))
    with pytest.raises(ValueError, match=r"returns \[samples, outputs\] or .*, got \(2, 3, 5, 5\)"):
        optimizer.penalty()


def test_a_model_that_returns_no_tensor() -> None:
    class Named(nn.Linear):
        def forward(self, x: Tensor) -> dict[str, list[Tensor]]:  # type: ignore[override]
            return {"pyramid": [super().forward(x)]}

    model = Named(4, 3)
    optimizer = lwf(model)
    optimizer.consolidate([])
    model(torch.randn(2, 4))
    with pytest.raises(TypeError, match="must return a tensor of outputs, alone or as `logits`, got a dict"):
        optimizer.penalty()


def test_heads_of_any_sizes_add_up() -> None:
    """Heads of one size are computed together; their sum is that of each head alone."""
    model = nn.Linear(4, 9)
    optimizer = holdfast.LwF(model, torch.optim.SGD(model.parameters(), lr=0.1), weight=0.5, temperature=2.0)
    heads = [[0, 1], [2, 3, 4], [6, 5], [7], None]
    x = torch.randn(16, 4)
    for head in heads:
        optimizer.consolidate([(x, torch.zeros(16, dtype=torch.long))], head)
    old = model(x).detach()
    nn.init.normal_(model.weight)
    new = model(x)
    expected = 0.0
    for head in heads:
        log_p, log_q = ((y if head is None else y[:, head]).div(2).log_softmax(1) for y in (old, new))
        expected += 0.5 * 4 * (log_p.exp() * (log_p - log_q)).sum(1).mean().item()
    assert optimizer.penalty().item() == pytest.approx(expected, rel=1e-5)


class Operations(TorchDispatchMode):
    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += 1
        return func(*args, **(kwargs or {}))


def test_the_work_of_a_step_does_not_grow_with_the_number_of_heads() -> None:
    def operations(tasks: int) -> int:
        model = nn.Linear(4, 2 * tasks)
        optimizer = holdfast.LwF(model, torch.optim.SGD(model.parameters(), lr=0.1))
        x = torch.randn(8, 4)
        for task in range(tasks):
            optimizer.consolidate([(x, torch.zeros(8, dtype=torch.long))], [2 * task, 2 * task + 1])
        for _ in range(2):  # the first time, indices are created
            model(x)
            with Operations() as counted:
                optimizer.penalty()
        return counted.number

    assert operations(40) == operations(2)
