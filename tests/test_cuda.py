"""Tests on a GPU; skipped without one."""

import copy
import gc
import io
import os
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import holdfast
from helpers import Block, assert_same_bits, memory_of, mlp, parameters_of, train
from holdfast.compiling import many_variants
from holdfast.methods import METHODS
from holdfast.runs.training import Interrupted, Progress, _Training
from holdfast.runs.training import train as train_run
from holdfast.streams.batches import DeviceImages, Shuffled, prepare
from holdfast.streams.tasks import Frame, permuted, rotated, split
from test_fused import BeforeNorm, FewChannels, NormReluPool, pictures, plain_and_fused
from test_streams import source
from test_training import outcome as run_outcome
from test_training import plan as run_plan
from test_training import stream as spots

CUDA = torch.device("cuda")

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.fixture(autouse=True)
def _exact() -> Iterator[None]:
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


@pytest.fixture(autouse=True)
def _many_variants() -> Iterator[None]:
    with many_variants():
        yield


def images(count: int) -> list[Tensor]:
    return [torch.randn(8, 2, 8, 8) for _ in range(count)]


@pytest.mark.parametrize("kind", [SGD, AdamW])
@pytest.mark.parametrize("moved", ["before", "after"])
def test_the_same_as_on_the_cpu(kind: type[Optimizer], moved: str) -> None:
    """Also for a model that is moved to the GPU after the optimizer was built."""
    here = Block()
    there = copy.deepcopy(here)
    batches = images(6)
    ours = holdfast.NPC(here, kind(here.parameters(), lr=0.01), rate=0.3, free=[here.head])
    if moved == "before":
        there.cuda()
    theirs = holdfast.NPC(there, kind(there.parameters(), lr=0.01), rate=0.3, free=[there.head])
    there.cuda()
    train(here, ours, batches)
    train(there, theirs, [x.cuda() for x in batches])
    torch.testing.assert_close(theirs.importance["conv"].cpu(), ours.importance["conv"], rtol=1e-3, atol=1e-4)
    for name, value in parameters_of(there).items():
        if name == "conv.bias":  # the normalization makes its gradient rounding noise, which Adam blows up
            continue
        torch.testing.assert_close(value.cpu(), parameters_of(here)[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", [SGD, AdamW])
def test_a_step_does_not_wait_for_the_gpu(kind: type[Optimizer]) -> None:
    model = Block().cuda()
    optimizer = holdfast.NPC(model, kind(model.parameters(), lr=0.01), rate=0.3, free=[model.head])
    batches = [x.cuda() for x in images(3)]
    train(model, optimizer, batches)
    model(batches[0]).square().mean().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
        optimizer.zero_grad()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_half_precision_with_a_scaler() -> None:
    model = mlp(width=32).cuda()
    optimizer = holdfast.NPC(model, SGD(model.parameters(), lr=0.01, fused=True), rate=0.3, beta=0.9)
    scaler = torch.amp.GradScaler("cuda")
    for _ in range(20):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = model(torch.randn(16, 4, device="cuda")).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert all(values.isfinite().all() and values.mean() > 0.5 for values in optimizer.importance.values())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled(mode: str) -> None:
    model = Block().cuda()
    plain = copy.deepcopy(model)
    batches = [x.cuda() for x in images(6)]
    ours = holdfast.NPC(model, SGD(model.parameters(), lr=0.1), rate=0.3, free=[model.head], example=batches[0])
    theirs = holdfast.NPC(plain, SGD(plain.parameters(), lr=0.1), rate=0.3, free=[plain.head])
    train(torch.compile(model, fullgraph=True, mode=mode), ours, batches)
    train(plain, theirs, batches)
    torch.testing.assert_close(ours.importance["conv"], theirs.importance["conv"], rtol=1e-3, atol=1e-4)


def test_the_same_bits_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        results = []
        for _ in range(2):
            torch.manual_seed(0)
            model = mlp(width=64).cuda()
            optimizer = holdfast.NPC(model, AdamW(model.parameters(), lr=0.01), rate=0.3)
            train(model, optimizer, [torch.randn(64, 4, device="cuda") for _ in range(10)])
            results.append(parameters_of(model) | optimizer.importance)
        assert_same_bits(*results)
    finally:
        torch.use_deterministic_algorithms(False)


STACKS = ("lwf+npc", "ewc+cpc", "ssl+npc", "lwf+dpc", "compact+dpc")


def two_tasks(name: str, device: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = mlp(width=16).double().to(device)
    tasks = [[(torch.randn(6, 4, dtype=torch.float64), torch.randint(2, (6,))) for _ in range(4)] for _ in range(2)]
    optimizer = METHODS[name](model, AdamW(model.parameters(), lr=0.01))
    for batches in tasks:
        train(model, optimizer, [x.to(device) for x, _ in batches])
        optimizer.consolidate(batches, active=[0, 1])  # from the host: it is moved to where the model is
    train(model, optimizer, [x.to(device) for x, _ in tasks[0]])
    return {key: value.cpu() for key, value in (parameters_of(model) | memory_of(optimizer)).items()}


@pytest.mark.parametrize("name", METHODS)
def test_every_method_does_the_same_as_on_the_cpu(name: str) -> None:
    here, there = two_tasks(name, "cpu"), two_tasks(name, "cuda")
    assert here.keys() == there.keys()
    for key, value in here.items():
        torch.testing.assert_close(there[key], value, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", METHODS)
def test_a_model_that_is_moved_after_a_task(name: str) -> None:
    results = []
    for moved in (False, True):
        torch.manual_seed(0)
        model = mlp(width=16).double()
        batches = [(torch.randn(6, 4, dtype=torch.float64), torch.randint(2, (6,))) for _ in range(3)]
        lr = torch.tensor(0.1) if name in ("ewc", "si") else 0.1
        optimizer = METHODS[name](model, SGD(model.parameters(), lr=lr, foreach=False))
        for _ in range(2):
            train(model, optimizer, [x.cuda() if next(model.parameters()).is_cuda else x for x, _ in batches])
            optimizer.consolidate(batches, active=[0, 1])
            if moved:
                model.cuda()
        train(model, optimizer, [x.cuda() if moved else x for x, _ in batches])
        results.append({key: value.cpu() for key, value in (parameters_of(model) | memory_of(optimizer)).items()})
    for key, value in results[0].items():
        torch.testing.assert_close(results[1][key], value, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", METHODS)
def test_no_method_waits_for_the_gpu_in_a_step(name: str) -> None:
    model = mlp().cuda()
    optimizer = METHODS[name](model, SGD(model.parameters(), lr=0.01))
    batches = [(torch.randn(8, 4, device="cuda"), torch.randint(2, (8,), device="cuda")) for _ in range(2)]
    x = batches[0][0]
    train(model, optimizer, [x, x])
    optimizer.consolidate(batches, active=[0, 1])
    train(model, optimizer, [x, x])
    torch.cuda.set_sync_debug_mode("error")
    try:
        train(model, optimizer, [x])
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", METHODS)
def test_a_state_saved_on_the_gpu_goes_on_there(name: str) -> None:
    model = mlp().cuda()
    optimizer = METHODS[name](model, SGD(model.parameters(), lr=0.01))
    batches = [(torch.randn(8, 4, device="cuda"), torch.randint(2, (8,), device="cuda"))]
    train(model, optimizer, [batches[0][0]])
    optimizer.consolidate(batches, active=[0, 1])
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    twin = copy.deepcopy(model)
    again = METHODS[name](twin, SGD(twin.parameters(), lr=0.01))
    if name == "joint":
        again.consolidate(batches, active=[0, 1])
    again.load_state_dict(torch.load(file, weights_only=True, map_location="cpu"))
    for each, method in ((model, optimizer), (twin, again)):
        train(each, method, [batches[0][0]] * 2)
    assert_same_bits(parameters_of(model), parameters_of(twin))


# ---- streams and training ----


def test_images_on_the_host_give_the_same_batches_as_on_the_gpu() -> None:
    made = spots()
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    ways = [DeviceImages(made, cpu), DeviceImages(made, gpu, resident=True), DeviceImages(made, gpu, resident=False)]
    batches = [Shuffled(images, made.tasks[0], 8, torch.Generator().manual_seed(0)) for images in ways]
    for _ in range(12):
        (x, y), *others = [next(each) for each in batches]
        for other_x, other_y in others:
            assert other_x.is_cuda
            assert torch.equal(other_y.cpu(), y)
            torch.testing.assert_close(other_x.cpu(), x)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("resident", [True, False])
def test_compiled_batches_are_the_same(resident: bool) -> None:
    """In several sizes, permuted and rotated."""
    torch.compiler.reset()
    streams = [
        split(source(channels=3), Frame(6, 2, True, "mean"), per_task=3),
        permuted(source(side=5), Frame(6, 2, True), tasks=2),
        rotated(source(), Frame(6, 1), angles=[0, 45]),
    ]
    for made in streams:
        task = made.tasks[1]
        compiled, eager = (DeviceImages(made, CUDA, resident=resident, compile=flag) for flag in (True, False))
        ours, theirs = (Shuffled(images, task, 8, torch.Generator().manual_seed(0)) for images in (compiled, eager))
        pairs = [(next(ours), next(theirs)) for _ in range(5)]
        ours, theirs = (Shuffled(images, task, 9, torch.Generator().manual_seed(1)) for images in (compiled, eager))
        pairs.append((next(ours), next(theirs)))
        for (x, y), (exact, labels) in pairs:
            assert x.is_cuda
            torch.testing.assert_close(x, exact, rtol=1e-4, atol=1e-5)
            assert torch.equal(y, labels)


def test_a_compiled_run_compiles_the_preparation_of_batches() -> None:
    runs = [_Training(spots(), run_plan("finetune", compile=flag), CUDA) for flag in (False, True)]
    assert [run.images.prepare is prepare for run in runs] == [True, False]


@pytest.mark.parametrize("name", METHODS)
def test_a_run_on_the_gpu_ends_with_the_same_bits_twice_and_after_a_stop(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    made, plan = spots(), run_plan(name, model="small_cnn", deterministic=True)
    first, again = (run_outcome(train_run(made, plan, device="cuda")) for _ in range(2))
    assert first == again
    steps = []

    def stop(progress: Progress) -> None:
        steps.append(progress)
        if len(steps) == 17:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted):
        train_run(made, plan, device="cuda", folder=tmp_path, tell=stop)
    assert run_outcome(train_run(made, plan, device="cuda", folder=tmp_path)) == first


def test_training_does_not_wait_for_the_gpu() -> None:
    made = spots()
    images = DeviceImages(made, torch.device("cuda"))
    batches = Shuffled(images, made.tasks[0], 8, torch.Generator().manual_seed(0))
    next(batches)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            next(batches)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ---- fused modules and CUDA graphs ----


@pytest.mark.parametrize("shape", [(5, 64, 32, 32), (3, 256, 16, 16), (3, 128, 8, 8), (7, 5, 6, 4), (2, 3, 2, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_of_norm_relu_and_pooling(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape, device="cuda", dtype=dtype)
    ours, theirs = x.clone().requires_grad_(), x.double().requires_grad_()
    out = NormReluPool(shape[1])(ours)
    exact = nn.functional.max_pool2d(nn.functional.instance_norm(theirs).relu(), 2)
    gradient = torch.randn_like(exact).to(dtype)
    out.backward(gradient)
    exact.backward(gradient.double())
    assert out.dtype == dtype
    close = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    torch.testing.assert_close(out.double(), exact, **close)
    if dtype == torch.float32:  # in bf16 several values of a window are often the same
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("shape", [(5, 64, 32, 32), (3, 128, 8, 8), (7, 5, 6, 4)])
def test_the_kernel_shows_the_activity_of_each_channel(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape, device="cuda")
    ours, theirs = x.clone().requires_grad_(), x.double().requires_grad_()
    module = NormReluPool(shape[1])
    module.shows = 1
    out, activity = module(ours), module.take_activity()
    active = nn.functional.instance_norm(theirs).relu()
    exact = nn.functional.max_pool2d(active, 2), active.mean((2, 3))
    torch.testing.assert_close(activity.double(), exact[1], rtol=1e-4, atol=1e-5)
    gradients = torch.randn_like(exact[0]), shape[2] * torch.randn_like(exact[1])
    torch.autograd.backward((out, activity), tuple(gradient.float() for gradient in gradients))
    torch.autograd.backward(exact, gradients)
    torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("shape", [(5, 64, 32, 32), (3, 128, 8, 8), (7, 5, 6, 4)])
@pytest.mark.parametrize("shows", [False, True])
def test_the_kernel_measures_the_importance_of_each_channel(shape: tuple[int, ...], shows: bool) -> None:
    """The importance of the pooled output alone, whatever gradient the activity has."""
    torch.manual_seed(0)
    x = torch.randn(shape, device="cuda", requires_grad=True)
    module = NormReluPool(shape[1])
    module.shows = int(shows)
    module.carrier = torch.zeros(shape[1], device="cuda", requires_grad=True)
    exact = nn.functional.max_pool2d(nn.functional.instance_norm(x.detach().double()).relu(), 2)
    gradient = torch.randn_like(exact)
    for times in (1, 2):
        term = module(x).mul(gradient.float()).sum()
        (term + module.take_activity().square().sum() if shows else term).backward()
        expected = times * (exact * gradient).mean((2, 3)).abs().sum(0)
        torch.testing.assert_close(module.carrier.grad.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("at", [(0, 0), (8, 16), (16, 16), (31, 31)])
@pytest.mark.parametrize("mean", [0, 1e3])
def test_the_kernel_is_exact_where_one_value_is_far_from_the_others(at: tuple[int, int], mean: float) -> None:
    torch.manual_seed(0)
    x = mean + torch.randn(3, 5, 32, 32, device="cuda")
    x[:, :, at[0], at[1]] += 300
    exact = nn.functional.max_pool2d(nn.functional.instance_norm(x.double()).relu(), 2)
    torch.testing.assert_close(NormReluPool(5)(x).double(), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_the_kernel_does_not_hide_values_that_are_not_finite(bad: float) -> None:
    x = torch.randn(2, 4, 8, 8, device="cuda")
    x[0, 1, 2, 3] = bad
    exact = nn.functional.max_pool2d(nn.functional.instance_norm(x).relu(), 2)
    torch.testing.assert_close(NormReluPool(4)(x), exact, equal_nan=True, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_a_graphed_run_that_diverges_is_noticed() -> None:
    run = _Training(pictures(), run_plan("npc", model="paper_cnn", width=0.2, batch=16, epochs=40, compile=True), CUDA)
    for progress in run:
        if progress.step == 30:
            with torch.no_grad():
                run.model.conv2.weight[0] = torch.nan
    assert run.record.failure is not None
    assert run.record.failure["step"] == 30


@pytest.mark.filterwarnings("ignore")
def test_a_finished_run_leaves_nothing_on_the_gpu() -> None:
    chosen = run_plan("ewc", model="paper_cnn", width=0.2, batch=16, epochs=4, compile=True)
    train_run(pictures(), chosen, device="cuda")  # allocates everything that stays for good
    gc.collect()
    before = torch.cuda.memory_allocated()
    gc.disable()
    try:
        train_run(pictures(), chosen, device="cuda")
    finally:
        gc.enable()
    assert torch.cuda.memory_allocated() - before < 2**20


@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
def test_a_convolution_of_few_channels(memory: torch.memory_format) -> None:
    plain = nn.Conv2d(3, 16, 3, padding=1, device="cuda")
    fused = FewChannels(3, 16, 3, padding=1, device="cuda")
    fused.load_state_dict(plain.state_dict())
    x, gradient = torch.randn(4, 3, 32, 32, device="cuda"), torch.randn(4, 16, 32, 32, device="cuda")
    x = x.contiguous(memory_format=memory)
    torch.testing.assert_close(fused(x), plain(x), rtol=1e-4, atol=1e-5)
    for layer in (plain, fused):
        layer(x).backward(gradient)
    torch.testing.assert_close(fused.weight.grad, plain.weight.grad, rtol=1e-4, atol=1e-3)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("compiled", [False, True])
def test_biases_that_a_norm_cancels_are_skipped(memory: torch.memory_format, compiled: bool) -> None:
    plain, fused = (model.cuda() for model in plain_and_fused())
    assert type(fused.conv2) is BeforeNorm  # so Triton is installed
    for model in (plain, fused):
        for convolution in (model.conv1, model.conv2, model.conv3):
            nn.init.constant_(convolution.bias, 3.0)
    x = torch.randn(6, 3, 32, 32, device="cuda").contiguous(memory_format=memory)
    exact = copy.deepcopy(plain).double()
    torch.compiler.reset()
    out = torch.compile(lambda x: fused(x), fullgraph=True)(x) if compiled else fused(x)
    torch.testing.assert_close(out.double(), exact(x.double()), rtol=1e-3, atol=1e-4)
    out.square().sum().backward()
    exact(x.double()).square().sum().backward()
    truth = dict(exact.named_parameters())
    for name, ours in fused.named_parameters():
        if "conv" in name and "bias" in name:
            assert ours.grad is None
        else:
            near = 1e-3 * float(truth[name].grad.abs().max())
            torch.testing.assert_close(ours.grad.double(), truth[name].grad, rtol=1e-2, atol=near)
    torch.testing.assert_close(copy.deepcopy(fused).double()(x.double()), exact(x.double()))  # the plain path


def learned(name: str, flag: bool) -> dict[str, Tensor]:
    """The parameters and the method's state after two tasks, without dropout: a graph draws other random numbers."""
    plan = run_plan(name, model="paper_cnn", width=0.2, batch=16, epochs=4, compile=flag, lr=0.02)
    run = _Training(pictures(), plan, torch.device("cuda"))
    run.model.dropout.p = 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in run:
            pass
    assert run.record.failure is None
    return parameters_of(run.model) | {f"memory {key}": value for key, value in memory_of(run.method).items()}


@pytest.mark.parametrize("name", [*METHODS, *STACKS])
def test_a_graphed_run_learns_the_same_as_an_eager_one(name: str) -> None:
    plain, graphed = (learned(name, flag) for flag in (False, True))
    for parameter, value in plain.items():
        if "vectors" in parameter:  # directions of nearly equal eigenvalues are not determined
            continue
        if "conv" not in parameter or "bias" not in parameter:  # the norm reduces it to noise
            near = 0.03 * float(value.abs().max()) if "memory" in parameter else 2e-3
            torch.testing.assert_close(
                graphed[parameter], value, rtol=0.02, atol=near, msg=lambda m, p=parameter: p + m
            )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*METHODS, *STACKS])
def test_steps_are_captured(name: str) -> None:
    run = _Training(
        pictures(), run_plan(name, model="paper_cnn", width=0.1, batch=16, epochs=4, compile=True), torch.device("cuda")
    )
    steps = iter(run)
    while run.task == 0 or run.step < 8:
        next(steps)
    captured = run.stepper.graphed is not None and run.stepper.graphed.graph is not None
    assert captured == (name != "joint")  # Joint draws the batches of old tasks itself
