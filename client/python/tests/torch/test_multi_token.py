"""multi_token_cross_entropy against a call of linear_cross_entropy for each depth, which is what it stands for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from problem import HIDDEN, TestHead, distance, labels
from torch import Tensor

from lossd.torch import linear_cross_entropy, multi_token_cross_entropy

DEPTHS, ROWS, LENGTH = 3, 2, 7
WEIGHTS = [1.0, 0.3, 0.15]
EXACT = 1e-6


def states(count: int = DEPTHS, length: int = LENGTH) -> list[Tensor]:
    return [torch.randn(ROWS, length, HIDDEN, requires_grad=True) for _ in range(count)]


def together(head: TestHead, hidden: list[Tensor], target: Any, upstream: float = 1.0, **options: Any) -> Any:
    """Loss, depths' losses, dX of each depth, dW."""
    loss, by_depth = multi_token_cross_entropy(hidden, target, head.remote, **options)
    (loss * upstream).backward()
    return loss, by_depth, [one.grad for one in hidden], head.gradients()[0]


def apart(head: TestHead, hidden: list[Tensor], target: Tensor, upstream: float = 1.0, **options: Any) -> Any:
    twins = [one.detach().clone().requires_grad_() for one in hidden]
    losses = [
        linear_cross_entropy(one, target, head.remote, shift=1 + depth, **options) for depth, one in enumerate(twins)
    ]
    total = sum(weight * loss for weight, loss in zip(WEIGHTS, losses, strict=True))
    (total * upstream).backward()
    return total, torch.stack(losses).detach(), [one.grad for one in twins], head.gradients()[0]


def seen(passes: list[Any]) -> list[tuple[str, bool]]:
    return [(one.mode, one.dx) for one in passes]


def same(found: Any, wanted: Any) -> None:
    for one, other in zip(found, wanted, strict=True):
        pairs = zip(one, other, strict=True) if isinstance(one, list) else [(one, other)]
        for ours, theirs in pairs:
            assert ours.shape == theirs.shape and distance(ours, theirs) <= EXACT


@pytest.mark.parametrize("declared", [False, True])
@pytest.mark.parametrize("upstream", [1.0, -2.5])
@pytest.mark.parametrize(
    "options", [{}, {"reduction": "sum"}, {"lse_square_scale": 0.01, "label_smoothing": 0.1, "softcap": 3.0}]
)
def test_a_call_for_each_depth(heads: Any, declared: bool, upstream: float, options: dict[str, Any]) -> None:
    head, hidden, target = heads(), states(), labels(ROWS, LENGTH, masked=0.3)
    more = {"grad_scale": upstream} if declared else {}
    found = together(head, hidden, target, upstream, weights=WEIGHTS, **options, **more)
    same(found, apart(head, hidden, target, upstream, **options))


@pytest.mark.parametrize("declared", [False, True])
def test_token_weights_and_normalizers(heads: Any, declared: bool) -> None:
    head, hidden, target = heads(), states(), labels(ROWS, LENGTH, masked=0.3)
    token_weights = torch.rand(ROWS, LENGTH)
    more = {"grad_scale": 1.0} if declared else {}
    found = together(
        head, hidden, target, weights=WEIGHTS, token_weights=token_weights, normalizers=[20.0] * DEPTHS, **more
    )
    same(found, apart(head, hidden, target, token_weights=token_weights, normalizer=20.0))


@pytest.mark.parametrize("declared", [False, True])
def test_class_weights(heads: Any, declared: bool) -> None:
    head, hidden, target = heads(class_weights=True), states(), labels(ROWS, LENGTH, masked=0.3)
    with pytest.raises(ValueError, match="normalizers"):
        multi_token_cross_entropy(hidden, target, head.remote)
    more = {"grad_scale": 1.0} if declared else {}
    found = together(head, hidden, target, weights=WEIGHTS, weight=head.class_weights, **more)
    same(found, apart(head, hidden, target))


def test_the_server_sees_one_batch(heads: Any, passes: list[Any]) -> None:
    head, target = heads(), labels(ROWS, LENGTH)
    together(head, states(), target)
    assert seen(passes) == [("loss", False), ("gradients", True)]
    passes.clear()
    together(head, states(), target, grad_scale=1.0)
    assert seen(passes) == [("gradients", True)]


def test_one_number_is_shared_by_the_depths(heads: Any) -> None:
    head, hidden, target = heads(), states(), labels(ROWS, LENGTH)
    loss, by_depth = multi_token_cross_entropy(hidden, target, head.remote, weights=0.6)
    assert distance(loss, 0.2 * by_depth.sum()) <= EXACT and not by_depth.requires_grad


def test_one_stacked_tensor(heads: Any) -> None:
    head, hidden, target = heads(), states(), labels(ROWS, LENGTH, masked=0.3)
    wanted = together(head, hidden, target, weights=WEIGHTS)
    stacked = torch.stack([one.detach() for one in hidden]).requires_grad_()
    loss, by_depth = multi_token_cross_entropy(stacked, target, head.remote, weights=WEIGHTS)
    loss.backward()
    same((loss, by_depth, list(stacked.grad), head.gradients()[0]), wanted)


def test_labels_of_each_depth_are_not_shifted(heads: Any) -> None:
    head, hidden, target = heads(), states(), labels(ROWS, LENGTH, masked=0.3)
    wanted = together(head, hidden, target, weights=WEIGHTS)
    own = []
    for shift in range(1, DEPTHS + 1):
        own.append(torch.cat([target[:, shift:], torch.full((ROWS, shift), -100)], dim=1))
    for given in (own, torch.stack(own)):
        twins = [one.detach().clone().requires_grad_() for one in hidden]
        same(together(head, twins, given, weights=WEIGHTS), wanted)


def test_losses_of_every_token(heads: Any) -> None:
    head, hidden, target = heads(), states(), labels(ROWS, LENGTH, masked=0.3)
    losses, sums = multi_token_cross_entropy(hidden, target, head.remote, reduction="none", shifts=[0, 2, 5])
    assert losses.shape == (DEPTHS, ROWS, LENGTH) and distance(sums, losses.sum((1, 2))) <= EXACT
    upstream = torch.randn(losses.shape)
    losses.backward(upstream)
    found = losses.detach(), [one.grad for one in hidden], head.gradients()[0]
    twins = [one.detach().clone().requires_grad_() for one in hidden]
    for one, shift, gradient, loss in zip(twins, [0, 2, 5], upstream, found[0], strict=True):
        own = linear_cross_entropy(one, target, head.remote, reduction="none", shift=shift)
        assert distance(loss, own) <= EXACT
        own.backward(gradient)
    same(found[1:], ([one.grad for one in twins], head.gradients()[0]))


@pytest.mark.parametrize("declared", [False, True])
def test_a_depth_without_tokens_counts_0(heads: Any, declared: bool) -> None:
    head, hidden = heads(), states(length=2)  # the last depth would predict the token behind the end
    target = torch.tensor([[3, 4]] * ROWS)
    more = {"grad_scale": 1.0} if declared else {}
    loss, by_depth = multi_token_cross_entropy(hidden, target, head.remote, weights=WEIGHTS, **more)
    loss.backward()
    wanted = linear_cross_entropy(hidden[0].detach(), target, head.remote, shift=1)
    assert by_depth.tolist()[1:] == [0.0, 0.0] and distance(loss, wanted) <= EXACT
    assert not any(bool(one.grad.any()) for one in hidden[1:]) and bool(torch.isfinite(hidden[0].grad).all())
    head.remote.zero_grad()


def test_without_gradients_nothing_is_added(heads: Any, passes: list[Any]) -> None:
    head = heads()
    with torch.no_grad():
        loss, _ = multi_token_cross_entropy(states(), labels(ROWS, LENGTH), head.remote)
    assert not loss.requires_grad and head.remote.head.info().window_tokens == 0 and seen(passes) == [("loss", False)]


def test_what_does_not_fit(heads: Any) -> None:
    head, hidden, target = heads().remote, states(), labels(ROWS, LENGTH)
    for options, message in [
        ({"weights": [1.0, 1.0]}, "weights has 2 entries"),
        ({"weights": [1.0, 1.0, float("nan")]}, "finite"),
        ({"weights": [1.0, 0.0, 1.0], "grad_scale": 1.0}, "weight 0"),
        ({"weights": 1.0, "reduction": "none"}, "weights"),
        ({"reduction": "median"}, "median"),
        ({"shifts": [1, 2]}, "shifts has 2 entries"),
        ({"normalizers": [1.0]}, "normalizers has 1 entries"),
        ({"normalizers": [1.0] * 3, "reduction": "sum"}, "normalizers"),
        ({"token_weights": torch.ones(LENGTH)}, "token_weights has shape"),
    ]:
        with pytest.raises(ValueError, match=message):
            multi_token_cross_entropy(hidden, target, head, **options)
    with pytest.raises(ValueError, match="target has shape"):
        multi_token_cross_entropy(hidden, target[:1], head)
    with pytest.raises(ValueError, match="one tensor for each depth"):
        multi_token_cross_entropy([hidden[0], hidden[1][:, 1:]], target, head)
    assert head.head.info().window_tokens == 0


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("declared", [None, 1.0])
def test_tokens_losses_beside_the_loss(heads: Any, reduction: str, declared: float | None) -> None:
    head, hidden, target = heads(), torch.randn(9, HIDDEN, requires_grad=True), labels(9, masked=0.3)
    declared = None if reduction == "none" else declared
    loss, values = linear_cross_entropy(
        hidden, target, head.remote, reduction=reduction, grad_scale=declared, return_values=["losses"]
    )
    losses = values["losses"]
    assert not losses.requires_grad and losses.shape == (9,)
    with torch.no_grad():
        wanted = linear_cross_entropy(hidden, target, head.remote, reduction="none")
    assert distance(losses, wanted) <= EXACT
    loss.sum().backward()
    weight = head.weight.double().requires_grad_()
    x = hidden.detach().double().requires_grad_()
    torch.nn.functional.cross_entropy(
        x @ weight.T, target, reduction="sum" if reduction != "mean" else "mean"
    ).backward()
    assert distance(hidden.grad, x.grad) <= 3e-6 and distance(head.gradients()[0], weight.grad) <= 3e-6
