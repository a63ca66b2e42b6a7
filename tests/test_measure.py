"""`holdfast.measure`: a model trained elsewhere, protected from the first step on."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, AdamW

import holdfast
from helpers import Block, assert_same_bits, hooks_of, memory_of, mlp, normalized_taylor, parameters_of
from holdfast.directions import dense

Batches = list[tuple[Tensor, Tensor]]


def data(sizes: tuple[int, ...] = (6, 6, 4), inputs: int = 4, classes: int = 3) -> Batches:
    torch.manual_seed(1)
    return [(torch.randn(size, inputs).double(), torch.randint(classes, (size,))) for size in sizes]


def reference(model: nn.Sequential, batches: Batches) -> dict[str, Tensor]:
    """Eq. 2 and 3 for each batch, by plain gradients at the layers' own outputs; the mean over batches."""
    total: dict[str, Tensor] = {}
    for x, y in batches:
        kept = {}
        for name, module in model.named_children():
            x = module(x)
            if isinstance(module, nn.Linear):
                kept[name] = x
        gradients = torch.autograd.grad(cross_entropy(x, y), list(kept.values()))
        for (name, n), g in zip(kept.items(), gradients, strict=True):
            total[name] = total.get(name, 0) + normalized_taylor(n.detach(), g, 1) / len(batches)
    return total


def test_importances_by_plain_gradients() -> None:
    model, batches = mlp().double(), data()
    measured, expected = holdfast.measure(model, batches), reference(model, batches)
    assert measured.importance.keys() == expected.keys()
    for name, value in measured.importance.items():
        torch.testing.assert_close(value, expected[name])
        torch.testing.assert_close(value.mean(), torch.ones(()).double())
    assert measured.samples == 16


def test_importances_of_npc_after_long_training() -> None:
    """A moving average at rate r has mean 1 - (1 - r)^t after t steps, and forgets its start."""
    model, batches, rate = mlp().double(), data((5, 5)), 0.002
    measured = holdfast.measure(model, batches, free=[model[4]])
    optimizer = holdfast.NPC(model, SGD(model.parameters(), lr=1e-12), rate=rate, free=[model[4]])
    for x, y in batches * 2000:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    for name, value in optimizer.importance.items():
        torch.testing.assert_close(measured.importance[name], value, rtol=3e-3, atol=3e-3)


@pytest.mark.parametrize("rank", [None, 3])
@pytest.mark.parametrize("every", [None, 5])
def test_dpc_remembers_what_it_would_have_consolidated(rank: int | None, every: int | None) -> None:
    model, batches = mlp().double(), data()
    told = holdfast.DPC(model, SGD(model.parameters(), lr=0.1), rank=rank, free=[model[4]])
    told.consolidate(batches)
    expected = {name: dense(directions) for name, directions in told.moments.items()}
    told.close()
    measured = holdfast.measure(model, batches, rank=rank)
    optimizer = holdfast.DPC(model, SGD(model.parameters(), lr=0.1), rank=rank, every=every, free=[model[4]])
    optimizer.remember(measured)
    assert optimizer.tasks == 1
    assert optimizer.moments.keys() == expected.keys()
    for name, directions in optimizer.moments.items():
        torch.testing.assert_close(dense(directions), expected[name], rtol=1e-9, atol=1e-12)
    for name, value in optimizer.importance.items():
        assert torch.equal(value, measured.importance[name])
    optimizer.consolidate(batches)
    if every is None:  # the next task adds to it
        for name, directions in optimizer.moments.items():
            torch.testing.assert_close(dense(directions), 2 * expected[name], rtol=1e-9, atol=1e-12)


def test_another_rank_than_measured() -> None:
    model, batches = mlp().double(), data()
    measured = holdfast.measure(model, batches, rank=3)
    optimizer = holdfast.DPC(model, SGD(model.parameters(), lr=0.1), rank=2)
    optimizer.remember(measured)
    assert optimizer.moments["0"].values.shape == (1, 2)
    torch.testing.assert_close(optimizer.moments["0"].values, measured.moments["0"].values[:, -2:])


@pytest.mark.parametrize("make", [lambda p: SGD(p, lr=0.1), lambda p: AdamW(p, lr=0.1)])
def test_the_first_step_is_protected(make: Any) -> None:
    model, batches = mlp().double(), data()
    measured = holdfast.measure(model, batches)
    optimizer = holdfast.NPC(model, make(model.parameters()), beta=0.7, free=[model[4]])
    optimizer.remember(measured)
    before = parameters_of(model)
    optimizer.zero_grad()
    model(torch.randn(8, 4).double()).square().mean().backward()
    optimizer.step()
    frozen = measured.importance["0"] > 0.71
    assert 0 < frozen.sum() < len(frozen)
    assert torch.equal(model[0].weight[frozen], before["0.weight"][frozen])
    assert not torch.equal(model[0].weight, before["0.weight"])


class Own(nn.Module):
    """Returns its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.second(torch.relu(self.first(x)))
        return {"logits": logits} if labels is None else {"loss": logits[:, 0].square().sum(), "logits": logits}


def test_which_loss() -> None:
    torch.manual_seed(0)
    model, ((x, y),) = Own().double(), data((6,))
    own = holdfast.measure(model, [{"x": x, "labels": y}]).importance["second"]
    assert (own[1:] == 0).all(), "the model's own loss reads the first output only"
    given = holdfast.measure(model, [{"x": x, "labels": y}], loss=lambda outputs, labels: outputs["logits"][:, 1].sum())
    assert given.importance["second"].tolist() == [0, 3, 0]
    labeled = holdfast.measure(model, [(x, y)]).importance["first"]
    given = holdfast.measure(model, [(x, y)], loss=lambda outputs, labels: cross_entropy(outputs["logits"], labels))
    assert torch.equal(labeled, given.importance["first"])
    torch.manual_seed(7)
    drawn = holdfast.measure(model, [x]).importance["first"]
    torch.manual_seed(7)
    labels = torch.multinomial(model(x)["logits"].softmax(1), 1).flatten()
    assert torch.equal(drawn, holdfast.measure(model, [(x, labels)]).importance["first"])


def test_the_outputs_of_one_task() -> None:
    torch.manual_seed(0)
    model, ((x, y),) = Own().double(), data((6,), classes=2)
    found = holdfast.measure(model, [{"x": x, "labels": y}], [2, 0])
    given = holdfast.measure(model, [(x, y)], loss=lambda outputs, y: cross_entropy(outputs["logits"][:, [2, 0]], y))
    assert_same_bits(found.importance, given.importance)
    assert holdfast.measure(model, [x], [2, 0]).importance["second"][1] == 0, "labels are drawn from these outputs"


def test_the_model_stays_as_it_is() -> None:
    model = Block(norm=True).train()
    model.norm.eval()
    x = torch.randn(5, 2, 6, 6)
    model(x).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    before, state = [hooks_of(model), [m.training for m in model.modules()]], copy.deepcopy(model.state_dict())
    holdfast.measure(model, [x])
    assert before == [hooks_of(model), [m.training for m in model.modules()]]
    assert_same_bits(dict(model.state_dict()), dict(state))
    assert_same_bits({name: p.grad for name, p in model.named_parameters() if p.grad is not None}, gradients)


def test_the_first_samples_of_an_iterator() -> None:
    model, batches = mlp().double(), data()
    cut = [batches[0], (batches[1][0][:3], batches[1][1][:3])]
    found, expected = holdfast.measure(model, iter(batches), samples=9), holdfast.measure(model, cut)
    assert found.samples == 9
    assert_same_bits(found.importance, expected.importance)


def test_a_model_of_hugging_face() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "num_labels": 3}
    config = transformers.BertConfig(**sizes, intermediate_size=10, max_position_embeddings=8)
    model = transformers.BertForTokenClassification(config)
    ids, mask = torch.randint(1, 9, (2, 5)), torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
    labels = (ids % 3).masked_fill(mask == 0, -100)
    for batch in ({"input_ids": ids, "attention_mask": mask, "labels": labels}, {"input_ids": ids}):
        measured = holdfast.measure(model, [batch], free=[model.classifier], rank=4)
        name = "bert.encoder.layer.0.intermediate.dense"
        assert measured.importance[name].mean().item() == pytest.approx(1)
        assert measured.moments[name].vectors.shape == (1, 9, 4)


# ---- files ----


def test_a_file_has_all_of_it(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    model, batches, path = mlp(), [(x.float(), y) for x, y in data()], tmp_path / "deep" / "old.safetensors"
    measured = holdfast.measure(model, batches, rank=2)
    measured.save(path)
    loaded = holdfast.load_measured(str(path))
    assert repr(loaded) == repr(measured) == "Measured(15 neurons in 3 layers, on 16 samples)"
    assert_same_bits(loaded.importance, measured.importance)
    found = []
    for each in (measured, loaded):
        optimizer = holdfast.DPC(model, SGD(model.parameters(), lr=0.1), rank=2)
        optimizer.remember(each)
        found.append(memory_of(optimizer))
    assert_same_bits(*found)


def test_bad_files(tmp_path: Path) -> None:
    torch_file = pytest.importorskip("safetensors.torch")
    path, measured = tmp_path / "bad", holdfast.measure(mlp(), [torch.randn(4, 4)])
    with pytest.raises(FileNotFoundError, match=r"there is no file '.*bad'"):
        holdfast.load_measured(path)
    path.write_bytes(b"\x80\x04pickle")
    with pytest.raises(ValueError, match=r"bad' is not a safetensors file, or it is damaged: "):
        holdfast.load_measured(path)
    measured.save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    with pytest.raises(ValueError, match=r"bad' is not a safetensors file, or it is damaged: "):
        holdfast.load_measured(path)
    torch_file.save_file({"weight": torch.ones(2)}, path)
    with pytest.raises(ValueError, match=r"was not written by Measured.save: its format is None"):
        holdfast.load_measured(path)
    path.write_bytes(whole)
    header, tensors = holdfast.methods.measured._FORMAT, torch_file.load_file(path)
    for key, value, message in (
        ("values:0", None, "'0'"),
        ("values:0", torch.ones(1, 9), "'0'"),
        ("importance:0", torch.full((6,), torch.nan), "'importance:0'"),
        ("biases:0", torch.ones(2), "'biases'"),
    ):
        broken = tensors | {key: value}
        torch_file.save_file(
            {k: v for k, v in broken.items() if v is not None}, path, {"format": header, "samples": "4"}
        )
        with pytest.raises(ValueError, match=rf"bad' is damaged, at {message}: measure the model again"):
            holdfast.load_measured(path)


def test_without_safetensors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "safetensors.torch", None)
    with pytest.raises(ImportError, match=r"files of measurements need safetensors: pip install 'holdfast\[measure\]'"):
        holdfast.load_measured(tmp_path / "any")


# ---- errors ----


def test_measurements_of_another_model_are_refused_and_nothing_changes() -> None:
    model = mlp()
    measured = holdfast.measure(model, [torch.randn(8, 4)], free=[model[4]])
    for kind in (holdfast.NPC, holdfast.DPC):
        optimizer = kind(model, SGD(model.parameters(), lr=0.1))
        with pytest.raises(ValueError, match=r"neurons of layer '4' were not measured: list it in free="):
            optimizer.remember(measured)
        wide = mlp(width=7)
        optimizer = kind(wide, SGD(wide.parameters(), lr=0.1), free=[wide[4]])
        with pytest.raises(ValueError, match=r"'0' has neurons \(7,\) here, but had \(6,\) when measured"):
            optimizer.remember(measured)
        assert all((value == 0).all() for value in optimizer.importance.values())
    other = mlp(inputs=5)
    optimizer = holdfast.DPC(other, SGD(other.parameters(), lr=0.1), free=[other[4]])
    with pytest.raises(ValueError, match=r"'0' has inputs \(1, 6\) here, but had \(1, 5\) when measured"):
        optimizer.remember(measured)
    assert optimizer.tasks == 0
    assert all((value == 0).all() for value in optimizer.importance.values())


def test_what_cannot_be_measured() -> None:
    model, x = mlp(), torch.randn(4, 4)
    with pytest.raises(ValueError, match=r"float32 \(4, 3\) are no class numbers for outputs \(4, 3\): give the loss"):
        holdfast.measure(model, [(x, torch.randn(4, 3))])
    with pytest.raises(ValueError, match="no neuron has a finite effect on the loss"):
        holdfast.measure(model, [(x, torch.tensor([0, 1, 2, 0]))], loss=lambda outputs, labels: 0 * outputs.sum())
    with pytest.raises(ValueError, match=r"samples must be at least 1, got 0"):
        holdfast.measure(model, [x], samples=0)
    with pytest.raises(ValueError, match="given no samples"):
        holdfast.measure(model, [])
    with pytest.raises(ValueError, match="no parameters that require gradients: measure it before freezing"):
        holdfast.measure(model.requires_grad_(False), [x])
    assert hooks_of(model) == 0
