"""docs/training.md and docs/trainers.md: each of their examples runs."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from glue_support import Ranks, batch, weights_of
from torch.nn.parallel import DistributedDataParallel

import lossd
import lossd.torch
from lossd.torch import RemoteHead

DOCS = Path(__file__).resolve().parents[4] / "docs"


def examples() -> dict[str, str]:
    """The indented text under each heading."""
    found = {}
    pages = "".join((DOCS / page).read_text() for page in ("training.md", "trainers.md"))
    for section in re.split(r"^## ", pages, flags=re.MULTILINE)[1:]:
        title, _, body = section.partition("\n")
        lines = [line for line in body.split("\n") if line.startswith("    ")]
        if lines:
            found[title] = textwrap.dedent("\n".join(lines))
    return found


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = torch.nn.Linear(6, 6)
        self.lm_head: torch.nn.Module = torch.nn.Linear(6, 11, bias=False)

    def forward(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.trunk(hidden), labels)


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
    exec(compile(examples()[title], title, "exec"), space)
    return space


ALONE = ["A loop of your own", "Steps", "GradScaler", "State and checkpoints", "A weight of the trainer's own"]


@pytest.mark.parametrize("title", ALONE)
def test_one_process(client: lossd.Client, title: str) -> None:
    torch.manual_seed(2)
    model = Model()
    before = model.lm_head.weight.detach().clone()
    space = run(title, client=client, model=model)
    head = space.get("head", model.lm_head)
    if title == "State and checkpoints":
        assert torch.equal(weights_of(head), before)
    else:
        assert not torch.equal(weights_of(head), before) and not head.dirty
    head.close()
    client.delete_head(head.name, discard_gradient=True)


def on_rank(rank: int, group: dist.ProcessGroup, title: str, target: str) -> Any:
    torch.manual_seed(rank)
    return run(title, group=group, target=target).get("shard")


def data_parallel(rank: int, group: dist.ProcessGroup, target: str) -> Any:
    batches = [batch(10 * rank + seed) for seed in range(3)]
    with lossd.connect(target) as client:
        model = Model()
        space = run(
            "DistributedDataParallel and accelerate",
            group=group,
            client=client,
            model=model,
            batches=batches,
            DistributedDataParallel=DistributedDataParallel,
        )
        return [p.detach() for p in space["model"].module.trunk.parameters()], weights_of(model.lm_head)


def test_data_parallel_ranks(ranks: Ranks, server: lossd.Server, client: lossd.Client) -> None:
    (first, head), (second, same) = ranks.run(data_parallel, server.target)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True)) and torch.equal(head, same)
    assert client.head("data-parallel").info().optimizer_steps == 3
    client.delete_head("data-parallel")


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
    assert set(examples()) == {*ALONE, "DistributedDataParallel and accelerate", "Ranks", "Sharded weights"}
