"""torch.distributed.checkpoint: heads in its checkpoints, and models with a head in its state_dict functions."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from glue_support import HIDDEN, VOCAB, Ranks, batch, weights_of
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import lossd
from lossd.torch import HeadCheckpoint, HeadState, RemoteHead


class Model(torch.nn.Module):
    def __init__(self, head: torch.nn.Module) -> None:
        super().__init__()
        self.trunk = torch.nn.Linear(HIDDEN, HIDDEN)
        self.lm_head = head

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.trunk(inputs), labels)


def connect(server: str, name: str, group: dist.ProcessGroup | None, **options: Any) -> RemoteHead:
    return RemoteHead(lossd.connect(server).head(name), group=group, **options)


# A head by itself


def save_head(rank: int, group: dist.ProcessGroup, server: str, name: str, path: str) -> list[tuple[int, ...]]:
    head = connect(server, name, group)
    state = HeadState(head)
    dcp.save({"lm_head": state}, checkpoint_id=path, process_group=group)
    return [tuple(one.to_local().shape) for one in state.state_dict().values()]


def load_head(rank: int, group: dist.ProcessGroup, server: str, name: str, path: str) -> int:
    head = connect(server, name, group)
    dcp.load({"lm_head": HeadState(head)}, checkpoint_id=path, process_group=group)
    return head.weight_version


@pytest.mark.parametrize("saved_by", [1, 3])
def test_weights_are_saved_in_shards_and_loaded_by_other_numbers_of_ranks(
    ranks: Ranks, server: lossd.Server, make_remote: Callable[..., RemoteHead], tmp_path: Path, saved_by: int
) -> None:
    head = make_remote(bias=True)
    head.write_weights(torch.randn(VOCAB, HIDDEN), torch.randn(VOCAB))
    want, want_bias = head.read_weights()
    assert want_bias is not None
    shapes = ranks.run(save_head, server.target, head.name, str(tmp_path), count=saved_by)
    assert sum(rows for (rows, _), _ in shapes) == VOCAB and all(rows <= 11 // saved_by + 1 for (rows, _), _ in shapes)
    for count in (2, 3):
        head.write_weights(torch.zeros(VOCAB, HIDDEN), torch.zeros(VOCAB))
        versions = ranks.run(load_head, server.target, head.name, str(tmp_path), count=count)
        assert set(versions) == {head.head.info().weight_version}
        found, bias = head.read_weights()
        assert torch.equal(found, want) and torch.equal(bias, want_bias)
    head.write_weights(torch.zeros(VOCAB, HIDDEN), torch.zeros(VOCAB))
    dcp.load({"lm_head": HeadState(head)}, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(head.read_weights()[0], want)
    linear = torch.nn.Linear(HIDDEN, VOCAB)  # and a model without lossd
    dcp.load({"lm_head": linear.state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(linear.weight, want) and torch.equal(linear.bias, want_bias)


def load_fresh(rank: int, group: dist.ProcessGroup, server: str, name: str, path: str) -> list[Any]:
    fresh = connect(server, f"{name}-fresh", group)
    model = Model(connect(server, f"{name}-model", group))
    model.lm_head.state_mesh = dist.device_mesh.DeviceMesh.from_group(group, "cpu")
    found = []
    for head, state in ((fresh, HeadState(fresh)), (model.lm_head, model.lm_head.state_dict())):
        dcp.load({"lm_head": state}, checkpoint_id=path, process_group=group)
        if isinstance(state, dict):
            model.lm_head.load_state_dict(state)
        found += head.read_weights()
    return found


def test_a_head_without_weights_loads_them(
    ranks: Ranks, server: lossd.Server, client: lossd.Client, make_remote: Callable[..., RemoteHead], tmp_path: Path
) -> None:
    head = make_remote(bias=True)
    head.write_weights(torch.randn(VOCAB, HIDDEN), torch.randn(VOCAB))
    want = list(head.read_weights())
    dcp.save({"lm_head": HeadState(head)}, checkpoint_id=tmp_path, no_dist=True)
    for kind in ("fresh", "model"):
        client.create_head(f"{head.name}-{kind}", VOCAB, HIDDEN, "float32", bias=True)
    for found in ranks.run(load_fresh, server.target, head.name, str(tmp_path)):
        assert all(torch.equal(*pair) for pair in zip(found, want * 2, strict=True))
    alone = make_remote(bias=True, weights=None)
    assert not any(value.any() for value in alone.state_dict().values())
    dcp.load({"lm_head": HeadState(alone)}, checkpoint_id=tmp_path, no_dist=True)
    assert all(torch.equal(*pair) for pair in zip(alone.read_weights(), want, strict=True))
    for kind in ("fresh", "model"):
        client.delete_head(f"{head.name}-{kind}")


def read_after_others(rank: int, group: dist.ProcessGroup, server: str, name: str) -> bool:
    head = connect(server, name, group)
    state = HeadState(head)
    before = full(state.state_dict())["weight"]
    dist.barrier(group)
    if rank == 0:  # as another process does, of which this head knows nothing
        lossd.connect(server).head(name).write_weights((before + 1).numpy())
    dist.barrier(group)
    return torch.equal(full(state.state_dict())["weight"], before + 1)


def test_weights_that_another_process_wrote_are_saved(
    ranks: Ranks, server: lossd.Server, make_remote: Callable[..., RemoteHead]
) -> None:
    assert all(ranks.run(read_after_others, server.target, make_remote().name))


def test_a_checkpoint_of_the_server_is_named_by_its_tag(tmp_path: Path) -> None:
    """Moments and steps are the server's."""
    with lossd.launch("cpu", checkpoint_dir=tmp_path / "server") as server, server.client() as client:
        weights = torch.randn(VOCAB, HIDDEN)
        head = RemoteHead.create(
            client, "h", VOCAB, HIDDEN, dtype=torch.float32, optimizer=lossd.AdamW(), weights=weights
        )

        def step(seed: int) -> None:
            head(*batch(seed)).backward()
            head.step(0.1)

        step(0)
        state = HeadCheckpoint(head)
        state.save("one-step")
        dcp.save({"lm_head": state}, checkpoint_id=tmp_path / "trainer", no_dist=True)
        step(1)
        want = weights_of(head)
        step(2)
        again = HeadCheckpoint(head)
        dcp.load({"lm_head": again}, checkpoint_id=tmp_path / "trainer", no_dist=True)
        assert again.tag == "one-step" and head.head.info().optimizer_steps == 1
        step(1)
        torch.testing.assert_close(weights_of(head), want, rtol=0, atol=0)
        with pytest.raises(ValueError, match=r"call HeadCheckpoint.save\(tag\)"):
            HeadCheckpoint(head).load_state_dict(HeadCheckpoint(head).state_dict())


# Models


def sharded(rank: int, group: dist.ProcessGroup, server: str, name: str) -> tuple[Model, torch.optim.Optimizer]:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(3)
    mesh = dist.device_mesh.DeviceMesh.from_group(group, "cpu")
    head = connect(server, name, group, average=True)
    head.state_mesh = mesh
    model = Model(head)
    fully_shard(model, mesh=mesh, ignored_params=set(head.parameters()))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def full(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: value.full_tensor() if hasattr(value, "full_tensor") else value for key, value in state.items()}


def model_states(rank: int, group: dist.ProcessGroup, server: str, name: str, options: dict[str, bool]) -> Any:
    model, _ = sharded(rank, group, server, name)
    before = full(model.state_dict())
    choice = StateDictOptions(**options)
    state = get_model_state_dict(model, options=choice)
    state = copy.deepcopy(state)
    shapes = {key: type(value).__name__ for key, value in state.items()}
    with torch.no_grad():
        model.trunk.weight.zero_()
        if rank == 0:
            model.lm_head.head.write_weights(torch.zeros(VOCAB, HIDDEN))
    dist.barrier(group)
    model.lm_head.weight_version = 0
    set_model_state_dict(model, state, options=choice)
    after = full(model.state_dict())
    return shapes, all(torch.equal(after[key], value) for key, value in before.items()), list(before)


@pytest.mark.parametrize(
    "options",
    [{}, {"full_state_dict": True}, {"full_state_dict": True, "broadcast_from_rank0": True}],
    ids=str,
)
def test_model_state_dicts(
    ranks: Ranks, server: lossd.Server, make_remote: Callable[..., RemoteHead], options: dict[str, bool]
) -> None:
    head = make_remote(weights=None)
    head.write_weights(torch.randn(VOCAB, HIDDEN))
    # broadcast_from_rank0 is of all ranks of the process
    answers = ranks.run(model_states, server.target, head.name, options, count=3)
    for rank, (kinds, same, keys) in enumerate(answers):
        assert same
        assert keys == ["trunk.weight", "trunk.bias", "lm_head.weight"]
        if not options:
            assert set(kinds.values()) == {"DTensor"}
        elif rank == 0 or "broadcast_from_rank0" not in options:
            assert set(kinds.values()) == {"Tensor"}


def optimizer_states(rank: int, group: dist.ProcessGroup, server: str, name: str, flatten: bool) -> Any:
    """States of a fresh optimizer, of one that has stepped, of one whose gradients wait; and back into fresh ones."""
    model, optimizer = sharded(rank, group, server, name)
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    steps = []

    def count() -> None:
        dist.barrier(group)
        steps.append(model.lm_head.head.info().optimizer_steps)
        dist.barrier(group)

    fresh = get_optimizer_state_dict(model, optimizer, options=options)
    count()
    model(*batch(rank)).backward()
    optimizer.step()
    optimizer.zero_grad()
    count()
    stepped = get_optimizer_state_dict(model, optimizer, options=options)
    model(*batch(rank + 2)).backward()
    model.lm_head.refresh_gradient()
    waiting = get_optimizer_state_dict(model, optimizer, options=options)
    count()
    assert model.lm_head.dirty
    optimizer.step()
    count()
    same = fresh.keys() == stepped.keys() == waiting.keys()
    keys = [sorted(map(str, state.get("state", state))) for state in (fresh, stepped, waiting)]
    model, optimizer = sharded(rank, group, server, name)
    set_optimizer_state_dict(model, optimizer, stepped, options=options)
    count()
    again = get_optimizer_state_dict(model, optimizer, options=options)
    return steps, same, keys, flatten or len(again["state"]) == len(stepped["state"])


@pytest.mark.parametrize("flatten", [False, True])
def test_optimizer_state_dicts_leave_the_head_alone(
    ranks: Ranks, server: lossd.Server, make_remote: Callable[..., RemoteHead], flatten: bool
) -> None:
    """They step an optimizer whose state is not there yet, with gradients of 0 and a learning rate of 0."""
    head = make_remote(optimizer=lossd.AdamW())
    for steps, same, keys, loaded in ranks.run(optimizer_states, server.target, head.name, flatten):
        assert steps == [0, 1, 1, 2, 2]
        assert same and loaded
        assert keys[0] == keys[1] == keys[2]


def test_a_fresh_optimizer_state_keeps_a_gradient_that_waits(make_remote: Callable[..., RemoteHead]) -> None:
    head = make_remote(optimizer=lossd.AdamW())
    model = Model(head)
    optimizer = torch.optim.AdamW(model.parameters())
    model(*batch()).backward()
    get_optimizer_state_dict(model, optimizer)
    assert head.dirty and head.head.info().optimizer_steps == 0
    head.zero_grad()


def test_a_gradient_of_nothing_does_not_reach_the_optimizers_state(make_remote: Callable[..., RemoteHead]) -> None:
    head = make_remote(optimizer=lossd.AdamW())
    optimizer = torch.optim.AdamW(head.parameters(), lr=0.1)
    for factor in (0.0, float("nan"), 1.0):
        (head(*batch()) * factor).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert head.head.info().optimizer_steps == 1 and head.proxy.item() == 0.0
    assert set(optimizer.state[head.proxy]) == {"step"}
