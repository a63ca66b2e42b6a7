"""Models with frozen modules, compiled into one graph."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import holdfast

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of torch's compiler, and of uncontrolled parameters


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch.compiler.reset()


class Frozen(nn.Module):
    """A frozen embedding and a frozen layer with a trained normalization, before trained layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 8).requires_grad_(False)
        self.first = nn.Linear(8, 8).requires_grad_(False)
        self.norm = nn.LayerNorm(8)
        self.second = nn.Linear(8, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.second(self.norm(self.first(self.embedding(x))))))


def llama() -> tuple[nn.Module, dict[str, Tensor]]:
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=32, use_cache=False,
    )  # fmt: skip
    adapters = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(transformers.LlamaForCausalLM(config), adapters)
    return model, {"input_ids": torch.randint(32, (2, 6))}


def whisper() -> tuple[nn.Module, dict[str, Tensor]]:
    transformers = pytest.importorskip("transformers")
    config = transformers.WhisperConfig(
        vocab_size=40, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, num_mel_bins=8, max_source_positions=10,
        max_target_positions=12, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=3,
        use_cache=False, dropout=0.0,
    )  # fmt: skip
    batch = {"input_features": torch.randn(2, 8, 20), "decoder_input_ids": torch.randint(40, (2, 5))}
    return transformers.WhisperForConditionalGeneration(config), batch


def frozen() -> tuple[nn.Module, dict[str, Tensor]]:
    return Frozen(), {"x": torch.randint(7, (4, 5))}


def npc(model: nn.Module, example: Any = None) -> holdfast.NPC:
    parameters = [p for p in model.parameters() if p.requires_grad]
    return holdfast.NPC(model, SGD(parameters, lr=0.01), rate=0.5, example=example)


def step(run: Callable[..., Any], optimizer: holdfast.NPC, batch: dict[str, Tensor]) -> None:
    optimizer.zero_grad()
    output = run(**batch)
    (output if isinstance(output, Tensor) else output.logits).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("build", [frozen, llama, whisper])
def test_a_model_with_frozen_modules_is_one_graph(build: Callable[[], tuple[nn.Module, dict[str, Tensor]]]) -> None:
    torch.manual_seed(0)
    model, batch = build()
    plain = copy.deepcopy(model)
    ours, theirs = npc(model, example=batch), npc(plain)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for _ in range(3):
        step(compiled, ours, batch)
        step(plain, theirs, batch)
        for name, values in ours.importance.items():
            assert values.sum() > 0, name
            torch.testing.assert_close(values, theirs.importance[name], rtol=1e-3, atol=1e-4)


def test_a_layer_trained_later_is_still_traced() -> None:
    model, batch = frozen()
    optimizer = holdfast.NPC(model, SGD(model.parameters(), lr=0.01), rate=0.5, example=batch)
    compiled = torch.compile(model, backend="aot_eager")
    step(compiled, optimizer, batch)
    assert optimizer.importance["first"].sum() == 0
    model.first.requires_grad_(True)
    step(compiled, optimizer, batch)
    assert optimizer.importance["first"].sum() > 0
