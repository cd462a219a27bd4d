"""Weights that no rank has whole: row shards up and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from glue_support import Ranks, weights_of

import lossd
from lossd.torch.distributed import read_shard, shard_offset, write_shard
from lossd.torch.head import RemoteHead

CUTS = {"even": [4, 4, 3], "uneven": [1, 9, 1], "empty": [11, 0, 0]}


def connect(target: str, name: str) -> RemoteHead:
    return RemoteHead(lossd.connect(target).head(name))


def whole() -> torch.Tensor:
    return torch.arange(66.0).view(11, 6) / 7


def plain_rows(rank: int, group: dist.ProcessGroup, server: str, name: str, cuts: list[int], bias: bool) -> Any:
    head = connect(server, name)
    first, rows = sum(cuts[:rank]), cuts[rank]
    shard = whole()[first : first + rows].clone()
    shard_bias = torch.arange(11.0)[first : first + rows].clone() if bias else None
    version = write_shard(head, shard, first_row=first, bias=shard_bias, write_key=f"{name} 1", group=group)
    back, back_bias = torch.zeros_like(shard), torch.zeros(rows) if bias else None
    assert read_shard(head, back, first_row=first, bias=back_bias, group=group) == version
    return version, back, back_bias


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_go_up_and_come_back(
    ranks: Ranks, server: lossd.Server, make_remote: Callable[..., RemoteHead], dtype: str, cuts: str, bias: bool
) -> None:
    head = make_remote(dtype=dtype, bias=bias)
    answers = ranks.run(plain_rows, server.target, head.name, CUTS[cuts], bias, count=3)
    versions = {version for version, _, _ in answers}
    assert versions == {head.head.info().weight_version}
    rounded = whole().to(torch.bfloat16 if dtype == "bfloat16" else torch.float32).float()
    assert torch.equal(weights_of(head), rounded)
    assert torch.equal(torch.cat([back for _, back, _ in answers]), rounded)
    if bias:
        assert torch.equal(torch.cat([b for _, _, b in answers]), torch.arange(11.0))


def dtensor(rank: int, group: dist.ProcessGroup, server: str, name: str, count: int) -> Any:
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

    mesh = dist.device_mesh.DeviceMesh.from_group(group, "cpu")
    weight = distribute_tensor(whole(), mesh, [Shard(0)])
    # The local part is all that this rank keeps; rows of torch.chunk: 4, 4 and 3 of three ranks.
    assert weight.to_local().shape[0] == min(-(-11 // count), 11 - shard_offset(weight))
    head = connect(server, name)
    version = write_shard(head, weight, write_key=f"{name} 2", group=group)
    back = distribute_tensor(torch.zeros(11, 6), mesh, [Shard(0)])
    read_shard(head, back, weight_version=version, group=group)
    same = torch.equal(back.to_local(), weight.to_local())
    replicated = distribute_tensor(whole() + 1, mesh, [Replicate()])
    assert shard_offset(replicated) == 0
    write_shard(head, replicated, write_key=f"{name} 3", group=group)
    assert init_device_mesh and DTensor
    try:
        write_shard(head, distribute_tensor(whole(), mesh, [Shard(1)]), write_key="4", group=group)
    except ValueError as error:
        return same, str(error)
    return same, ""


@pytest.mark.parametrize("count", [2, 3])
def test_dtensors_know_their_rows(
    ranks: Ranks, server: lossd.Server, make_remote: Callable[..., RemoteHead], count: int
) -> None:
    head = make_remote()
    for same, message in ranks.run(dtensor, server.target, head.name, count, count=count):
        assert same and "Shard(0) or Replicate()" in message
    assert torch.equal(weights_of(head), whole() + 1)


def sharded_model(rank: int, group: dist.ProcessGroup, server: str, name: str) -> Any:
    """A lm_head that fully_shard has cut, stepped by the trainer and sent up by its ranks; and load_state_dict of
    shards."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(1)
    linear = torch.nn.Linear(6, 11, bias=False)
    mesh = dist.device_mesh.DeviceMesh.from_group(group, "cpu")
    fully_shard(linear, mesh=mesh)
    head = RemoteHead(connect(server, name).head, group=group)
    write_shard(head, linear.weight, write_key=f"{name} fsdp", group=group)
    first = head.read_weights()[0]
    with torch.no_grad():
        linear.weight.mul_(2.0)
    head.load_state_dict(linear.state_dict())
    return first, linear.weight.full_tensor().detach()


def test_fully_sharded_parameters(ranks: Ranks, server: lossd.Server, make_remote: Callable[..., RemoteHead]) -> None:
    head = make_remote()
    for first, second in ranks.run(sharded_model, server.target, head.name, count=3):
        torch.testing.assert_close(first * 2, second, rtol=0, atol=0)
        assert torch.equal(weights_of(head), second)


def missing_rows(rank: int, group: dist.ProcessGroup, server: str, name: str) -> str:
    head = connect(server, name)
    try:
        write_shard(head, torch.zeros(3, 6), first_row=3 * rank, write_key=f"{name} gap", group=group)
    except lossd.FailedPreconditionError as error:
        return str(error)
    return ""


def test_rows_that_nobody_has_are_named(
    ranks: Ranks, server: lossd.Server, make_remote: Callable[..., RemoteHead]
) -> None:
    head = make_remote()
    before = weights_of(head)
    for message in ranks.run(missing_rows, server.target, head.name):
        assert "6" in message
    assert torch.equal(weights_of(head), before)


def test_shards_that_do_not_fit(make_remote: Callable[..., RemoteHead]) -> None:
    head = make_remote()
    for rows, first, message in (
        (torch.zeros(3, 6), None, "first_row is needed"),
        (torch.zeros(3, 5), 0, r"rows \[3, 5\] from row 0"),
        (torch.zeros(3, 6), 9, "from row 9 are no part"),
        (torch.zeros(3, 6), -1, "from row -1"),
    ):
        with pytest.raises(ValueError, match=message):
            write_shard(head, rows, first_row=first, write_key="k")
    with pytest.raises(ValueError, match=r"bias has \[2\] of 3 rows"):
        write_shard(head, torch.zeros(3, 6), first_row=0, bias=torch.zeros(2), write_key="k")
