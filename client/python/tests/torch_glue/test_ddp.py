"""LocalWeight under torch's DistributedDataParallel: its buckets see what backward returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from glue_support import Ranks, batch, weights_of
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import lossd
from lossd.torch import clip_grad_norm_, linear_cross_entropy
from lossd.torch.contracts import LocalWeight
from lossd.torch.head import RemoteHead


class Model(torch.nn.Module):
    def __init__(self, head: RemoteHead, weight: torch.Tensor, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.trunk = torch.nn.Linear(6, 6)
        self.weight = torch.nn.Parameter(weight.clone())
        self.contract = LocalWeight(head, self.weight, **options)
        self.head = head

    def forward(self, hidden: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = linear_cross_entropy(self.contract(self.trunk(hidden)), target, self.head)
        return loss


def wrapped(model: Model, group: dist.ProcessGroup, view: bool) -> DistributedDataParallel:
    # Buckets of a few bytes: the weight and the trunk are reduced apart, the weight's first.
    return DistributedDataParallel(model, process_group=group, bucket_cap_mb=1e-5, gradient_as_bucket_view=view)


def plain(rank: int, group: dist.ProcessGroup, server: str, name: str, view: bool) -> Any:
    head = RemoteHead(lossd.connect(server).head(name), group=group)
    model = Model(head, weights_of(head))
    ddp = wrapped(model, group, view)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(3):
        optimizer.zero_grad()
        with ddp.no_sync():  # accumulation: only the last backward is reduced
            if rank == 0:  # in one pass more than the other rank
                (ddp(*batch(10 * step)) / 4).backward()
            (ddp(*batch(10 * step + rank)) / (4 if rank == 0 else 2)).backward()
        (ddp(*batch(10 * step + rank + 5)) / 2).backward()
        optimizer.step()
        model.contract.upload()
    with ddp.no_sync():
        for _ in range(2):
            model.contract.upload()  # of weights as they are
            ddp(*batch(rank)).backward()
    torch.optim.AdamW([model.contract.weight], lr=0.0, fused=True).step()
    try:
        model.contract.upload()
        said = ""
    except RuntimeError as error:
        said = str(error)
    head.zero_grad()
    head.close()
    return said, [p.detach() for p in model.parameters() if p is not head.proxy]


def plain_alone(weight: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(5)
    trunk, weight = torch.nn.Linear(6, 6), torch.nn.Parameter(weight.clone())
    parameters = [weight, *trunk.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.5)
    for step in range(3):
        optimizer.zero_grad()
        for seed in (0, 1, 5, 6):
            hidden, target = batch(10 * step + seed)
            (torch.nn.functional.cross_entropy(trunk(hidden) @ weight.T, target) / 4).backward()
        optimizer.step()
    return [p.detach() for p in parameters]


@pytest.mark.parametrize("view", [False, True])
def test_plain_is_reduced_as_a_local_gradient(
    ranks: Ranks, server: lossd.Server, make_remote: Callable[..., RemoteHead], view: bool
) -> None:
    head = make_remote()
    alone = plain_alone(weights_of(head))
    answers = ranks.run(plain, server.target, head.name, view)
    for said, parameters in answers:
        assert "call wgrad()" in said
        torch.testing.assert_close(parameters, alone, rtol=1e-4, atol=1e-5)
    assert torch.equal(weights_of(head), answers[0][1][0])


def contract_row(rank: int, group: dist.ProcessGroup, server: str, name: str, delay: bool, flag: bool) -> Any:
    head = RemoteHead(lossd.connect(server).head(name), group=group)
    model = Model(head, weights_of(head), delay_wgrad=delay, accumulate_into_main_grad=True)
    model.weight.main_grad = torch.zeros(11, 6)  # type: ignore[attr-defined]
    if flag:
        model.weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    ddp = wrapped(model, group, False)
    ddp(*batch(rank)).backward()
    model.contract.wgrad()
    main_grad: torch.Tensor = model.weight.main_grad  # type: ignore[attr-defined]
    dist.all_reduce(main_grad, group=group)  # as whoever owns main_grad reduces it
    head.close()
    return main_grad, model.weight.grad, model.trunk.weight.grad


@pytest.mark.parametrize("flag", [False, True])
@pytest.mark.parametrize("delay", [False, True])
def test_buckets_take_nothing_and_dummies_for_zeros(
    ranks: Ranks, server: lossd.Server, make_remote: Callable[..., RemoteHead], delay: bool, flag: bool
) -> None:
    head = make_remote()
    weight = weights_of(head).requires_grad_()
    torch.manual_seed(5)
    trunk = torch.nn.Linear(6, 6)
    for seed in range(2):
        hidden, target = batch(seed)
        torch.nn.functional.cross_entropy(trunk(hidden) @ weight.T, target).backward()
    assert weight.grad is not None and trunk.weight.grad is not None
    for main_grad, grad, trunk_grad in ranks.run(contract_row, server.target, head.name, delay, flag):
        torch.testing.assert_close(main_grad, weight.grad, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(trunk_grad, trunk.weight.grad / 2, rtol=1e-4, atol=1e-6)
        assert grad is not None and not grad.any()  # DDP makes it: of the dummy, and of None too


def ignored(rank: int, group: dist.ProcessGroup, server: str, name: str) -> Any:
    """The weight is kept from DDP, which then spends no bucket on it."""
    head = RemoteHead(lossd.connect(server).head(name), group=group)
    model = Model(head, weights_of(head), delay_wgrad=True)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["weight", ".weight"])  # it knows both
    ddp = wrapped(model, group, False)
    ddp(*batch(rank)).backward()
    none_before = model.weight.grad is None
    model.contract.wgrad()
    head.close()
    return none_before, model.weight.grad


def test_a_weight_that_ddp_ignores(ranks: Ranks, server: lossd.Server, make_remote: Callable[..., RemoteHead]) -> None:
    head = make_remote()
    (first_none, first), (second_none, second) = ranks.run(ignored, server.target, head.name)
    assert first_none and second_none and first.any() and not second.any()


class WithHead(torch.nn.Module):
    def __init__(self, lm_head: torch.nn.Module) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.trunk = torch.nn.Linear(6, 6)
        self.lm_head = lm_head

    def forward(self, hidden: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        hidden = self.trunk(hidden)
        if isinstance(self.lm_head, RemoteHead):
            return self.lm_head(hidden, target)
        return torch.nn.functional.cross_entropy(self.lm_head(hidden), target)


def linear_of(weight: torch.Tensor) -> torch.nn.Linear:
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight = torch.nn.Parameter(weight.clone())
    return linear


def in_place_of_the_lm_head(rank: int, group: dist.ProcessGroup, server: str, name: str, weight: torch.Tensor) -> Any:
    """Three steps of a model under DistributedDataParallel with its head at the server, and with a local one."""
    client = lossd.connect(server)
    head = RemoteHead.from_linear(
        client, linear_of(weight), name, optimizer=lossd.AdamW(), group=group, average=True, exist_ok=False
    )
    losses = []
    for lm_head in (head, linear_of(weight)):
        model = WithHead(lm_head)
        ddp = DistributedDataParallel(model, process_group=group)
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.05)
        for step in range(3):
            with ddp.no_sync():
                (ddp(*batch(10 * step + rank)) / 2).backward()
            loss = ddp(*batch(10 * step + rank + 5)) / 2
            loss.backward()
            losses.append(loss.item())
            norm = clip_grad_norm_(ddp.parameters(), 0.2)
            losses.append(float(norm))
            optimizer.step()
            optimizer.zero_grad()
    state = model.state_dict()
    head.close()
    return losses[:6], losses[6:], state["lm_head.weight"]


def test_a_head_in_a_data_parallel_model_is_stepped_as_a_local_one(
    ranks: Ranks, server: lossd.Server, client: lossd.Client
) -> None:
    torch.manual_seed(3)
    weight = torch.randn(11, 6) * 0.3
    for remote, local, final in ranks.run(in_place_of_the_lm_head, server.target, "ddp-head", weight):
        assert remote == pytest.approx(local, rel=1e-5)
        torch.testing.assert_close(RemoteHead(client.head("ddp-head")).read_weights()[0], final, rtol=1e-5, atol=1e-6)
    assert client.head("ddp-head").info().optimizer_steps == 3
    client.delete_head("ddp-head")


def joined(rank: int, group: dist.ProcessGroup, server: str, name: str, outside: bool, throws: bool) -> Any:
    """What a rank with two batches, and one with four, are told inside join(); and how many steps there were."""
    head = RemoteHead(lossd.connect(server).head(name), group=group, average=True)
    torch.manual_seed(5)
    ddp = DistributedDataParallel(torch.nn.Linear(6, 6) if outside else WithHead(head), process_group=group)
    optimizer = torch.optim.SGD([*ddp.parameters(), *(head.parameters() if outside else [])], lr=0.1)
    said = ""
    try:
        with ddp.join(throw_on_early_termination=throws):
            for step in range(2 + 2 * rank):
                hidden, target = batch(10 * step + rank)
                (head(ddp(hidden), target) if outside else ddp(hidden, target)).backward()
                optimizer.step()
                optimizer.zero_grad()
    except (RuntimeError, ValueError) as error:
        said = str(error)
    dist.barrier(group)
    steps = head.head.info().optimizer_steps
    head.close()
    return said, steps


@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("throws", [False, True])
def test_ranks_that_run_out_of_batches_are_refused_or_end_together(
    ranks: Ranks, server: lossd.Server, make_remote: Callable[..., RemoteHead], outside: bool, throws: bool
) -> None:
    head = make_remote(optimizer=lossd.SGD())
    (first, steps), (second, _) = ranks.run(joined, server.target, head.name, outside, throws)
    if throws:
        assert "exhausted all inputs" in first and "exhausted inputs" in second and steps == 2
    else:
        assert "drop_last=True" in first and first == second and steps == 0


def sharded_optimizer(rank: int, group: dist.ProcessGroup, server: str, name: str, weight: torch.Tensor) -> Any:
    head = RemoteHead.from_linear(
        lossd.connect(server), linear_of(weight), name, optimizer=lossd.AdamW(), group=group, average=True
    )
    weights = []
    for lm_head in (head, linear_of(weight)):
        model = WithHead(lm_head)
        ddp = DistributedDataParallel(model, process_group=group)
        optimizer = ZeroRedundancyOptimizer(
            ddp.parameters(), optimizer_class=torch.optim.AdamW, process_group=group, lr=0.05
        )
        for step in range(2):
            ddp(*batch(10 * step + rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        weights.append(model.state_dict()["lm_head.weight"])
    head.close()
    return weights


def test_an_optimizer_that_is_sharded_over_ranks_steps_the_head_on_all(
    ranks: Ranks, server: lossd.Server, client: lossd.Client
) -> None:
    """Its inner optimizer has the head's parameter on one rank alone."""
    torch.manual_seed(3)
    weight = torch.randn(11, 6) * 0.3
    for remote, local in ranks.run(sharded_optimizer, server.target, "zero-head", weight):
        torch.testing.assert_close(remote, local, rtol=1e-5, atol=1e-6)
    client.delete_head("zero-head")
