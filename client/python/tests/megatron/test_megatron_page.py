"""docs/megatron.md: each of its examples runs."""

from __future__ import annotations

import re
import textwrap
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpt_models import HIDDEN, VOCABULARY, Layout, WithoutCuda, batch, client_of, model_of, parallel
from ranks import Ranks
from test_megatron_model import finish

import lossd
from lossd.torch import RemoteHead, multi_token_cross_entropy

PAGE = Path(__file__).resolve().parents[4] / "docs" / "megatron.md"


def examples() -> dict[str, str]:
    """The indented text under each heading."""
    found = {}
    for section in re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)[1:]:
        title, _, body = section.partition("\n")
        lines = [line for line in body.split("\n") if line.startswith("    ") or not line]
        if "".join(lines):
            found[title] = textwrap.dedent("\n".join(lines))
    return found


def trained(rank: int, group: dist.ProcessGroup, target: str, title: str) -> None:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    from lossd.megatron import OptimizerWithHead, replace_output_layer

    layout = Layout(tp=2)
    with parallel(layout), WithoutCuda():
        model = model_of(layout)
        before = model.output_layer.weight.detach().clone()
        given = [batch(layout, step) for step in range(3)]
        space: dict[str, Any] = {
            "lossd": lossd,
            "client": client_of(target),
            "model": model,
            "config": model.config,
            "spec": get_gpt_layer_local_spec(),
            "vocab_size": VOCABULARY,
            "max_sequence_length": layout.length,
            "ddp_config": DistributedDataParallelConfig(),
            "optimizer_config": OptimizerConfig(optimizer="adam", lr=0.01, min_lr=0.0),
            "schedule": {
                "init_lr": 0.0,
                "max_lr": 0.01,
                "min_lr": 0.0,
                "lr_warmup_steps": 1,
                "lr_decay_steps": 9,
                "lr_decay_style": "cosine",
                "start_wd": 0.1,
                "end_wd": 0.1,
                "wd_incr_steps": 9,
                "wd_incr_style": "constant",
            },
            "batches": [
                types.SimpleNamespace(
                    tokens=one["input_ids"],
                    positions=one["position_ids"],
                    attention_mask=one["attention_mask"],
                    labels=one["labels"],
                    loss_mask=one["loss_mask"],
                )
                for one in given
            ],
            "GPTModel": GPTModel,
            "DistributedDataParallel": DistributedDataParallel,
            "OptimizerParamScheduler": OptimizerParamScheduler,
            "OptimizerWithHead": OptimizerWithHead,
            "finalize_model_grads": finalize_model_grads,
            "get_megatron_optimizer": get_megatron_optimizer,
            "replace_output_layer": replace_output_layer,
        }
        exec(compile(examples()[title], f"{PAGE.name}, {title}", "exec"), space)
        layer = space["layer"]
        layer.upload()
        assert not torch.equal(layer.read_rows(), before) and layer.head.head.info().window_tokens == 0
        finish(layer)


@pytest.mark.parametrize("title", ["The server steps the head", "Megatron steps the weight"])
def test_trainings(ranks: Ranks, server: lossd.Server, title: str) -> None:
    ranks.run(trained, server.target, title)


def test_other_stages_have_no_layer() -> None:
    """A GPTModel of them has no such attribute, and torch.nn.Module raises."""
    found = [line for line in examples()["The server steps the head"].split("\n") if line.startswith("layer = ")]
    space: dict[str, Any] = {"model": torch.nn.Linear(1, 1)}
    exec(found[0], space)
    assert len(found) == 1 and space["layer"] is None


def test_multi_token_prediction(client: lossd.Client) -> None:
    weights = torch.randn(VOCABULARY, HIDDEN)
    head = RemoteHead.create(client, "depths", VOCABULARY, HIDDEN, dtype=torch.float32, weights=weights)
    main, *depths = (torch.randn(2, 8, HIDDEN, requires_grad=True) for _ in range(3))
    space = {"main": main, "depths": depths, "tokens": torch.randint(VOCABULARY, (2, 8)), "head": head}
    space["multi_token_cross_entropy"] = multi_token_cross_entropy
    exec(compile(examples()["Multi-token prediction"], PAGE.name, "exec"), space)
    assert space["by_depth"].shape == (3,) and all(one.grad is not None for one in (main, *depths))
    head.close()
    client.delete_head("depths", discard_gradient=True)


def test_every_example_is_run() -> None:
    assert set(examples()) == {"The server steps the head", "Multi-token prediction", "Megatron steps the weight"}
