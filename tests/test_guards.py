"""Protection that would silently end: changed parameters, steps that bypass a method, penalties of other forwards."""

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import holdfast
from helpers import assert_same_bits, mlp, parameters_of, train
from holdfast.methods import METHODS, Method

ANCHORED = ["ewc", "mas", "si", "ssl"]
FIXED = ["npc", "dpc", "cpc", "kfac"]


def batches(count: int = 4) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(8, 4), torch.randint(3, (8,))) for _ in range(count)]


def after_a_task(name: str, model: nn.Module, **settings: float) -> Method:
    method = METHODS[name](model, SGD(model.parameters(), lr=0.1), **settings)
    finished = batches()
    train(model, method, [x for x, _ in finished])
    method.consolidate(finished)
    return method


def replace_first_layer(model: nn.Sequential, method: Method) -> nn.Linear:
    """As many parameters as before, all of them in the optimizer."""
    model[0] = layer = nn.Linear(4, 6)
    method.param_groups[0]["params"] = list(model.parameters())
    return layer


@pytest.mark.parametrize("name", ANCHORED)
def test_a_replaced_layer_is_named_and_pulled(name: str) -> None:
    torch.manual_seed(0)
    model = mlp()
    method = after_a_task(name, model, strength=1e12)
    layer = replace_first_layer(model, method)
    before, anchor = layer.weight.detach().clone(), method.anchor["0.weight"]
    with pytest.warns(
        UserWarning, match=r"^these parameters were replaced: 0\.weight, 0\.bias; \w+ pulls them"
    ) as told:
        train(model, method, [x for x, _ in batches(2)])
    assert len(told) == 1
    important = method.importance["0.weight"] > 1e-6
    assert important.any()
    torch.testing.assert_close(layer.weight[important], anchor[important], rtol=1e-3, atol=1e-3)
    assert (layer.weight - before).abs().max() > 0.01


@pytest.mark.parametrize("name", FIXED)
def test_a_replaced_layer_that_is_not_protected_is_named(name: str) -> None:
    model = mlp()
    method = after_a_task(name, model)
    replace_first_layer(model, method)
    expected = (
        r"^these parameters were added or replaced after \w+ was built, so it does not protect them: 0\.weight, 0\."
    )
    with pytest.warns(UserWarning, match=expected) as told:
        train(model, method, [x for x, _ in batches(2)])
    assert len(told) == 1


class Adapter(nn.Module):
    """A small correction to the outputs of a layer."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


@pytest.mark.parametrize("name", ANCHORED)
def test_memory_follows_a_layer_into_an_adapter(name: str) -> None:
    torch.manual_seed(0)
    model = mlp()
    method = after_a_task(name, model, strength=1e12)
    old = method.importance["0.weight"]
    model[0] = adapter = Adapter(model[0])
    method.add_param_group({"params": [adapter.down.weight, adapter.up.weight]})
    before = adapter.base.weight.detach().clone(), adapter.up.weight.detach().clone()
    train(model, method, [x for x, _ in batches(2)])
    assert torch.equal(method.importance["0.base.weight"], old)
    assert "0.weight" not in method.importance
    important = old > 1e-6
    torch.testing.assert_close(adapter.base.weight[important], before[0][important], rtol=1e-3, atol=1e-3)
    assert not torch.equal(adapter.up.weight, before[1])
    method.consolidate(batches())
    assert "0.up.weight" in method.importance


def test_the_names_in_a_state_dict_are_the_present_ones() -> None:
    model = mlp()
    method = after_a_task("ewc", model)
    model[0] = Adapter(model[0])  # its own parameters are not trained
    state = method.state_dict()
    assert "0.base.weight" in state["param_groups"][0]["holdfast"]["importance"]
    method.load_state_dict(state)
    assert "0.base.weight" in method.importance


@pytest.mark.parametrize("name", sorted(METHODS))
def test_a_head_that_grows_is_no_surprise(name: str) -> None:
    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.heads = nn.Linear(4, 6), nn.ModuleList([nn.Linear(6, 2)])

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([head(self.body(x).relu()) for head in self.heads], 1)

    model = Growing()
    settings = {"free": [model.heads]} if METHODS[name].needs.heads else {}
    settings |= {"sparsity": 0.0} if name == "ssl" else {}  # there is no module to read activations from
    method = METHODS[name](model, SGD(model.parameters(), lr=0.1), **settings)
    train(model, method, [x for x, _ in batches(2)])
    model.heads.append(head := nn.Linear(6, 2))
    method.add_param_group({"params": list(head.parameters())})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, method, [x for x, _ in batches(2)])


# ---- steps that bypass a method ----


@pytest.mark.parametrize("name", sorted(METHODS))
def test_stepping_the_wrapped_optimizer_is_noticed_once(name: str) -> None:
    model = mlp()
    wrapped = SGD(model.parameters(), lr=0.1)
    method = METHODS[name](model, wrapped)
    train(model, method, [x for x, _ in batches(2)])
    with pytest.warns(UserWarning, match=r"^the SGD inside \w+ was stepped directly: this is training without") as told:
        wrapped.step()
    assert len(told) == 1
    wrapped.step()  # told once
    method.close()


def test_a_closed_method_lets_the_wrapped_optimizer_go() -> None:
    model = mlp()
    wrapped = SGD(model.parameters(), lr=0.1)
    method = holdfast.NPC(model, wrapped)
    train(model, method, [x for x, _ in batches(2)])
    method.close()
    train(model, wrapped, [x for x, _ in batches(2)])


def test_stepping_a_part_of_a_stack_is_noticed() -> None:
    model = mlp()
    inner = holdfast.NPC(model, SGD(model.parameters(), lr=0.1))
    outer = holdfast.LwF(model, inner)
    train(model, outer, [x for x, _ in batches(2)])
    with pytest.warns(UserWarning, match="^the NPC inside LwF was stepped directly: this is training without LwF"):
        train(model, inner, [x for x, _ in batches(1)])


# ---- layers of one neuron ----


class Single(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.scale, self.output = nn.Linear(4, 6), nn.Parameter(torch.ones(1)), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.output(self.body(x).tanh())


unprotected = pytest.mark.filterwarnings("ignore:.*of the trained parameters are not controlled")


@unprotected
@pytest.mark.parametrize("name", ["npc", "cpc"])
def test_a_single_neuron_is_not_frozen(name: str) -> None:
    """Its importance relative to its layer is always 1."""
    torch.manual_seed(0)
    model = Single()
    method = METHODS[name](model, SGD(model.parameters(), lr=0.1), rate=0.5)
    train(model, method, [x for x, _ in batches(20)])
    before = parameters_of(model)
    train(model, method, [torch.randn(8, 4)])
    for key in ("output.bias", "scale") if name == "cpc" else ("output.weight", "output.bias", "scale"):
        assert key not in method.importance
        change = parameters_of(model)[key] - before[key]
        torch.testing.assert_close(change, -0.1 * model.get_parameter(key).grad)


@unprotected
def test_a_single_neuron_changes_by_direction() -> None:
    torch.manual_seed(0)
    model = Single().double()
    method = holdfast.DPC(model, SGD(model.parameters(), lr=0.1), rate=0.5, kappa=1e12)
    data = [x.double() for x, _ in batches(20)]
    train(model, method, data)
    before = model.output.weight.detach().clone()
    train(model, method, data[:1])
    torch.testing.assert_close(model.output.weight.detach() - before, -0.1 * model.output.weight.grad)
    method.consolidate(data)
    before = model.output.weight.detach().clone()
    train(model, method, data[:1])
    assert (model.output.weight - before).abs().max() < 1e-9  # old inputs lie in all directions


# ---- gradients after a step ----


@pytest.mark.parametrize("name", sorted(METHODS))
@pytest.mark.parametrize("kind", [SGD, AdamW])
def test_a_step_leaves_the_gradients_as_they_were(name: str, kind: type[Optimizer]) -> None:
    model = mlp()
    method = METHODS[name](model, kind(model.parameters(), lr=0.1))
    train(model, method, [x for x, _ in batches(4)])
    method.consolidate(batches())
    method.zero_grad()
    (model(torch.randn(8, 4)).square().mean() + method.penalty()).backward()
    before = {key: p.grad for key, p in model.named_parameters()}
    values = {key: gradient.clone() for key, gradient in before.items()}
    method.step()
    for key, parameter in model.named_parameters():
        assert parameter.grad is before[key]
        assert torch.equal(parameter.grad, values[key])


@pytest.mark.parametrize("name", ["npc", "cpc", "dpc"])
def test_two_steps_on_one_gradient_are_limited_alike(name: str) -> None:
    torch.manual_seed(0)
    model = mlp().double()
    method = METHODS[name](model, SGD(model.parameters(), lr=0.1), rate=0.3)
    train(model, method, [x.double() for x, _ in batches(6)])
    assert any(0 < share < 1 for values in method.plasticity.values() for share in values.flatten().tolist())
    method.rate = 1e-300  # importances stay as they are
    changes = []
    for _ in range(2):
        before = parameters_of(model)
        method.step()
        changes.append({key: value - before[key] for key, value in parameters_of(model).items()})
    for key, change in changes[0].items():
        torch.testing.assert_close(changes[1][key], change, rtol=1e-9, atol=1e-15)


# ---- penalties of another forward ----

ON_FORWARDS = ["lwf", "ssl", "compact"]


def with_penalty(name: str) -> tuple[nn.Module, Method]:
    model = mlp()
    method = after_a_task(name, model)
    assert method.has_penalty
    return model, method


@pytest.mark.parametrize("name", ON_FORWARDS)
def test_a_penalty_of_another_forward_is_refused_before_the_step(name: str) -> None:
    model, method = with_penalty(name)
    before = parameters_of(model)
    method.zero_grad()
    loss = model(torch.randn(8, 4)).square().mean()
    model(torch.randn(8, 4))  # with gradients, for some other purpose
    (loss + method.penalty()).backward()
    with pytest.raises(ValueError, match=r"^the loss has a forward without its penalty: call penalty\(\) right after"):
        method.step()
    assert_same_bits(parameters_of(model), before)
    train(model, method, [torch.randn(8, 4)])


@pytest.mark.parametrize("name", ON_FORWARDS)
def test_forwards_and_backwards_outside_the_loss_are_no_matter(name: str) -> None:
    model, method = with_penalty(name)
    model(torch.randn(8, 4))
    attack = torch.randn(8, 4, requires_grad=True)
    model(attack).sum().backward()
    train(model, method, [torch.randn(8, 4)])


@pytest.mark.parametrize("name", ON_FORWARDS)
def test_several_forwards_in_the_loss_have_a_penalty_each(name: str) -> None:
    torch.manual_seed(0)
    model, method = with_penalty(name)
    x = torch.randn(2, 8, 4)
    before = copy.deepcopy(model.state_dict())
    steps = []
    for together in (True, False):
        model.load_state_dict(before)
        method.zero_grad()
        losses = []
        for part in x:
            loss = model(part).square().mean() + method.penalty()
            losses.append(loss) if together else loss.backward()
        if together:
            (losses[0] + losses[1]).backward()
        method.step()
        steps.append(parameters_of(model))
    for key, value in steps[0].items():
        torch.testing.assert_close(value, steps[1][key])
