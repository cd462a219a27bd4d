"""Data-parallel ranks, each a process with a session of one head, against one process over the global batch."""

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
from lossd.torch.distributed import all_do, first_rank_does, gather_marks, global_token_count
from lossd.torch.head import RemoteHead
from lossd.torch.optimizer import RemoteOptimizer

STEPS, MAX_NORM = 4, 0.05


def part_of(seed: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ranks of one global batch have different numbers of tokens that count."""
    hidden, target = batch(seed, tokens=12)
    target[2:5] = -100
    cut = slice(0, 6) if rank == 0 else slice(6, 12)
    return hidden[cut], target[cut]


def trunk_of() -> torch.nn.Linear:
    torch.manual_seed(3)
    return torch.nn.Linear(6, 6)


def connect(target: str, name: str, group: dist.ProcessGroup, **options: Any) -> RemoteHead:
    return RemoteHead(lossd.connect(target).head(name), group=group, **options)


def train_rank(rank: int, group: dist.ProcessGroup, server: str, name: str, average: bool, clip: bool) -> Any:
    """STEPS steps of trunk (averaged or summed by hand) and head; what the trunk came to, and its norms."""
    head = connect(server, name, group, average=average)
    trunk = trunk_of()
    local = torch.optim.SGD(trunk.parameters(), lr=0.1)
    remote = RemoteOptimizer(head, lr=0.1)
    norms = []
    for seed in range(STEPS):
        hidden, target = part_of(seed, rank)
        count = global_token_count(target, group=group)
        loss = linear_cross_entropy(trunk(hidden), target, head, normalizer=count / (2 if average else 1))
        loss.backward()
        for parameter in trunk.parameters():
            dist.all_reduce(parameter.grad, group=group)
            parameter.grad /= 2 if average else 1
        if clip:
            norms.append(float(clip_grad_norm_(trunk.parameters(), MAX_NORM, heads=head)))
        for one in (local, remote):
            one.step()
            one.zero_grad()
    assert not head.dirty and head.weight_version == head.head.info().weight_version
    head.close()
    return [p.detach() for p in trunk.parameters()], norms, remote.last_results[name]


def train_alone(head: RemoteHead, clip: bool) -> tuple[list[torch.Tensor], list[float]]:
    trunk = trunk_of()
    local, remote = torch.optim.SGD(trunk.parameters(), lr=0.1), RemoteOptimizer(head, lr=0.1)
    norms = []
    for seed in range(STEPS):
        hidden, target = (torch.cat(parts) for parts in zip(part_of(seed, 0), part_of(seed, 1), strict=True))
        linear_cross_entropy(trunk(hidden), target, head).backward()
        if clip:
            norms.append(float(clip_grad_norm_(trunk.parameters(), MAX_NORM, heads=head)))
        for one in (local, remote):
            one.step()
            one.zero_grad()
    return [p.detach() for p in trunk.parameters()], norms


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("average", [False, True])
def test_two_ranks_are_one_process_over_the_global_batch(
    ranks: Ranks, server: lossd.Server, make_remote: Callable[..., RemoteHead], average: bool, clip: bool
) -> None:
    shared, alone = make_remote(optimizer=lossd.AdamW()), make_remote(optimizer=lossd.AdamW())
    answers = ranks.run(train_rank, server.target, shared.name, average, clip)
    trunk, norms = train_alone(alone, clip)
    torch.testing.assert_close(weights_of(shared), weights_of(alone), rtol=1e-4, atol=1e-5)
    for parameters, rank_norms, result in answers:
        torch.testing.assert_close(parameters, trunk, rtol=1e-4, atol=1e-5)
        assert rank_norms == pytest.approx(norms, rel=1e-4)
        assert result == answers[0][2] and result.step == STEPS
    assert shared.head.info().optimizer_steps == STEPS


def scaled(rank: int, group: dist.ProcessGroup, server: str, name: str, spoiled: int) -> Any:
    """One GradScaler step, of which one rank's loss may not be finite."""
    head = connect(server, name, group)
    optimizer = RemoteOptimizer(head, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    hidden, target = part_of(0, rank)
    factor = float("inf") if rank == spoiled else 1.0
    scaler.scale(linear_cross_entropy(hidden, target, head, normalizer=9) * factor).backward()
    head.refresh_gradient()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    head.close()
    return scaler.get_scale(), head.head.info().window_tokens


@pytest.mark.parametrize("spoiled", [-1, 1])
def test_a_loss_that_is_not_finite_on_one_rank_skips_on_all(
    ranks: Ranks, server: lossd.Server, make_remote: Callable[..., RemoteHead], spoiled: int
) -> None:
    head = make_remote(optimizer=lossd.SGD())
    before = weights_of(head)
    answers = ranks.run(scaled, server.target, head.name, spoiled)
    assert answers == [(4.0 if spoiled == 1 else 8.0, 0)] * 2
    assert torch.equal(weights_of(head), before) == (spoiled == 1)


def unread(rank: int, group: dist.ProcessGroup, server: str, name: str) -> str:
    head = connect(server, name, group)
    linear_cross_entropy(*part_of(0, rank), head, normalizer=9).backward()
    message = ""
    try:
        float(head.proxy.grad)
    except RuntimeError as error:
        message = str(error)
    head.proxy.grad = None  # whoever only wants it gone may say so
    head.close()
    return message


def test_a_groups_gradient_is_not_asked_for_by_one_rank(
    ranks: Ranks, server: lossd.Server, make_remote: Callable[..., RemoteHead]
) -> None:
    head = make_remote()
    for message in ranks.run(unread, server.target, head.name):
        assert "refresh_gradient()" in message
    assert head.head.info().window_tokens == 0


def by_hand(rank: int, group: dist.ProcessGroup, server: str, name: str) -> Any:
    """Without a group of the head's: marks gathered, and one rank flushes."""
    head = RemoteHead(lossd.connect(server).head(name), rank=rank)
    linear_cross_entropy(*part_of(0, rank), head, normalizer=9).backward()
    marks = gather_marks(head, group)
    result = first_rank_does(lambda: head.head.flush(marks=marks).gradient, group)
    head.close()
    return len(marks), torch.as_tensor(result)


def test_marks_are_gathered_for_the_one_that_flushes(
    ranks: Ranks, server: lossd.Server, make_remote: Callable[..., RemoteHead]
) -> None:
    head = make_remote()
    answers = ranks.run(by_hand, server.target, head.name)
    weight = weights_of(head).requires_grad_()
    hidden, target = (torch.cat(parts) for parts in zip(part_of(0, 0), part_of(0, 1), strict=True))
    torch.nn.functional.cross_entropy(hidden @ weight.T, target).backward()
    for count, gradient in answers:
        assert count == 2
        torch.testing.assert_close(gradient, weight.grad, rtol=1e-5, atol=1e-6)


def failing(rank: int, group: dist.ProcessGroup, server: str, name: str) -> list[str]:
    head = connect(server, name, group)
    said = []
    for work in (
        lambda: head.step(0.1),  # the head has no optimizer: the first rank is told
        lambda: all_do(lambda: 1 // (1 - rank), group),  # the second rank fails
        lambda: first_rank_does(lambda: 1 // rank, group),  # the first one does
    ):
        try:
            work()
        except Exception as error:
            said.append(type(error).__name__)
    head.close()
    return said


def test_errors_of_one_rank_are_raised_on_all(
    ranks: Ranks, server: lossd.Server, make_remote: Callable[..., RemoteHead]
) -> None:
    head = make_remote()
    wanted = ["FailedPreconditionError", "ZeroDivisionError", "ZeroDivisionError"]
    assert ranks.run(failing, server.target, head.name) == [wanted, wanted]


def counted(rank: int, group: dist.ProcessGroup) -> list[int]:
    target = torch.tensor([[1, 2, -100, 3], [-100, -100, 7, 7]]) if rank == 0 else torch.full((1, 3), -100)
    return [
        global_token_count(target, group=group),
        global_token_count(target, ignore_index=7, group=group),
        global_token_count(target, group=group, shift=True),
        global_token_count(target, group=group, shift=2),
    ]


def test_global_token_count(ranks: Ranks) -> None:
    assert ranks.run(counted) == [[5, 9, 4, 3]] * 2
    assert global_token_count(torch.tensor([1, -100, 2])) == 2  # without torch.distributed


def loaded(rank: int, group: dist.ProcessGroup, server: str, name: str) -> Any:
    head = connect(server, name, group)
    head.load_state_dict({"weight": torch.full((11, 6), float(rank + 1))})
    version = head.weight_version
    weight = head.state_dict()["weight"]
    head.close()
    return version, weight


def test_of_ranks_that_load_a_state_the_first_one_writes(
    ranks: Ranks, server: lossd.Server, make_remote: Callable[..., RemoteHead]
) -> None:
    head = make_remote()
    version = head.head.info().weight_version
    for rank_version, weight in ranks.run(loaded, server.target, head.name):
        assert rank_version == version + 1 and torch.equal(weight, torch.ones(11, 6))
