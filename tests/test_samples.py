"""Per-sample gradients against a plain loop over samples."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from holdfast.models import paper_cnn
from holdfast.samples import Batch, output_nodes, read, samples_of, select, sum_over_samples
from holdfast.samples import gradients as per_sample

CPU = torch.device("cpu")


def conv() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(2, 4, 3, padding=1), nn.InstanceNorm2d(4, affine=True), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        *(nn.Conv2d(4, 4, 3, groups=2), nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.Flatten(), nn.Dropout(0.5)),
        nn.Linear(16, 5),
    )


class Tied(nn.Module):
    """One weight used twice, a parameter outside any layer, and an unused one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.scale = nn.Parameter(torch.ones(5))
        self.unused = nn.Parameter(torch.ones(2))
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.second(torch.tanh(self.first(x))))) * self.scale


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5)), (6,)),
    "conv": (conv, (2, 8, 8)),
    "tied": (Tied, (6,)),
    "attention": (Attention, (3, 4)),
}


def objective(outputs: Tensor, label: Tensor) -> Tensor:
    return outputs.log_softmax(0).gather(0, label.view(1)) * outputs[:2]  # two values for each sample


def loop(model: nn.Module, batch: Batch, reduce: Any, active: list[int] | None) -> dict[str, Tensor]:
    model = copy.deepcopy(model).eval()
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    assert batch.labels is not None
    for x, label in zip(batch.inputs[0], batch.labels, strict=True):
        for k in range(2):
            model.zero_grad()
            outputs = model(x[None])[0]
            objective(outputs if active is None else outputs[active], label)[k].backward()
            for name, p in model.named_parameters():
                if p.grad is not None:
                    total[name] += reduce(p.grad)
    return total


def batch_for(shape: tuple[int, ...], size: int, classes: int) -> Batch:
    return Batch((torch.randn(size, *shape, dtype=torch.float64),), {}, torch.randint(classes, (size,)))


@pytest.mark.parametrize("kind", MODELS)
@settings(max_examples=8, deadline=None)
@given(
    st.integers(1, 7),
    st.sampled_from([torch.abs, torch.square]),
    st.sampled_from([None, [4, 1, 0]]),
    st.sampled_from([1, 20_000, 2**26]),
    st.integers(0, 1000),
)
def test_as_a_loop_over_single_samples(
    kind: str, size: int, reduce: Any, active: list[int] | None, chunk_bytes: int, seed: int
) -> None:
    torch.manual_seed(seed)
    make, shape = MODELS[kind]
    model = make().double()
    batch = batch_for(shape, size, 5 if active is None else 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(per_sample, "_CHUNK_BYTES", chunk_bytes)
        found, count = sum_over_samples(model, dict(model.named_parameters()), [batch], objective, reduce, active)
    assert count == size
    expected = loop(model, batch, reduce, active)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-12)


def test_the_papers_network() -> None:
    model = paper_cnn(5).double()
    batch = batch_for((3, 32, 32), 2, 5)
    found, _ = sum_over_samples(model, dict(model.named_parameters()), [batch], objective, torch.square)
    expected = loop(model, batch, torch.square, None)
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-12)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(0, 1000))
def test_it_does_not_matter_how_samples_are_batched(sizes: list[int], seed: int) -> None:
    torch.manual_seed(seed)
    model = conv().double()
    whole = batch_for((2, 8, 8), sum(sizes), 5)
    ends = torch.tensor(sizes).cumsum(0).tolist()
    parts = [whole.part(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    parameters = dict(model.named_parameters())
    ours, count = sum_over_samples(model, parameters, parts, objective, torch.abs)
    theirs, same_count = sum_over_samples(model, parameters, [whole], objective, torch.abs)
    assert count == same_count == sum(sizes)
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-9, atol=1e-12)


def test_where_memory_runs_out_the_samples_are_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    model = conv().double()
    batch, sizes, vectorized = batch_for((2, 8, 8), 7, 5), [], per_sample._Statistic._vectorized

    def scarce(statistic: Any, part: Batch) -> dict[str, Tensor]:
        sizes.append(part.size)
        if part.size > 2:
            raise torch.OutOfMemoryError("no memory left")
        return vectorized(statistic, part)

    monkeypatch.setattr(per_sample._Statistic, "_vectorized", scarce)
    found, _ = sum_over_samples(model, dict(model.named_parameters()), [batch], objective, torch.abs)
    assert sizes == [7, 4, 2, 2, 3, 2, 1]
    for name, value in loop(model, batch, torch.abs, None).items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12)
    monkeypatch.setattr(per_sample._Statistic, "_vectorized", lambda *_: scarce(None, batch))
    with pytest.raises(torch.OutOfMemoryError):
        sum_over_samples(model, dict(model.named_parameters()), [batch.part(0, 1)], objective, torch.abs)


class Recurrent(nn.Module):
    """Not supported by torch.func: a recurrent kernel, and control flow that depends on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(4, 6, batch_first=True)
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        outputs = self.head(self.cell(x)[0][:, -1])
        return outputs if x.sum().item() > 0 else -outputs


def test_models_that_cannot_be_vectorized_are_taken_one_by_one() -> None:
    model = Recurrent().double()
    batch = batch_for((3, 4), 5, 5)
    with pytest.warns(UserWarning, match="torch.func.vmap does not support this model.*one by one, which is slow"):
        found, count = sum_over_samples(model, dict(model.named_parameters()), [batch], objective, torch.square)
    assert count == 5
    expected = loop(model, batch, torch.square, None)
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-12)


def test_recurrent_layers_alone() -> None:
    """Whose weights torch keeps in a list beside the parameters."""

    class Plain(Recurrent):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.cell(x)[0][:, -1])

    model, batch = Plain().double(), batch_for((3, 4), 4, 5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found, _ = sum_over_samples(model, dict(model.named_parameters()), [batch], objective, torch.abs)
    for name, value in loop(model, batch, torch.abs, None).items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12)


def test_modules_that_act_when_their_mode_changes() -> None:
    class Merging(nn.Linear):
        merged = False

        def train(self, mode: bool = True) -> "Merging":
            self.merged = not mode
            return super().train(mode)

    model = nn.Sequential(Merging(4, 5))
    with per_sample.evaluating(model):
        assert model[0].merged
    assert not model[0].merged


def test_an_error_of_the_model_itself_is_shown_as_it_is() -> None:
    model = nn.Linear(4, 5).double()
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        sum_over_samples(model, dict(model.named_parameters()), [batch_for((3,), 2, 5)], objective, torch.abs)


def test_several_inputs_and_keywords() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 5)

        def forward(self, x: Tensor, *, shift: Tensor) -> Tensor:
            return self.head(x + shift)

    model, x, shift = Two(), torch.randn(3, 4), torch.randn(3, 4)
    parameters = dict(model.named_parameters())
    plain = Batch((x + shift,), {}, torch.tensor([0, 1, 2]))
    expected, _ = sum_over_samples(model.head, dict(model.head.named_parameters()), [plain], objective, torch.abs)
    given_by_name = read(({"x": x, "shift": shift}, [0, 1, 2]), CPU)
    found, _ = sum_over_samples(model, parameters, [given_by_name], objective, torch.abs)
    torch.testing.assert_close(found["head.weight"], expected["weight"])


def test_a_budget_takes_the_first_samples_and_no_more_batches_than_it_needs() -> None:
    drawn = []

    def endless() -> Any:
        while True:
            drawn.append(1)
            yield torch.full((4, 2), float(len(drawn))), torch.zeros(4)

    batches = list(samples_of(endless(), 6, CPU))
    assert [batch.size for batch in batches] == [4, 2]
    assert len(drawn) <= 3
    assert batches[1].inputs[0].unique().item() == 2.0
    assert batches[1].labels is not None
    assert len(batches[1].labels) == 2


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({1, 2}, r"batches must be \(inputs, labels\) pairs or dicts, got a set"),
        ({"x": torch.ones(2, 4), "idx": [3, 4]}, "must be tensors with samples along their first axis"),
        ((torch.ones(2), torch.ones(2), torch.ones(2)), "got a tuple"),
        (("images", torch.ones(2)), "must be tensors with samples along their first axis"),
        ((torch.tensor(1.0), torch.ones(2)), "must be tensors with samples along their first axis"),
    ],
)
def test_batches_that_are_none(batch: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        read(batch, CPU)


def test_outputs_that_do_not_fit() -> None:
    for answer in ({"loss": torch.tensor(1.0)}, ("a", "b"), 3):
        with pytest.raises(TypeError, match="must return a tensor of outputs, alone or as `logits`, got a "):
            select(answer, None)
    with pytest.raises(ValueError, match=r"must return \[samples, outputs\], got shape \(2,\)"):
        select(torch.ones(2), None)
    with pytest.raises(ValueError, match="active names output 3, but the model has 3 outputs"):
        select(torch.ones(2, 3), [0, 3])
    for bad in ([], [-1, 0], [1, 1]):
        with pytest.raises(ValueError, match="active must list the task's output nodes, each once"):
            output_nodes(bad)
    for mask in ([True, False], torch.tensor([True, False])):
        with pytest.raises(TypeError, match=r"by number, as in \[2, 3\]; got a boolean mask"):
            output_nodes(mask)
    assert output_nodes(torch.tensor([2, 1])) == [2, 1]
    assert output_nodes(range(2, 4)) == [2, 3]
