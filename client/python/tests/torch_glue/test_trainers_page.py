"""docs/trainers.md: each of its examples runs."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from glue_support import Ranks, batch, weights_of

import lossd
import lossd.torch
from lossd.torch import RemoteHead

PAGE = Path(__file__).resolve().parents[4] / "docs" / "trainers.md"


def examples() -> dict[str, str]:
    """The indented text under each heading."""
    found = {}
    for section in re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)[1:]:
        title, _, body = section.partition("\n")
        lines = [line for line in body.split("\n") if line.startswith("    ")]
        if lines:
            found[title] = textwrap.dedent("\n".join(lines))
    return found


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = torch.nn.Linear(6, 6)
        self.lm_head = torch.nn.Linear(6, 11, bias=False)


def run(title: str, **given: Any) -> dict[str, Any]:
    names = {name: getattr(lossd.torch, name) for name in lossd.torch.__all__}
    space = {
        "lossd": lossd,
        "torch": torch,
        "dist": dist,
        "batches": [batch(seed) for seed in range(3)],
        **names,
        **given,
    }
    exec(compile(examples()[title], f"{PAGE.name}, {title}", "exec"), space)
    return space


@pytest.mark.parametrize("title", ["Steps", "GradScaler", "State and checkpoints", "A weight of the trainer's own"])
def test_one_process(client: lossd.Client, title: str) -> None:
    torch.manual_seed(2)
    model = Model()
    before = model.lm_head.weight.detach().clone()
    space = run(title, client=client, model=model)
    head = space["head"]
    if title == "State and checkpoints":
        assert torch.equal(weights_of(head), before)
    else:
        assert not torch.equal(weights_of(head), before) and not head.dirty
    head.close()
    client.delete_head(head.name, discard_gradient=True)


def on_rank(rank: int, group: dist.ProcessGroup, title: str, target: str) -> Any:
    torch.manual_seed(rank)
    return run(title, group=group, target=target).get("shard")


@pytest.mark.parametrize("title", ["Ranks", "Sharded weights"])
def test_two_ranks(ranks: Ranks, server: lossd.Server, client: lossd.Client, title: str) -> None:
    name = {"Ranks": "ranks", "Sharded weights": "shards"}[title]
    weights = torch.zeros(11, 6)
    head = RemoteHead.create(client, name, 11, 6, dtype=torch.float32, optimizer=lossd.SGD(), weights=weights)
    shards = ranks.run(on_rank, title, server.target)
    if title == "Ranks":
        assert head.head.info().optimizer_steps == 1
    else:
        assert torch.equal(weights_of(head), torch.cat(shards))
    client.delete_head(name, discard_gradient=True)


def test_every_example_is_run() -> None:
    assert set(examples()) == {
        "Steps",
        "GradScaler",
        "State and checkpoints",
        "A weight of the trainer's own",
        "Ranks",
        "Sharded weights",
    }
