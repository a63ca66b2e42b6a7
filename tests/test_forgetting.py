"""The report of forgetting, against counts by hand."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

import holdfast
from helpers import hooks_of, memory_of, mlp, train
from test_tokens import make, padded, samples


def data(size: int = 7) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(n, 4), torch.randint(3, (n,))) for n in (3, size - 3)]


def test_accuracy_and_loss_over_all_samples_whatever_the_batches() -> None:
    model, batches = mlp(), data()
    x, y = (torch.cat(each) for each in zip(*batches, strict=True))
    right = (model(x).argmax(1) == y).float().mean().item()
    loss = nn.functional.cross_entropy(model(x), y).item()
    assert holdfast.Forgetting(model, {"old": batches}).before["old"] == pytest.approx(right)
    assert holdfast.Forgetting(model, {"old": batches}, "loss").before["old"] == pytest.approx(loss)
    report = holdfast.Forgetting(model, {"old": batches}, samples=2)
    assert report.before["old"] == pytest.approx((model(x[:2]).argmax(1) == y[:2]).float().mean().item())


def test_before_and_after() -> None:
    model = nn.Linear(1, 2)
    with torch.no_grad():
        model.weight.zero_()
        model.bias.copy_(torch.tensor([1.0, 0.0]))
    old = DataLoader(TensorDataset(torch.zeros(4, 1), torch.tensor([0, 0, 0, 1])), batch_size=3)
    report = holdfast.Forgetting(model, {"old task": old})
    assert report.as_dict() == {"old task": {"before": 0.75, "after": 0.75, "change": 0.0}}
    with torch.no_grad():
        model.bias.copy_(torch.tensor([0.0, 1.0]))
    assert report.after == {"old task": 0.75}, "nothing is measured unasked"
    report.update()
    assert report.as_dict() == {"old task": {"before": 0.75, "after": 0.25, "change": -0.5}}
    assert str(report).splitlines() == [
        "accuracy  before   after   change",
        "old task  0.7500  0.2500  -0.5000",
    ]


def test_a_metric_of_ones_own_is_weighted_by_samples() -> None:
    def first_output(outputs: Tensor, labels: Tensor | None) -> float:
        assert labels is None
        return outputs[:, 0].mean().item()

    model, x = mlp(), torch.randn(5, 4)
    report = holdfast.Forgetting(model, {"x": [x[:1], x[1:]]}, first_output)
    assert report.before["x"] == pytest.approx(model(x)[:, 0].mean().item())
    assert str(report).startswith("first_output  before")


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_tokens_that_are_not_ignored(name: str) -> None:
    model, given = make(name)
    shift = int(name == "gpt2")
    right, losses, counted = 0, 0.0, 0
    for sample in given:
        outputs = model(**sample)
        labels = sample["labels"][0, shift:]
        guesses = outputs.logits[0, : len(labels)].argmax(1)
        right += int(((guesses == labels) & (labels != -100)).sum())
        counted += int((labels != -100).sum())
        losses += outputs.loss.item() * int((labels != -100).sum())
    for batches in ([padded(given)], given, [padded(given[:2]), given[2]]):
        assert holdfast.Forgetting(model, {"old": batches}).before["old"] == pytest.approx(right / counted)
        found = holdfast.Forgetting(model, {"old": batches}, "loss").before["old"]
        assert found == pytest.approx(losses / counted, rel=1e-5)


def test_a_loss_of_the_models_own() -> None:
    class Regression(nn.Linear):
        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
            logits = super().forward(x)
            return {"logits": logits, "loss": (logits - labels).square().mean()}

    model, x, y = Regression(4, 1), torch.randn(5, 4), torch.randn(5, 1)
    found = holdfast.Forgetting(model, {"old": [{"x": x[:2], "labels": y[:2]}, {"x": x[2:], "labels": y[2:]}]}, "loss")
    assert found.before["old"] == pytest.approx(model(x, y)["loss"].item())


def test_the_model_and_its_method_are_not_disturbed() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.ReLU(), nn.Linear(6, 3))
    model[1].eval()
    twin_states = []
    for measuring in (False, True):
        torch.manual_seed(0)
        for module in model:
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        optimizer = holdfast.LwF(model, holdfast.NPC(model, SGD(model.parameters(), lr=0.1), free=[model[4]]))
        optimizer.consolidate([])
        report = holdfast.Forgetting(model, {"old": [(torch.ones(4, 4), torch.zeros(4).long())]}) if measuring else None
        torch.manual_seed(1)
        x = torch.randn(8, 4)
        outputs = model(x)
        if report is not None:
            report.update()
        optimizer.zero_grad()
        (outputs.square().mean() + optimizer.penalty()).backward()
        if report is not None:
            report.update()
        optimizer.step()
        assert [module.training for module in model] == [True, False, True, True, True]
        hooks = {"hooks": torch.tensor(hooks_of(model))}
        twin_states.append(memory_of(optimizer) | dict(model.state_dict()) | hooks)
        optimizer.close()
    for name, value in twin_states[0].items():
        assert torch.equal(value, twin_states[1][name]), name


def test_forgetting_is_seen() -> None:
    torch.manual_seed(0)
    model, x = mlp(), torch.randn(32, 4)
    old = [(x, (x[:, 0] > 0).long())]
    optimizer = SGD(model.parameters(), lr=0.5)
    for _ in range(100):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), old[0][1]).backward()
        optimizer.step()
    report = holdfast.Forgetting(model, {"old": old})
    train(model, optimizer, [x] * 100)  # outputs go to 0
    report.update()
    assert report.before["old"] > 0.9
    assert report.as_dict()["old"]["change"] < 0


@pytest.mark.parametrize(
    ("given", "metric", "error", "message"),
    [
        ({}, "accuracy", ValueError, "nothing to measure: give batches by name"),
        ({"old": iter([])}, "accuracy", TypeError, "batches of 'old' are read for every measurement: give a list"),
        ({"old": []}, "accuracy", ValueError, "data set 'old' has no samples"),
        ({"old": []}, "f1", ValueError, 'metric must be "accuracy", "loss" or a function, got \'f1\''),
        ({"old": [torch.ones(2, 4)]}, "loss", ValueError, r'metric="loss" needs labels .* \(2, 3\), got none; or give'),
        ({"old": [(torch.ones(2, 4), torch.ones(2))]}, "accuracy", ValueError, r"got torch.float32 \(2,\)"),
    ],
)
def test_what_cannot_be_reported(given: Any, metric: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        holdfast.Forgetting(mlp(), given, metric)


def test_only_ignored_labels() -> None:
    model, given = make("tagger")[0], samples(4)
    batch = padded(given) | {"labels": torch.full((3, 5), -100)}
    with pytest.raises(ValueError, match="or all its labels are ignored"):
        holdfast.Forgetting(model, {"old": [batch]})
