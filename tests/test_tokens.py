"""Models with an output for every token, dicts as batches and as outputs: against loops over unpadded samples."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import holdfast
from helpers import memory_of
from holdfast.samples import Batch, following, logits_of, loss_of, predicts_next, read, select
from holdfast.taps import module_inputs

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.func.vmap does not support this model"),
    pytest.mark.filterwarnings("ignore:these parameters belong to no tapped neuron"),
]
CPU = torch.device("cpu")
Sample = dict[str, Tensor]


class Tagger(nn.Module):
    """Mixes the tokens that are no padding, and returns one output per token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        self.mix = nn.Linear(6, 6)
        self.head = nn.Linear(6, 4)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        x, mask = self.embed(input_ids), attention_mask.unsqueeze(-1).to(self.mix.weight)
        mean = (x * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)
        return {"logits": self.head(torch.tanh(self.mix(x) + mean))}


def bert(kind: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=9,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=10,
        max_position_embeddings=8,
        num_labels=4,
    )
    return getattr(transformers, kind)(config)


def gpt2(attention: str = "eager") -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=9,
        n_positions=8,
        n_embd=8,
        n_layer=1,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation=attention,
    )
    return transformers.GPT2LMHeadModel(config)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "tagger": Tagger,
    "gpt2": gpt2,
    "bert": lambda: bert("BertForTokenClassification"),
}
SHIFT = {"tagger": 0, "gpt2": 1, "bert": 0}


def samples(classes: int, seed: int = 0) -> list[Sample]:
    """Sequences of different lengths, each with one label to ignore."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for length in (5, 3, 4):
        ids = torch.randint(1, 9, (1, length), generator=generator)
        labels = torch.randint(classes, (1, length), generator=generator)
        labels[0, 1] = -100
        found.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})
    return found


def padded(given: list[Sample]) -> Sample:
    fill = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    pad = nn.utils.rnn.pad_sequence
    return {
        name: pad([sample[name][0] for sample in given], batch_first=True, padding_value=value)
        for name, value in fill.items()
    }


def make(name: str) -> tuple[nn.Module, list[Sample]]:
    torch.manual_seed(0)
    model = MODELS[name]().double().eval()
    for parameter in model.parameters():  # away from the tiny initial values
        parameter.data += 0.3 * torch.randn_like(parameter)
    return model, samples(9 if name == "gpt2" else 4)


def log_p(model: nn.Module, sample: Sample) -> Tensor:
    """The log probabilities of a sample's tokens, `[tokens, classes]`."""
    outputs = model(input_ids=sample["input_ids"], attention_mask=sample["attention_mask"])
    return outputs["logits"][0].log_softmax(-1)


def likelihood(model: nn.Module, sample: Sample, shift: int) -> Tensor:
    labels, total = sample["labels"][0].tolist(), torch.zeros(())
    for position, row in enumerate(log_p(model, sample)):
        if position + shift < len(labels) and labels[position + shift] != -100:
            total = total + row[labels[position + shift]]
    return total


def mean_of(terms: list[list[tuple[Tensor, Tensor]]], model: nn.Module, reduce: Any) -> dict[str, Tensor]:
    """The mean over samples of the weighted, reduced gradients of their terms."""
    named = dict(model.named_parameters())
    total = {name: torch.zeros_like(p) for name, p in named.items()}
    for values in terms:
        for weight, value in values:
            gradients = torch.autograd.grad(value, list(named.values()), retain_graph=True, materialize_grads=True)
            for name, gradient in zip(named, gradients, strict=True):
                total[name] += weight * reduce(gradient) / len(terms)
    return total


def consolidated(kind: str, model: nn.Module, batches: list[Any], **settings: Any) -> dict[str, Tensor]:
    method = holdfast.METHODS[kind](model, SGD(model.parameters(), lr=0.1), **settings)
    method.consolidate(batches)
    return method.importance


def assert_close(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert sum(float(value.abs().sum()) for value in theirs.values()) > 0
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-7, atol=1e-12)


# ---- importances ----


@pytest.mark.parametrize("name", MODELS)
def test_ewc_sums_the_log_likelihood_over_the_tokens_of_a_sample(name: str) -> None:
    model, given = make(name)
    one = torch.ones(())
    expected = mean_of([[(one, likelihood(model, sample, SHIFT[name]))] for sample in given], model, torch.square)
    assert_close(consolidated("ewc", model, [padded(given)]), expected)
    assert_close(consolidated("ewc", model, given), expected)


@pytest.mark.parametrize("name", MODELS)
def test_exact_labels_of_tokens(name: str) -> None:
    """Tokens are independent given the inputs, so the cross terms of the squared sum vanish in the expectation."""
    model, given = make(name)
    rows = [list(log_p(model, sample)) for sample in given]
    terms = [[(value.detach().exp(), value) for row in each for value in row] for each in rows]
    batch = padded(given)
    del batch["labels"]
    expected = mean_of(terms, model, torch.square)
    assert_close(consolidated("ewc", model, [batch], labels="exact"), expected)


def test_sampled_labels_estimate_the_exact_fisher() -> None:
    model, given = make("tagger")
    batch = padded(given)
    exact = consolidated("ewc", model, [batch], labels="exact")
    found = consolidated("ewc", model, [batch] * 400, labels="sampled")
    for name, value in exact.items():
        torch.testing.assert_close(found[name].sum(), value.sum(), rtol=0.05, atol=0)
    assert (found["embed.weight"][0] == 0).all(), "the token 0 is padding"


def test_sampled_labels_of_samples() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(3, 4).double(), torch.randn(1, 3, dtype=torch.float64)
    exact, found = (consolidated("ewc", model, [x.expand(2000, 3)], labels=labels) for labels in ("exact", "sampled"))
    torch.testing.assert_close(found["weight"], exact["weight"], rtol=0.2, atol=0.02)


@pytest.mark.parametrize("kind", ["mas", "ssl"])
@pytest.mark.parametrize("name", MODELS)
def test_mas_of_tokens(name: str, kind: str) -> None:
    model, given = make(name)
    one = torch.ones(())
    terms = [
        [(one, model(**{k: v for k, v in sample.items() if k != "labels"})["logits"].square().sum())]
        for sample in given
    ]
    assert_close(consolidated(kind, model, [padded(given)]), mean_of(terms, model, torch.abs))


def test_the_neurons_of_ssl_without_padding() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 4)).double()

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
            return self.inner(x)

    masked, x = Masked(), torch.randn(2, 4, 3, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    method = holdfast.SSL(masked, SGD(masked.parameters(), lr=0.1))
    method.consolidate([{"x": x, "attention_mask": mask}])
    expected = torch.zeros(5, dtype=torch.float64)
    for i, length in enumerate((4, 2)):
        hidden = torch.relu(model[0](x[i, :length])).detach().requires_grad_()
        (gradient,) = torch.autograd.grad(model[2](hidden).square().sum(), hidden)
        expected += gradient.sum(0).abs() / 2
    torch.testing.assert_close(method.neurons["inner.0"], expected)


@pytest.mark.parametrize("active", [None, [2, 0]])
def test_samples_with_one_output_and_a_mask(active: list[int] | None) -> None:
    """A sequence classifier: the mask has tokens, the outputs do not."""
    torch.manual_seed(0)
    model, given = bert("BertForSequenceClassification").double().eval(), samples(4)
    labels, one = torch.tensor([0, 1, 1]), torch.ones(())
    nodes = active or [0, 1, 2, 3]
    terms = []
    for sample, label in zip(given, labels, strict=True):
        logits = model(input_ids=sample["input_ids"], attention_mask=sample["attention_mask"]).logits[0, nodes]
        terms.append([(one, logits.log_softmax(0)[label])])
    method = holdfast.EWC(model, SGD(model.parameters(), lr=0.1))
    method.consolidate([padded(given) | {"labels": labels}], active)
    assert_close(method.importance, mean_of(terms, model, torch.square))


def test_an_attention_that_cannot_be_vectorized() -> None:
    torch.manual_seed(0)
    model, other = gpt2("sdpa").double(), gpt2("eager").double()
    other.load_state_dict(model.state_dict())
    batch = padded(samples(9))
    with pytest.warns(UserWarning, match="samples are processed one by one"):
        found = consolidated("ewc", model, [batch])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_close(found, consolidated("ewc", other, [batch]))


# ---- inputs of layers ----


def test_kfac_without_padding() -> None:
    model, given = make("tagger")
    method = holdfast.KFAC(model, SGD(model.parameters(), lr=0.1))
    method.consolidate([padded(given)])
    inputs, outputs, count = torch.zeros(7, 7).double(), torch.zeros(4, 4).double(), 0
    for sample in given:
        hidden = torch.tanh(model.mix(x := model.embed(sample["input_ids"])) + x.mean(1, keepdim=True))[0].detach()
        logits = model.head(hidden)
        labels = sample["labels"][0]
        kept = labels != -100
        (g,) = torch.autograd.grad(logits.log_softmax(1)[kept, labels[kept]].sum(), logits)
        a = torch.cat([hidden, torch.ones(len(hidden), 1)], 1)
        inputs += a.T @ a / len(given)
        outputs += g.T @ g
        count += len(g)
    found = memory_of(method)
    torch.testing.assert_close(found["/inputs/head"][0], inputs)
    torch.testing.assert_close(found["/outputs/head"][0], outputs / count)


@pytest.mark.parametrize("kind", ["dpc", "kfac"])
@pytest.mark.parametrize("name", ["tagger", "bert"])
def test_padding_leaves_no_trace(name: str, kind: str) -> None:
    model, given = make(name)
    found = []
    for batches in ([padded(given)], given):
        method = holdfast.METHODS[kind](model, SGD(model.parameters(), lr=0.1))
        method.consolidate(batches)
        found.append(memory_of(method))
        method.close()
    for key, value in found[0].items():
        if "vectors" not in key:  # whose signs are arbitrary
            torch.testing.assert_close(value, found[1][key], rtol=1e-6, atol=1e-9)


def test_inputs_of_convolutions_have_no_tokens() -> None:
    """Even where their shape begins like that of the mask."""

    class Text(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(4, 2, 1)

        def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
            return self.conv(x)

    model, mask = Text(), torch.tensor([[1, 1, 0, 0]])
    (inputs,) = module_inputs(model, {"conv": model.conv}, [{"x": torch.randn(1, 4, 6), "attention_mask": mask}])
    assert inputs["conv"][0].shape == (1, 4, 6)


def test_dpc_without_boundaries_takes_the_arguments_of_the_call() -> None:
    model, given = make("bert")
    batch = padded(given)
    method = holdfast.DPC(model, SGD(model.parameters(), lr=0.01), every=1, samples=2, free=[model.bert.embeddings])
    model(**batch, output_attentions=None, return_dict=True).loss.backward()
    method.step()
    assert method.tasks == 1


# ---- losses ----


def test_lwf_is_a_mean_over_tokens() -> None:
    model, given = make("tagger")
    method = holdfast.LwF(model, SGD(model.parameters(), lr=0.1), weight=1.0, temperature=2.0)
    method.consolidate([])
    old = copy.deepcopy(model)
    with torch.no_grad():
        model.head.weight.mul_(2)
    total, tokens = torch.zeros(()), 0
    for sample in given:
        p, q = ((m(**sample)["logits"][0] / 2).softmax(-1) for m in (old, model))
        total = total + 4 * (p * (p / q).log()).sum()
        tokens += len(p)
    model(**padded(given))
    torch.testing.assert_close(method.penalty(), total / tokens)
    model(**given[0])
    p, q = ((m(**given[0])["logits"][0] / 2).softmax(-1) for m in (old, model))
    torch.testing.assert_close(method.penalty(), 4 * (p * (p / q).log()).sum() / 5)


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_joint_training_has_the_models_own_loss(name: str) -> None:
    model, given = make(name)
    method = holdfast.Joint(model, SGD(model.parameters(), lr=0.1))
    method.consolidate([padded(given)])
    torch.testing.assert_close(method.penalty(), model(**padded(given)).loss, check_dtype=False)


@pytest.mark.parametrize("name", ["npc", "dpc", "cpc", "ewc", "kfac", "mas", "si", "ssl", "lwf", "joint", "compact"])
def test_every_method_trains_a_model_of_hugging_face(name: str) -> None:
    model, given = make("bert")
    free = {"free": [model.classifier, model.bert.embeddings]} if name in ("npc", "dpc", "cpc") else {}
    extra = {"observe": {"bert.encoder.layer.0.intermediate.dense": "bert.encoder.layer.0.intermediate"}}
    settings = {**free, **(extra if name == "ssl" else {})}
    before = copy.deepcopy(model.state_dict())
    method, batch = holdfast.METHODS[name](model, SGD(model.parameters(), lr=0.1), **settings), padded(given)
    for _ in range(2):
        for _ in range(2):
            loss = model(**batch).loss + method.penalty()
            method.zero_grad()
            loss.backward()
            method.step()
        method.consolidate([batch])
    assert all(value.isfinite().all() for value in model.state_dict().values())
    assert not torch.equal(before["classifier.weight"], model.classifier.weight)


# ---- reading ----


def test_outputs_in_every_form() -> None:
    x, loss = torch.randn(2, 3), torch.tensor(0.5)
    for outputs in (x, {"loss": loss, "logits": x}, {"loss": loss, "scores": x}, (loss, x, x + 1), [x]):
        assert logits_of(outputs) is x
    assert loss_of({"loss": loss, "logits": x}) is loss
    assert loss_of((loss, x)) is None
    assert loss_of(x) is None
    tokens = torch.arange(12.0).view(1, 3, 4)
    assert torch.equal(select({"logits": tokens}, [3, 0]), tokens[:, :, [3, 0]])
    assert torch.equal(select(tokens[..., None], [2]), tokens[:, [2], :, None])
    with pytest.raises(ValueError, match="active names output 4, but the model has 4 outputs"):
        select(tokens, [4])


def test_a_dict_is_given_to_the_model_as_it_is() -> None:
    batch = read({"input_ids": torch.ones(2, 3), "labels": torch.tensor([1, 2])}, CPU)
    assert list(batch.keywords) == ["input_ids", "labels"]
    assert batch.labels is not None
    assert batch.labels.tolist() == [1, 2]
    part = Batch((torch.ones(4, 2), None), {"flag": True, "x": torch.ones(4)}, None).part(1, 3)
    assert part.size == 2
    assert part.inputs[1] is None
    assert part.keywords["flag"] is True


def test_whose_label_an_output_predicts() -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(2, 4, 5), torch.tensor([[1, 2, 3, 4], [0, 0, -100, -100]])
    for target, answer in ((labels, False), (following(labels), True)):
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), label_smoothing=0.05)
        assert predicts_next({"loss": loss, "logits": logits}, labels).item() is answer
    assert predicts_next(logits, labels).item() is False


def test_labels_of_tokens_that_do_not_fit() -> None:
    model, given = make("tagger")
    batch = padded(given)
    for kind in ("ewc", "kfac"):
        with pytest.raises(ValueError, match=r"one class number per token, \(3, 5\), got torch.int64 \(3,\)"):
            consolidated(kind, model, [batch | {"labels": torch.tensor([0, 1, 2])}])
        with pytest.raises(ValueError, match="from 0 to 3 for its 4 outputs; got 0 to 4"):
            consolidated(kind, model, [batch | {"labels": batch["labels"].where(batch["labels"] < 3, 4)}])
        with pytest.raises(ValueError, match=r"must return \[samples, classes\] or .* follow axes \(2, 3, 4\)"):
            consolidated(kind, nn.Conv2d(1, 3, 1), [(torch.randn(2, 1, 4, 5), torch.zeros(2).long())])
