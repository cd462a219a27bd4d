"""fully_shard: a head that takes over a sharded lm_head, and a trunk that is sharded around a head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from glue_support import HIDDEN, VOCAB, Ranks

import lossd
from lossd.torch import RemoteHead, clip_grad_norm_

BATCH, STEPS = 4, 3


class Model(torch.nn.Module):
    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.trunk = torch.nn.Sequential(torch.nn.Linear(HIDDEN, 7), torch.nn.GELU(), torch.nn.Linear(7, HIDDEN))
        self.lm_head = torch.nn.Linear(HIDDEN, VOCAB, bias=bias)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.trunk(inputs)
        if isinstance(self.lm_head, RemoteHead):
            return self.lm_head(hidden, labels)
        return F.cross_entropy(self.lm_head(hidden), labels)


def model(bias: bool = False) -> Model:
    torch.manual_seed(5)
    return Model(bias)


def batches(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(100 + rank)
    return [
        (torch.randn(BATCH, HIDDEN, generator=generator), torch.randint(VOCAB, (BATCH,), generator=generator))
        for _ in range(STEPS)
    ]


def local_training(ranks: int, bias: bool, max_norm: float) -> tuple[list[list[float]], list[float], Model]:
    """The losses of each rank's batches, the norms, and the model, where one process has all."""
    whole = model(bias)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2, weight_decay=0.1)
    losses: list[list[float]] = []
    norms = []
    for step in range(STEPS):
        own = [whole(*batches(rank)[step]) for rank in range(ranks)]
        torch.stack(own).mean().backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(whole.parameters(), max_norm)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append([loss.item() for loss in own])
    return losses, norms, whole


def remote_training(
    rank: int, group: dist.ProcessGroup, server: str, name: str, bias: bool, max_norm: float, clip: str
) -> Any:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    mesh = dist.device_mesh.DeviceMesh.from_group(group, "cpu")
    whole = model(bias)
    fully_shard(whole.lm_head, mesh=mesh)
    assert isinstance(whole.lm_head.weight, DTensor)
    whole.lm_head = RemoteHead.from_linear(
        lossd.connect(server),
        whole.lm_head,
        name,
        optimizer=lossd.AdamW(weight_decay=0.1),
        group=group,
        average=True,
        reset=True,
    )
    fully_shard(whole.trunk, mesh=mesh)
    fully_shard(whole, mesh=mesh, ignored_params=set(whole.lm_head.parameters()))
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2, weight_decay=0.1)
    losses, norms = [], []
    for inputs, labels in batches(rank):
        loss = whole(inputs, labels)
        loss.backward()
        if clip == "lossd":
            norm = clip_grad_norm_(whole.parameters(), max_norm, heads=whole.lm_head)
        else:
            whole.lm_head.refresh_gradient()
            norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), max_norm)
        norms.append(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    state = whole.state_dict()
    assert isinstance(state["lm_head.weight"], DTensor)
    return losses, norms, {key: value.full_tensor() for key, value in state.items()}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("count", "clip"), [(2, "lossd"), (2, "torch"), (3, "lossd")])
def test_training_is_that_of_one_process(
    ranks: Ranks, server: lossd.Server, client: lossd.Client, bias: bool, count: int, clip: str
) -> None:
    losses, norms, whole = local_training(count, bias, 0.05)
    answers = ranks.run(remote_training, server.target, "fsdp", bias, 0.05, clip, count=count)
    client.delete_head("fsdp", discard_gradient=True)
    for rank, (found, found_norms, state) in enumerate(answers):
        assert found == pytest.approx([step[rank] for step in losses], rel=1e-6)
        assert found_norms == pytest.approx(norms, rel=1e-5)
        assert state.keys() == whole.state_dict().keys()
        for key, value in whole.state_dict().items():
            torch.testing.assert_close(state[key], value, rtol=1e-5, atol=1e-6)


def replicated(rank: int, group: dist.ProcessGroup, server: str, name: str) -> Any:
    from torch.distributed.tensor import Replicate, distribute_module, distribute_tensor

    mesh = dist.device_mesh.DeviceMesh.from_group(group, "cpu")
    linear = torch.nn.Linear(HIDDEN, VOCAB)
    torch.nn.init.constant_(linear.weight, 0.5)

    def replicate(_: str, module: torch.nn.Module, mesh: Any) -> None:
        for key, parameter in list(module.named_parameters()):
            module.register_parameter(key, torch.nn.Parameter(distribute_tensor(parameter.data, mesh, [Replicate()])))

    distribute_module(linear, mesh, replicate)
    head = RemoteHead.from_linear(lossd.connect(server), linear, name, group=group, reset=True)
    return head.state_dict()["weight"].to_local(), head.read_weights()[1], linear.bias.to_local().detach()


def test_replicated_weights(ranks: Ranks, server: lossd.Server, client: lossd.Client) -> None:
    for weight, bias, wanted in ranks.run(replicated, server.target, "replicated"):
        assert torch.equal(weight, torch.full((VOCAB, HIDDEN), 0.5))
        assert weight.dtype == torch.float32 and bias.shape == wanted.shape
    client.delete_head("replicated", discard_gradient=True)


def peaks(rank: int, group: dist.ProcessGroup, server: str, name: str) -> int:
    """The largest tensor that is made while shards go up, are trained and come back."""
    from torch.distributed.fsdp import fully_shard
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            found = func(*args, **(kwargs or {}))
            for one in found if isinstance(found, (tuple, list)) else [found]:
                if type(one) is torch.Tensor:
                    largest = max(largest, one.untyped_storage().nbytes())
            return found

    mesh = dist.device_mesh.DeviceMesh.from_group(group, "cpu")
    linear = torch.nn.Linear(64, 4000, bias=False)
    fully_shard(linear, mesh=mesh)
    with Sizes():
        head = RemoteHead.from_linear(
            lossd.connect(server), linear, name, optimizer=lossd.SGD(), group=group, reset=True
        )
        head(torch.randn(8, 64), torch.arange(8)).backward()
        head.step(0.1)
        state = head.state_dict()
        head.load_state_dict(state)
    return largest


def test_no_rank_has_all_rows(ranks: Ranks, server: lossd.Server, client: lossd.Client) -> None:
    for largest in ranks.run(peaks, server.target, "peaks"):
        assert 0 < largest <= 4000 * 64 * 4 // 2
    client.delete_head("peaks", discard_gradient=True)


def unignored(rank: int, group: dist.ProcessGroup, server: str, name: str) -> str:
    from torch.distributed.fsdp import fully_shard

    whole = model()
    whole.lm_head = RemoteHead(lossd.connect(server).head(name), group=group)
    try:
        fully_shard(whole, mesh=dist.device_mesh.DeviceMesh.from_group(group, "cpu"))
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_head_is_to_be_kept_from_being_sharded(
    ranks: Ranks, server: lossd.Server, make_remote: Callable[..., RemoteHead]
) -> None:
    for message in ranks.run(unignored, server.target, make_remote().name):
        assert "fully_shard(model, ignored_params=set(model.lm_head.parameters()))" in message


def groupless(rank: int, group: dist.ProcessGroup, server: str, name: str) -> str:
    from torch.distributed.fsdp import fully_shard

    linear = fully_shard(torch.nn.Linear(HIDDEN, VOCAB), mesh=dist.device_mesh.DeviceMesh.from_group(group, "cpu"))
    try:
        RemoteHead.from_linear(lossd.connect(server), linear, name)
    except ValueError as error:
        return str(error)
    return ""


def test_a_sharded_linear_needs_the_group_of_its_ranks(ranks: Ranks, server: lossd.Server) -> None:
    for message in ranks.run(groupless, server.target, "groupless"):
        assert "a DTensor over 2 ranks" in message and "group=" in message
