"""What autograd may do with a loss besides one plain backward()."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest
import torch
from cases import pairwise
from problem import HIDDEN, Reference, check_weight_gradient, distance, hidden_states, labels, tolerance

import lossd
from lossd.torch import global_token_count, linear_cross_entropy

LOSS, BOTH, WEIGHT = ("loss", False), ("gradients", True), ("gradients", False)
DECLARED = pytest.mark.parametrize("grad_scale", [None, 1.0, 2.0])


def sent(passes: list[Any]) -> list[tuple[str, bool]]:
    return [(one.mode, one.dx) for one in passes]


def tokens_in_window(head: Any) -> int:
    """Once all that was accepted is added."""
    return head.remote.gradient_stats().window_tokens


def nothing_was_added(head: Any) -> bool:
    return tokens_in_window(head) == 0


# Passes, as docs/pytorch.md counts them


@pytest.mark.parametrize(
    ("grad_scale", "upstream", "wanted"),
    [
        (None, 1.0, [LOSS, BOTH]),
        (None, 0.0, [LOSS]),
        (1.0, 1.0, [BOTH]),
        (-2.5, -2.5, [BOTH]),
        (1 / 3, 1 / 3, [BOTH]),
        (1.0, 2.0, [BOTH, BOTH]),
        (1.0, 0.0, [BOTH, WEIGHT]),
        (1.0, 0.125, [BOTH, WEIGHT, BOTH]),
        (0.0, 1.0, [LOSS, BOTH]),
    ],
)
def test_passes(heads: Any, passes: list[Any], grad_scale: Any, upstream: float, wanted: Any) -> None:
    head, hidden = heads(), hidden_states(6)
    loss = linear_cross_entropy(hidden, labels(6), head.remote, grad_scale=grad_scale)
    (loss * upstream).backward()
    assert sent(passes) == wanted


def test_a_third_as_a_scale_is_met_by_its_fp32_self(heads: Any, passes: list[Any]) -> None:
    """1/3 in Python is no number of fp32, which upstream gradients are."""
    loss = linear_cross_entropy(hidden_states(6), labels(6), heads().remote, grad_scale=1 / 3)
    (loss / 3).backward()
    assert sent(passes) == [BOTH]


def test_passes_with_gradients_of_other_outputs(heads: Any, passes: list[Any]) -> None:
    loss, lse = linear_cross_entropy(hidden_states(6), labels(6), heads().remote, grad_scale=1.0, return_lse=True)
    (loss + lse.sum()).backward()
    assert sent(passes) == [BOTH, WEIGHT, BOTH]


@pytest.mark.parametrize(
    ("options", "wanted"), [({}, [LOSS, BOTH]), ({"normalizer": 3.0}, [BOTH]), ({"weight": "tensor"}, [BOTH])]
)
def test_passes_with_class_weights(heads: Any, passes: list[Any], options: dict[str, Any], wanted: Any) -> None:
    head = heads(class_weights=True)
    given = {name: head.class_weights if value == "tensor" else value for name, value in options.items()}
    linear_cross_entropy(hidden_states(6), labels(6), head.remote, grad_scale=1.0, **given).backward()
    assert sent(passes) == wanted


def test_a_scale_that_was_rounded_on_its_way_is_met(heads: Any, passes: list[Any]) -> None:
    loss = linear_cross_entropy(hidden_states(6), labels(6), heads().remote, grad_scale=0.1 * 0.3 * 7)
    (loss * 0.1 * 7 * 0.3).backward()
    assert sent(passes) == [BOTH]


def test_a_declared_scale_without_backward_is_in_the_window(heads: Any) -> None:
    head = heads()
    linear_cross_entropy(hidden_states(6), labels(6), head.remote, grad_scale=1.0)
    assert not nothing_was_added(head)
    linear_cross_entropy(hidden_states(6), labels(6), heads().remote)
    assert nothing_was_added(head)


# No gradients wanted


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@DECLARED
def test_without_gradients_the_loss_alone_is_computed(
    heads: Any, passes: list[Any], mode: Any, grad_scale: float | None
) -> None:
    head, hidden, target = heads(), hidden_states(6), labels(6)
    with mode():
        loss = linear_cross_entropy(hidden, target, head.remote, grad_scale=grad_scale)
    assert not loss.requires_grad and sent(passes) == [LOSS] and nothing_was_added(head)
    assert distance(loss, Reference(head, hidden).losses(target)[0]) < 2e-6


@DECLARED
def test_hidden_states_of_inference_mode_train_the_head(heads: Any, grad_scale: float | None) -> None:
    head = heads()
    with torch.inference_mode():
        hidden, target, weights = torch.randn(6, HIDDEN), labels(6), torch.rand(6)
    linear_cross_entropy(hidden, target, head.remote, grad_scale=grad_scale, token_weights=weights).backward()
    reference = Reference(head, hidden.clone())
    reference.losses(target.clone(), token_weights=weights.clone())[0].backward()
    check_weight_gradient(head, head.gradients()[0], reference.weight.grad, slack=1e-5)


# Parts that are frozen


@pairwise(reduction=["mean", "sum", "none"], grad_scale=[None, 1.0, 2.0], upstream=[1.0, -2.5])
def test_frozen_trunk(heads: Any, passes: list[Any], reduction: str, upstream: float, grad_scale: float | None) -> None:
    if reduction == "none" and grad_scale is not None:
        grad_scale = None
    head, hidden, target = heads(), hidden_states(6).detach(), labels(6, masked=0.3)
    loss = linear_cross_entropy(hidden, target, head.remote, reduction=reduction, grad_scale=grad_scale)
    assert loss.requires_grad
    (loss * upstream).sum().backward()
    assert hidden.grad is None and BOTH not in sent(passes)
    reference = Reference(head, hidden)
    (reference.losses(target, reduction=reduction)[0] * upstream).sum().backward()
    check_weight_gradient(head, head.gradients()[0], reference.weight.grad, slack=1e-5)


@pairwise(reduction=["mean", "sum", "none"], grad_scale=[None, 1.0, 2.0], upstream=[0.0, 1.0, -2.5])
def test_frozen_head(heads: Any, reduction: str, upstream: float, grad_scale: float | None) -> None:
    if reduction == "none" and grad_scale is not None:
        grad_scale = None
    head, hidden, target = heads(frozen=True), hidden_states(6), labels(6, masked=0.3)
    loss = linear_cross_entropy(hidden, target, head.remote, reduction=reduction, grad_scale=grad_scale)
    (loss * upstream).sum().backward()
    reference = Reference(head, hidden)
    (reference.losses(target, reduction=reduction)[0] * upstream).sum().backward()
    assert distance(hidden.grad, reference.x.grad) < tolerance(head, hidden)
    assert head.remote.proxy.marker is None


def test_all_frozen(heads: Any, passes: list[Any]) -> None:
    head = heads(frozen=True)
    assert not linear_cross_entropy(hidden_states(6).detach(), labels(6), head.remote, grad_scale=1.0).requires_grad
    assert sent(passes) == [LOSS]


def test_train_head(heads: Any, passes: list[Any]) -> None:
    head, frozen = heads(), heads(frozen=True)
    hidden, target = hidden_states(6), labels(6)
    loss = linear_cross_entropy(hidden.detach(), target, head.remote, train_head=False, grad_scale=1.0)
    assert not loss.requires_grad and sent(passes) == [LOSS]
    with pytest.raises(ValueError, match="train_head is False and input needs a gradient"):
        linear_cross_entropy(hidden, target, head.remote, train_head=False)
    with pytest.raises(ValueError, match="train_head is True, but head .* is frozen"):
        linear_cross_entropy(hidden, target, frozen.remote, train_head=True)


# More than one backward, more than one use


@DECLARED
@pytest.mark.parametrize("second", [1.0, 2.0, 0.5])
def test_backward_twice(heads: Any, grad_scale: float | None, second: float) -> None:
    head, hidden, target = heads(), hidden_states(6), labels(6, masked=0.3)
    loss = linear_cross_entropy(hidden, target, head.remote, grad_scale=grad_scale)
    loss.backward(retain_graph=True)
    (loss * second).backward()
    reference = Reference(head, hidden)
    (reference.losses(target)[0] * (1 + second)).backward()
    assert distance(hidden.grad, reference.x.grad) < tolerance(head, hidden)
    check_weight_gradient(head, head.gradients()[0], reference.weight.grad, slack=1e-5)


@DECLARED
def test_backward_twice_without_retain_graph_is_refused(heads: Any, grad_scale: float | None) -> None:
    head = heads()
    loss = linear_cross_entropy(hidden_states(6), labels(6), head.remote, grad_scale=grad_scale)
    loss.backward()
    added = tokens_in_window(head)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    assert tokens_in_window(head) == added


@DECLARED
def test_two_losses_of_one_input(heads: Any, grad_scale: float | None) -> None:
    head, hidden = heads(), hidden_states(6)
    first, second = labels(6), labels(6, masked=0.5)
    total = linear_cross_entropy(hidden, first, head.remote, grad_scale=grad_scale)
    total = total + 0.3 * linear_cross_entropy(hidden, second, head.remote)
    total = total + hidden.square().sum()
    total.backward()
    reference = Reference(head, hidden)
    wanted = reference.losses(first)[0] + 0.3 * reference.losses(second)[0] + reference.x.square().sum()
    wanted.backward()
    assert distance(hidden.grad, reference.x.grad) < tolerance(head, hidden)
    check_weight_gradient(head, head.gradients()[0], reference.weight.grad, slack=1e-5)


@DECLARED
def test_one_loss_twice_in_the_objective(heads: Any, grad_scale: float | None) -> None:
    head, hidden, target = heads(), hidden_states(6), labels(6)
    loss = linear_cross_entropy(hidden, target, head.remote, grad_scale=grad_scale)
    (loss * loss + loss).backward()
    reference = Reference(head, hidden)
    wanted = reference.losses(target)[0]
    (wanted * wanted + wanted).backward()
    assert distance(hidden.grad, reference.x.grad) < tolerance(head, hidden)
    check_weight_gradient(head, head.gradients()[0], reference.weight.grad, slack=1e-5)


def test_losses_of_reversed_order(heads: Any) -> None:
    """Graphs may go backward in another order than they were made in."""
    head = heads()
    hidden, target = [hidden_states(4) for _ in range(3)], [labels(4) for _ in range(3)]
    losses = [linear_cross_entropy(x, y, head.remote, grad_scale=1.0) for x, y in zip(hidden, target, strict=True)]
    for loss in reversed(losses):
        (2 * loss).backward()
    whole = Reference(head, torch.stack([x.detach() for x in hidden]))
    (2 * whole.losses(torch.stack(target), reduction="sum")[0] / 4).backward()
    assert distance(torch.stack([x.grad for x in hidden]), whole.x.grad) < tolerance(head, hidden[0])
    check_weight_gradient(head, head.gradients()[0], whole.weight.grad, slack=1e-5)


# Accumulation


@pytest.mark.parametrize("declared", [False, True])
def test_accumulation_with_a_global_count(heads: Any, declared: bool) -> None:
    """Micro-batches of unlike counts, of which one has nothing."""
    head = heads()
    parts = [(hidden_states(n), labels(n, masked=m)) for n, m in ((5, 0.0), (7, 0.6), (3, 1.0), (2, 0.0))]
    count = sum(global_token_count(target) for _, target in parts)
    total = 0.0
    for hidden, target in parts:
        loss = linear_cross_entropy(hidden, target, head.remote, normalizer=count, grad_scale=1.0 if declared else None)
        loss.backward()
        total += float(loss.detach())
    reference = Reference(head, torch.cat([hidden.detach() for hidden, _ in parts]))
    wanted = reference.losses(torch.cat([target for _, target in parts]))[0]
    wanted.backward()
    assert total == pytest.approx(float(wanted.detach()), rel=2e-6)
    assert distance(torch.cat([hidden.grad for hidden, _ in parts]), reference.x.grad) < 3e-6
    check_weight_gradient(head, head.gradients()[0], reference.weight.grad)


@pytest.mark.parametrize("declared", [False, True])
@pytest.mark.parametrize("z", [0.0, 0.1])
def test_a_global_count_of_none(heads: Any, declared: bool, z: float) -> None:
    head = heads()
    hidden, target = hidden_states(4), labels(4, masked=1.0)
    count = global_token_count(target)
    options = {"normalizer": count, "grad_scale": 1.0 if declared else None, "lse_square_scale": z}
    loss, z_loss = linear_cross_entropy(hidden, target, head.remote, return_z_loss=True, **options)
    assert loss.isnan() and z_loss.isnan()
    loss.backward()
    assert not hidden.grad.any() and not head.remote.proxy.marker.any()
    assert linear_cross_entropy(hidden, target, head.remote, torch_compat=False, **options).item() == 0.0
    assert not head.gradients()[0].any()
    with pytest.raises(ValueError, match="normalizer is 0, but 4 tokens"):
        linear_cross_entropy(hidden, labels(4), head.remote, **options)
    assert not head.gradients()[0].any()


@pytest.mark.parametrize("declared", [False, True])
def test_accumulation_by_division(heads: Any, passes: list[Any], declared: bool) -> None:
    head, steps = heads(), 3
    reference_weight = torch.zeros_like(head.weight, dtype=torch.float64)
    for _ in range(steps):
        hidden, target = hidden_states(5), labels(5, masked=0.3)
        loss = linear_cross_entropy(hidden, target, head.remote, grad_scale=1 / steps if declared else None)
        (loss / steps).backward()
        reference = Reference(head, hidden)
        (reference.losses(target)[0] / steps).backward()
        reference_weight += reference.weight.grad
        assert distance(hidden.grad, reference.x.grad) < 3e-6
    check_weight_gradient(head, head.gradients()[0], reference_weight)
    assert len(passes) == (steps if declared else 2 * steps)


# What is refused, what is not finite


@DECLARED
def test_create_graph_is_refused(heads: Any, grad_scale: float | None) -> None:
    hidden = hidden_states(6)
    loss = linear_cross_entropy(hidden, labels(6), heads().remote, grad_scale=grad_scale)
    with pytest.raises(RuntimeError, match="no second derivative; call backward.. without create_graph=True"):
        torch.autograd.grad(loss, hidden, create_graph=True)


def test_torch_autograd_grad_adds_to_the_window_too(heads: Any) -> None:
    head, hidden, target = heads(), hidden_states(6), labels(6)
    (dx,) = torch.autograd.grad(linear_cross_entropy(hidden, target, head.remote), hidden)
    reference = Reference(head, hidden)
    reference.losses(target)[0].backward()
    assert distance(dx, reference.x.grad) < 3e-6 and hidden.grad is None
    check_weight_gradient(head, head.gradients()[0], reference.weight.grad)


def test_hidden_states_that_were_changed_are_noticed(heads: Any) -> None:
    hidden = hidden_states(6)
    used = hidden * 1
    loss = linear_cross_entropy(used, labels(6), heads().remote)
    with torch.no_grad():
        used.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_weights_that_were_changed_are_noticed(heads: Any) -> None:
    head, hidden, target = heads(dtype=torch.float32), hidden_states(6), labels(6)
    two_passes = linear_cross_entropy(hidden, target, head.remote)
    one_pass = linear_cross_entropy(hidden, target, head.remote, grad_scale=1.0)
    head.remote.write_weights(head.weight)
    with pytest.raises(lossd.FailedPreconditionError, match="weight"):
        two_passes.backward()
    one_pass.backward()  # was made before
    hidden.grad = None
    head.remote.zero_grad()
    linear_cross_entropy(hidden, target, head.remote).backward()
    reference = Reference(head, hidden)
    reference.losses(target)[0].backward()
    assert distance(hidden.grad, reference.x.grad) < 3e-6
    check_weight_gradient(head, head.gradients()[0], reference.weight.grad)


@pytest.mark.parametrize("upstream", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_upstream_gradients_that_are_not_finite(heads: Any, reduction: str, upstream: float) -> None:
    """dX is NaN, but not of ignored tokens; nothing is added to dW, and the anchor tells who asks."""
    head, hidden, target = heads(), hidden_states(6), labels(6)
    target[2] = -100
    loss = linear_cross_entropy(hidden, target, head.remote, reduction=reduction)
    (loss * upstream).sum().backward()
    assert hidden.grad[target != -100].isnan().all() and not hidden.grad[2].any()
    assert head.remote.proxy.marker.isnan().all()
    assert not head.gradients()[0].any()


def test_one_token_with_an_upstream_gradient_that_is_not_finite(heads: Any) -> None:
    head, hidden, target = heads(), hidden_states(6), labels(6)
    upstream = torch.ones(6)
    upstream[3] = math.inf
    (linear_cross_entropy(hidden, target, head.remote, reduction="none") * upstream).sum().backward()
    reference = Reference(head, hidden)
    others = torch.arange(6) != 3
    reference.losses(target, reduction="none")[0][others].sum().backward()
    assert hidden.grad[3].isnan().all() and distance(hidden.grad[others], reference.x.grad[others]) < 3e-6
    assert head.remote.proxy.marker.isnan().all()
    check_weight_gradient(head, head.gradients()[0], reference.weight.grad)


@DECLARED
def test_a_loss_that_is_not_finite(heads: Any, grad_scale: float | None) -> None:
    head, hidden, target = heads(), hidden_states(6), labels(6)
    with torch.no_grad():
        hidden[1] = 3e38  # its logits are beyond fp32
    loss = linear_cross_entropy(hidden, target, head.remote, grad_scale=grad_scale)
    assert loss.isnan()
    loss.backward()
    assert head.remote.proxy.marker.isnan().all()
    assert hidden.grad[1].isnan().all() and hidden.grad[0].isfinite().all()
    assert head.gradients()[0].isfinite().all()


def test_the_anchor_of_a_finite_loss_gets_zero(heads: Any) -> None:
    head = heads()
    linear_cross_entropy(hidden_states(6), labels(6), head.remote).backward()
    assert torch.equal(head.remote.proxy.marker, torch.zeros(1, 1))


# Surroundings


def test_hooks_see_dx(heads: Any) -> None:
    hidden, seen = hidden_states(6), []
    hidden.register_hook(lambda grad: seen.append(grad.clone()))
    linear_cross_entropy(hidden, labels(6), heads().remote, grad_scale=1.0).backward()
    assert torch.equal(seen[0], hidden.grad)


@DECLARED
def test_saved_tensors_may_be_offloaded(heads: Any, grad_scale: float | None) -> None:
    head, hidden, target = heads(), hidden_states(6), labels(6)
    with torch.autograd.graph.save_on_cpu():
        loss = linear_cross_entropy(hidden, target, head.remote, grad_scale=grad_scale)
    loss.backward()
    reference = Reference(head, hidden)
    reference.losses(target)[0].backward()
    assert distance(hidden.grad, reference.x.grad) < 3e-6


def test_threads_share_a_head(heads: Any) -> None:
    head = heads()
    batches = [(hidden_states(5), labels(5)) for _ in range(6)]

    def run(hidden: torch.Tensor, target: torch.Tensor) -> None:
        linear_cross_entropy(hidden, target, head.remote, reduction="sum").backward()

    threads = [threading.Thread(target=run, args=batch) for batch in batches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    reference = Reference(head, torch.cat([hidden.detach() for hidden, _ in batches]))
    reference.losses(torch.cat([target for _, target in batches]), reduction="sum")[0].backward()
    assert distance(torch.cat([hidden.grad for hidden, _ in batches]), reference.x.grad) < 3e-6
    check_weight_gradient(head, head.gradients()[0], reference.weight.grad)


@pytest.mark.parametrize("declared", [False, True])
def test_deterministic_sessions(heads: Any, declared: bool) -> None:
    """dW has the same bits however the tokens are cut into batches, and torch's deterministic mode has no objection."""
    head, hidden, target = heads(deterministic=True), torch.randn(12, HIDDEN), labels(12, masked=0.3)
    found = []
    torch.use_deterministic_algorithms(True)
    try:
        for cut in (12, 5, 1):
            for x, y in zip(hidden.split(cut), target.split(cut), strict=True):
                loss = linear_cross_entropy(
                    x.clone().requires_grad_(), y, head.remote, normalizer=10, grad_scale=1.0 if declared else None
                )
                loss.backward()
            found.append(head.gradients()[0])
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    reference = Reference(head, hidden)
    reference.losses(target, normalizer=10)[0].backward()
    check_weight_gradient(head, found[0], reference.weight.grad)
