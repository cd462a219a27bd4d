"""The programs of docs/objectives.md run as they stand there, and the page names every function."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from problem import HIDDEN, hidden_states, labels

import lossd
import lossd.torch.objectives
from lossd.torch import RemoteHead, token_log_probs

PAGE = (Path(__file__).parents[4] / "docs" / "objectives.md").read_text()
PROGRAMS = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
ABOUT = ("grpo", "dpo", "once", "gkd", "topk")


@pytest.mark.parametrize("about", ABOUT)
@pytest.mark.filterwarnings("ignore::lossd.torch.FrozenCopyWarning")
def test_programs_run(client: lossd.Client, heads: Any, about: str) -> None:
    model = torch.nn.Module()
    model.trunk, linear = torch.nn.Linear(5, HIDDEN), torch.nn.Linear(HIDDEN, 61, bias=False)
    name = f"objectives-page-{about}"
    model.lm_head = RemoteHead.from_linear(client, linear, name, optimizer=lossd.SGD())
    tokens, target = torch.randn(4, 7, 5), labels(4, 7, masked=0.2)
    with torch.no_grad():
        ref_log_probs = token_log_probs(model.trunk(tokens), target, model.lm_head)
    teacher_log_probs, teacher_ids = torch.randn(4, 7, 61).log_softmax(-1).topk(5)
    before = model.lm_head.read_weights()[0].clone()
    space: dict[str, Any] = {
        "copy": copy,
        "torch": torch,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "tokens": tokens,
        "labels": target,
        "advantages": torch.randn(4),
        "ref_log_probs": ref_log_probs,
        "teacher": heads(frozen=True).remote,
        "teacher_hidden": hidden_states(4, 7),
        "teacher_ids": teacher_ids,
        "teacher_log_probs": teacher_log_probs,
    }
    exec(compile(PROGRAMS[ABOUT.index(about)], f"objectives.md, {about}", "exec"), space)  # noqa: S102
    assert not torch.equal(model.lm_head.read_weights()[0], before)
    model.lm_head.close()
    client.delete_head(name, discard_gradient=True)


def test_every_program_is_run_and_every_function_named() -> None:
    assert len(PROGRAMS) == len(ABOUT)
    assert all(name in PAGE for name in lossd.torch.objectives.__all__)
