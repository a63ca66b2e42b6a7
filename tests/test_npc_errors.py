"""Bad input gets one line that names the value and the remedy."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam

import holdfast
from helpers import mlp, parameters_of


def npc(model: nn.Module, **knobs: Any) -> holdfast.NPC:
    return holdfast.NPC(model, SGD(model.parameters(), lr=0.1), **knobs)


@pytest.mark.parametrize(
    ("knobs", "error", "message"),
    [
        ({"beta": 0}, ValueError, "beta must be above 0, got 0"),
        ({"beta": -1.5}, ValueError, "got -1.5"),
        ({"beta": float("nan")}, ValueError, "got nan"),
        ({"beta": float("inf")}, ValueError, "got inf"),
        ({"beta": "0.7"}, TypeError, "beta must be a number, got '0.7'"),
        ({"rate": 0}, ValueError, "rate must be above 0 and at most 1, got 0"),
        ({"rate": 1.1}, ValueError, "got 1.1"),
        ({"rate": True}, TypeError, "rate must be a number"),
        ({"gain": -1}, ValueError, "gain must be above 0, got -1"),
        ({"free": [4]}, TypeError, r"free takes modules, parameters and names, as in free=\[model.head, .*\]; got 4"),
        (
            {"free": ["4.wieght"]},
            ValueError,
            "no module or parameter '4.wieght'; did you mean '4.weight'",
        ),
        ({"free": "head"}, ValueError, r"no module or parameter 'head'; names are those of model.named_parameters\(\)"),
        (
            {"free": nn.Parameter(torch.ones(2, 3))},
            ValueError,
            r"a parameter of shape \(2, 3\) that is not of",
        ),
        ({"free": [nn.Linear(2, 2)]}, ValueError, "free has a Linear that is not a module of this model"),
        ({"observe": {"nowhere": "1"}}, ValueError, "'nowhere' is not an observable layer; choose from 0, 2, 4"),
        ({"observe": {"0": "nowhere"}}, ValueError, "no module 'nowhere' to observe '0' at"),
        ({"observe": {"0": "2"}}, ValueError, "'2' shows its own neurons"),
    ],
)
def test_settings(knobs: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        npc(mlp(), **knobs)


def test_a_single_free_module_need_not_be_in_a_list() -> None:
    model = mlp()
    assert npc(model, free=model[4]).importance.keys() == {"0", "2"}


def test_no_neurons() -> None:
    with pytest.raises(ValueError, match="Embedding has no neurons to control: it has only sparse embeddings"):
        npc(nn.Embedding(3, 2, sparse=True))
    model = mlp()
    with pytest.raises(ValueError, match="no neuron is left to control"):
        npc(model, free=[model])


def test_a_place_with_another_number_of_neurons() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.GLU(), nn.Linear(3, 2))
    optimizer = npc(model, observe={"0": "1"})
    with pytest.raises(ValueError, match=r"'0' has 6 neurons, but the output of '1' has shape \(5, 3\)"):
        model(torch.randn(5, 4))
    optimizer.close()

    class Pair(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, x

    model = nn.Sequential(nn.Linear(4, 6), Pair())
    npc_ = npc(model, observe={"0": "1"})
    with pytest.raises(TypeError, match="'1' returns a tuple"):
        model(torch.randn(5, 4))
    npc_.close()


def test_a_state_dict_that_does_not_fit_changes_nothing() -> None:
    model = mlp()
    optimizer = npc(model, rate=0.5)
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    state = {name: values.clone() for name, values in optimizer.importance.items()}
    wider = mlp(width=7)
    with pytest.raises(ValueError, match="of another model: it has \\(7,\\) for '0', this model has \\(6,\\)"):
        optimizer.load_state_dict(npc(wider).state_dict())
    freer = mlp()
    with pytest.raises(ValueError, match="it has nothing for '4', this model has \\(3,\\)"):
        optimizer.load_state_dict(npc(freer, free=[freer[4]]).state_dict())
    with pytest.raises(ValueError, match="was not made by a holdfast method"):
        optimizer.load_state_dict(SGD(model.parameters(), lr=0.1).state_dict())
    adam = holdfast.NPC(model, Adam([{"params": [p]} for p in model.parameters()], lr=0.1))
    with pytest.raises(ValueError, match="parameter group"):
        optimizer.load_state_dict(adam.state_dict())
    foreign = optimizer.state_dict()
    foreign["param_groups"][0]["holdfast"]["method"] = "EWC"
    with pytest.raises(ValueError, match="made by EWC, not by NPC"):
        optimizer.load_state_dict(foreign)
    for name, values in optimizer.importance.items():
        assert torch.equal(values, state[name])


def test_a_step_without_a_new_backward_moves_on_with_the_gradients_it_has() -> None:
    model = mlp()
    optimizer = npc(model, rate=0.5)
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    importance, weight = optimizer.importance, model[0].weight.detach().clone()
    optimizer.step()
    assert torch.equal(optimizer.importance["0"], importance["0"])
    assert not torch.equal(model[0].weight, weight)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_activations_that_are_not_finite(bad: float) -> None:
    """A layer with such activations keeps its importance, and its step is what that importance makes of it."""
    model, bare = tanh_mlp(), tanh_mlp()
    bare.load_state_dict(model.state_dict())
    optimizer = npc(model, rate=0.5)
    x = torch.randn(3, 4)
    x[1, 2] = bad
    for m, o in ((model, optimizer), (bare, SGD(bare.parameters(), lr=0.1))):
        m(x).square().mean().backward()
        o.step()
    assert all(values.isfinite().all() for values in optimizer.importance.values())
    assert optimizer.importance["0"].sum() == 0  # so that layer is fully plastic, as under the bare optimizer:
    assert torch.equal(model[0].weight.nan_to_num(99), bare[0].weight.nan_to_num(99))
    if bad is torch.nan:
        for name, value in parameters_of(model).items():
            assert torch.equal(value.nan_to_num(99), parameters_of(bare)[name].nan_to_num(99))


def tanh_mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))


def test_importance_recovers_after_a_bad_batch() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    optimizer = npc(model, rate=0.5, beta=1e-6)  # all is frozen after the first step, so the weights survive
    for value in (1.0, torch.nan, 1.0):
        optimizer.zero_grad()
        model(torch.randn(3, 4) * value).square().mean().backward()
        optimizer.step()
    assert optimizer.importance["0"].mean().item() == pytest.approx(1 - 0.5**2)


class Odd(nn.Module):
    """Parameters of every kind that no module shows."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4, sparse=sparse)
        self.scale = nn.Parameter(torch.ones(()))
        self.position = nn.Parameter(torch.randn(4))
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.norm = nn.LayerNorm(4)
        self.linear = nn.Linear(4, 4)
        self.fixed = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(4, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.scale * self.embedding(tokens) + self.position
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.head(self.fixed(torch.relu(self.linear(self.norm(x)))).mean(1))


@pytest.mark.parametrize("sparse", [False, True])
def test_a_warning_tells_what_share_is_not_controlled(sparse: bool) -> None:
    model = Odd(sparse)
    optimizer = npc(model, free=[model.head])
    fixed = model.fixed.weight.clone()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randint(5, (3, 6))).sum().backward()
            optimizer.step()
    layers = {"linear", "fixed", "position", "attention.in_proj", "attention.out_proj", "norm"}
    assert optimizer.importance.keys() == layers | (set() if sparse else {"embedding"})
    assert torch.equal(model.fixed.weight, fixed)
    if not sparse:  # only the scale, a single number
        assert not caught
        return
    (warning,) = caught
    assert warning.filename == __file__
    trained = 5 * 4 + 1 + 4 + (3 * 4 * 5 + 4 * 5) + 8 + 20
    assert str(warning.message).startswith(
        f"{21 / trained:.0%} of the trained parameters are not controlled and train at the full rate: "
        "embedding.weight, scale; name them in free="
    )


def test_the_warning_of_a_large_model_is_short() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Embedding(5, 4, sparse=True) for _ in range(100))
            self.tables = nn.ModuleDict(
                {f"table_{letter * 12}": nn.Embedding(5, 4, sparse=True) for letter in "abcdefghi"}
            )
            self.head = nn.Linear(4, 2)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(sum(table(tokens) for table in (*self.layers, *self.tables.values())))

    model = Counter()
    optimizer = npc(model)
    model(torch.randint(5, (3, 6))).sum().backward()
    with pytest.warns(UserWarning, match=r"100% of .*: layers\.\*\.weight \(100\), tables\..* and \d more;") as caught:
        optimizer.step()
    assert len(str(caught[0].message)) < 400


def test_a_layer_that_is_used_without_being_called_is_measured_by_its_gradients() -> None:
    class Bypass(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.called, self.bypassed = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(self.called(x), self.bypassed.weight)

    model = Bypass()
    optimizer = npc(model, rate=1.0)
    y = model(torch.randn(3, 4))
    (g,) = torch.autograd.grad(y.square().sum(), y, retain_graph=True)
    y.square().sum().backward()
    optimizer.step()
    expected = (y * g).sum(0).abs().detach()
    torch.testing.assert_close(optimizer.importance["bypassed"], expected / expected.mean())
