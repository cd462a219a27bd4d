"""Steps whose factor is not finite, and steps that are tried again."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from glue_support import batch, weights_of

import lossd
from lossd.torch import linear_cross_entropy
from lossd.torch.clip import clip_grad_norm_
from lossd.torch.head import RemoteHead
from lossd.torch.optimizer import RemoteOptimizer

MakeRemote = Callable[..., RemoteHead]


def two_heads(make_remote: MakeRemote) -> tuple[list[RemoteHead], list[torch.Tensor]]:
    heads = [make_remote(optimizer=lossd.SGD()) for _ in range(2)]
    for head in heads:
        linear_cross_entropy(*batch(), head).backward()
    return heads, [weights_of(head) for head in heads]


def local_gradient(value: float) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.full((3,), value)
    return parameter


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("clipped", [[0, 1], [1]])
def test_a_local_gradient_that_is_not_finite(
    make_remote: MakeRemote, value: float, skip: bool, clipped: list[int]
) -> None:
    heads, before = two_heads(make_remote)
    optimizer = RemoteOptimizer(heads, lr=0.1, skip_non_finite=skip)
    heads[0].proxy.grad.mul_(1)  # looked at, and left as it is
    norm = clip_grad_norm_([local_gradient(value)], 1.0, heads=[heads[one] for one in clipped])
    assert not math.isfinite(norm)
    spoiled = math.isnan(value)  # an infinite norm makes the factor 0, as it does to local gradients
    if not skip and spoiled:
        with pytest.raises(FloatingPointError, match=r"nothing was stepped. Call zero_grad\(\)"):
            optimizer.step()
        assert all(head.dirty for head in heads)
        for number, head in enumerate(heads):
            assert torch.equal(weights_of(head), before[number])
        optimizer.zero_grad()
    else:
        optimizer.step()
        for number, head in enumerate(heads):
            assert optimizer.last_results[head.name].skipped == (spoiled and number in clipped)
            assert torch.equal(weights_of(head), before[number]) == (number in clipped)
    assert not any(head.dirty for head in heads)
    for head in heads:  # and the next step is as any other
        linear_cross_entropy(*batch(1), head).backward()
    optimizer.step()
    assert not any(optimizer.last_results[head.name].skipped for head in heads)


def failing_once(head: RemoteHead, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    real = head.head.step

    def step(*arguments: Any, **options: Any) -> Any:
        monkeypatch.setattr(head.head, "step", real)
        raise error

    monkeypatch.setattr(head.head, "step", step)


@pytest.mark.parametrize("between", ["nothing", "a batch", "a flush and a batch"])
def test_a_step_that_is_tried_again(make_remote: MakeRemote, monkeypatch: pytest.MonkeyPatch, between: str) -> None:
    """The first head has taken it, and is left alone unless there is something new in its window."""
    heads, _ = two_heads(make_remote)
    optimizer = RemoteOptimizer(heads, lr=0.1)
    failing_once(heads[1], lossd.UnavailableError("gone"), monkeypatch)
    with pytest.raises(lossd.UnavailableError):
        optimizer.step()
    if between == "a flush and a batch":
        heads[0].flush()
    if between != "nothing":
        linear_cross_entropy(*batch(1), heads[0]).backward()
    optimizer.step()
    assert not any(head.dirty for head in heads)
    steps = [head.head.info().optimizer_steps for head in heads]
    assert steps == [1 if between == "nothing" else 2, 1]


def test_another_error_gives_a_step_up(make_remote: MakeRemote, monkeypatch: pytest.MonkeyPatch) -> None:
    heads, _ = two_heads(make_remote)
    optimizer = RemoteOptimizer(heads, lr=0.1)
    failing_once(heads[1], lossd.ResourceExhaustedError("no room"), monkeypatch)
    with pytest.raises(lossd.ResourceExhaustedError):
        optimizer.step()
    assert not optimizer._stepped
    optimizer.step()
    assert [head.head.info().optimizer_steps for head in heads] == [1, 1]
