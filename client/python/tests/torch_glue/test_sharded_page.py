"""docs/sharded.md: each of its examples runs, on all ranks."""

from __future__ import annotations

import dataclasses
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from glue_support import HIDDEN, VOCAB, Ranks, batch, weights_of

import lossd
import lossd.torch
from lossd.torch import RemoteHead

PAGE = Path(__file__).resolve().parents[4] / "docs" / "sharded.md"


def examples() -> dict[str, str]:
    """The indented text under each heading."""
    found = {}
    for section in re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)[1:]:
        title, _, body = section.partition("\n")
        lines = [line for line in body.split("\n") if line.startswith("    ") or not line]
        found[title] = textwrap.dedent("\n".join(lines)).strip()
    return found


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = torch.nn.Linear(HIDDEN, HIDDEN)
        self.lm_head = torch.nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.trunk(inputs), labels)


def on_rank(rank: int, group: dist.ProcessGroup, title: str, target: str, folder: str) -> Any:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    torch._dynamo.reset()
    torch.manual_seed(2)
    space = {name: getattr(lossd.torch, name) for name in lossd.torch.__all__}
    space |= {"lossd": lossd, "torch": torch, "dist": dist, "dcp": dcp, "init_device_mesh": init_device_mesh}
    space |= {"fully_shard": fully_shard, "Shard": Shard, "distribute_tensor": distribute_tensor}
    space |= {"group": group, "target": target, "folder": folder, "model": Model()}
    space["batches"] = [batch(seed) for seed in range(3)]
    if title == "torchtitan":
        from torchtitan.components.loss import ChunkedLossWrapper

        space |= {"ChunkedLossWrapper": ChunkedLossWrapper, "dataclass": dataclasses.dataclass}
    exec(compile(examples()[title], f"{PAGE.name}, {title}", "exec"), space)
    if title == "torchtitan":
        loss = space["RemoteHeadLoss"].Config().build()
        loss.set_lm_head(RemoteHead(lossd.connect(target).head("titan"), group=group))
        (inputs, labels), valid = batch(rank), torch.tensor(24)
        return loss(inputs, labels, valid)[0].item(), loss(inputs, labels)[0].item()
    return None


@pytest.mark.parametrize(
    ("title", "name", "count"),
    [
        ("fully_shard", "sharded", 3),
        ("Hidden states that are DTensors", "dtensors", 3),
        ("Checkpoints", "saved", 3),
        ("torchtitan", "titan", 3),
        ("torch.compile", "compiled", 1),
    ],
)
def test_examples(
    ranks: Ranks, server: lossd.Server, client: lossd.Client, tmp_path: Path, title: str, name: str, count: int
) -> None:
    weights = torch.randn(VOCAB, HIDDEN)
    if title != "fully_shard":
        RemoteHead.create(client, name, VOCAB, HIDDEN, dtype=torch.float32, optimizer=lossd.SGD(), weights=weights)
    answers = ranks.run(on_rank, title, server.target, str(tmp_path), count=count)
    head = RemoteHead(client.head(name))
    steps = {"fully_shard": 3, "Hidden states that are DTensors": 1, "torch.compile": 3}.get(title, 0)
    assert head.head.info().optimizer_steps == steps
    if title == "Checkpoints":
        assert torch.equal(weights_of(head), weights)
    if title == "torchtitan":
        for rank, (divided, summed) in enumerate(answers):
            inputs, labels = batch(rank)
            want = torch.nn.functional.cross_entropy(inputs @ weights.T, labels, reduction="sum").item()
            assert (divided, summed) == pytest.approx((want / 24, want), rel=1e-5)
    client.delete_head(name, discard_gradient=True)


def test_every_section_has_an_example_that_is_run() -> None:
    (mark,) = (mark for mark in test_examples.pytestmark)  # type: ignore[attr-defined]
    assert list(examples()) == [title for title, _, _ in mark.args[1]]
