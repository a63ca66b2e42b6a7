"""The importances of EWC and MAS, worked out by hand and in plain loops."""

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import holdfast
from helpers import assert_same_bits, mlp
from holdfast.models import paper_cnn

Batches = list[tuple[Tensor, Tensor]]


def importance(kind: str, model: nn.Module, batches: Batches, active: list[int] | None = None, **knobs):
    method = holdfast.METHODS[kind](model, SGD(model.parameters(), lr=0.1), **knobs)
    method.consolidate(batches, active)
    return method.importance


def linear(weight: list[list[float]]) -> nn.Linear:
    model = nn.Linear(len(weight[0]), len(weight))
    with torch.no_grad():
        model.weight.copy_(torch.tensor(weight))
        model.bias.zero_()
    return model


# ---- by hand ----


def test_ewc_of_two_classes_by_hand() -> None:
    """Zero weights, so p = 1/2: d log p(label) / d w = (1 - 1/2) x for the label's row and -x/2 for the other."""
    x = torch.tensor([[1.0, 2.0], [3.0, 0.0]])
    for labels in ("true", "exact"):
        found = importance("ewc", linear([[0.0, 0.0], [0.0, 0.0]]), [(x, torch.tensor([0, 1]))], labels=labels)
        torch.testing.assert_close(found["weight"], torch.tensor([[1.25, 0.5], [1.25, 0.5]]))  # mean of x^2 / 4
        torch.testing.assert_close(found["bias"], torch.tensor([0.25, 0.25]))


def test_ewc_with_true_and_exact_labels_by_hand() -> None:
    """Outputs log 3 and 0, so p = 3/4 and 1/4. d log p(c) / d b_0 = [c is 0] - 3/4."""
    model = linear([[0.0], [0.0]])
    with torch.no_grad():
        model.bias[0] = torch.tensor(3.0).log()
    batch = [(torch.zeros(1, 1), torch.tensor([1]))]
    true, exact = (importance("ewc", model, batch, labels=labels)["bias"] for labels in ("true", "exact"))
    torch.testing.assert_close(true, torch.tensor([9 / 16, 9 / 16]))  # (0 - 3/4)^2, (1 - 1/4)^2
    torch.testing.assert_close(exact, torch.tensor([3 / 16, 3 / 16]))  # 3/4 (1/4)^2 + 1/4 (3/4)^2


def test_mas_by_hand() -> None:
    """Outputs 2x and -x, so d ||f||^2 / d w_i = 2 f_i x: mean over x = 1, -3 of |2 * 2 * x^2| and |2 * -1 * x^2|."""
    model = linear([[2.0], [-1.0]])
    found = importance("mas", model, [(torch.tensor([[1.0], [-3.0]]), torch.zeros(2))])
    torch.testing.assert_close(found["weight"], torch.tensor([[20.0], [10.0]]))  # (4 + 36) / 2, (2 + 18) / 2
    torch.testing.assert_close(found["bias"], torch.tensor([8.0, 4.0]))  # (|4 * 1| + |4 * -3|) / 2, half of it


# ---- in loops ----


def loop(kind: str, model: nn.Module, batches: Batches, active: list[int]) -> dict[str, Tensor]:
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    count = 0
    for inputs, labels in batches:
        for x, label in zip(inputs, labels, strict=True):
            outputs = model(x[None])[0, active]
            p = outputs.detach().softmax(0)
            if kind == "mas":
                terms = [(1.0, outputs.square().sum(), torch.abs)]
            elif kind == "true":
                terms = [(1.0, outputs.log_softmax(0)[label], torch.square)]
            else:
                terms = [(p[c], outputs.log_softmax(0)[c], torch.square) for c in range(len(active))]
            for weight, value, reduce in terms:
                grads = torch.autograd.grad(value, list(model.parameters()), retain_graph=True)
                for name, grad in zip(total, grads, strict=True):
                    total[name] += weight * reduce(grad)
            count += 1
    return {name: value / count for name, value in total.items()}


@pytest.mark.parametrize("kind", ["mas", "true", "exact"])
def test_as_in_plain_loops_over_samples(kind: str) -> None:
    """A sum over tasks, and single samples: not the square of a batch's mean gradient."""
    model = mlp(outputs=5).double()
    knobs = {} if kind == "mas" else {"labels": kind}
    method = holdfast.METHODS["mas" if kind == "mas" else "ewc"](model, SGD(model.parameters(), lr=0.1), **knobs)
    expected = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for active in ([0, 1], [4, 2]):
        batches = [(torch.randn(size, 4, dtype=torch.float64), torch.randint(2, (size,))) for size in (5, 3)]
        for name, value in loop(kind, model, batches, active).items():
            expected[name] += value
        method.consolidate(batches, active)
    for name, value in method.importance.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", ["ewc", "mas", "ssl"])
def test_importance_does_not_depend_on_the_batch_size(kind: str) -> None:
    model = mlp().double()
    x, y = torch.randn(24, 4, dtype=torch.float64), torch.randint(3, (24,))
    found = [importance(kind, model, list(zip(x.split(size), y.split(size), strict=True))) for size in (1, 5, 24)]
    for other in found[1:]:
        for name, value in found[0].items():
            torch.testing.assert_close(value, other[name], rtol=1e-9, atol=1e-14)
            assert value.sum() > 0


@pytest.mark.parametrize("kind", ["ewc", "mas", "si", "ssl"])
def test_rows_of_other_tasks_in_the_head_have_no_importance(kind: str) -> None:
    model = paper_cnn(classes=6, channels=1) if kind == "ewc" else mlp(outputs=6)
    shape = (1, 32, 32) if kind == "ewc" else (4,)
    method = holdfast.METHODS[kind](model, SGD(model.parameters(), lr=0.1, momentum=0.9))
    batch, active = (torch.randn(3, *shape), torch.tensor([0, 1, 1])), [2, 4]
    for _ in range(2):
        loss = nn.functional.cross_entropy(model(batch[0])[:, active], batch[1]) + method.penalty()
        method.zero_grad()
        loss.backward()
        method.step()
    method.consolidate([batch], active)
    weight, bias = list(method.importance.values())[-2:]
    others = [0, 1, 3, 5]
    assert weight[others].abs().sum() == 0
    assert bias[others].abs().sum() == 0
    assert weight[active].abs().sum() > 0


def test_a_budget_of_samples() -> None:
    model = mlp()
    batches = [(torch.randn(4, 4), torch.randint(3, (4,))) for _ in range(3)]
    cut = [batches[0], (batches[1][0][:2], batches[1][1][:2])]
    for kind in ("ewc", "mas", "ssl"):
        assert_same_bits(importance(kind, model, batches, samples=6), importance(kind, model, cut))


def test_labels_in_small_numbers_and_empty_batches() -> None:
    model, x, y = mlp(), torch.randn(4, 4), torch.randint(3, (4,))
    expected = importance("ewc", model, [(x, y)])
    assert_same_bits(importance("ewc", model, [(x[:0], y[:0]), (x, y.to(torch.uint8))]), expected)
    assert_same_bits(importance("ewc", model, [(x, y.tolist())]), expected)


def test_labels_that_are_not_needed_may_be_anything() -> None:
    model, x = mlp(), torch.randn(4, 4)
    assert_same_bits(importance("mas", model, [(x, {"boxes": x})]), importance("mas", model, [x]))


def test_a_model_that_compiles_itself() -> None:
    model, x = mlp(), torch.randn(4, 4)
    expected = importance("mas", model, [x])
    model.compile(backend="eager")
    assert_same_bits(importance("mas", model, [x]), expected)


def test_exact_labels_need_none() -> None:
    model, x = mlp(), torch.randn(4, 4)
    assert_same_bits(
        importance("ewc", model, [x], labels="exact"),
        importance("ewc", model, [(x, torch.zeros(4))], labels="exact"),
    )


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (torch.tensor([0, 2]), "labels must count within the task, from 0 to 1 for its 2 outputs; got 0 to 2"),
        (torch.tensor([-1, 0]), "got -1 to 0"),
        (torch.tensor([0.0, 1.0]), r"one class number per sample, got torch.float32 \(2,\)"),
        (torch.tensor([[0], [1]]), r"got torch.int64 \(2, 1\)"),
    ],
)
def test_labels_that_do_not_fit(labels: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        importance("ewc", mlp(), [(torch.randn(2, 4), labels)], active=[1, 2])


def test_labels_of_any_batch_are_looked_at_and_nothing_is_consolidated() -> None:
    model = mlp()
    good, bad = (torch.randn(2, 4), torch.tensor([0, 1])), (torch.randn(2, 4), torch.tensor([0, 9]))
    method = holdfast.EWC(model, SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="for its 2 outputs; got 0 to 9"):
        method.consolidate([good, good, bad], active=[1, 2])
    assert not method.importance


def test_what_ewc_cannot_measure_is_said() -> None:
    with pytest.raises(ValueError, match="from 0 to 2 for its 3 outputs; got 3 to 3"):
        importance("ewc", mlp(), [(torch.randn(1, 4), torch.tensor([3]))])
    with pytest.raises(ValueError, match=r'labels="true" needs .* without labels, use labels="exact"'):
        importance("ewc", mlp(), [torch.randn(1, 4)])
    with pytest.raises(ValueError, match='labels must be "true" or "sampled" or "exact", got \'drawn\''):
        importance("ewc", mlp(), [], labels="drawn")
    with pytest.raises(ValueError, match=r"returns \[samples, classes\] or .*, a sample here has \(3, 2, 2\)"):
        importance("ewc", nn.Conv2d(1, 3, 1), [torch.randn(1, 1, 2, 2)], labels="exact")
    with pytest.raises(ValueError, match="active names output 7, but the model has 3 outputs"):
        importance("mas", mlp(), [torch.randn(1, 4)], active=[7])
    with pytest.raises(FloatingPointError, match=r"importance of '0\.weight' is not finite"):
        importance("mas", mlp(), [torch.full((1, 4), torch.inf)])
