"""Fused modules compute the same network, here on a CPU; tests/test_cuda.py has the kernels."""

import copy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import instance_norm, max_pool2d

import holdfast
from helpers import gradient_at, memory_of, parameters_of
from holdfast.importance import Observe
from holdfast.methods import METHODS
from holdfast.models import build_model, paper_cnn
from holdfast.runs import training
from holdfast.streams.sources import LabeledImages, Source
from holdfast.streams.tasks import Frame, Stream, split
from holdfast.taps.hooks import inside_transform
from test_compile import BACKENDS
from test_training import plan

fused = pytest.importorskip("holdfast.gpu.fused")
BeforeNorm, FewChannels, FewChannelsBeforeNorm = fused.BeforeNorm, fused.FewChannels, fused.FewChannelsBeforeNorm
NormReluPool, fuse_modules = fused.NormReluPool, fused.fuse_modules

needs_compiler = pytest.mark.skipif("inductor" not in BACKENDS, reason="no C++ compiler")


@pytest.fixture(autouse=True)
def _with_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.gpu.fused.find_spec", lambda name: object())


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU path of the fused modules, with plain torch in place of the kernel."""

    def norm_relu_pool(x: Tensor, shows: bool, carrier: Tensor | None) -> tuple[Tensor, None, None, Tensor, None]:
        active = instance_norm(x).relu()
        pooled = max_pool2d(active, 2)
        observed = pooled if carrier is None else Observe.apply(pooled, carrier, 1, False)
        return observed, None, None, active.mean((2, 3)), None

    kernels = ModuleType("holdfast.gpu.kernels")
    kernels.norm_relu_pool = norm_relu_pool  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "holdfast.gpu.kernels", kernels)
    monkeypatch.setattr("holdfast.gpu.fused._runs_fused", lambda x: x.dtype != torch.float64 and not inside_transform())


def plain_and_fused() -> tuple[nn.Sequential, nn.Sequential]:
    """A narrow model of the paper's kind, without dropout, and the same one fused."""
    torch.manual_seed(0)
    model = paper_cnn(classes=4, width=0.1)
    model.dropout = nn.Identity()
    twin = copy.deepcopy(model)
    fuse_modules(twin)
    return model, twin


def test_the_paper_s_network_is_fused_where_it_can_be() -> None:
    _, twin = plain_and_fused()
    assert type(twin.conv1) is FewChannelsBeforeNorm
    assert type(twin.conv2) is type(twin.conv3) is BeforeNorm
    assert [type(twin[number]) for number in (1, 2, 3)] == [NormReluPool, nn.Identity, nn.Identity]
    assert not twin.norm1.shows


def test_it_computes_the_same() -> None:
    plain, twin = plain_and_fused()
    assert list(plain.state_dict()) == list(twin.state_dict())
    x = torch.randn(6, 3, 32, 32)
    torch.testing.assert_close(twin(x), plain(x))
    for model in (plain, twin):
        model(x).square().sum().backward()
    for ours, theirs in zip(twin.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_it_computes_the_same_without_the_biases_that_a_norm_takes_away() -> None:
    plain, twin = plain_and_fused()
    for model in (plain, twin):
        for convolution in (model.conv1, model.conv2, model.conv3):
            nn.init.constant_(convolution.bias, 3.0)
    x = torch.randn(6, 3, 32, 32)
    torch.testing.assert_close(twin(x), plain(x), rtol=1e-4, atol=1e-4)
    for model in (plain, twin):
        model(x).square().sum().backward()
    exact = dict(plain.named_parameters())
    for name, ours in twin.named_parameters():
        if "conv" in name and "bias" in name:
            assert ours.grad is None
        else:
            torch.testing.assert_close(ours.grad, exact[name].grad, rtol=1e-3, atol=1e-4)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("nested", [False, True])
def test_biases_stay_where_no_instance_norm_follows(nested: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(2))
    shared = nn.Conv2d(4, 4, 3, padding=1)
    after = nn.Sequential(shared) if nested else shared
    plain.extend([shared, nn.InstanceNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), after])
    twin = copy.deepcopy(plain)
    fuse_modules(twin)
    assert [type(twin[i]) for i in (0, 4)] == [FewChannels] * 2
    x = torch.randn(5, 3, 8, 8)
    torch.testing.assert_close(twin(x), plain(x), rtol=1e-4, atol=1e-5)
    for model in (plain, twin):
        model(x).square().sum().backward()
    for ours, theirs in zip(twin.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(
    ("channels", "compiled"), [(1, False), (3, False), (4, False), pytest.param(3, True, marks=needs_compiler)]
)
def test_a_convolution_of_few_channels_is_a_product_with_patches(
    channels: int, memory: torch.memory_format, compiled: bool
) -> None:
    torch.manual_seed(0)
    plain, twin = nn.Conv2d(channels, 16, 3, padding=1), FewChannels(channels, 16, 3, padding=1)
    twin.load_state_dict(plain.state_dict())
    twin.to(memory_format=torch.channels_last)
    x = torch.randn(4, channels, 7, 6).contiguous(memory_format=memory)
    gradient = torch.randn(4, 16, 7, 6)
    torch.compiler.reset()
    out = torch.compile(lambda x: twin(x), fullgraph=True)(x) if compiled else twin(x)
    torch.testing.assert_close(out, plain(x), rtol=1e-4, atol=1e-5)
    out.backward(gradient)
    plain(x).backward(gradient)
    for ours, theirs in zip(twin.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4)


def pictures(train: int = 60, test: int = 20) -> Stream:
    """Images of 32x32; each class is bright in a stripe of its own."""
    generator = torch.Generator().manual_seed(0)

    def part(count: int) -> LabeledImages:
        labels = torch.arange(4).repeat_interleave(count)
        pixels = torch.randint(0, 200, (len(labels), 3, 32, 32), dtype=torch.uint8, generator=generator)
        for label in range(4):
            pixels[labels == label, :, 8 * label : 8 * label + 8] += 50
        return LabeledImages(pixels, labels)

    return split(Source("stripes", part(train), part(test), tuple("abcd")), Frame(32, padding=1), per_task=2)


def fused_model(*arguments: Any) -> nn.Sequential:
    model = build_model(*arguments)
    fuse_modules(model)
    return model


WEAK = {"kfac": {"strength": 1.0}}
"""KFAC's pull couples weights with a bias that has a gradient, so both networks agree only while it is weak."""


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        *((name, WEAK.get(name, {})) for name in METHODS),
        *((name, {"form": "loss"}) for name in ("ewc", "mas", "si", "ssl")),
    ],
)
def test_every_method_copes_with_biases_that_have_no_gradient(
    name: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, chosen = (
        pictures(24, 2),
        plan(name, settings=settings, model="paper_cnn", width=0.1, batch=8, epochs=1, lr=0.02),
    )
    results = []
    for build in (build_model, fused_model):
        monkeypatch.setattr(training, "build_model", build)
        run = training._Training(made, chosen, torch.device("cpu"))
        before = parameters_of(run.model)
        assert len([progress for progress in run if progress.step]) == 2 * 5
        assert run.record.failure is None
        results.append(parameters_of(run.model) | memory_of(run.method))
        again = training._Training(made, chosen, torch.device("cpu"))
        again.load_state_dict(run.state_dict(), Path("here"))
    plain, twin = results
    biases = {key for key in plain if "conv" in key and "bias" in key}
    for key in biases & before.keys():
        assert torch.equal(twin[key], before[key])
    for key in plain.keys() - biases:
        ours, theirs = twin[key], plain[key]
        if key.startswith("/vectors"):  # directions of nearly equal eigenvalues are not determined
            continue
        if key.startswith("/anchor/conv") and ours.dim() == 3:  # a matrix whose last column is the bias
            ours, theirs = ours[:, :, :-1], theirs[:, :, :-1]
        near = 1e-3 * float(theirs.abs().max())
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=near, msg=lambda text, key=key: key + text)


def test_npc_finds_the_same_importance() -> None:
    """Neurons tapped after the pooling have the same importance as neurons tapped after the norm."""

    def learn(model: nn.Sequential, batches: list[Tensor]) -> dict[str, Tensor]:
        npc = holdfast.NPC(model, torch.optim.SGD(model.parameters(), lr=0.05), rate=0.3, free=[model.head])
        for x in batches:
            npc.zero_grad()
            model(x).square().sum(1).mean().backward()
            npc.step()
        return npc.importance

    batches = [torch.randn(6, 3, 32, 32) for _ in range(4)]
    ours, theirs = (learn(model, batches) for model in reversed(plain_and_fused()))
    assert list(ours) == ["conv1", "conv2", "conv3", "hidden"]
    for name, values in theirs.items():
        torch.testing.assert_close(ours[name], values, rtol=1e-3, atol=1e-4)


# ---- the fused module measures importance for NPC ----

NORMS = ("norm1", "norm2", "norm3")


def under_npc(model: nn.Sequential, example: Tensor | None = None) -> holdfast.NPC:
    return holdfast.NPC(
        model, torch.optim.SGD(model.parameters(), lr=0.05), rate=0.3, free=[model.head], example=example
    )


def carried(model: nn.Sequential) -> dict[str, Tensor]:
    return {name: model.get_submodule(name).carrier.grad for name in NORMS}


def taylor_at(model: nn.Sequential, name: str, x: Tensor) -> Tensor:
    """Eq. 2 in double precision, by an independent hook."""
    n, gradient = gradient_at(copy.deepcopy(model).double(), name, x.double())
    return (n * gradient).mean((2, 3)).abs().sum(0)


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_the_module_measures_once(mode: str) -> None:
    _, twin = plain_and_fused()
    x = torch.randn(6, 3, 32, 32)
    npc = under_npc(twin, x)
    getattr(twin, mode)()
    twin(x).square().mean().backward()
    for name, values in carried(twin).items():
        torch.testing.assert_close(values.double(), taylor_at(twin, name, x), rtol=1e-3, atol=1e-9)
    assert [len(module._forward_hooks) for module in twin][:4] == [0, 1, 0, 0]
    npc.close()


def test_measurements_of_micro_batches_add_up() -> None:
    _, twin = plain_and_fused()
    npc = under_npc(twin, torch.randn(2, 3, 32, 32))
    parts = [torch.randn(count, 3, 32, 32) for count in (2, 4)]
    for part in parts:
        twin(part).square().mean().backward()
    for name, values in carried(twin).items():
        expected = sum(taylor_at(twin, name, part) for part in parts)
        torch.testing.assert_close(values.double(), expected, rtol=1e-3, atol=1e-9)
    npc.zero_grad()
    assert set(carried(twin).values()) == {None}


def test_without_gradients_nothing_is_measured() -> None:
    _, twin = plain_and_fused()
    npc = under_npc(twin, torch.randn(2, 3, 32, 32))
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert not twin(x).requires_grad
    twin.conv1.requires_grad_(False)
    assert not twin[:4](x).requires_grad
    npc.close()


def test_a_closed_npc_leaves_no_carrier() -> None:
    _, twin = plain_and_fused()
    x = torch.randn(2, 3, 32, 32)
    for end in (lambda npc: npc.close(), lambda npc: None):
        npc = under_npc(twin, x)
        assert twin.norm1.carrier is not None
        end(npc)
        del npc
        assert [twin.get_submodule(name).carrier for name in NORMS] == [None] * 3


def test_a_copy_of_the_model_is_not_measured() -> None:
    _, twin = plain_and_fused()
    x = torch.randn(2, 3, 32, 32)
    npc = under_npc(twin, x)
    other = copy.deepcopy(twin)
    assert torch.equal(other(x), twin(x))
    other(x).sum().backward()
    assert other.norm1.carrier is None
    assert set(carried(twin).values()) == {None}
    npc.close()


def test_a_module_measures_for_one_npc_and_others_see_the_same() -> None:
    _, twin = plain_and_fused()
    x = torch.randn(4, 3, 32, 32)
    npcs = [under_npc(twin, x) for _ in range(2)]
    twin(x).square().mean().backward()
    for name, values in carried(twin).items():
        for npc in npcs:
            (layer,) = (layer for layer in npc._layers if layer.name == name.replace("norm", "conv"))
            torch.testing.assert_close(npc._taps.carriers[layer].gradient, values)
    npcs[1].close()
    assert twin.norm1.carrier is not None
    npcs[0].close()
    assert twin.norm1.carrier is None


def test_an_output_that_is_changed_in_place_is_observed_as_ever() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(
        *(nn.Conv2d(2, 4, 3, padding=1), nn.InstanceNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.ELU(inplace=True), nn.Flatten(), nn.Linear(64, 3)),
    )
    twin, batches = copy.deepcopy(plain), [torch.randn(5, 2, 8, 8) for _ in range(3)]
    fuse_modules(twin)
    importances = []
    for model in (plain, twin):
        npc = holdfast.NPC(model, torch.optim.SGD(model.parameters(), lr=0.1), rate=0.5, free=[model[6]])
        for x in batches:
            npc.zero_grad()
            model(x).square().mean().backward()
            npc.step()
        importances.append(npc.importance["0"])
    assert type(twin[1]) is NormReluPool
    torch.testing.assert_close(*importances)


def test_a_model_that_is_moved_gets_new_carriers() -> None:
    _, twin = plain_and_fused()
    npc = under_npc(twin, torch.randn(2, 3, 32, 32))
    x = torch.randn(2, 3, 32, 32, device="meta")
    twin.to("meta")
    for _ in range(2):  # measured by the hook, then by the module
        for p in twin.parameters():
            p.grad = None
        twin(x).sum().backward()
        for name, values in carried(twin).items():
            (layer,) = (layer for layer in npc._layers if layer.name == name.replace("norm", "conv"))
            assert values.device.type == "meta"
            assert npc._taps.carriers[layer].tensor is twin.get_submodule(name).carrier
    npc.close()


@pytest.mark.filterwarnings("ignore")  # warnings of torch's compiler
def test_a_compiled_model_measures_in_one_graph() -> None:
    torch.compiler.reset()
    _, twin = plain_and_fused()
    x = torch.randn(4, 3, 32, 32)
    npc = under_npc(twin, x)
    compiled = torch.compile(twin, fullgraph=True, backend="aot_eager")
    for times in (1, 2):
        compiled(x).square().mean().backward()
        for name, values in carried(twin).items():
            torch.testing.assert_close(values.double(), times * taylor_at(twin, name, x), rtol=1e-3, atol=1e-9)
    npc.step()
    assert npc._taps.compiled
    assert all(values.sum() > 0 for values in npc.importance.values())


def test_ssl_sees_the_same_activations_and_finds_the_same_importance() -> None:
    """A channel's gradients have the same sum before and after the pooling; its activity differs."""

    def learn(model: nn.Sequential, batches: list[Tensor]) -> tuple[list[Tensor], dict[str, Tensor], list[Tensor]]:
        ssl = holdfast.SSL(model, torch.optim.SGD(model.parameters(), lr=0.05), sparsity=0.1)
        penalties = []
        for x in batches:
            loss = model(x).square().sum(1).mean()
            penalties.append(ssl.penalty())
            ssl.zero_grad()
            (loss + penalties[-1]).backward()
            ssl.step()
            ssl.consolidate([x])
        return penalties, ssl.neurons, list(model.parameters())

    batches = [torch.randn(6, 3, 32, 32) for _ in range(3)]
    theirs, ours = (learn(model, batches) for model in plain_and_fused())
    assert list(ours[1]) == ["conv1", "conv2", "conv3", "hidden"]
    assert all(penalty > 0 for penalty in ours[0])
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def test_activity_is_asked_for_and_taken_once() -> None:
    x = torch.randn(2, 4, 6, 6)
    silent, showing = NormReluPool(4), NormReluPool(4)
    showing.shows = 1
    assert torch.equal(silent(x), showing(x))
    assert silent.activity is None
    torch.testing.assert_close(showing.take_activity(), nn.functional.instance_norm(x).relu().mean((2, 3)))
    assert showing.activity is None


@pytest.mark.parametrize(
    "modules",
    [
        [nn.InstanceNorm2d(4, affine=True), nn.ReLU(), nn.MaxPool2d(2)],
        [nn.InstanceNorm2d(4, track_running_stats=True), nn.ReLU(), nn.MaxPool2d(2)],
        [nn.InstanceNorm2d(4, eps=1e-3), nn.ReLU(), nn.MaxPool2d(2)],
        [nn.InstanceNorm2d(4), nn.ReLU(), nn.MaxPool2d(3)],
        [nn.InstanceNorm2d(4), nn.ReLU(), nn.MaxPool2d(2, stride=1)],
        [nn.InstanceNorm2d(4), nn.ReLU(), nn.MaxPool2d(2, ceil_mode=True)],
        [nn.InstanceNorm2d(4), nn.GELU(), nn.MaxPool2d(2)],
        [nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(2)],
        [nn.Conv2d(4, 4, 5, padding=1)],
        [nn.Conv2d(4, 4, 3, padding=1, stride=2)],
        [nn.Conv2d(4, 4, 3, padding=1, groups=2)],
        [nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect")],
        [nn.Conv2d(8, 4, 3, padding=1)],
        [NormReluPool(4), nn.ReLU(), nn.MaxPool2d(2)],
    ],
)
def test_what_is_not_the_same_is_left_as_it_is(modules: list[nn.Module]) -> None:
    model = nn.Sequential(*modules)
    kinds = [type(module) for module in model]
    fuse_modules(model)
    assert [type(module) for module in model] == kinds


def test_fused_modules_share_the_parameters_and_their_order() -> None:
    model = paper_cnn(classes=2, width=0.05)
    before, state = dict(model.named_parameters()), torch.get_rng_state()
    fuse_modules(model)
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is parameter for name, parameter in before.items())
    assert torch.equal(torch.get_rng_state(), state)  # fusing does not change a run's random numbers


def test_a_shared_convolution_stays_one_module() -> None:
    shared = nn.Conv2d(4, 4, 3, padding=1, bias=False)
    model = nn.Sequential(shared, nn.ReLU(), shared, nn.Sequential(nn.Tanh(), shared))
    fuse_modules(model)
    assert type(model[0]) is FewChannels
    assert model[0] is model[2] is model[3][1]
    assert model[0].weight is shared.weight
    assert model[0].bias is None


def test_a_fused_model_stays_in_its_mode() -> None:
    model = paper_cnn(classes=2, width=0.05).eval()
    fuse_modules(model)
    assert not any(module.training for module in model.modules() if not isinstance(module, nn.Identity))


def test_images_of_odd_sizes() -> None:
    x = torch.randn(2, 4, 7, 5)
    plain = nn.Sequential(nn.InstanceNorm2d(4), nn.ReLU(), nn.MaxPool2d(2))
    assert torch.equal(NormReluPool(4)(x), plain(x))
