"""DPC against a plain reference: inputs from derivatives, matrices inverted by numpy, one neuron at a time."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import holdfast
from helpers import assert_same_bits, hooks_of, memory_of, mlp, parameters_of, train
from holdfast.directions import Directions, capacity, dense, directed, leading
from holdfast.neurons.rows import Layout, group_rows

LAYERS: dict[str, Callable[[bool], nn.Module]] = {
    "linear": lambda bias: nn.Linear(4, 6, bias=bias),
    "convolution": lambda bias: nn.Conv2d(4, 6, 3, stride=2, padding=1, bias=bias),
    "dilated": lambda bias: nn.Conv1d(4, 6, 2, dilation=2, bias=bias),
    "circular": lambda bias: nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular", bias=bias),
    "grouped": lambda bias: nn.Conv2d(4, 6, (2, 3), groups=2, bias=bias),
    "depthwise": lambda bias: nn.Conv1d(4, 8, 3, groups=4, bias=bias),
    "transposed": lambda bias: nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, bias=bias),
    "grouped transposed": lambda bias: nn.ConvTranspose1d(4, 6, 3, stride=2, dilation=2, groups=2, bias=bias),
    "volume": lambda bias: nn.Conv3d(4, 6, 2, bias=bias),
}


def axes(module: nn.Module) -> int:
    return len(getattr(module, "kernel_size", ()))


def inputs_for(module: nn.Module, samples: int = 3) -> Tensor:
    return torch.randn(samples, *([4, *[5] * axes(module)] if axes(module) else [4]), dtype=torch.float64)


def derivative_rows(module: nn.Module, neuron: int, x: Tensor) -> np.ndarray:
    """The inputs of a neuron: an output is linear in the neuron's parameters, and its derivatives are the inputs."""
    rows = []
    for sample in x:
        outputs = module(sample.unsqueeze(0)).transpose(0, 1)[neuron].flatten()
        for output in outputs:
            gradients = torch.autograd.grad(output, list(module.parameters()), retain_graph=True)
            rows.append(np.concatenate([own(module, g, neuron).flatten().numpy() for g in gradients]))
    return np.array(rows)


def own(module: nn.Module, parameter: Tensor, neuron: int) -> Tensor:
    """The entries of a parameter that belong to a neuron."""
    groups = getattr(module, "groups", 1)
    if not isinstance(module, nn.modules.conv._ConvTransposeNd) or parameter.dim() == 1:
        return parameter[neuron]
    inputs, outputs = parameter.shape[0] // groups, parameter.shape[1]
    group = neuron // outputs
    return parameter[group * inputs : (group + 1) * inputs, neuron % outputs]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", LAYERS)
def test_rows_are_the_derivatives_by_the_weights(kind: str, bias: bool) -> None:
    module = LAYERS[kind](bias).double()
    x = inputs_for(module, samples=2)
    rows = group_rows(module, x)
    width = module(x).shape[1]
    for neuron in range(width):
        expected = derivative_rows(module, neuron, x)
        ours = rows[neuron // (width // len(rows))].numpy()
        np.testing.assert_allclose(ours, expected[:, : ours.shape[1]], atol=1e-12)
    layout = Layout.of(module)
    torch.testing.assert_close(layout.weight(layout.matrix(module.weight), module.weight.shape), module.weight)


class Net(nn.Module):
    def __init__(self, layer: nn.Module, width: int) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.nn.functional.softplus(self.layer(x))
        return self.head(x.flatten(2).mean(2) if x.dim() > 2 else x)


def reference_step(
    net: Net,
    before: dict[str, Tensor],
    after: dict[str, Tensor],
    share: Tensor,
    a: list[np.ndarray] | None,
    kappa: float,
) -> dict[str, Tensor]:
    """The parameters after s G + (1 - s) G P, neuron by neuron. `a[neuron]` is A; without A, P is 0, as in NPC."""
    expected = {name: value.clone() for name, value in after.items()}
    names = [f"layer.{name}" for name, _ in net.layer.named_parameters()]
    for neuron in range(len(share)):
        s = float(share[neuron])
        pieces = [own(net.layer, after[name] - before[name], neuron).flatten().numpy() for name in names]
        g = np.concatenate(pieces)
        p = np.zeros((len(g), len(g))) if a is None else np.linalg.inv(np.eye(len(g)) + kappa * a[neuron])
        changed = s * g + (1 - s) * (g @ p)
        start = 0
        for name, piece in zip(names, pieces, strict=True):
            target = own(net.layer, expected[name], neuron)
            old = own(net.layer, before[name], neuron)
            target.copy_(old + torch.from_numpy(changed[start : start + len(piece)]).view(target.shape))
            start += len(piece)
    return expected


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda p: SGD(p, lr=0.1),
    "momentum": lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda p: AdamW(p, lr=0.05),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", LAYERS)
def test_a_step_is_the_formula_neuron_by_neuron(kind: str, bias: bool, optimizer: str) -> None:
    """Three tasks. The bare optimizer's step from the same state gives G, the method's own plasticity s."""
    layer = LAYERS[kind](bias).double()
    width = layer(inputs_for(layer)).shape[1]
    net = Net(layer, width).double()
    kappa = 3.0
    method = holdfast.DPC(
        net, OPTIMIZERS[optimizer](net.parameters()), beta=0.8, kappa=kappa, rate=0.3, free=[net.head]
    )
    a: list[Any] = [0.0] * width
    for task in range(3):
        for _ in range(3):
            x = inputs_for(layer)
            twin = copy.deepcopy(net)
            bare = OPTIMIZERS[optimizer](twin.parameters())
            state = copy.deepcopy(method.wrapped.state_dict())
            bare.load_state_dict({**state, "param_groups": bare.state_dict()["param_groups"]})
            before = parameters_of(net)
            for model, stepper in ((twin, bare), (net, method)):
                stepper.zero_grad()
                model(x).square().mean().backward()
                stepper.step()
            share, after = method.plasticity["layer"], parameters_of(twin)
            expected = reference_step(net, before, after, share, a if task else None, kappa)
            for name, value in parameters_of(net).items():
                torch.testing.assert_close(value, expected[name], rtol=1e-7, atol=1e-10, msg=lambda m, n=name: n + m)
        batches = [inputs_for(layer, samples=2) for _ in range(2)]
        method.consolidate(batches)
        for neuron in range(width):
            rows = np.concatenate([derivative_rows(copy.deepcopy(layer), neuron, x) for x in batches])
            moment = rows.T @ rows / len(rows)
            a[neuron] = a[neuron] + moment / np.mean(np.diag(moment))
    eigenvalues = [np.linalg.eigvalsh(each) for each in a]
    taken = np.mean([np.mean(kappa * values / (1 + kappa * values)) for values in eigenvalues])
    assert method.capacity["layer"] == pytest.approx(taken)


# ---- low rank ----


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 9), st.integers(1, 9), st.integers(1, 3), st.integers(0, 2**16))
def test_the_leading_directions_and_the_mean_of_the_rest(inputs: int, rank: int, groups: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    rows = generator.normal(size=(groups, 2 * inputs, inputs))
    moment = rows.transpose(0, 2, 1) @ rows
    directions = leading(torch.from_numpy(moment), rank)
    for group in range(groups):
        values, vectors = np.linalg.eigh(moment[group])
        kept = min(rank, inputs)
        others = values[: inputs - kept]
        values[: inputs - kept] = others.mean() if len(others) else 0
        expected = vectors @ np.diag(values) @ vectors.T
        np.testing.assert_allclose(dense(directions)[group].numpy(), expected, atol=1e-9)
        change, share = generator.normal(size=(4, inputs)), generator.uniform(size=(4, 1))
        p = np.linalg.inv(np.eye(inputs) + 0.7 * expected)
        one = Directions(*(each[group : group + 1] for each in directions))
        ours, _ = directed(torch.from_numpy(change).unsqueeze(0), None, torch.from_numpy(share).unsqueeze(0), one, 0.7)
        np.testing.assert_allclose(ours[0].numpy(), share * change + (1 - share) * (change @ p), atol=1e-9)
        taken = np.mean(0.7 * values / (1 + 0.7 * values))
        assert float(capacity(one, 0.7)) == pytest.approx(taken)


@settings(max_examples=20, deadline=None)
@given(st.integers(100, 160), st.integers(1, 15), st.floats(1, 3), st.integers(0, 160), st.integers(0, 2**16))
def test_few_directions_of_a_large_moment(inputs: int, rank: int, power: float, present: int, seed: int) -> None:
    """They are found by iteration. As many eigenvalues as `present` are not 0, and fall by a power law."""
    generator = np.random.default_rng(seed)
    vectors, _ = np.linalg.qr(generator.normal(size=(inputs, inputs)))
    eigenvalues = np.arange(1, inputs + 1) ** -power * (np.arange(inputs) < present)
    directions = leading(torch.from_numpy(vectors * eigenvalues @ vectors.T).unsqueeze(0), rank)
    values = np.append(eigenvalues[:rank], np.full(inputs - rank, eigenvalues[rank:].mean()))
    np.testing.assert_allclose(dense(directions)[0].numpy(), vectors * values @ vectors.T, atol=1e-4)
    np.testing.assert_allclose(directions.values[0].flip(0).numpy(), eigenvalues[:rank], rtol=1e-5, atol=1e-12)


def test_a_rank_as_large_as_the_inputs_is_the_full_form() -> None:
    results = []
    for rank in (None, 100):
        torch.manual_seed(0)
        net = mlp().double()
        method = holdfast.DPC(net, SGD(net.parameters(), lr=0.1), rate=0.1, rank=rank, free=[net[4]])
        for _ in range(2):
            x = [torch.randn(8, 4, dtype=torch.float64) for _ in range(4)]
            train(net, method, x)
            method.consolidate(x)
        results.append(parameters_of(net))
    assert_same_bits(*results)


def test_memory_is_bounded_by_the_rank() -> None:
    net = nn.Sequential(nn.Linear(50, 20), nn.ReLU(), nn.Linear(20, 2))
    sizes = {}
    for rank in (None, 5):
        method = holdfast.DPC(net, SGD(net.parameters(), lr=0.1), rank=rank, free=[net[2]])
        sizes[rank] = method.memory()
    assert sizes[None] == {"importance": 80, "vectors": 4 * 51 * 51, "values": 4 * 51, "rest": 4}
    assert sizes[5] == {"importance": 80, "vectors": 4 * 51 * 5, "values": 4 * 5, "rest": 4}


# ---- without task boundaries ----


def boundless(net: nn.Sequential, **settings: Any) -> holdfast.DPC:
    settings = {"rate": 0.1, "every": 3, **settings}
    return holdfast.DPC(net, SGD(net.parameters(), lr=0.1), free=[net[4]], **settings)


@pytest.mark.parametrize("samples", [None, 5])
def test_every_few_steps_the_moment_grows_by_that_of_the_batch(samples: int | None) -> None:
    net = mlp().double()
    method = boundless(net, samples=samples)
    batches = [torch.randn(8, 4, dtype=torch.float64) for _ in range(7)]
    train(net, method, batches[:2])
    assert method.capacity["0"] == 0
    train(net, method, batches[2:])
    expected = np.zeros((5, 5))
    for x in (batches[2], batches[5]):  # the third and the sixth
        rows = np.concatenate([x[:samples].numpy(), np.ones((len(x[:samples]), 1))], 1)
        moment = rows.T @ rows
        expected += 0.1 * 3 * moment / np.mean(np.diag(moment))
    kept = Directions(*(memory["0"] for memory in (method._vectors, method._values, method._rest)))
    np.testing.assert_allclose(dense(kept)[0].numpy(), expected, atol=1e-12)


def test_a_run_without_boundaries_resumes_to_the_bit() -> None:
    torch.manual_seed(0)
    batches = [torch.randn(8, 4) for _ in range(8)]
    whole, first = mlp(), mlp()
    first.load_state_dict(whole.state_dict())
    train(whole, method := boundless(whole), batches)
    train(first, interrupted := boundless(first), batches[:4])
    second = mlp()
    second.load_state_dict(first.state_dict())
    resumed = boundless(second)
    resumed.load_state_dict(interrupted.state_dict())
    train(second, resumed, batches[4:])
    assert_same_bits(parameters_of(whole), parameters_of(second))
    assert_same_bits(memory_of(method), memory_of(resumed))


def test_without_boundaries_the_end_of_a_task_changes_nothing() -> None:
    net = mlp()
    method = boundless(net)
    train(net, method, [torch.randn(8, 4)] * 3)
    before = memory_of(method)
    method.consolidate([torch.randn(8, 4)])
    assert_same_bits(memory_of(method), before)
    assert not method.recordable
    method.close()
    assert hooks_of(net) == 0


# ---- what it is for ----


@pytest.mark.parametrize("every", [None, 10])
def test_frozen_neurons_keep_their_outputs_on_old_inputs_and_learn_elsewhere(every: int | None) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2)).double()
    old, new = torch.zeros(40, 6, dtype=torch.float64), torch.zeros(40, 6, dtype=torch.float64)
    old[:, :3], new[:, 3:] = torch.randn(40, 3), torch.randn(40, 3)
    knobs: dict[str, Any] = {"beta": 1e-9, "kappa": 1e10, "rate": 1.0, "every": every}
    method = holdfast.DPC(net, SGD(net.parameters(), lr=0.5), free=[net[1]], **knobs)
    train(net, method, [old] * 10)
    method.consolidate([old])
    before = net[0](old).detach(), net[0](new).detach()
    train(net, method, [new] * 9)
    assert set(method.plasticity["0"].tolist()) == {0.0}
    assert (net[0](old) - before[0]).abs().max() < 1e-6
    assert (net[0](new) - before[1]).abs().mean() > 0.01


def test_the_input_side_alone_leaves_the_first_task_free_and_protects_all_neurons_later() -> None:
    torch.manual_seed(0)
    free, limited = mlp().double(), mlp().double()
    limited.load_state_dict(free.state_dict())
    method = holdfast.DPC(limited, SGD(limited.parameters(), lr=0.1), beta=1e-9, rate=1.0, kappa=1e10, sides="inputs")
    data = [torch.randn(8, 4, dtype=torch.float64) for _ in range(5)]
    train(free, SGD(free.parameters(), lr=0.1), data)
    train(limited, method, data)
    assert_same_bits(parameters_of(free), parameters_of(limited))
    assert {value for share in method.plasticity.values() for value in share.tolist()} == {1.0}
    method.consolidate(data)
    assert {value for share in method.plasticity.values() for value in share.tolist()} == {0.0}
    before = limited(data[0]).detach()
    train(limited, method, [torch.randn(8, 4, dtype=torch.float64) for _ in range(5)])
    torch.testing.assert_close(limited(data[0]).detach(), before, rtol=1e-6, atol=1e-6)


def test_plastic_neurons_learn_everywhere() -> None:
    """With every neuron plastic, it is the bare optimizer, to the bit."""
    for kind in (SGD, AdamW):
        results = []
        for controlled in (False, True):
            torch.manual_seed(0)
            net = mlp()
            optimizer: Any = kind(net.parameters(), lr=0.05)
            if controlled:
                optimizer = holdfast.DPC(net, optimizer, beta=1e12, rate=0.1)
                optimizer.consolidate([torch.randn(8, 4, generator=torch.Generator().manual_seed(1))])
            train(net, optimizer, [torch.randn(8, 4) for _ in range(5)])
            results.append(parameters_of(net))
        assert_same_bits(*results)


def test_a_shared_weight_counts_the_inputs_of_all_its_layers() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.head = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)
            self.second.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.relu(self.second(torch.relu(self.first(x)))))

    net = Tied().double()
    method = holdfast.DPC(net, SGD(net.parameters(), lr=0.1), free=[net.head])
    x = torch.randn(20, 3, dtype=torch.float64)
    method.consolidate([x])
    rows = torch.cat([x, torch.relu(net.first(x)).detach()])
    rows = torch.cat([rows, torch.ones(40, 1)], 1)
    moment = rows.T @ rows
    kept = Directions(*(memory["first"] for memory in (method._vectors, method._values, method._rest)))
    torch.testing.assert_close(dense(kept)[0], moment / moment.diagonal().mean())


def test_a_frozen_bias_has_no_column() -> None:
    net = mlp()
    net[0].bias.requires_grad_(False)
    method = holdfast.DPC(net, SGD([p for p in net.parameters() if p.requires_grad], lr=0.1), rate=0.1)
    method.consolidate([torch.randn(8, 4)])
    before = net[0].bias.clone()
    train(net, method, [torch.randn(8, 4) for _ in range(3)])
    assert torch.equal(net[0].bias, before)
    assert method._vectors["0"].shape == (1, 4, 4)


def test_samples_limits_the_measurement() -> None:
    x = torch.randn(40, 4)
    kept = []
    for samples, batches in ((10, [x[:8], x[8:]]), (None, [x[:10]])):
        torch.manual_seed(0)
        net = mlp()
        method = holdfast.DPC(net, SGD(net.parameters(), lr=0.1), samples=samples)
        method.consolidate(batches)
        kept.append(memory_of(method))
    for name, value in kept[0].items():
        if "vectors" not in name:
            torch.testing.assert_close(value, kept[1][name], rtol=1e-5, atol=1e-6)


def test_no_samples_is_an_error() -> None:
    net = mlp()
    method = holdfast.DPC(net, SGD(net.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="consolidate\\(\\) was given no samples"):
        method.consolidate([])


def test_inputs_that_are_not_finite_are_an_error_and_nothing_is_consolidated() -> None:
    net = mlp()
    method = holdfast.DPC(net, SGD(net.parameters(), lr=0.1))
    with pytest.raises(FloatingPointError, match="'0' is not finite, so nothing was consolidated"):
        method.consolidate([torch.full((4, 4), torch.nan)])
    assert method.tasks == 0
