"""The service of taps: its rules, its users, and the inputs of layers."""

import ast
import copy
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vmap

import holdfast
from helpers import Block, hooks_of, mlp
from holdfast.neurons import (
    MeasuresImportance,
    ShowsActivity,
    find_layers,
    input_rows,
    resolve_observe,
    weight_layers,
)
from holdfast.samples import Batch
from holdfast.taps import ActivationTaps, CallTap, ImportanceTaps, Taps, layer_inputs, module_inputs

SOURCE = Path(holdfast.__file__).parent


# ---- who may do what ----


def test_hooks_are_registered_by_the_service_alone() -> None:
    registering = re.compile(r"register_\w*hook|\._(forward|backward)\w*_hooks\[")
    users = {path.relative_to(SOURCE) for path in SOURCE.rglob("*.py") if registering.search(path.read_text())}
    assert users == {Path("taps/hooks.py"), Path("taps/backward.py")}


def imported_packages(path: Path) -> set[str]:
    """Packages of Holdfast that a file imports from."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.split(".")[1] for name in names if name.startswith("holdfast.")}


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [
        ("neurons", {"taps", "methods", "gpu", "samples", "runs"}),
        ("taps", {"methods", "gpu", "runs"}),
        ("methods", {"gpu", "runs"}),
    ],
)
def test_imports_point_down(package: str, forbidden: set[str]) -> None:
    files = list((SOURCE / package).rglob("*.py"))
    assert files
    for path in files:
        assert imported_packages(path).isdisjoint(forbidden), path


# ---- the rules ----


def test_taps_see_inputs_and_outputs_and_may_replace_outputs() -> None:
    model, x, y = nn.Bilinear(2, 3, 4), torch.randn(5, 2), torch.randn(5, 3)
    expected = model(x, y)
    calls: list[Any] = []

    def double(module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor:
        calls.append((module, args, kwargs, output))
        return 2 * output

    with Taps() as taps:
        taps.on_input(model, lambda *call: calls.append(call))
        taps.on_output(model, double)
        assert torch.equal(model(x, input2=y), 2 * expected)
    assert calls[0] == (model, (x,), {"input2": y})
    assert calls[1][:3] == calls[0]
    assert torch.equal(calls[1][3], expected)
    assert torch.equal(model(x, y), expected)
    assert len(calls) == 2


def test_a_first_tap_comes_before_all_others() -> None:
    model, order = nn.Linear(2, 2), []
    model.register_forward_hook(lambda *_: order.append("other"))
    with Taps() as taps:
        taps.on_output(model, lambda *_: order.append("last"))
        taps.on_output(model, lambda *_: order.append("first"), first=True)
        model(torch.zeros(1, 2))
    assert order == ["first", "other", "last"]


@pytest.mark.parametrize("always", [False, True])
def test_without_gradients_a_tap_must_be_asked_for(always: bool) -> None:
    model, calls = nn.Linear(2, 2), []
    with Taps() as taps:
        taps.on_input(model, lambda *_: calls.append(1), always=always)
        taps.on_output(model, lambda *_: calls.append(1), always=always)
        with torch.no_grad():
            model(torch.zeros(1, 2))
        assert len(calls) == 2 * always
        model(torch.zeros(1, 2))
    assert len(calls) == 2 * always + 2


def test_nothing_is_tapped_inside_transforms() -> None:
    model, calls, x = nn.Linear(2, 2), [], torch.randn(3, 2)
    with Taps() as taps:
        taps.on_input(model, lambda *_: calls.append(1), always=True)
        taps.on_output(model, lambda *_: calls.append(1), always=True)
        vmap(model)(x)
        torch.func.grad(lambda x: model(x).sum())(x)
        assert not calls
        model(x)
    assert len(calls) == 2


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_hooks_of_copied_and_pickled_models_are_idle(duplicate: Callable[[nn.Module], nn.Module]) -> None:
    model, calls = nn.Linear(2, 2), []
    with Taps() as taps:
        taps.on_input(model, lambda *_: calls.append(1), always=True)
        taps.on_output(model, lambda *_: calls.append(1), always=True)
        twin, x = duplicate(model), torch.randn(3, 2)
        assert torch.equal(twin(x), model(x))
    assert len(calls) == 2


# ---- the users ----


class FusedReluPool(nn.Module):
    """ReLU and pooling that shows the activity in between."""

    def __init__(self) -> None:
        super().__init__()
        self.shows = 0
        self.activity: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        active = torch.relu(x)
        self.activity = active.mean((2, 3)) if self.shows else None
        return F.max_pool2d(active, 2)

    def take_activity(self) -> Tensor | None:
        activity, self.activity = self.activity, None
        return activity


class MeasuringNorm(nn.BatchNorm2d):
    """Normalization that measures for a carrier, with a mark of its own: thousandfold."""

    carrier: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        out, carrier = super().forward(x), self.carrier
        if carrier is not None and out.requires_grad:
            n = out.detach()
            out.register_hook(lambda g: setattr(carrier, "grad", 1000 * (n * g).mean((2, 3)).abs().sum(0)))
        return out


def fused_model() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), FusedReluPool(), nn.Flatten(), nn.Linear(64, 3))


def importance_taps(model: nn.Module) -> ImportanceTaps:
    parameters = set(model.parameters())
    return ImportanceTaps(model, find_layers(model, parameters, ()), parameters, {})


USERS: dict[str, Callable[[nn.Module], Any]] = {
    "importance": importance_taps,
    "activations": ActivationTaps,
    "chosen activations": lambda model: ActivationTaps(model, {"0": "1"}),
    "calls": CallTap,
}


@pytest.mark.parametrize("settled", [False, True])
@pytest.mark.parametrize("name", USERS)
def test_closing_removes_every_hook(name: str, settled: bool) -> None:
    model, x = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.ReLU(), nn.Linear(6, 3)), torch.randn(5, 4)
    model.register_forward_hook(lambda *_: None)  # which is not theirs to remove
    user = USERS[name](model)
    assert hooks_of(model) > 1
    if settled:
        user.rehearse(x) if name == "importance" else model(x)
    user.close()
    assert hooks_of(model) == 1
    model(x).sum().backward()
    user.close()


@pytest.mark.parametrize("name", USERS)
def test_users_are_not_disturbed_by_transforms_and_evaluation(name: str) -> None:
    model, x = mlp(), torch.randn(5, 4)
    user = USERS[name](model)
    vmap(model)(x)
    with torch.no_grad():
        model(x)
    if name == "importance":
        user.settle()
        assert user.collect() == [None] * 3
    else:
        assert not user.take()
    user.close()


def test_iterating_over_inputs_leaves_no_hook_and_no_mode() -> None:
    model = mlp()
    model[1].eval()
    for _ in layer_inputs(model, weight_layers(model), [torch.randn(2, 4)] * 2):
        assert hooks_of(model) == 0
        assert torch.is_grad_enabled()
        assert [module.training for module in model] == [True, False, True, True, True]


def test_a_call_is_returned_and_forgotten() -> None:
    model, x = nn.Bilinear(2, 3, 4), torch.randn(5, 2)
    y = torch.randn(5, 3)
    tap = CallTap(model)
    first, second = model(x, y), model(x, input2=y)
    call = tap.take()
    assert call is not None
    assert call == ((x,), {"input2": y}, second)
    assert first is not second
    assert tap.take() is None


# ---- fused modules ----


def test_activity_of_a_fused_module_is_that_before_pooling() -> None:
    model, x = fused_model(), torch.randn(3, 2, 8, 8)
    taps = ActivationTaps(model)
    model(x)
    ((layer, axis, values),) = taps.take()
    assert (layer, axis) == ("0", 1)
    torch.testing.assert_close(values, torch.relu(model[0](x)).mean((2, 3)))
    with taps.whole():
        model(x)
    assert taps.take()[0].values.shape == (3, 4, 4, 4)


def test_a_fused_module_shows_its_activity_as_long_as_anyone_uses_it() -> None:
    """One user may follow another before the first is closed, as when an optimizer is built anew."""
    model = fused_model()
    assert isinstance(model[1], ShowsActivity)
    assert not isinstance(model[0], ShowsActivity)
    first, second = ActivationTaps(model), ActivationTaps(model)
    first.close()
    first.close()
    assert model[1].shows
    second.close()
    assert not model[1].shows


def test_a_fused_module_measures_by_itself_until_the_taps_are_closed() -> None:
    model, x = nn.Sequential(nn.Conv2d(2, 4, 3), MeasuringNorm(4), nn.Tanh()), torch.randn(3, 2, 8, 8)
    plain = nn.Sequential(model[0], nn.BatchNorm2d(4), nn.Tanh())
    expected = []
    for each in (plain, model):
        taps = importance_taps(each)
        taps.rehearse(x)
        each(x).square().mean().backward()
        (measured,) = taps.collect()
        assert measured is not None
        expected.append(measured)
        if each is model:
            assert isinstance(model[1], MeasuresImportance)
            assert model[1].carrier is not None
            taps.close()
            assert model[1].carrier is None
    torch.testing.assert_close(expected[1], 1000 * expected[0], rtol=1e-4, atol=1e-6)


# ---- observe= ----


@pytest.mark.parametrize(
    ("observe", "error", "message"),
    [
        (["1"], TypeError, r"observe takes names, .* got \['1'\]"),
        ({"0": nn.ReLU()}, TypeError, "observe takes names, .* got {'0': ReLU"),
        ({"1": "1"}, ValueError, "'1' is not an observable layer; choose from 0, 2, 4"),
        ({"0": "nowhere"}, ValueError, "no module 'nowhere' to observe '0' at"),
        ({"0": "2"}, ValueError, "'2' shows its own neurons"),
    ],
)
def test_observe_is_checked(observe: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        resolve_observe(mlp(), ["0", "2", "4"], observe)


def test_observe_is_resolved_by_name() -> None:
    model = mlp()
    assert resolve_observe(model, ["0", "2"], {"0": "1", "2": "2"}) == {"0": model[1], "2": model[2]}
    assert resolve_observe(model, ["0"], None) == {}


# ---- inputs of layers ----

MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(3, 4), (2, 3)),
    "linear on tokens": (lambda: nn.Linear(3, 4), (2, 5, 3)),
    "linear without a batch": (lambda: nn.Linear(3, 4), (3,)),
    "conv1d": (lambda: nn.Conv1d(2, 4, 3, stride=2, padding=1, dilation=2), (3, 2, 9)),
    "conv2d": (lambda: nn.Conv2d(3, 4, 3), (2, 3, 6, 5)),
    "conv2d, all uneven": (lambda: nn.Conv2d(3, 4, (3, 2), (1, 2), (2, 1), (2, 3)), (2, 3, 9, 8)),
    "conv2d without a bias": (lambda: nn.Conv2d(3, 4, 1, bias=False), (2, 3, 6, 5)),
    "conv2d without a batch": (lambda: nn.Conv2d(3, 4, 3), (3, 6, 5)),
    "conv3d": (lambda: nn.Conv3d(2, 4, (2, 3, 1), stride=(1, 2, 1), padding=(1, 0, 2)), (2, 2, 3, 7, 2)),
    "same": (lambda: nn.Conv2d(2, 4, (4, 3), padding="same", dilation=(1, 2)), (2, 2, 6, 5)),
    "valid": (lambda: nn.Conv1d(2, 4, 3, padding="valid"), (2, 2, 6)),
    **{
        mode: (lambda mode=mode: nn.Conv2d(2, 4, 3, padding=(1, 2), padding_mode=mode), (2, 2, 6, 5))
        for mode in ("reflect", "replicate", "circular")
    },
}


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("name", MODULES)
def test_a_layer_is_the_product_of_its_input_rows_and_its_weight(name: str) -> None:
    build, shape = MODULES[name]
    module, x = build().double(), torch.randn(shape, dtype=torch.float64)
    rows = input_rows(module, x)
    output = module(x)
    axis = output.dim() - 1 if isinstance(module, nn.Linear) else output.dim() - 1 - len(module.kernel_size)
    expected = output.movedim(axis, -1).reshape(-1, 4)
    assert rows.shape == (len(expected), module.weight[0].numel())
    torch.testing.assert_close(F.linear(rows, module.weight.flatten(1), module.bias), expected)


@pytest.mark.parametrize(
    "module", [nn.Conv2d(4, 4, 2, groups=2), nn.ConvTranspose1d(2, 4, 2), nn.LayerNorm(4), nn.Embedding(4, 4)]
)
def test_other_modules_are_refused_by_name(module: nn.Module) -> None:
    kind = type(module).__name__
    with pytest.raises(ValueError, match=rf"not for {kind}\(.*; leave this layer out"):
        input_rows(module, torch.zeros(4, 4))
    with pytest.raises(ValueError, match=rf"layer 'a' is {kind}\(.*: leave it out"):
        layer_inputs(nn.Sequential(module), {"a": module}, [])


def test_weight_layers_are_those_that_are_called_and_not_free() -> None:
    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv1d(2, 4, 2), nn.BatchNorm1d(4)
            self.attention = nn.MultiheadAttention(4, 2)
            self.parametrized = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
            self.up = nn.ConvTranspose1d(4, 4, 2)
            self.heads = nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 3)])

    model = Many()
    assert list(weight_layers(model)) == ["conv", "up", "heads.0", "heads.1"]
    assert weight_layers(model, free=[model.heads]) == {"conv": model.conv, "up": model.up}


class Twice(nn.Module):
    """A layer called twice, one called under a condition, and an input that is changed in place afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.rare, self.dropout = nn.Linear(4, 4), nn.Linear(4, 4), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.twice(x)
        z = self.twice(input=y)
        y.zero_()
        return self.dropout(self.rare(z) if len(x) == 3 else z)


def test_layer_inputs_batch_by_batch() -> None:
    model = Twice()
    layers = weight_layers(model)
    batches = [torch.randn(2, 4), (torch.randn(3, 4), torch.zeros(3)), Batch((torch.randn(5, 4),), {}, None)]
    inputs = list(layer_inputs(model, layers, iter(batches)))
    assert [list(each) for each in inputs] == [["twice"], ["twice", "rare"], ["twice"]]
    for each, x in zip(inputs, [batches[0], batches[1][0], batches[2].inputs[0]], strict=True):
        torch.testing.assert_close(each["twice"], torch.cat([x, model.twice(x)]))
        assert not each["twice"].requires_grad
    torch.testing.assert_close(inputs[1]["rare"], model.twice(model.twice(batches[1][0])))


def test_layer_inputs_of_a_convolutional_network() -> None:
    model, x = Block().double(), torch.randn(3, 2, 8, 8, dtype=torch.float64)
    (inputs,) = layer_inputs(model, weight_layers(model, free=[model.head]), [x])
    assert list(inputs) == ["conv"]
    weights = model.conv.weight.flatten(1)
    torch.testing.assert_close(
        F.linear(inputs["conv"], weights, model.conv.bias).view(3, 6, 6, 6).movedim(-1, 1), model.conv(x)
    )


def test_layer_inputs_may_be_left_early() -> None:
    model = mlp()
    for _ in layer_inputs(model, weight_layers(model), (torch.randn(2, 4) for _ in range(3))):
        break
    assert hooks_of(model) == 0
    assert model.training


def test_an_error_in_a_forward_leaves_no_hook_and_no_mode() -> None:
    model = mlp()
    with pytest.raises(RuntimeError):
        list(layer_inputs(model, weight_layers(model), [torch.randn(2, 5)]))
    assert hooks_of(model) == 0
    assert model.training


def test_inputs_of_any_module_are_given_as_they_are() -> None:
    model, x = Block(), torch.randn(3, 2, 8, 8)
    (inputs,) = module_inputs(model, {"a": model.norm, "b": model.head}, [x])
    assert torch.equal(inputs["a"][0], model.conv(x))
    assert inputs["b"][0].shape == (3, 6)
