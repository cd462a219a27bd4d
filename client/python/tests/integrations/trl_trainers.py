"""TRL's trainers of models of models.py, on texts that they make up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers
import transformers
import trl
from datasets import Dataset
from models import VOCABULARY

STEPS = 3


def words_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """A word for each token."""
    words = tokenizers.models.WordLevel({f"w{token}": token for token in range(VOCABULARY)}, unk_token="w3")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="w0", bos_token="w1", eos_token="w2", unk_token="w3"
    )


def words(seed: int, count: int) -> str:
    return "".join(f" w{4 + (7 * seed + 5 * place * place) % (VOCABULARY - 4)}" for place in range(count))


def rows(*columns: str, shortest: int = 3) -> Dataset:
    """Texts of different lengths, of `shortest` words and up to three more."""
    return Dataset.from_dict(
        {column: [words(row + 20 * index, shortest + (row + index) % 4) for row in range(16)] for index, column in
         enumerate(columns)}
    )  # fmt: skip


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """That is not the same for different completions."""
    return [float(sum(ids) % 23) for ids in completion_ids]


def options(folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder), "use_cpu": True, "report_to": [], "disable_tqdm": True, "logging_steps": 1,
        "max_steps": STEPS, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "optim": "sgd",
        "learning_rate": 0.05, "max_grad_norm": 1.0, "seed": 4, "save_strategy": "no", "bf16": False, **more,
    }  # fmt: skip


def sft(model: Any, tokenizer: Any, folder: Path, kind: type = trl.SFTTrainer, **more: Any) -> transformers.Trainer:
    special = {key: more.pop(key) for key in ("peft_config", "eval_dataset", "compute_metrics") if key in more}
    return kind(
        model=model, args=trl.SFTConfig(**options(folder, **more)), train_dataset=rows("prompt", "completion"),
        processing_class=tokenizer, **special,
    )  # fmt: skip


def dpo(model: Any, tokenizer: Any, folder: Path, **more: Any) -> transformers.Trainer:
    special = {key: more.pop(key) for key in ("peft_config", "ref_model") if key in more}
    texts = rows("prompt", "chosen", "rejected", shortest=more.pop("shortest", 3))
    return trl.DPOTrainer(
        model=model, args=trl.DPOConfig(**options(folder, **more)), processing_class=tokenizer, train_dataset=texts,
        **special,
    )  # fmt: skip


def grpo(model: Any, tokenizer: Any, folder: Path, **more: Any) -> transformers.Trainer:
    settings = {"num_generations": 4, "max_completion_length": 5, "temperature": 0.7, **more}
    texts = rows("prompt", shortest=settings.pop("shortest", 3))
    return trl.GRPOTrainer(
        model=model, args=trl.GRPOConfig(**options(folder, **settings)), reward_funcs=reward, train_dataset=texts,
        processing_class=tokenizer,
    )  # fmt: skip


def rloo(model: Any, tokenizer: Any, folder: Path, **more: Any) -> transformers.Trainer:
    settings = options(folder, num_generations=4, max_completion_length=5, **{"beta": 0.0, **more})
    return trl.RLOOTrainer(
        model=model, args=trl.RLOOConfig(**settings), reward_funcs=reward, train_dataset=rows("prompt"),
        processing_class=tokenizer,
    )  # fmt: skip
