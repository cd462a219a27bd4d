"""Hugging Face causal language models whose `lm_head` lives in a lossd server.

    head = lossd.transformers.patch(model, client=client, optimizer=lossd.AdamW())
    loss = model(input_ids, labels=labels).loss      # no logits, here or in the server
    loss.backward()
    optimizer.step()                                 # of model.parameters(): the head is stepped at the server

Works with every causal model of `transformers` whose logits are those of one linear layer, scaled and capped or
not: Llama, Mistral, Qwen, Gemma, GPT-2, Mixtral, Granite and their like. docs/transformers.md says how.
"""

from typing import Any

from lossd import torch as _torch  # noqa: F401, first: it says so if PyTorch is missing
from lossd.transformers import _trainer
from lossd.transformers._patch import flush_tied, patch, patched_head, unpatch
from lossd.transformers._trainer import RemoteHeadTrainerMixin

__all__ = [
    "RemoteHeadTrainer",
    "RemoteHeadTrainerMixin",
    "flush_tied",
    "patch",
    "patched_head",
    "unpatch",
]


def __getattr__(name: str) -> Any:
    if name == "RemoteHeadTrainer":
        return _trainer.RemoteHeadTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
