"""Where neurons are tapped: the importance must be the statistic at the expected module, and at no other."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import holdfast
from helpers import Block, gradient_at, mlp, normalized_taylor, train
from holdfast.taps.hooks import tensors_in


class Functional(nn.Module):
    """A module whose forward is a given function of itself."""

    def __init__(self, forward: Callable[[nn.Module, Tensor], Tensor], **modules: nn.Module) -> None:
        super().__init__()
        self.function = forward
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def images() -> Tensor:
    return torch.randn(5, 2, 8, 8)


def conv() -> nn.Conv2d:
    return nn.Conv2d(2, 4, 3, padding=1)


def second() -> nn.Conv2d:
    return nn.Conv2d(4, 4, 3, padding=1)


def pooled(x: Tensor) -> Tensor:
    return x.mean((2, 3))


# name: (model, input, layer, the module at which it must be tapped, the axis there)
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], str, str, int]] = {
    "a plain layer": (mlp, lambda: torch.randn(5, 4), "0", "0", 1),
    "sequential, normalized": (
        lambda: nn.Sequential(conv(), nn.InstanceNorm2d(4), nn.ReLU(), nn.Flatten()),
        images,
        "0",
        "1",
        1,
    ),
    "modules declared in another order": (Block, images, "conv", "norm", 1),
    "activation and pooling before the normalization": (
        lambda: Functional(
            lambda m, x: pooled(m.norm(F.max_pool2d(F.relu(m.conv(x)), 2))), norm=nn.GroupNorm(2, 4), conv=conv()
        ),
        images,
        "conv",
        "norm",
        1,
    ),
    "an activation of two uses": (
        lambda: Functional(
            lambda m, x: pooled(m.norm((y := m.conv(x)) * torch.sigmoid(y))), norm=nn.BatchNorm2d(4), conv=conv()
        ),
        images,
        "conv",
        "norm",
        1,
    ),
    "an activation with parameters": (
        lambda: nn.Sequential(conv(), nn.PReLU(4), nn.BatchNorm2d(4), nn.Flatten()),
        images,
        "0",
        "2",
        1,
    ),
    "calls crosswise": (
        lambda: Functional(
            lambda m, x: pooled((b := m.b(x), a := m.a(x), m.norm_a(a).relu() + m.norm_b(b).tanh())[2]),
            a=conv(),
            b=conv(),
            norm_b=nn.BatchNorm2d(4),
            norm_a=nn.BatchNorm2d(4),
        ),
        images,
        "b",
        "norm_b",
        1,
    ),
    "channels moved last for a layer norm": (
        lambda: Functional(
            lambda m, x: pooled(m.norm(m.conv(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)).relu(),
            conv=conv(),
            norm=nn.LayerNorm(4),
        ),
        images,
        "conv",
        "norm",
        3,
    ),
    "layer norm over channels and pixels": (
        lambda: nn.Sequential(conv(), nn.LayerNorm((4, 8, 8)), nn.ReLU(), nn.Flatten()),
        images,
        "0",
        "1",
        1,
    ),
    "a sum is nobody's normalization": (
        lambda: Functional(
            lambda m, x: pooled(m.norm(m.first(x) + m.second(F.relu(m.first(x))))),
            first=nn.Conv2d(2, 2, 1),
            second=nn.Conv2d(2, 2, 1),
            norm=nn.BatchNorm2d(2),
        ),
        images,
        "second",
        "second",
        1,
    ),
    "a free layer stands between": (
        lambda: Functional(
            lambda m, x: pooled(m.norm(m.free(m.conv(x)))), conv=conv(), free=second(), norm=nn.BatchNorm2d(4)
        ),
        images,
        "conv",
        "conv",
        1,
    ),
    "a parameter of no module stands between": (
        lambda: _with_offset(),
        images,
        "conv",
        "conv",
        1,
    ),
    "tokens": (
        lambda: Functional(
            lambda m, x: m.norm(m.linear(x)).relu().mean(1), linear=nn.Linear(4, 6), norm=nn.LayerNorm(6)
        ),
        lambda: torch.randn(5, 3, 4),
        "linear",
        "norm",
        2,
    ),
    "changed in place afterwards": (
        lambda: nn.Sequential(conv(), nn.BatchNorm2d(4), nn.LeakyReLU(0.2, inplace=True), nn.Flatten()),
        images,
        "0",
        "1",
        1,
    ),
    "changed in place without a normalization": (
        lambda: Functional(lambda m, x: m.linear(x).add_(1).tanh(), linear=nn.Linear(4, 6)),
        lambda: torch.randn(5, 4),
        "linear",
        "linear",
        1,
    ),
    "a chain in a sequence": (
        lambda: nn.Sequential(
            conv(), nn.BatchNorm2d(4), nn.LeakyReLU(0.1, inplace=True), nn.MaxPool2d(2), nn.AvgPool2d(2), nn.Flatten()
        ),
        images,
        "0",
        "1",
        1,
    ),
    "a chain with dropout, after a linear layer": (
        lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Dropout(0.0), nn.Linear(6, 2)),
        lambda: torch.randn(5, 4),
        "0",
        "0",
        1,
    ),
    "a chain before the normalization": (
        lambda: nn.Sequential(conv(), nn.ReLU(), nn.MaxPool2d(2), nn.InstanceNorm2d(4), nn.ReLU(), nn.Flatten()),
        images,
        "0",
        "3",
        1,
    ),
    "a normalization outside of the sequence": (
        lambda: Functional(
            lambda m, x: pooled(m.norm(m.body(x)).relu()),
            body=nn.Sequential(conv(), nn.ReLU()),
            norm=nn.InstanceNorm2d(4),
        ),
        images,
        "body.0",
        "norm",
        1,
    ),
    "inside a transformer layer": (
        lambda: nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True),
        lambda: torch.randn(5, 3, 4),
        "linear1",
        "linear1",
        2,
    ),
    "a sequence walked by hand, with a way out": (
        lambda: Functional(
            lambda m, x: pooled(m.body[2](y := m.body[1](m.body[0](x))) * y.tanh()),
            body=nn.Sequential(conv(), nn.BatchNorm2d(4), nn.ReLU()),
        ),
        images,
        "body.0",
        "body.1",
        1,
    ),
    "pooling along the neurons": (
        lambda: nn.Sequential(nn.Linear(4, 6), nn.MaxPool1d(3, stride=1, padding=1), nn.Tanh()),
        lambda: torch.randn(5, 3, 4),
        "0",
        "0",
        2,
    ),
    "a skip around a layer norm": (
        lambda: Functional(
            lambda m, x: ((y := m.stem(x)) + m.up(m.norm(y))).tanh().mean(1),
            stem=nn.Linear(4, 6),
            norm=nn.LayerNorm(6),
            up=nn.Linear(6, 6),
        ),
        lambda: torch.randn(5, 3, 4),
        "stem",
        "stem",
        2,
    ),
    "a skip behind the normalization": (
        lambda: Functional(
            lambda m, x: pooled((y := m.norm(m.conv(x))) + m.second(F.relu(y))).tanh(),
            conv=conv(),
            norm=nn.BatchNorm2d(4),
            second=second(),
        ),
        images,
        "conv",
        "norm",
        1,
    ),
    "something without a gradient is added": (
        lambda: Functional(
            lambda m, x: m.norm(x + m.linear(x)).tanh().mean(1), linear=nn.Linear(4, 4), norm=nn.LayerNorm(4)
        ),
        lambda: torch.randn(5, 3, 4),
        "linear",
        "linear",
        2,
    ),
    "an activation that adds a number": (
        lambda: Functional(
            lambda m, x: pooled(m.norm((y := m.conv(x)) * F.relu6(y + 3) / 6)).tanh(),
            conv=conv(),
            norm=nn.BatchNorm2d(4),
        ),
        images,
        "conv",
        "norm",
        1,
    ),
    "called with a keyword": (
        lambda: Functional(lambda m, x: pooled(m.norm(input=m.conv(x))).relu(), conv=conv(), norm=nn.InstanceNorm2d(4)),
        images,
        "conv",
        "norm",
        1,
    ),
}


def _with_offset() -> nn.Module:
    model = Functional(lambda m, x: pooled(m.norm(m.conv(x) + m.offset)).relu(), conv=conv(), norm=nn.BatchNorm2d(4))
    model.offset = nn.Parameter(torch.randn(4, 8, 8))
    return model


@pytest.mark.parametrize("rehearsed", [False, True], ids=["in training", "by sample"])
@pytest.mark.parametrize("name", CASES)
def test_tap(name: str, rehearsed: bool) -> None:
    build, batch, layer, tapped, axis = CASES[name]
    model, x = build(), batch()
    free = [model.free] if hasattr(model, "free") else []
    twin = copy.deepcopy(model)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = holdfast.NPC(model, sgd, rate=1.0, free=free, example=x if rehearsed else None)
    for _ in range(3):  # the first step finds the tap, the others rely on it
        twin.load_state_dict(model.state_dict())
        expected = normalized_taylor(*gradient_at(twin, tapped, x), axis)
        optimizer.zero_grad()
        output = model(x)
        assert torch.equal(output, twin(x))
        output.square().mean().backward()
        optimizer.step()
        torch.testing.assert_close(optimizer.importance[layer], expected, rtol=1e-4, atol=1e-5)
        if tapped != layer:  # the test would fail if the layer's own output were tapped
            n, g = gradient_at(twin, layer, x)
            at_layer = normalized_taylor(n, g, 1 if n.dim() == 4 else n.dim() - 1)
            assert not torch.allclose(at_layer, expected, rtol=1e-2)


def test_the_hook_is_put_where_it_costs_least() -> None:
    model = nn.Sequential(conv(), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten())
    optimizer = holdfast.NPC(model, torch.optim.SGD(model.parameters(), lr=0.1), example=images())
    assert [len(module._forward_hooks) for module in model] == [0, 0, 0, 1, 0]
    optimizer.close()


def test_the_hook_in_a_transformer_layer_is_put_where_it_costs_least() -> None:
    x = torch.randn(5, 3, 4)
    for activation, hooked in (("relu", "dropout"), ("gelu", "linear1")):
        model = nn.TransformerEncoderLayer(4, 2, 6, activation=activation, batch_first=True)
        optimizer = holdfast.NPC(model, torch.optim.SGD(model.parameters(), lr=0.1), example=x)
        names = [name for name, module in model.named_children() if module._forward_hooks]
        assert names == [hooked, "linear2"]
        optimizer.close()


def test_a_hook_of_others_may_take_the_output_elsewhere() -> None:
    model, x = nn.Sequential(conv(), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()), images()
    kept: list[Tensor] = []
    model[1].register_forward_hook(lambda _module, _args, output: kept.append(output))
    twin = nn.Sequential(copy.deepcopy(model[0]), copy.deepcopy(model[1]))
    n = twin(x)
    n.retain_grad()
    (n.relu().square().mean() + n.tanh().mean()).backward()
    assert n.grad is not None
    optimizer = holdfast.NPC(model, torch.optim.SGD(model.parameters(), lr=0.1), rate=1.0)
    (model(x).square().mean() + kept[-1].tanh().mean()).backward()
    optimizer.step()
    torch.testing.assert_close(
        optimizer.importance["0"], normalized_taylor(n.detach(), n.grad, 1), rtol=1e-4, atol=1e-5
    )


def test_importance_before_an_instance_norm_is_noise() -> None:
    """The reason to tap after it: the loss does not depend on the scale that instance norm removes."""
    model, x = CASES["sequential, normalized"][0]().double(), images().double()
    n, g = gradient_at(model, "0", x)
    before = (n * g).mean((2, 3)).abs().mean()
    n, g = gradient_at(model, "1", x)
    after = (n * g).mean((2, 3)).abs().mean()
    assert before < 1e-4 * after


@pytest.mark.parametrize("norm", [nn.BatchNorm2d(4), nn.LayerNorm((4, 8, 8)), nn.InstanceNorm2d(4, affine=True)])
def test_affine_parameters_of_a_following_normalization_are_the_layers(norm: nn.Module) -> None:
    model, x = nn.Sequential(conv(), norm, nn.ReLU(), nn.Flatten()), images()
    optimizer = holdfast.NPC(model, torch.optim.SGD(model.parameters(), lr=0.1), rate=1.0, beta=0.95)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model(x).square().mean().backward()
    optimizer.step()
    frozen = optimizer.plasticity["0"] == 0
    assert 0 < frozen.sum() < 4
    for name, p in model.named_parameters():
        moved = (p.detach() != before[name]).flatten(1).any(1) if p.dim() > 1 else p.detach() != before[name]
        if name == "0.bias":  # the normalization makes the loss blind to it
            continue
        assert torch.equal(moved, ~frozen), name


def test_a_free_normalization_shows_the_neurons_but_keeps_its_parameters() -> None:
    model, x = Block(), images()
    expected = normalized_taylor(*gradient_at(model, "norm", x), 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = holdfast.NPC(model, sgd, rate=1.0, beta=0.01, free=[model.head, model.norm])
    before = model.norm.weight.detach().clone()
    step_once(optimizer, x)
    torch.testing.assert_close(optimizer.importance["conv"], expected, rtol=1e-4, atol=1e-5)
    assert (optimizer.plasticity["conv"] == 0).all()
    assert (model.norm.weight != before).all()


def test_observe_overrides_the_search() -> None:
    model, x = Block(), images()
    expected = normalized_taylor(*gradient_at(model, "conv", x), 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = step_once(holdfast.NPC(model, sgd, rate=1.0, free=[model.head], observe={"conv": "conv"}), x)
    torch.testing.assert_close(optimizer.importance["conv"], expected, rtol=1e-4, atol=1e-5)


def test_two_layers_may_be_observed_at_their_sum() -> None:
    model = Functional(
        lambda m, x: pooled(m.norm(m.a(x) + m.b(x))).relu(), a=conv(), b=conv(), norm=nn.BatchNorm2d(4, affine=False)
    )
    x = images()
    expected = normalized_taylor(*gradient_at(model, "norm", x), 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = step_once(holdfast.NPC(model, sgd, rate=1.0, observe={"a": "norm", "b": "norm"}), x)
    for layer in ("a", "b"):
        torch.testing.assert_close(optimizer.importance[layer], expected, rtol=1e-4, atol=1e-5)


def sum_at(model: nn.Module, x: Tensor, *names: str) -> Tensor:
    """The statistic of eq. 2, summed over the outputs of several modules, with a mean of 1."""
    total = torch.zeros(())
    for name in names:
        n, g = gradient_at(model, name, x)
        total = total + (n * g).mean((2, 3)).abs().mean(0)
    return total / total.mean()


@pytest.mark.parametrize("rehearsed", [False, True], ids=["in training", "by sample"])
@pytest.mark.parametrize("norm", [nn.BatchNorm2d(4), nn.InstanceNorm2d(4, affine=True), nn.GroupNorm(4, 4)])
def test_a_skip_around_a_normalization_of_single_neurons_is_measured_on_both_ways(
    norm: nn.Module, rehearsed: bool
) -> None:
    model = Functional(
        lambda m, x: pooled((y := m.stem(x)) + m.second(F.relu(m.norm(y)))).tanh(),
        stem=conv(), norm=copy.deepcopy(norm), second=second(),
    )  # fmt: skip
    x, sgd = images(), torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = holdfast.NPC(model, sgd, rate=1.0, example=x if rehearsed else None)
    for _ in range(3):
        expected = sum_at(model, x, "stem", "norm")
        step_once(optimizer, x)
        torch.testing.assert_close(optimizer.importance["stem"], expected, rtol=1e-4, atol=1e-5)


@dataclass
class Outputs:
    hidden: Tensor
    normalized: list[Tensor]


@pytest.mark.parametrize("kind", [dict, Outputs, lambda **named: tuple(named.values())], ids=["dict", "class", "tuple"])
def test_a_model_may_return_what_it_normalizes(kind: Callable[..., Any]) -> None:
    model = Functional(
        lambda m, x: kind(hidden=(y := m.stem(x)), normalized=[m.norm(y)]),
        stem=nn.Linear(4, 6), norm=nn.LayerNorm(6),
    )  # fmt: skip
    x = torch.randn(5, 4)
    y = model.stem(x)
    y.retain_grad()
    (y.square().mean() + model.norm(y).tanh().mean()).backward()
    assert y.grad is not None
    expected = normalized_taylor(y.detach(), y.grad, 1)
    optimizer = holdfast.NPC(model, torch.optim.SGD(model.parameters(), lr=0.1), rate=1.0)
    optimizer.zero_grad()
    hidden, normalized = tensors_in(model(x))
    (hidden.square().mean() + normalized.tanh().mean()).backward()
    optimizer.step()
    torch.testing.assert_close(optimizer.importance["stem"], expected)


def test_a_branch_inside_a_checkpoint_over_several_forwards() -> None:
    plain = Functional(
        lambda m, x: ((y := m.stem(x)) + m.up(F.dropout(m.norm(y), 0.0))).tanh(),
        stem=nn.Linear(4, 6), norm=nn.LayerNorm(6), up=nn.Linear(6, 6),
    )  # fmt: skip
    model = Functional(lambda m, x: checkpoint(m.inner, x, use_reentrant=False), inner=plain)
    parts = [torch.randn(5, 4) for _ in range(2)]
    pairs = [gradient_at(plain, "stem", x) for x in parts]
    expected = normalized_taylor(torch.cat([n for n, _ in pairs]), torch.cat([g for _, g in pairs]), 1)
    optimizer = holdfast.NPC(model, torch.optim.SGD(model.parameters(), lr=0.1), rate=1.0)
    for x in parts:
        model(x).square().mean().backward()
    optimizer.step()
    torch.testing.assert_close(optimizer.importance["inner.stem"], expected)


def test_a_normalization_on_a_branch_belongs_to_its_layer() -> None:
    build, batch, _, _, _ = CASES["a skip around a layer norm"]
    model, x = build(), batch()
    optimizer = holdfast.NPC(model, torch.optim.SGD(model.parameters(), lr=0.1), rate=1.0, beta=0.95)
    before = model.norm.weight.detach().clone()
    step_once(optimizer, x)  # no warning about the norm
    frozen = optimizer.plasticity["stem"] == 0
    assert 0 < frozen.sum() < 6
    assert torch.equal(model.norm.weight.detach() == before, frozen)


def test_a_module_called_twice_is_one_set_of_neurons() -> None:
    model = Functional(lambda m, x: m.shared(torch.tanh(m.shared(x))), shared=nn.Linear(4, 4))
    x = torch.randn(5, 4)
    first = model.shared(x)
    second_call = model.shared(torch.tanh(first))
    g1, g2 = torch.autograd.grad(second_call.square().mean(), [first, second_call])
    c = (first * g1).abs().sum(0) + (second_call * g2).abs().sum(0)
    optimizer = step_once(holdfast.NPC(model, torch.optim.SGD(model.parameters(), lr=0.1), rate=1.0), x)
    torch.testing.assert_close(optimizer.importance["shared"], (c / c.mean()).detach())


def test_a_normalization_of_several_layers_shows_none_of_them() -> None:
    model = Functional(
        lambda m, x: pooled(m.norm(m.second(F.relu(m.norm(m.conv(x)))))),
        conv=conv(),
        second=second(),
        norm=nn.GroupNorm(1, 4),
    )
    x = images()
    expected = normalized_taylor(*gradient_at(model, "conv", x), 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match=r"'norm' normalizes several layers \(conv, second\)"):
        optimizer = step_once(holdfast.NPC(model, sgd, rate=1.0), x)
    assert optimizer.importance.keys() == {"conv", "second", "norm"}
    torch.testing.assert_close(optimizer.importance["conv"], expected, rtol=1e-3, atol=1e-4)


def test_a_layer_first_used_later_is_found_then() -> None:
    model = Functional(
        lambda m, x: pooled(m.norm_b(m.b(x)) if m.second_half else m.norm_a(m.a(x))),
        a=conv(), b=conv(), norm_a=nn.BatchNorm2d(4), norm_b=nn.BatchNorm2d(4),
    )  # fmt: skip
    x = images()
    model.second_half = False
    optimizer = step_once(holdfast.NPC(model, torch.optim.SGD(model.parameters(), lr=0.1), rate=1.0), x)
    assert optimizer.importance["b"].sum() == 0
    model.second_half = True
    expected = normalized_taylor(*gradient_at(model, "norm_b", x), 1)
    held = optimizer.importance["a"]
    step_once(optimizer, x)
    torch.testing.assert_close(optimizer.importance["b"], expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(optimizer.importance["a"], held)


def test_submodules_called_by_the_user() -> None:
    """No forward of the whole model is needed."""
    model, x = nn.Module(), images()
    model.features, model.head = nn.Sequential(conv(), nn.BatchNorm2d(4)), nn.Linear(4, 3)
    optimizer = holdfast.NPC(model, torch.optim.SGD(model.parameters(), lr=0.1), free=[model.head])
    model.head(pooled(model.features(x))).square().mean().backward()
    optimizer.step()
    assert optimizer.importance["features.0"].sum() > 0


def test_a_rehearsal_leaves_no_trace() -> None:
    model, x = nn.Sequential(conv(), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Flatten()), images()
    before = copy.deepcopy(model.state_dict())
    drawn = torch.get_rng_state()
    holdfast.NPC(model, torch.optim.SGD(model.parameters(), lr=0.1), example=x)
    assert torch.equal(torch.get_rng_state(), drawn)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("sample", [(torch.randn(2, 4),), [torch.randn(2, 4)], {"input": torch.randn(2, 4)}])
def test_samples_of_several_arguments(sample: object) -> None:
    model = mlp()
    holdfast.NPC(model, torch.optim.SGD(model.parameters(), lr=0.1), example=sample)


def test_frozen_layers_below_cost_no_graph() -> None:
    model = mlp()
    model[0].requires_grad_(False)
    optimizer = holdfast.NPC(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.randn(3, 4)
    assert not model[0](x).requires_grad
    before = model[0].weight.clone()
    step_once(optimizer, x)
    assert torch.equal(model[0].weight, before)
    assert optimizer.importance["0"].sum() == 0
    assert optimizer.importance["2"].sum() > 0


class PerTaskNorm(nn.Module):
    """One convolution, a normalization for each task."""

    def __init__(self) -> None:
        super().__init__()
        self.task, self.conv, self.norms = 0, conv(), nn.ModuleList(nn.BatchNorm2d(4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return pooled(F.silu(y if self.task is None else self.norms[self.task](y)))


def test_a_normalization_of_a_later_task_shows_the_layer_too() -> None:
    model, x = PerTaskNorm(), images()
    optimizer = holdfast.NPC(model, torch.optim.SGD(model.parameters(), lr=0.1), rate=1.0)
    step_once(step_once(optimizer, x), x)
    for task in (1, 0, 1):
        model.task = task
        expected = normalized_taylor(*gradient_at(model, f"norms.{task}", x), 1)
        step_once(optimizer, x)
        torch.testing.assert_close(optimizer.importance["conv"], expected, rtol=1e-4, atol=1e-5)
    frozen = optimizer.plasticity["conv"] == 0
    before = model.norms[1].weight.detach().clone()
    step_once(optimizer, x)
    frozen &= optimizer.plasticity["conv"] == 0
    assert frozen.any()
    assert torch.equal(model.norms[1].weight[frozen], before[frozen])
    optimizer.close()
    assert not any(module._forward_hooks for module in model.modules())


def test_a_normalization_that_comes_later_replaces_the_layers_output() -> None:
    model, x = PerTaskNorm(), images()
    model.task = None
    optimizer = step_once(holdfast.NPC(model, torch.optim.SGD(model.parameters(), lr=0.1), rate=1.0), x)
    model.task = 1
    for _ in range(2):
        expected = normalized_taylor(*gradient_at(model, "norms.1", x), 1)
        step_once(optimizer, x)
        torch.testing.assert_close(optimizer.importance["conv"], expected, rtol=1e-4, atol=1e-5)


def test_a_layer_that_is_frozen_at_first() -> None:
    model, x = PerTaskNorm(), images()
    model.conv.requires_grad_(False)
    second_layer = nn.Linear(4, 3)
    whole = nn.Sequential(model, second_layer)
    optimizer = step_once(holdfast.NPC(whole, torch.optim.SGD(whole.parameters(), lr=0.1), rate=1.0), x)
    model.conv.requires_grad_(True)
    for _ in range(2):
        expected = normalized_taylor(*gradient_at(whole, "0.norms.0", x), 1)
        step_once(optimizer, x)
        torch.testing.assert_close(optimizer.importance["0.conv"], expected, rtol=1e-4, atol=1e-5)


def test_a_layer_that_is_no_longer_seen_is_named_once() -> None:
    model = Functional(
        lambda m, x: m.last(torch.tanh(m.body[0](x)) if m.other_way else m.body(x)),
        body=nn.Sequential(nn.Linear(4, 6), nn.ReLU()),
        last=nn.Linear(6, 2),
    )
    model.other_way = False
    x = torch.randn(5, 4)
    optimizer = step_once(holdfast.NPC(model, torch.optim.SGD(model.parameters(), lr=0.1)), x)
    model.other_way = True
    with pytest.warns(UserWarning, match="importance stays the same: body.0;"):
        step_once(optimizer, x)
    step_once(optimizer, x)


def test_two_optimizers_may_share_a_layer() -> None:
    model, x = Block(), images()
    expected = normalized_taylor(*gradient_at(model, "norm", x), 1)
    weights = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    both = [
        holdfast.NPC(model, torch.optim.SGD(part, lr=0.1), rate=1.0, free=[model.head]) for part in (weights, others)
    ]
    model(x).square().mean().backward()
    for optimizer in both:
        optimizer.step()
        torch.testing.assert_close(optimizer.importance["conv"], expected, rtol=1e-4, atol=1e-5)


def test_layers_whose_output_is_not_their_neurons_are_measured_by_their_gradients() -> None:
    class Pair(nn.Linear):
        def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:  # noqa: A002
            return super().forward(input), self.weight.square().sum()

    class Gated(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002
            return F.glu(super().forward(input))

    model = Functional(
        lambda m, x: (pair := m.pair(x))[0] + m.last(m.gated(x)) + pair[1],
        pair=Pair(4, 3),
        gated=Gated(4, 6),
        last=nn.Linear(3, 3),
    )
    optimizer = holdfast.NPC(model, torch.optim.SGD(model.parameters(), lr=0.1), rate=1.0)
    x = torch.randn(5, 4)
    inner = F.linear(x, model.gated.weight, model.gated.bias).detach().requires_grad_()
    pair = model.pair(x)
    (pair[0] + model.last(F.glu(inner)) + pair[1]).square().mean().backward()
    model.zero_grad()
    step_once(optimizer, x)
    expected = (inner * inner.grad).sum(0).abs().detach()
    torch.testing.assert_close(optimizer.importance["gated"], expected / expected.mean(), rtol=1e-4, atol=1e-5)
    assert (optimizer.importance["pair"] > 0).all()


def test_gradients_discarded_by_the_model_are_not_measured() -> None:
    model, plain = mlp(), mlp()
    plain.load_state_dict(model.state_dict())
    ours = holdfast.NPC(model, torch.optim.SGD(model.parameters(), lr=0.1), rate=0.5)
    theirs = holdfast.NPC(plain, torch.optim.SGD(plain.parameters(), lr=0.1), rate=0.5)
    for x in (torch.randn(5, 4) for _ in range(4)):
        model.zero_grad()
        model(x).square().mean().backward()
        ours.step()
        model(torch.randn(5, 4)).sum().backward()  # somebody else's loss, as in adversarial training
        step_once(theirs, x)
    for name, values in ours.importance.items():
        assert torch.equal(values, theirs.importance[name])


def test_image_rows_are_not_taken_for_neurons() -> None:
    model, x = nn.Sequential(conv(), nn.LayerNorm((4, 4)), nn.Flatten()), torch.randn(5, 2, 4, 4)
    expected = normalized_taylor(*gradient_at(model, "0", x), 1)
    optimizer = step_once(holdfast.NPC(model, torch.optim.SGD(model.parameters(), lr=0.1), rate=1.0), x)
    assert optimizer.importance.keys() == {"0", "1"}
    torch.testing.assert_close(optimizer.importance["0"], expected, rtol=1e-4, atol=1e-5)


def test_a_rehearsal_is_a_training_forward_and_leaves_modes_and_buffers() -> None:
    class Averaging(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 6)
            self.register_buffer("average", torch.zeros(6))

        def forward(self, x: Tensor) -> Tensor:
            y = F.dropout(self.linear(x), 0.5, self.training, inplace=True)
            self.average = 0.9 * self.average + y.detach().mean(0)
            return y

    model, x = Averaging().eval(), torch.randn(5, 4)
    optimizer = holdfast.NPC(model, torch.optim.SGD(model.parameters(), lr=0.1), example=x)
    assert not any(module.training for module in model.modules())
    assert model.average.sum() == 0
    model.train()
    step_once(optimizer, x)


def step_once(optimizer: holdfast.NPC, x: Tensor) -> holdfast.NPC:
    train(optimizer.model, optimizer, [x])
    return optimizer
