"""RemoteOptimizer beside torch.optim's own: same batches, same schedules, same weights."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from glue_support import batch, weights_of

import lossd
from lossd.torch import linear_cross_entropy
from lossd.torch.head import RemoteHead
from lossd.torch.optimizer import RemoteOptimizer

MakeRemote = Callable[..., RemoteHead]


class Twin:
    """The head's weight as a local parameter, with torch.optim's optimizer."""

    def __init__(self, head: RemoteHead, optimizer: Callable[..., torch.optim.Optimizer], **options: Any) -> None:
        self.weight = torch.nn.Parameter(weights_of(head))
        self.optimizer = optimizer([self.weight], **options)

    def loss(self, hidden: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(hidden @ self.weight.T, target)


RULES = {
    "sgd": (lossd.SGD(), torch.optim.SGD, {}),
    "momentum": (
        lossd.SGD(momentum=0.9, nesterov=True, weight_decay=0.1),
        torch.optim.SGD,
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    ),
    "dampening": (
        lossd.SGD(momentum=0.9, dampening=0.3, weight_decay=0.1),
        torch.optim.SGD,
        {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1},
    ),
    "maximize": (
        lossd.Adam(maximize=True, betas=(0.3, 0.99)),
        torch.optim.Adam,
        {"maximize": True, "betas": (0.3, 0.99)},
    ),
    "adam": (lossd.Adam(weight_decay=0.02), torch.optim.Adam, {"weight_decay": 0.02}),
    "adamw": (lossd.AdamW(betas=(0.8, 0.95)), torch.optim.AdamW, {"betas": (0.8, 0.95)}),
}
SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "none": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1.0),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 6),
    "warmup": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=3), torch.optim.lr_scheduler.ExponentialLR(o, 0.7)],
        [3],
    ),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("rule", RULES)
def test_steps_are_those_of_torch_optim(make_remote: MakeRemote, rule: str, schedule: str) -> None:
    ours, theirs, options = RULES[rule]
    head = make_remote(optimizer=ours)
    twin = Twin(head, theirs, lr=0.05, **options)
    optimizer = RemoteOptimizer(head, lr=0.05)
    schedulers = [SCHEDULES[schedule](o) for o in (optimizer, twin.optimizer)]
    for seed in range(8):
        hidden, target = batch(seed)
        linear_cross_entropy(hidden, target, head).backward()
        twin.loss(hidden, target).backward()
        for one, scheduler in zip((optimizer, twin.optimizer), schedulers, strict=True):
            one.step()
            one.zero_grad()
            scheduler.step()
        torch.testing.assert_close(weights_of(head), twin.weight.detach(), rtol=2e-5, atol=2e-6)
    assert optimizer.param_groups[0]["lr"] == twin.optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("rule", ["momentum", "adamw"])
def test_one_cycle_changes_momentum_and_betas(make_remote: MakeRemote, rule: str) -> None:
    ours, theirs, options = RULES[rule]
    head = make_remote(optimizer=ours)
    twin = Twin(head, theirs, lr=0.05, **options)
    optimizer = RemoteOptimizer(head, lr=0.05)
    schedulers = [
        torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=7) for o in (optimizer, twin.optimizer)
    ]
    for seed in range(6):
        hidden, target = batch(seed)
        linear_cross_entropy(hidden, target, head).backward()
        twin.loss(hidden, target).backward()
        for one, scheduler in zip((optimizer, twin.optimizer), schedulers, strict=True):
            one.step()
            one.zero_grad()
            scheduler.step()
    name = "momentum" if rule == "momentum" else "betas"
    assert optimizer.param_groups[0][name] == twin.optimizer.param_groups[0][name]
    assert optimizer.param_groups[0][name] not in (0.9, (0.8, 0.95))
    torch.testing.assert_close(weights_of(head), twin.weight.detach(), rtol=2e-5, atol=2e-6)


def test_groups_of_heads_have_rates_of_their_own(make_remote: MakeRemote) -> None:
    first, second = make_remote(optimizer=lossd.SGD()), make_remote(optimizer=lossd.AdamW())
    before = [weights_of(head) for head in (first, second)]
    optimizer = RemoteOptimizer([{"params": [first], "lr": 0.5}, {"params": second, "lr": 0.0, "weight_decay": 0.0}])
    assert "momentum" in optimizer.param_groups[0] and "betas" in optimizer.param_groups[1]
    hidden, target = batch()
    for head in (first, second):
        linear_cross_entropy(hidden, target, head).backward()
    optimizer.step()
    assert not torch.equal(weights_of(first), before[0])
    assert torch.equal(weights_of(second), before[1])
    assert optimizer.last_results[second.name].step == 1


def test_gradients_of_several_backwards_are_one_step(make_remote: MakeRemote) -> None:
    head = make_remote(optimizer=lossd.SGD())
    twin = Twin(head, torch.optim.SGD, lr=0.3)
    optimizer = RemoteOptimizer(head, lr=0.3)
    for seed in range(3):
        hidden, target = batch(seed)
        (linear_cross_entropy(hidden, target, head) / 3).backward()
        (twin.loss(hidden, target) / 3).backward()
    optimizer.step()
    twin.optimizer.step()
    torch.testing.assert_close(weights_of(head), twin.weight.detach(), rtol=1e-5, atol=1e-6)
    assert head.head.info().optimizer_steps == 1


def test_closure_and_profiling_hooks(make_remote: MakeRemote) -> None:
    head = make_remote(optimizer=lossd.SGD())
    optimizer = RemoteOptimizer(head, lr=0.1)
    seen = []
    optimizer.register_step_post_hook(lambda *_: seen.append("stepped"))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = linear_cross_entropy(*batch(), head)
        loss.backward()
        return loss

    first = optimizer.step(closure).item()
    assert optimizer.step(closure).item() < first
    assert seen == ["stepped", "stepped"]


def test_zero_grad_drops_what_waits_and_costs_nothing_otherwise(make_remote: MakeRemote) -> None:
    head = make_remote(optimizer=lossd.SGD())
    optimizer = RemoteOptimizer(head, lr=0.1)
    before = weights_of(head)
    hidden, target = batch()
    linear_cross_entropy(hidden, target, head).backward()
    assert head.dirty and head.gradient_stats().window_tokens == len(target)
    optimizer.zero_grad()
    info = head.head.info()
    assert not head.dirty and info.window_tokens == 0
    optimizer.zero_grad()
    assert head.head.info().generation == info.generation  # no second window was consumed
    optimizer.step()
    assert torch.equal(weights_of(head), before)


def test_state_dict_has_the_schedule_and_the_server_the_moments(make_remote: MakeRemote) -> None:
    head = make_remote(optimizer=lossd.AdamW())
    optimizer = RemoteOptimizer(head, lr=0.1, weight_decay=0.3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    linear_cross_entropy(*batch(), head).backward()
    optimizer.step()
    scheduler.step()
    state = optimizer.state_dict()
    assert state["state"] == {0: {"step": 1}}
    other = RemoteOptimizer(head, lr=7.0)
    other.load_state_dict(state)
    assert other.param_groups[0]["lr"] == 0.05 and other.param_groups[0]["weight_decay"] == 0.3
    assert other.param_groups[0]["params"] == [head.proxy]
    twice = torch.optim.lr_scheduler.StepLR(other, 1, 0.5)
    twice.load_state_dict(scheduler.state_dict())
    assert twice.last_epoch == 1


def scaled_steps(head: RemoteHead, scales: list[float], clip: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Steps of head and twin under GradScalers, whose first loss is spoiled where the scale is inf."""
    twin = Twin(head, torch.optim.SGD, lr=0.2)
    optimizer = RemoteOptimizer(head, lr=0.2)
    ours, theirs = (torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2) for _ in range(2))
    for seed, factor in enumerate(scales):
        hidden, target = batch(seed)
        ours.scale(linear_cross_entropy(hidden, target, head) * factor).backward()
        theirs.scale(twin.loss(hidden, target) * factor).backward()
        if clip is not None:
            ours.unscale_(optimizer)
            theirs.unscale_(twin.optimizer)
            mine = torch.nn.utils.clip_grad_norm_([head.proxy], clip)
            torch.testing.assert_close(mine, torch.nn.utils.clip_grad_norm_([twin.weight], clip), rtol=1e-5, atol=0)
        for scaler, one in ((ours, optimizer), (theirs, twin.optimizer)):
            scaler.step(one)
            scaler.update()
            one.zero_grad()
        assert ours.get_scale() == theirs.get_scale()
    return weights_of(head), twin.weight.detach()


@pytest.mark.parametrize("clip", [None, 0.05])
def test_grad_scaler_unscales_and_clips(make_remote: MakeRemote, clip: float | None) -> None:
    ours, theirs = scaled_steps(make_remote(optimizer=lossd.SGD()), [1.0] * 4, clip)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_grad_scaler_skips_a_loss_that_is_not_finite(make_remote: MakeRemote) -> None:
    head = make_remote(optimizer=lossd.SGD())
    ours, theirs = scaled_steps(head, [1.0, math.inf, 1.0, 1.0], None)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert head.head.info().optimizer_steps == 3


def test_grad_scaler_finds_elements_that_the_server_counts(
    make_remote: MakeRemote, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = make_remote(optimizer=lossd.SGD())
    optimizer = RemoteOptimizer(head, lr=0.2)
    before = weights_of(head)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(linear_cross_entropy(*batch(), head)).backward()
    honest = head.head.gradient_stats
    monkeypatch.setattr(head.head, "gradient_stats", lambda **how: dataclasses.replace(honest(**how), non_finite=1))
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    assert scaler.get_scale() == 2.0
    assert torch.equal(weights_of(head), before) and head.head.info().window_tokens == 0


@pytest.mark.parametrize("factor", [1.0, math.nan])
def test_skip_non_finite_without_a_scaler(make_remote: MakeRemote, factor: float) -> None:
    head = make_remote(optimizer=lossd.SGD())
    optimizer = RemoteOptimizer(head, lr=0.2, skip_non_finite=True)
    before = weights_of(head)
    (linear_cross_entropy(*batch(), head) * factor).backward()
    optimizer.step()
    skipped = math.isnan(factor)
    assert optimizer.last_results[head.name].skipped == skipped
    assert torch.equal(weights_of(head), before) == skipped
    assert not head.dirty


def test_a_step_without_an_optimizer_says_what_to_do(make_remote: MakeRemote) -> None:
    head = make_remote()
    with pytest.raises(ValueError, match="has no optimizer: create it with"):
        RemoteOptimizer(head, lr=0.1)
    linear_cross_entropy(*batch(), head).backward()
    with pytest.raises(lossd.FailedPreconditionError, match="optimizer"):
        head.step(0.1)
    assert head.dirty  # nothing was consumed


def test_arguments_that_cannot_be(make_remote: MakeRemote) -> None:
    head = make_remote(optimizer=lossd.SGD())
    with pytest.raises(ValueError, match="heads is empty"):
        RemoteOptimizer([])
    with pytest.raises(TypeError, match="not a Linear"):
        RemoteOptimizer([torch.nn.Linear(1, 1)])
    with pytest.raises(ValueError, match="betas is no parameter"):
        RemoteOptimizer(head, betas=(0.9, 0.99))
    with pytest.raises(lossd.InvalidArgumentError, match="learning_rate|lr"):
        head.step(-1.0)
