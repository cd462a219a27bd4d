"""What test_memory.py starts: TRL's trainers over a large vocabulary, and what their process has needed for that."""

from __future__ import annotations

import copy
from pathlib import Path
from tempfile import TemporaryDirectory

import models
import torch
import transformers
import trl_trainers
from memory_trainer import LargestTensor, status_bytes

import lossd
from lossd.transformers import patch

VOCABULARY, WORDS = 1 << 16, 24
METHODS = ("dpo", "grpo")


def logits_bytes(method: str) -> int:
    """Logits of the completions of a step, in fp32: the least that a local head makes of them at once."""
    sequences = 8 if method == "dpo" else 4
    return sequences * WORDS * VOCABULARY * 4


def _trainer(method: str, model: transformers.PreTrainedModel, folder: Path) -> transformers.Trainer:
    tokenizer = trl_trainers.words_tokenizer()
    if method == "dpo":
        return trl_trainers.dpo(model, tokenizer, folder, shortest=WORDS, max_steps=1, ref_model=copy.deepcopy(model))
    return trl_trainers.grpo(model, tokenizer, folder, shortest=WORDS, max_completion_length=WORDS, max_steps=1)


def _train(method: str, target: str, name: str) -> dict[str, int]:
    torch.manual_seed(1)
    config = models.CONFIGS["llama"]()
    config.vocab_size = VOCABULARY
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    if target:
        patch(model, client=lossd.connect(target), name=name, optimizer=lossd.SGD())
    largest = LargestTensor()
    with TemporaryDirectory() as folder:
        trainer = _trainer(method, model, Path(folder))
        before = status_bytes("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from here.
        with largest:
            trainer.train()
        growth = status_bytes("VmHWM") - before
    return {"growth": growth, "largest_tensor": largest.bytes}


def train(target: str) -> dict[str, list[dict[str, int]]]:
    """By method, a step with a head at `target`, which is named as the method, and one with the model's own. Run in a
    process of its own."""
    torch.set_num_threads(1)
    return {method: [_train(method, target, method), _train(method, "", method)] for method in METHODS}
