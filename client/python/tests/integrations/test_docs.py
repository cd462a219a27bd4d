"""The programs of docs/transformers.md run as they stand there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import transformers
from models import VOCABULARY, build
from test_trainer import Rows

PAGE = Path(__file__).parents[4] / "docs" / "transformers.md"
PROGRAMS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_programs_run(number: int, tmp_path: Path) -> None:
    names = {
        "torch": torch,
        "model": build("llama"),
        "tokens": torch.arange(3, 27).reshape(2, 12),
        "folder": tmp_path,
        "rows": Rows(8),
        "arguments": transformers.TrainingArguments(
            output_dir=str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=True, max_steps=2,
            per_device_train_batch_size=2, gradient_accumulation_steps=2, save_steps=1,
        ),
    }  # fmt: skip
    exec(compile(PROGRAMS[number], f"{PAGE.name}, program {number + 1}", "exec"), names)  # noqa: S102
    assert isinstance(names["model"].lm_head, torch.nn.Linear)
    if number == 0:
        assert names["text"].shape == (2, 12) and names["outputs"].logits is None
        assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path).lm_head.weight.shape[0] == VOCABULARY


def test_there_are_programs() -> None:
    assert len(PROGRAMS) == 3
