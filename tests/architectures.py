"""Real architectures from small configurations, with random weights: a model, a batch, and what is left free."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")


class Case(NamedTuple):
    """A model, the keyword arguments of a forward, and the names of what is free."""

    model: nn.Module
    batch: dict[str, Tensor]
    free: list[str]


TOKENS = {"vocab_size": 96}
WIDE = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
TEXT = TOKENS | WIDE | {"num_hidden_layers": 2}
DECODER = TEXT | {"num_key_value_heads": 1, "head_dim": 16}
IMAGE = {"image_size": 32, "num_labels": 3}


def tokens() -> Tensor:
    return torch.randint(3, 96, (3, 12))


def text(kind: str, free: list[str], **config: Any) -> Callable[[], Case]:
    """A classifier of texts, or a language model."""

    def build() -> Case:
        model = _model(kind, pad_token_id=1, **config)
        causal = kind.endswith(("LM", "LMHeadModel"))
        return Case(model, {"input_ids": tokens(), "labels": tokens() if causal else torch.tensor([0, 1, 1])}, free)

    return build


def image(kind: str, free: list[str], **config: Any) -> Callable[[], Case]:
    def build() -> Case:
        batch = {"pixel_values": torch.randn(3, 3, 32, 32), "labels": torch.tensor([0, 1, 2])}
        return Case(_model(kind, **config), batch, free)

    return build


def _model(kind: str, **config: Any) -> nn.Module:
    cls = getattr(transformers, kind)
    torch.manual_seed(0)
    model: nn.Module = cls(cls.config_class(**config))
    return model


def t5() -> Case:
    model = _model("T5ForConditionalGeneration", vocab_size=96, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2,
                   decoder_start_token_id=0, tie_word_embeddings=False)  # fmt: skip
    return Case(model, {"input_ids": tokens(), "labels": tokens()}, ["lm_head"])


def bart() -> Case:
    sizes = {f"{side}_{name}": value for side in ("encoder", "decoder")
             for name, value in (("layers", 2), ("ffn_dim", 64), ("attention_heads", 2))}  # fmt: skip
    model = _model("BartForSequenceClassification", vocab_size=96, d_model=32, max_position_embeddings=32, num_labels=2,
                   pad_token_id=1, eos_token_id=2, **sizes)  # fmt: skip
    ids = tokens()
    ids[:, -1] = 2
    return Case(model, {"input_ids": ids, "labels": torch.tensor([0, 1, 1])}, ["classification_head"])


def whisper() -> Case:
    sizes = {f"{side}_{name}": value for side in ("encoder", "decoder")
             for name, value in (("layers", 2), ("ffn_dim", 64), ("attention_heads", 2))}  # fmt: skip
    model = _model("WhisperForConditionalGeneration", vocab_size=96, d_model=32, num_mel_bins=8,
                   max_source_positions=16, max_target_positions=16, pad_token_id=1, bos_token_id=0,
                   eos_token_id=2, decoder_start_token_id=0, suppress_tokens=None, begin_suppress_tokens=None,
                   **sizes)  # fmt: skip
    return Case(model, {"input_features": torch.randn(3, 8, 32), "labels": tokens()}, [])


def clip() -> Case:
    vision = WIDE | {"num_hidden_layers": 2, "image_size": 32, "patch_size": 16}
    special = {"max_position_embeddings": 16, "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1}
    model = _model("CLIPModel", text_config=TEXT | special, vision_config=vision, projection_dim=16)
    batch = {"input_ids": tokens(), "pixel_values": torch.randn(3, 3, 32, 32)}
    return Case(Contrastive(model), batch, [])


class Contrastive(nn.Module):
    """CLIP with its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, pixel_values: Tensor) -> Any:
        return self.model(input_ids=input_ids, pixel_values=pixel_values, return_loss=True)


def wav2vec2() -> Case:
    model = _model("Wav2Vec2ForSequenceClassification", **WIDE, num_hidden_layers=2, conv_dim=(16, 16),
                   conv_stride=(5, 2), conv_kernel=(10, 3), num_feat_extract_layers=2, num_conv_pos_embeddings=8,
                   num_conv_pos_embedding_groups=2, classifier_proj_size=16, num_labels=2, mask_time_prob=0.0,
                   layerdrop=0.0)  # fmt: skip
    return Case(model, {"input_values": torch.randn(3, 400), "labels": torch.tensor([0, 1, 1])}, ["classifier"])


def lora() -> Case:
    model = _model("LlamaForSequenceClassification", **DECODER, pad_token_id=1, num_labels=2)
    targets = ["q_proj", "v_proj", "up_proj"]
    config = peft.LoraConfig(r=4, target_modules=targets, task_type="SEQ_CLS", init_lora_weights=False)
    return Case(peft.get_peft_model(model, config), {"input_ids": tokens(), "labels": torch.tensor([0, 1, 1])},
                ["*.score"])  # fmt: skip


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(96, 32)
        self.position = nn.Parameter(torch.randn(1, 12, 32))
        layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 2)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(input_ids) + self.position).mean(1))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(96, 32)
        self.recurrent = kind(32, 32, 1, batch_first=True, bidirectional=True)
        self.head = nn.Linear(64, 2)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.recurrent(self.embedding(input_ids))[0].mean(1))


def plain(build: Callable[[], nn.Module]) -> Callable[[], Case]:
    return lambda: Case(build(), {"input_ids": tokens()}, ["head"])


CASES: dict[str, Callable[[], Case]] = {
    "BERT": text("BertForSequenceClassification", ["classifier"], **TEXT, max_position_embeddings=32),
    "RoBERTa": text("RobertaForSequenceClassification", ["classifier"], **TEXT, max_position_embeddings=32),
    "DistilBERT": text("DistilBertForSequenceClassification", ["*classifier"], vocab_size=96, dim=32, n_layers=2,
                       n_heads=2, hidden_dim=64, max_position_embeddings=32),
    "ALBERT": text("AlbertForSequenceClassification", ["classifier"], **TEXT, embedding_size=16,
                   max_position_embeddings=32),
    "ELECTRA": text("ElectraForSequenceClassification", ["classifier"], **TEXT, embedding_size=16,
                    max_position_embeddings=32),
    "DeBERTa-v2": text("DebertaV2ForSequenceClassification", ["classifier"], **TEXT, max_position_embeddings=32,
                       relative_attention=True, pos_att_type=["p2c", "c2p"]),
    "GPT-2": text("GPT2LMHeadModel", [], vocab_size=96, n_embd=32, n_layer=2, n_head=2, n_positions=32),
    "GPT-2 classifier": text("GPT2ForSequenceClassification", ["score"], vocab_size=96, n_embd=32, n_layer=2, n_head=2,
                             n_positions=32),
    "GPT-NeoX": text("GPTNeoXForCausalLM", ["lm_head"], **TEXT, max_position_embeddings=32),
    "BLOOM": text("BloomForCausalLM", [], vocab_size=96, hidden_size=32, n_layer=2, n_head=2),
    "OPT": text("OPTForCausalLM", [], vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
                ffn_dim=64, max_position_embeddings=32, word_embed_proj_dim=32),
    "Llama": text("LlamaForCausalLM", ["lm_head"], **DECODER),
    "Mistral": text("MistralForCausalLM", ["lm_head"], **DECODER),
    "Gemma": text("GemmaForCausalLM", [], **DECODER),
    "Phi": text("PhiForCausalLM", ["lm_head"], **TEXT),
    "Qwen2": text("Qwen2ForCausalLM", ["lm_head"], **TEXT, num_key_value_heads=1),
    "Mixtral": text("MixtralForCausalLM", ["lm_head"], **DECODER, num_local_experts=4, num_experts_per_tok=2),
    "Qwen2-MoE": text("Qwen2MoeForCausalLM", ["lm_head"], **TEXT, num_key_value_heads=1, num_experts=4,
                      num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32),
    "GPT-OSS": text("GptOssForCausalLM", ["lm_head"], **DECODER, num_local_experts=4, num_experts_per_tok=2),
    "Mamba": text("MambaForCausalLM", [], vocab_size=96, hidden_size=32, num_hidden_layers=2, state_size=4),
    "T5": t5,
    "BART": bart,
    "Whisper": whisper,
    "Wav2Vec2": wav2vec2,
    "CLIP": clip,
    "ViT": image("ViTForImageClassification", ["classifier"], **WIDE, num_hidden_layers=2, patch_size=8, **IMAGE),
    "DeiT": image("DeiTForImageClassification", ["classifier"], **WIDE, num_hidden_layers=2, patch_size=8, **IMAGE),
    "BEiT": image("BeitForImageClassification", ["classifier"], **WIDE, num_hidden_layers=2, patch_size=8,
                  use_relative_position_bias=True, **IMAGE),
    "Swin": image("SwinForImageClassification", ["classifier"], embed_dim=16, depths=[2, 2], num_heads=[2, 4],
                  window_size=4, patch_size=2, **IMAGE),
    "SegFormer": image("SegformerForImageClassification", ["classifier"], depths=[1, 1, 1, 1],
                       hidden_sizes=[16, 32, 32, 32], num_attention_heads=[1, 2, 2, 2], decoder_hidden_size=32,
                       num_labels=3),
    "ConvNeXt": image("ConvNextForImageClassification", ["classifier"], hidden_sizes=[16, 32, 32, 32],
                      depths=[1, 1, 1, 1], **IMAGE),
    "ResNet": image("ResNetForImageClassification", ["classifier"], embedding_size=16, hidden_sizes=[16, 32, 32, 32],
                    depths=[1, 1, 1, 1], layer_type="basic", num_labels=3),
    "MobileNetV2": image("MobileNetV2ForImageClassification", ["classifier"], depth_multiplier=0.35, **IMAGE),
    "nn.TransformerEncoder": plain(Encoder),
    "nn.LSTM": plain(lambda: Recurrent(nn.LSTM)),
    "nn.GRU": plain(lambda: Recurrent(nn.GRU)),
    "Llama with LoRA": lora,
}  # fmt: skip


def loss_of(case: Case) -> Tensor:
    output = case.model(**case.batch)
    loss = getattr(output, "loss", None)
    return output.square().mean() if isinstance(output, Tensor) else loss
