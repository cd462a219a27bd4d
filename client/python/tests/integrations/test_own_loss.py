"""Models whose forward computes its loss by itself: patch() refuses them, unless it is transformers' loss."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
import transformers
from models import batch, build
from torch.nn.functional import cross_entropy

import lossd
from lossd.transformers import patch, unpatch
from lossd.transformers._own_loss import _calls_loss_function

Llama = transformers.LlamaForCausalLM
_TOKENS = {"vocab_size": models.VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_BART = {
    "d_model": 16, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 32, "is_decoder": True,
    "max_position_embeddings": 32, "is_encoder_decoder": False, **_TOKENS,
}  # fmt: skip
_MARIAN = {**_BART, "decoder_start_token_id": 1, "decoder_vocab_size": models.VOCABULARY}
_WHISPER = {**_BART, "max_target_positions": 32, "suppress_tokens": None, "begin_suppress_tokens": None}
_XLM = {"emb_dim": 16, "n_layers": 1, "n_heads": 2, "n_words": models.VOCABULARY, "pad_index": 0, "mask_index": 3}

OWN = {
    "BartForCausalLM": lambda: transformers.BartConfig(**_BART),
    "MBartForCausalLM": lambda: transformers.MBartConfig(**_BART),
    "PegasusForCausalLM": lambda: transformers.PegasusConfig(**_BART),
    "PLBartForCausalLM": lambda: transformers.PLBartConfig(**_BART),
    "MvpForCausalLM": lambda: transformers.MvpConfig(**_BART),
    "MarianForCausalLM": lambda: transformers.MarianConfig(**_MARIAN),
    "BlenderbotForCausalLM": lambda: transformers.BlenderbotConfig(**_BART),
    "BlenderbotSmallForCausalLM": lambda: transformers.BlenderbotSmallConfig(**_BART),
    "TrOCRForCausalLM": lambda: transformers.TrOCRConfig(**_BART),
    "WhisperForCausalLM": lambda: transformers.WhisperConfig(**_WHISPER),
    "XLNetLMHeadModel": lambda: transformers.XLNetConfig(d_model=16, n_layer=1, n_head=2, d_inner=32, **_TOKENS),
    "XLMWithLMHeadModel": lambda: transformers.XLMConfig(**_XLM),
    "BertForMaskedLM": lambda: transformers.BertConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, **_TOKENS
    ),
}


@pytest.mark.parametrize("model_class", OWN)
def test_classes_with_a_loss_of_their_own_are_refused(client: lossd.Client, name: str, model_class: str) -> None:
    model = getattr(transformers, model_class)(OWN[model_class]())
    before = model.training
    weight = model.get_output_embeddings().weight.clone()
    with pytest.raises(
        (ValueError, TypeError), match=f"{model_class}.*(loss of its own|are XLMPredLayer)|ForMaskedLMLoss"
    ):
        patch(model, client=client, name=name)
    assert torch.equal(model.get_output_embeddings().weight if model_class[:3] != "XLM" else weight, weight)
    assert model.training == before and not hasattr(model, "_lossd")
    assert not [head for head in client.heads() if head.config.name == name]


def shifted(logits: torch.Tensor, labels: torch.Tensor, **options: Any) -> torch.Tensor:
    return cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), **options)


def own(compute: Callable[..., torch.Tensor]) -> type[Llama]:
    """A class whose forward computes its loss as remote code does."""

    class OwnLoss(Llama):
        def forward(self, input_ids=None, attention_mask=None, labels=None):
            outputs = super().forward(input_ids, attention_mask)
            if labels is not None:
                outputs.loss = compute(self, outputs.logits, labels, attention_mask)
            return outputs

    return OwnLoss


def masked(model: Any, logits: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    return shifted(logits, labels if mask is None else labels.masked_fill(mask == 0, -100))


def penalized(model: Any, logits: torch.Tensor, labels: torch.Tensor, mask: Any) -> torch.Tensor:
    return shifted(logits, labels) + 1e-4 * logits.logsumexp(-1).square().mean()


def smoothed(model: Any, logits: torch.Tensor, labels: torch.Tensor, mask: Any) -> torch.Tensor:
    return shifted(logits, labels, label_smoothing=0.1 if model.training else 0.0)


def scaled(model: Any, logits: torch.Tensor, labels: torch.Tensor, mask: Any) -> torch.Tensor:
    return shifted(logits / 2, labels)


def decorated(forward: Any) -> Any:
    @functools.wraps(forward)
    def twice(*args: Any, **kwargs: Any) -> Any:
        outputs = forward(*args, **kwargs)
        if outputs.loss is not None:
            outputs.loss = outputs.loss * 2
        return outputs

    return twice


class PadsAreIgnored(Llama):
    def forward(self, input_ids=None, labels=None, **kwargs):
        logits = self.lm_head(self.model(input_ids).last_hidden_state)
        labels[labels == 0] = -100
        loss = self.loss_function(logits, labels, self.vocab_size, **kwargs)
        return transformers.modeling_outputs.CausalLMOutputWithPast(loss=loss, logits=logits)


class LossInPlace(Llama):
    def forward(self, input_ids=None, labels=None, **kwargs):
        logits = self.lm_head(self.model(input_ids).last_hidden_state)
        loss = self.loss_function(logits, labels, self.vocab_size, **kwargs)
        loss.mul_(0.5)
        return transformers.modeling_outputs.CausalLMOutputWithPast(loss=loss, logits=logits)


OWN_FORWARDS = {
    "no shift": own(lambda model, logits, labels, mask: cross_entropy(logits.flatten(0, 1), labels.flatten())),
    "mask": own(masked),
    "z loss": own(penalized),
    "smoothing in training": own(smoothed),
    "temperature": own(scaled),
    "sum": own(lambda model, logits, labels, mask: shifted(logits, labels, reduction="sum")),
    "no loss": own(lambda *_: None),
    "no labels": type("Unlabelled", (Llama,), {"forward": lambda self, input_ids: Llama.forward(self, input_ids)}),
    "decorator": type("Decorated", (Llama,), {"forward": decorated(Llama.forward)}),
    "pads": PadsAreIgnored,
    "in place": LossInPlace,
}


@pytest.mark.parametrize("what", OWN_FORWARDS)
def test_forwards_with_a_loss_of_their_own_are_refused(client: lossd.Client, name: str, what: str) -> None:
    model = OWN_FORWARDS[what](models.CONFIGS["llama"]())
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match="loss of its own: .*call lossd.torch.linear_cross_entropy"):
        patch(model, client=client, name=name)
    assert torch.equal(torch.get_rng_state(), state) and isinstance(model.lm_head, torch.nn.Linear)


class Delegating(Llama):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


SAME_FORWARDS = {
    "remote code": own(lambda model, logits, labels, mask: shifted(logits.float(), labels)),
    "delegation": Delegating,
    "decorator": type(
        "Timed", (Llama,), {"forward": functools.wraps(Llama.forward)(lambda *a, **k: Llama.forward(*a, **k))}
    ),
}


@pytest.mark.parametrize("what", SAME_FORWARDS)
def test_forwards_that_come_to_the_same_are_taken(client: lossd.Client, name: str, what: str) -> None:
    model = SAME_FORWARDS[what](models.CONFIGS["llama"]()).eval()
    local = model(**batch()).loss
    patch(model, client=client, name=name, dtype="float32")
    torch.testing.assert_close(model(**batch()).loss, local, rtol=1e-5, atol=1e-6)
    unpatch(model)


def test_forwards_of_every_other_model_are_not_run() -> None:
    for kind in models.CONFIGS:
        assert _calls_loss_function(type(build(kind)).forward), kind
    vision = ("Gemma3ForConditionalGeneration", "LlavaForConditionalGeneration", "Qwen2VLForConditionalGeneration")
    for model_class in (*vision, "OPTForCausalLM", "GptOssForCausalLM", "BertLMHeadModel"):
        assert _calls_loss_function(getattr(transformers, model_class).forward), model_class


def test_a_loss_type_set_later_is_refused(client: lossd.Client, name: str) -> None:
    model = build("llama")
    patch(model, client=client, name=name)
    with pytest.raises(ValueError, match="loss_function is ForMaskedLMLoss"):
        model.loss_type = "ForMaskedLM"
    model.loss_type = "ForCausalLM"
