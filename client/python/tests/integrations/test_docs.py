"""The programs of docs/transformers.md run as they stand there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
import trl
import trl_trainers
from models import VOCABULARY, build
from test_trainer import Rows

import lossd

PAGE = Path(__file__).parents[4] / "docs" / "transformers.md"
PROGRAMS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
ABOUT = ("loop", "trainer", "checkpoints", "trl", "lora", "ranks")


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """The programs of one rank: what several do is in test_trainer_ranks.py."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def names(server: lossd.Server, tmp_path: Path) -> dict[str, Any]:
    """What the programs are told to have."""
    return {
        "torch": torch,
        "transformers": transformers,
        "model": build("llama"),
        "tokens": torch.arange(3, 27).reshape(2, 12),
        "folder": tmp_path,
        "rows": Rows(8),
        "arguments": transformers.TrainingArguments(
            output_dir=str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=True, max_steps=2,
            per_device_train_batch_size=2, gradient_accumulation_steps=2, save_steps=1,
        ),
        "sft": trl.SFTConfig(**trl_trainers.options(tmp_path, max_steps=1, optim="adamw_torch")),
        "dpo": trl.DPOConfig(**trl_trainers.options(tmp_path, max_steps=1, optim="adamw_torch")),
        "prompts": trl_trainers.rows("prompt", "completion"),
        "pairs": trl_trainers.rows("prompt", "chosen", "rejected"),
        "tokenizer": trl_trainers.words_tokenizer(),
        "target": server.target,
    }  # fmt: skip


def run(about: str, names: dict[str, Any]) -> dict[str, Any]:
    number = ABOUT.index(about)
    exec(compile(PROGRAMS[number], f"{PAGE.name}, program {number + 1}", "exec"), names)  # noqa: S102
    assert isinstance(names["model"].get_output_embeddings(), torch.nn.Linear)
    return names


def test_the_loop(names: dict[str, Any], tmp_path: Path) -> None:
    run("loop", names)
    assert names["text"].shape == (2, 12) and names["outputs"].logits is None
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path).lm_head.weight.shape[0] == VOCABULARY


@pytest.mark.parametrize("about", ["trainer", "checkpoints", "trl"])
def test_programs_run(names: dict[str, Any], about: str) -> None:
    weight = names["model"].lm_head.weight.detach().clone()
    assert not run(about, names)["model"].lm_head.weight.equal(weight)


def test_lora(names: dict[str, Any], tmp_path: Path) -> None:
    weight = names["model"].lm_head.weight.detach().clone()
    assert run("lora", names)["model"].lm_head.weight.equal(weight)
    assert (tmp_path / "adapter_model.safetensors").exists()


def test_ranks(names: dict[str, Any], group: None, client: lossd.Client) -> None:
    weight = names["model"].lm_head.weight.detach().clone()
    try:
        assert not run("ranks", names)["model"].lm_head.weight.equal(weight)
    finally:
        client.delete_head("lm_head", discard_gradient=True)


def test_there_are_programs() -> None:
    assert len(PROGRAMS) == len(ABOUT)
