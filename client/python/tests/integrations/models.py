"""Tiny models of transformers, from their configurations alone."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers

VOCABULARY = 61
HIDDEN = 16
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _config(name: str, **options: Any) -> transformers.PretrainedConfig:
    return getattr(transformers, name)(**{**_SIZES, "tie_word_embeddings": False, **options})


def _gpt2() -> transformers.PretrainedConfig:
    return transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=HIDDEN, n_layer=2, n_head=2, n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip


CONFIGS = {
    "llama": lambda: _config("LlamaConfig"),
    "llama-tied": lambda: _config("LlamaConfig", tie_word_embeddings=True),
    "mistral": lambda: _config("MistralConfig", sliding_window=16),
    "qwen2": lambda: _config("Qwen2Config"),
    "qwen3": lambda: _config("Qwen3Config"),
    # Large weights (_widen) and a low cap, so that the cap matters.
    "gemma2": lambda: _config("Gemma2Config", final_logit_softcapping=1.5, query_pre_attn_scalar=8),
    "gemma3": lambda: _config("Gemma3TextConfig", final_logit_softcapping=1.5, query_pre_attn_scalar=8),
    "gemma2-tied": lambda: _config("Gemma2Config", tie_word_embeddings=True, query_pre_attn_scalar=8),
    "gpt2-tied": _gpt2,
    "granite": lambda: _config("GraniteConfig", logits_scaling=0.25),
    "cohere": lambda: _config("CohereConfig", logit_scale=0.5),
    "mixtral": lambda: _config(
        "MixtralConfig", num_local_experts=2, output_router_logits=True, router_aux_loss_coef=0.5
    ),
    "phi-bias": lambda: transformers.PhiConfig(
        **{**_SIZES, "num_key_value_heads": 2, "tie_word_embeddings": False, "resid_pdrop": 0.0}
    ),
}


def build(kind: str, seed: int = 3) -> transformers.PreTrainedModel:
    """A model in fp32, the same for the same seed, with logits large enough that a softcap shows."""
    torch.manual_seed(seed)
    config = CONFIGS[kind]()
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        model.get_output_embeddings().weight.normal_(0, 0.5, generator=torch.Generator().manual_seed(seed))
        if model.get_output_embeddings().bias is not None:
            model.get_output_embeddings().bias.normal_(0, 0.5, generator=torch.Generator().manual_seed(seed))
    return model


def twin(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    return copy.deepcopy(model)


def batch(rows: int = 3, length: int = 11, seed: int = 5) -> dict[str, torch.Tensor]:
    """Tokens with labels, some ignored."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, VOCABULARY, (rows, length), generator=generator)
    labels = tokens.clone()
    labels[0, :4] = -100
    labels[-1, -2:] = -100
    return {"input_ids": tokens, "labels": labels}
