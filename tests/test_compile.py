"""NPC with torch.compile."""

import copy
import inspect
import shutil
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import holdfast
from helpers import Block, assert_same_bits, memory_of, mlp, parameters_of, train
from holdfast.compiling import many_variants
from holdfast.importance import layer_means
from holdfast.methods import METHODS, npc
from holdfast.methods.anchor import pull_
from holdfast.methods.cpc import control_, limit_all, measure_
from holdfast.methods.si import exact_copies, walk_
from holdfast.runs.training import train as train_run
from test_training import plan, stream

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of torch's compiler

BACKENDS = ["aot_eager"]
if shutil.which("g++") or shutil.which("clang++"):
    BACKENDS.append("inductor")


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch.compiler.reset()


def batches(model: nn.Module) -> list[Tensor]:
    return [torch.randn(6, 4) if isinstance(model, nn.Sequential) else torch.randn(6, 2, 8, 8) for _ in range(4)]


def inplace() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.ReLU(inplace=True), nn.Linear(6, 3))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("build", [mlp, Block, inplace])
def test_model_and_loss_in_one_graph(build: type[nn.Module], backend: str) -> None:
    model = build()
    plain = copy.deepcopy(model)
    data = batches(model)
    ours = holdfast.NPC(model, torch.optim.SGD(model.parameters(), lr=0.1), rate=0.5, example=data[0])
    theirs = holdfast.NPC(plain, torch.optim.SGD(plain.parameters(), lr=0.1), rate=0.5)

    @torch.compile(fullgraph=True, backend=backend)
    def loss_of(x: Tensor) -> Tensor:
        return model(x).square().mean()

    for x in data:
        for optimizer, loss in ((ours, loss_of(x)), (theirs, plain(x).square().mean())):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p, plain.get_parameter(name), rtol=1e-4, atol=1e-5)
    for name, values in ours.importance.items():
        torch.testing.assert_close(values, theirs.importance[name], rtol=1e-3, atol=1e-4)
        assert values.sum() > 0


def test_the_wrapper_of_a_compiled_model_may_be_given() -> None:
    model = mlp()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.randn(6, 4)
    optimizer = holdfast.NPC(compiled, torch.optim.SGD(compiled.parameters(), lr=0.1), rate=0.5, example=x)
    compiled(x).square().mean().backward()
    optimizer.step()
    assert optimizer.importance.keys() == {"0", "2", "4"}
    assert all(values.sum() > 0 for values in optimizer.importance.values())


def test_without_a_sample_one_graph_is_refused_by_name() -> None:
    model = mlp()
    optimizer = holdfast.NPC(model, torch.optim.SGD(model.parameters(), lr=0.1))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with pytest.raises(RuntimeError, match=r"NPC\(model, optimizer, example=x\)"):
        compiled(torch.randn(6, 4))
    optimizer.close()


def test_without_a_sample_several_graphs_find_their_way() -> None:
    model, plain = Block(), Block()
    plain.load_state_dict(model.state_dict())
    compiled = torch.compile(model, backend="aot_eager")
    ours = holdfast.NPC(model, torch.optim.SGD(model.parameters(), lr=0.1), rate=0.5)
    theirs = holdfast.NPC(plain, torch.optim.SGD(plain.parameters(), lr=0.1), rate=0.5)
    for x in batches(model):
        for optimizer, m in ((ours, compiled), (theirs, plain)):
            optimizer.zero_grad()
            m(x).square().mean().backward()
            optimizer.step()
    for name, values in ours.importance.items():
        torch.testing.assert_close(values, theirs.importance[name], rtol=1e-4, atol=1e-5)


def test_a_compiled_evaluation_needs_no_sample() -> None:
    model = mlp()
    optimizer = holdfast.NPC(model, torch.optim.SGD(model.parameters(), lr=0.1))
    compiled, x = torch.compile(model, fullgraph=True, backend="aot_eager"), torch.randn(6, 4)
    before = parameters_of(model)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
    assert_same_bits(parameters_of(model), before)
    optimizer.close()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_the_control_of_a_step_compiles_into_one_graph(
    kind: type[torch.optim.Optimizer], backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(
        nn.ConvTranspose2d(2, 4, 2, groups=2, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(324, 3)
    )
    plain = copy.deepcopy(model)
    data = [torch.randn(6, 2, 8, 8) for _ in range(6)]
    theirs = holdfast.NPC(plain, kind(plain.parameters(), lr=0.01), rate=0.3, free=[plain[4]])
    train(plain, theirs, data)
    for part in ("measure_", "limit_all"):
        monkeypatch.setattr(npc, part, torch.compile(getattr(npc, part), fullgraph=True, backend=backend))
    ours = holdfast.NPC(model, kind(model.parameters(), lr=0.01), rate=0.3, free=[model[4]])
    train(model, ours, data)
    assert sum((values == 0).sum() for values in ours.plasticity.values()) > 0
    for name, p in model.named_parameters():
        torch.testing.assert_close(p, plain.get_parameter(name), rtol=1e-4, atol=1e-5)
    for name, values in ours.importance.items():
        torch.testing.assert_close(values, theirs.importance[name], rtol=1e-4, atol=1e-5)


def test_a_second_optimizer_for_the_same_kind_of_model_is_not_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    for part in ("measure_", "limit_all"):
        monkeypatch.setattr(npc, part, torch.compile(getattr(npc, part), fullgraph=True, backend="aot_eager"))
    for stance in ("default", "fail_on_recompile"):
        model = Block()
        optimizer = holdfast.NPC(model, torch.optim.SGD(model.parameters(), lr=0.1), free=[model.head])
        with torch.compiler.set_stance(stance):
            train(model, optimizer, batches(model))


def test_whether_the_model_runs_compiled_is_known() -> None:
    model, x = mlp(), torch.randn(6, 4)
    optimizer = holdfast.NPC(model, torch.optim.SGD(model.parameters(), lr=0.1), example=x)
    train(torch.compile(model, fullgraph=True, backend="aot_eager"), optimizer, [x, x])
    assert optimizer._taps.compiled
    train(model, optimizer, [x])
    assert not optimizer._taps.compiled


@pytest.mark.parametrize("name", METHODS)
def test_every_method_in_one_graph(name: str) -> None:
    """Two tasks, with the model compiled and eager; the penalty is outside the graph."""
    results = []
    for compiled in (True, False):
        torch.manual_seed(1)
        model = mlp(width=16)
        tasks = [[(torch.randn(6, 4), torch.randint(2, (6,))) for _ in range(3)] for _ in range(2)]
        takes_example = "example" in inspect.signature(METHODS[name]).parameters
        options = {"example": tasks[0][0][0]} if takes_example else {}
        optimizer = METHODS[name](model, torch.optim.SGD(model.parameters(), lr=0.1), **options)
        run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
        for batches in tasks:
            train(run, optimizer, [x for x, _ in batches])
            optimizer.consolidate(batches, active=[0, 1])
        results.append(parameters_of(model) | memory_of(optimizer))
    for key, value in results[0].items():
        torch.testing.assert_close(value, results[1][key], rtol=1e-4, atol=1e-5)


@pytest.mark.skipif("inductor" not in BACKENDS, reason="no C++ compiler")
@pytest.mark.parametrize("name", ["npc", "lwf", "ssl", "compact"])
def test_a_run_does_not_reuse_code_compiled_for_a_method_without_hooks(name: str) -> None:
    """One process, several runs, as in a study."""
    made, settings = stream(), {"rate": 0.1} if name == "npc" else {}
    plans = [plan(each, settings=settings if each == name else {}, compile=True) for each in ("finetune", name)]
    _, after = (train_run(made, each, device="cpu") for each in plans)
    torch.compiler.reset()
    alone = train_run(made, plans[1], device="cpu")
    assert after.matrix == alone.matrix
    assert after.failure is None


def test_means_of_layers_are_the_same_compiled() -> None:
    row, sizes = torch.tensor([1.0, torch.nan, 3.0, 5.0, torch.inf, 0.0]), [2, 2, 1, 1]
    found = torch.compile(layer_means, fullgraph=True, backend="aot_eager")(row, torch.tensor(sizes), sizes)
    torch.testing.assert_close(found, torch.tensor([torch.nan, 4.0, torch.inf, 0.0]), equal_nan=True)
    torch.testing.assert_close(found, layer_means(row, torch.tensor(sizes), sizes), equal_nan=True)


def copies(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.clone() for tensor in tensors]


@pytest.mark.parametrize("normalize", ["parameter", "model"])
@pytest.mark.parametrize("name", ["pull", "measure", "limit", "control", "walk"])
def test_a_method_s_own_part_of_a_step_is_one_graph(name: str, normalize: str) -> None:
    """With a graph break, torch would silently leave it eager."""
    torch.manual_seed(0)
    values, gradients, importances = ([torch.rand(4, 3), torch.rand(4)] for _ in range(3))
    function, arguments = {
        "pull": (pull_, lambda: (copies(values), importances, gradients, 3.0)),
        "measure": (measure_, lambda: (copies(importances), values, gradients, 0.1, normalize)),
        "limit": (limit_all, lambda: (importances, copies(gradients), None, 0.7, 1.0)),
        "control": (
            control_,
            lambda: (copies(importances), copies(values), copies(gradients), (0.1, 0.7, 1.0), normalize),
        ),
        "walk": (walk_, lambda: (copies(importances), gradients, values, copies(gradients))),
    }[name]
    ours, theirs = arguments(), arguments()
    returned = torch.compile(function, fullgraph=True, backend="aot_eager")(*ours)
    torch.testing.assert_close((*ours[:3], returned or []), (*theirs[:3], function(*theirs) or []))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("stiffness", [1e-30, 1.0, 2e5, 1e30])
def test_the_compiled_pull_is_between_and_exact_at_both_ends(stiffness: float, backend: str) -> None:
    importance = torch.tensor([0.0, 1e-45, 1e-20, 1e-3, 1.0, 1e20, 3e38, torch.inf])
    ours, theirs, to = torch.full((8,), 1.3), torch.full((8,), 1.3), torch.full((8,), 2.7)
    with torch.no_grad():
        torch.compile(pull_, fullgraph=True, backend=backend)([ours], [importance], [to], stiffness)
    pull_([theirs], [importance], [to], stiffness)
    torch.testing.assert_close(ours, theirs)
    assert ((ours >= 1.3) & (ours <= to)).all()
    assert torch.equal(ours[importance * stiffness == 0], theirs[importance * stiffness == 0])
    assert torch.equal(ours[importance * stiffness > 1e20], to[importance * stiffness > 1e20])


def test_the_compiled_pull_is_no_operation_on_lists() -> None:
    """The compiler does not fuse a lerp over lists."""
    called: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., object]:
        called.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    values = [torch.rand(3), torch.rand(2)]
    torch.compile(pull_, fullgraph=True, backend=backend)(values, copies(values), copies(values), 1.0)
    assert any("lerp" in target for target in called)
    assert not any("foreach" in target for target in called)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_copies_have_memory_of_their_own(dtype: torch.dtype, backend: str) -> None:
    values = [torch.rand(4, 3, dtype=dtype), torch.rand(4, dtype=dtype)]
    made = torch.compile(exact_copies, fullgraph=True, backend=backend)(values)
    expected = [value.float() for value in copies(values)]
    for value in values:
        value.zero_()
    torch.testing.assert_close(made, expected)


def test_a_process_may_compile_more_often_than_torch_lets_it() -> None:
    made: list[int] = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., object]:
        made.append(1)
        return graph.forward

    function = torch.compile(lambda x: x + 1, backend=backend, dynamic=False)
    with many_variants():
        for size in range(2, 14):
            function(torch.zeros(size))
    assert len(made) == 12
    for size in range(14, 26):
        function(torch.zeros(size))
    assert len(made) == 12  # torch's own limit is reached
