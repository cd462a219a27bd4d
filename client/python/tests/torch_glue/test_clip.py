"""clip_grad_norm_ over parameters here and heads at a server."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import chain

import pytest
import torch
from glue_support import batch, weights_of

import lossd
from lossd.torch import linear_cross_entropy
from lossd.torch._window import window_of
from lossd.torch.clip import clip_grad_norm_
from lossd.torch.head import RemoteHead

MakeRemote = Callable[..., RemoteHead]


def both(head: RemoteHead, seed: int = 0) -> tuple[torch.nn.Linear, torch.nn.Linear, torch.nn.Parameter]:
    """A trunk before the head and one before its twin, with gradients."""
    torch.manual_seed(seed)
    trunk, twin_trunk = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)
    twin_trunk.load_state_dict(trunk.state_dict())
    weight = torch.nn.Parameter(weights_of(head))
    hidden, target = batch(seed)
    linear_cross_entropy(trunk(hidden), target, head).backward()
    torch.nn.functional.cross_entropy(twin_trunk(hidden) @ weight.T, target).backward()
    return trunk, twin_trunk, weight


@pytest.mark.parametrize("max_norm", [0.01, 100.0])
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_the_norm_is_global_and_scales_both(make_remote: MakeRemote, norm_type: float, max_norm: float) -> None:
    head = make_remote(optimizer=lossd.SGD())
    trunk, twin_trunk, weight = both(head)
    ours = clip_grad_norm_(trunk.parameters(), max_norm, norm_type, heads=head)
    theirs = torch.nn.utils.clip_grad_norm_([*twin_trunk.parameters(), weight], max_norm, norm_type)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)
    for mine, its in zip(trunk.parameters(), twin_trunk.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, its.grad, rtol=1e-5, atol=1e-8)
    before = weights_of(head)
    head.step(1.0)
    assert weight.grad is not None
    torch.testing.assert_close(weights_of(head), before - weight.grad, rtol=1e-5, atol=1e-6)


def test_the_factor_ends_with_its_window(make_remote: MakeRemote) -> None:
    head = make_remote(optimizer=lossd.SGD())
    both(head)
    clip_grad_norm_([], 1e-3, heads=[head])
    assert window_of(head).scale < 0.1
    head.step(0.0)
    assert window_of(head).scale == 1.0 and head.proxy.grad is None


def test_a_flush_is_scaled_as_a_step_is(make_remote: MakeRemote) -> None:
    head = make_remote()
    _, _, weight = both(head)
    clip_grad_norm_([], 0.01, heads=head)
    gradient = head.flush().gradient
    torch.testing.assert_close(gradient.norm(), torch.tensor(0.01), rtol=1e-3, atol=0)
    assert weight.grad is not None
    torch.testing.assert_close(gradient / gradient.norm(), weight.grad / weight.grad.norm(), rtol=1e-4, atol=1e-6)


def test_bias_counts(make_remote: MakeRemote) -> None:
    head = make_remote(bias=True)
    linear_cross_entropy(*batch(), head).backward()
    stats = head.gradient_stats()
    assert stats.bias_norm > 0
    total = clip_grad_norm_([], 1.0, heads=head)
    assert float(total) == pytest.approx(math.hypot(stats.norm, stats.bias_norm), rel=1e-6)


def test_torchs_own_function_takes_the_proxy(make_remote: MakeRemote) -> None:
    head = make_remote()
    trunk, twin_trunk, weight = both(head)

    def parameters() -> Iterator[torch.nn.Parameter]:
        return chain(trunk.parameters(), [head.proxy])

    ours = torch.nn.utils.clip_grad_norm_(parameters(), 0.02)
    theirs = torch.nn.utils.clip_grad_norm_([*twin_trunk.parameters(), weight], 0.02)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)
    assert weight.grad is not None
    torch.testing.assert_close(head.flush().gradient, weight.grad, rtol=1e-4, atol=1e-7)


def test_more_gradient_after_a_look_is_seen(make_remote: MakeRemote) -> None:
    head = make_remote()
    linear_cross_entropy(*batch(0), head).backward()
    first = head.proxy.grad
    assert first is not None and head.proxy.grad is first  # one tensor as long as nothing is added
    linear_cross_entropy(*batch(1), head).backward()
    assert head.proxy.grad is not first


def test_nothing_to_clip(make_remote: MakeRemote) -> None:
    head, frozen = make_remote(), make_remote(frozen=True)
    assert head.proxy.grad is None and frozen.proxy.grad is None
    assert float(clip_grad_norm_([], 1.0, heads=[head, frozen])) == 0.0


def test_norms_that_cannot_be(make_remote: MakeRemote) -> None:
    head = make_remote()
    (linear_cross_entropy(*batch(), head) * math.nan).backward()
    with pytest.raises(ValueError, match="norm_type is 1"):
        clip_grad_norm_([], 1.0, 1, heads=head)
    with pytest.raises(RuntimeError, match="cannot be clipped"):
        clip_grad_norm_([], 1.0, error_if_nonfinite=True, heads=head)
    with pytest.raises(ValueError, match="multiply .grad in place"):
        head.proxy.grad = torch.ones(1, 1)


@pytest.mark.parametrize("foreach", [False, True])
def test_clipping_by_value_is_refused_and_changes_nothing(make_remote: MakeRemote, foreach: bool) -> None:
    head = make_remote(optimizer=lossd.SGD())
    trunk, _, _ = both(head)
    before = [parameter.grad.clone() for parameter in trunk.parameters() if parameter.grad is not None]
    with pytest.raises(RuntimeError, match="cannot be done to a head's gradient.*LocalWeight"):
        torch.nn.utils.clip_grad_value_([head.proxy, *trunk.parameters()], 1e-6, foreach=foreach)
    assert head.proxy.grad is not None
    with pytest.raises(RuntimeError, match=r"add cannot be done.*clip_grad_norm_"):
        head.proxy.grad.add_(torch.randn(1, 1))
    with pytest.raises(RuntimeError, match=r"normal cannot be done"):
        head.proxy.grad.data.normal_()
    assert window_of(head).scale == 1.0
    assert all(torch.equal(a, b.grad) for a, b in zip(before, trunk.parameters(), strict=True))
    head.proxy.grad *= 0.5
    head.proxy.grad.div_(2)
    assert window_of(head).scale == pytest.approx(0.25)
    (head.proxy.grad + 1).clamp_(max=0.1)  # what is computed from it is anybody's
