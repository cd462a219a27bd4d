"""What is wrong on one rank alone is raised on all of them, and none waits for ever."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from glue_support import Ranks, batch, weights_of

import lossd
from lossd.torch import linear_cross_entropy
from lossd.torch.clip import clip_grad_norm_
from lossd.torch.distributed import all_do, read_shard, write_shard
from lossd.torch.head import RemoteHead

MakeRemote = Callable[..., RemoteHead]


def connect(target: str, name: str, group: dist.ProcessGroup) -> RemoteHead:
    return RemoteHead(lossd.connect(target).head(name), group=group)


CALLS: dict[str, Callable[[RemoteHead, Any], Any]] = {
    "write_weights": lambda head, bad: head.write_weights(torch.zeros(11, 5 if bad else 6)),
    "load_state_dict": lambda head, bad: head.load_state_dict({"weight": torch.zeros(11, 5 if bad else 6)}),
    "load_state_dict lacks": lambda head, bad: head.load_state_dict({} if bad else {"weight": torch.zeros(11, 6)}),
    "load_state_dict may lack": lambda head, bad: head.load_state_dict(
        {} if bad else {"weight": torch.zeros(11, 6)}, strict=False
    ),
    "write_shard": lambda head, bad: write_shard(
        head, torch.zeros(5, 6), first_row=None if bad else 0, write_key="k", group=head.group
    ),
    "read_shard": lambda head, bad: read_shard(head, torch.zeros(5, 5 if bad else 6), first_row=0, group=head.group),
}


def spoil(rank: int, group: dist.ProcessGroup, server: str, name: str, call: str, spoiled: int) -> str:
    head = connect(server, name, group)
    try:
        CALLS[call](head, rank == spoiled)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    else:
        said = ""
    all_do(lambda: None, group)  # the ranks are in step
    return said


@pytest.mark.parametrize("spoiled", [0, 1])
@pytest.mark.parametrize("call", list(CALLS))
def test_an_argument_of_one_rank(
    ranks: Ranks, server: lossd.Server, make_remote: MakeRemote, call: str, spoiled: int
) -> None:
    head = make_remote()
    version = head.head.info().weight_version
    said = ranks.run(spoil, server.target, head.name, call, spoiled)
    if "lack" in call and spoiled == 1:  # the first rank's are written, whatever the others have
        assert said == ["", ""] and head.head.info().weight_version > version
        return
    if call == "load_state_dict may lack":  # that is right where it lacks, if nowhere else
        said = [said[1 - spoiled]]
    assert all("Error" in one for one in said), said
    assert head.head.info().weight_version == version


def stale(rank: int, group: dist.ProcessGroup, server: str, name: str) -> Any:
    """Looks at the gradient, adds to it, and looks again."""
    head = connect(server, name, group)
    linear_cross_entropy(*batch(rank), head, normalizer=8).backward()
    head.refresh_gradient()
    first = float(head.proxy.grad)
    if rank == 0:
        linear_cross_entropy(*batch(2), head, normalizer=8).backward()
    said = ""
    try:
        float(head.proxy.grad)
    except RuntimeError as error:
        said = str(error)
    head.proxy._norm.mul_(0.5)
    total = float(clip_grad_norm_([], 1e9, heads=head))
    norm = head.gradient_stats().norm
    head.zero_grad()
    head.close()
    return said, first, total, norm


def test_a_norm_that_is_stale_is_not_given(ranks: Ranks, server: lossd.Server, make_remote: MakeRemote) -> None:
    head = make_remote()
    weight = weights_of(head).requires_grad_()
    for seed in range(3):
        hidden, target = batch(seed)
        torch.nn.functional.cross_entropy(hidden @ weight.T, target).backward()
    assert weight.grad is not None
    (said, first, total, norm), (other, *others) = ranks.run(stale, server.target, head.name)
    assert "refresh_gradient()" in said and other == ""  # the second one has added nothing since
    assert others == pytest.approx([first, total, norm])
    assert total == pytest.approx(0.5 * float(weight.grad.norm()), rel=1e-4)  # of all, with the factor so far
    assert norm == pytest.approx(total, rel=1e-5)
