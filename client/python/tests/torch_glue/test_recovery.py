"""A server that goes in a forward pass, in a backward pass and in a step, and what a trainer does then."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from glue_support import Ranks, batch, weights_of
from servers import Restartable

import lossd
from lossd.torch import linear_cross_entropy
from lossd.torch.head import RemoteHead
from lossd.torch.optimizer import RemoteOptimizer


@pytest.fixture(scope="module")
def restartable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Restartable]:
    server = Restartable(tmp_path_factory.mktemp("server"), "--memory_limit_bytes=1073741824", saves=True)
    yield server
    server.kill()


@pytest.fixture
def head(restartable: Restartable, request: pytest.FixtureRequest) -> Iterator[RemoteHead]:
    with lossd.connect(restartable.target, reconnect_timeout=1.0) as patient:
        torch.manual_seed(1)
        weights = torch.randn(11, 6) * 0.3
        name = request.node.name.replace("[", "-").rstrip("]")
        yield RemoteHead.create(patient, name, 11, 6, dtype=torch.float32, optimizer=lossd.AdamW(), weights=weights)


class Local:
    """What the head should come to."""

    def __init__(self, head: RemoteHead) -> None:
        self.weight = torch.nn.Parameter(weights_of(head))
        self.optimizer = torch.optim.AdamW([self.weight], lr=0.05)

    def step(self, *seeds: int) -> None:
        self.optimizer.zero_grad()
        for seed in seeds:
            hidden, target = batch(seed)
            torch.nn.functional.cross_entropy(hidden @ self.weight.T, target).backward()
        self.optimizer.step()

    def check(self, head: RemoteHead) -> None:
        torch.testing.assert_close(weights_of(head), self.weight.detach(), rtol=2e-5, atol=2e-6)


def backward(head: RemoteHead, seed: int, **options: Any) -> None:
    linear_cross_entropy(*batch(seed), head, **options).backward()


def test_a_step_that_met_no_server_counts_once_when_it_is_tried_again(
    restartable: Restartable, head: RemoteHead
) -> None:
    local, optimizer = Local(head), RemoteOptimizer(head, lr=0.05)
    backward(head, 0)
    restartable.end(signal.SIGTERM)
    for _ in range(2):
        with pytest.raises(lossd.UnavailableError):
            optimizer.step()
    restartable.start()
    optimizer.step()
    local.step(0)
    local.check(head)
    assert head.head.info().optimizer_steps == 1
    optimizer.zero_grad()
    backward(head, 1)  # and the session goes on
    optimizer.step()
    local.step(1)
    local.check(head)


def test_a_scalers_step_can_be_tried_again(restartable: Restartable, head: RemoteHead) -> None:
    local, optimizer = Local(head), RemoteOptimizer(head, lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    scaler.scale(linear_cross_entropy(*batch(0), head)).backward()
    scaler.unscale_(optimizer)
    restartable.end(signal.SIGTERM)
    with pytest.raises(lossd.UnavailableError):
        scaler.step(optimizer)
    restartable.start()
    scaler.step(optimizer)
    scaler.update()
    local.step(0)
    local.check(head)


@pytest.mark.parametrize(
    ("where", "grad_scale"), [("forward", None), ("forward", 1.0), ("backward", None), ("backward", 2.0)]
)
def test_a_pass_that_met_no_server_is_computed_again(
    restartable: Restartable, head: RemoteHead, where: str, grad_scale: float | None
) -> None:
    local, optimizer = Local(head), RemoteOptimizer(head, lr=0.05)
    backward(head, 0)
    hidden, target = batch(1)
    loss = linear_cross_entropy(hidden.requires_grad_(), target, head, grad_scale=grad_scale)
    restartable.end(signal.SIGTERM)
    with pytest.raises(lossd.UnavailableError):
        if where == "forward":
            linear_cross_entropy(hidden, target, head, grad_scale=grad_scale)
        else:
            loss.backward()
    assert hidden.grad is None
    with pytest.raises(lossd.UnavailableError):
        head.reopen()  # too early
    restartable.start()
    head.reopen()
    assert head.head.info().window_tokens == 0 and not head.dirty
    for seed in (0, 1):  # the step anew, from its first batch
        backward(head, seed, grad_scale=1.0)
    optimizer.step()
    local.step(0, 1)
    local.check(head)


@pytest.mark.parametrize("where", ["step", "backward"])
def test_a_killed_server_comes_back_as_it_was_saved(restartable: Restartable, head: RemoteHead, where: str) -> None:
    local, optimizer = Local(head), RemoteOptimizer(head, lr=0.05)
    backward(head, 0)
    optimizer.step()
    local.step(0)
    assert head.save_checkpoint("step-1").info.tag == "step-1"
    backward(head, 1)
    loss = linear_cross_entropy(*batch(2), head)
    restartable.end(signal.SIGKILL)
    restartable.start()
    with pytest.raises(lossd.WindowLostError):
        optimizer.step() if where == "step" else loss.backward()
    head.reopen() if where == "backward" else head.restore_checkpoint("step-1")
    assert head.head.info().optimizer_steps == 1 and not head.dirty
    backward(head, 1)
    optimizer.step()
    local.step(1)
    local.check(head)


def test_a_save_has_what_the_trainer_has_added_and_nothing_else(restartable: Restartable, head: RemoteHead) -> None:
    optimizer = RemoteOptimizer(head, lr=0.05)
    head.save_checkpoint("before")
    backward(head, 0)
    assert head.save_checkpoint("in-the-window").info.window_tokens == batch(0)[1].numel()
    optimizer.step()
    head.save_checkpoint("between")
    backward(head, 1)
    with lossd.connect(restartable.target) as client:
        hidden, target = batch(2)
        with client.head(head.name).open_session() as another:
            another.compute(hidden.numpy(), target.numpy())
        with pytest.raises(lossd.FailedPreconditionError):
            head.save_checkpoint("with-more")
        assert head.save_checkpoint("with-more", marks=()).info.window_tokens == 2 * target.numel()
        marks = head.head.marks() + client.head(head.name).marks()
        assert head.save_checkpoint("with-all", marks=marks).info.window_tokens == 2 * target.numel()
    restartable.end(signal.SIGKILL)
    restartable.start()
    with pytest.raises((lossd.WindowLostError, lossd.NotFoundError)):
        head.save_checkpoint("lost")


def saved_by(rank: int, group: dist.ProcessGroup, server: str, name: str) -> int:
    head = RemoteHead(lossd.connect(server).head(name), group=group)
    backward(head, rank)
    saved = head.save_checkpoint("of-all")
    head.close()
    return int(saved.info.window_tokens)


def test_ranks_save_what_all_of_them_have_added(ranks: Ranks, restartable: Restartable, head: RemoteHead) -> None:
    tokens = sum(batch(seed)[1].numel() for seed in (0, 1))
    assert ranks.run(saved_by, restartable.target, head.name) == [tokens, tokens]


def test_a_head_goes_back_to_a_checkpoint(restartable: Restartable, head: RemoteHead) -> None:
    optimizer = RemoteOptimizer(head, lr=0.05)
    head.save_checkpoint("start")
    local = Local(head)
    for seed in range(3):
        backward(head, seed)
        optimizer.step()
    backward(head, 3)
    head.restore_checkpoint("start")
    local.check(head)
    backward(head, 4)
    optimizer.step()
    local.step(4)
    local.check(head)
    with pytest.raises(lossd.NotFoundError):
        head.restore_checkpoint("never-saved")


def failing_once(call: Callable[..., Any], error: Exception) -> Callable[..., Any]:
    failed = []

    def once(*arguments: Any, **options: Any) -> Any:
        if not failed:
            failed.append(True)
            raise error
        return call(*arguments, **options)

    return once


def test_heads_that_have_taken_the_step_are_left_alone(
    make_remote: Callable[..., RemoteHead], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = make_remote(optimizer=lossd.AdamW()), make_remote(optimizer=lossd.AdamW())
    optimizer = RemoteOptimizer([first, second], lr=0.1)
    for one in (first, second):
        backward(one, 0)
    monkeypatch.setattr(second.head, "step", failing_once(second.head.step, lossd.UnavailableError("gone")))
    with pytest.raises(lossd.UnavailableError):
        optimizer.step()
    optimizer.step()
    assert [one.head.info().optimizer_steps for one in (first, second)] == [1, 1]
    for one in (first, second):
        backward(one, 1)
    optimizer.step()  # and the next one is a new one
    assert [one.head.info().optimizer_steps for one in (first, second)] == [2, 2]
