"""target_lists: soft targets on lists of tokens, against the same divergence in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from problem import (
    LIST_CONFIGS,
    VOCABULARY,
    Reference,
    TestHead,
    check_weight_gradient,
    distance,
    hidden_states,
    labels,
    tolerance,
    weight_gradient_in_any_cut,
)
from torch import Tensor

import lossd
from lossd.torch import linear_cross_entropy
from lossd.torch.objectives import topk_distillation_loss


def teach(target: Tensor, *, most: float = 0.8, **weights: float) -> tuple[lossd.TargetLists, Tensor, Tensor]:
    """Lists of about a quarter of all tokens, in any order; and the same as probabilities [..., V] and a mask. Those of
    every third token add up to 1, of the others to `most`. Half of the ignored tokens have no list."""
    flat = target.reshape(-1)
    mask = torch.rand(len(flat), VOCABULARY) < 0.25
    mask[:, 7] = True
    mask[(flat < 0) & (torch.arange(len(flat)) % 2 == 0)] = False
    probabilities = torch.rand(len(flat), VOCABULARY).masked_fill(~mask, 0.0)
    sums = torch.where(torch.arange(len(flat)) % 3 == 0, 1.0, most)
    probabilities *= (sums / probabilities.sum(-1).clamp(min=1e-6))[:, None]
    rows = [torch.nonzero(row)[:, 0][torch.randperm(int(row.sum()))] for row in mask]
    offsets = torch.tensor([0, *(len(row) for row in rows)]).cumsum(0)
    listed = torch.cat([probabilities[i, row] for i, row in enumerate(rows)])
    shape = (*target.shape, VOCABULARY)
    lists = lossd.TargetLists(offsets, torch.cat(rows), listed, **weights)
    return lists, probabilities.double().reshape(shape), mask.reshape(shape)


def divergence(reference: Reference, probabilities: Tensor, mask: Tensor, target: Tensor, **options: Any) -> Tensor:
    """D of each token; 0 where tokens are ignored."""
    spec = reference.head.spec
    logits = F.linear(reference.x, reference.weight, reference.bias) * options.get("logit_scale", spec.logit_scale)
    cap = options.get("softcap", spec.softcap)
    logits = cap * torch.tanh(logits / cap) if cap else logits
    log_p = logits.log_softmax(-1)
    listed = (torch.xlogy(probabilities, probabilities) - probabilities * log_p).sum(-1)
    rest = (1 - probabilities.sum(-1)).clamp(min=0)
    others = (1 - log_p.exp().where(mask, 0.0).sum(-1)).clamp(min=2.0**-16)
    return (listed + torch.xlogy(rest, rest) - rest * others.log()).masked_fill(target < 0, 0.0)


@pytest.mark.parametrize("name", LIST_CONFIGS)
def test_losses_of_each_token(heads: Any, name: str) -> None:
    config, options = LIST_CONFIGS[name]
    head: TestHead = heads(**config)
    hidden, target = hidden_states(3, 7), labels(3, 7, masked=0.3)
    lists, probabilities, mask = teach(target)
    found = linear_cross_entropy(hidden, target, head.remote, reduction="none", target_lists=lists, **options)
    reference = Reference(head, hidden)
    wanted = divergence(reference, probabilities, mask, target, **options)
    assert found.shape == target.shape and distance(found, wanted) < 3e-6
    upstream = torch.linspace(-1, 2, 21).reshape(3, 7)
    (found * upstream).sum().backward()
    (wanted * upstream).sum().backward()
    assert distance(hidden.grad, reference.x.grad) < tolerance(head, hidden)
    weight, bias = head.gradients()
    check_weight_gradient(head, weight, reference.weight.grad)
    if bias is not None:
        check_weight_gradient(head, bias, reference.bias.grad)


@pytest.mark.parametrize("declared", [None, 1.0, 2.0])
def test_a_mean_with_labels_and_a_z_loss(heads: Any, declared: float | None) -> None:
    head, hidden, target = heads(), hidden_states(8), labels(8, masked=0.2)
    lists, probabilities, mask = teach(target, weight=0.5, label_weight=0.25)
    loss, lse = linear_cross_entropy(
        hidden, target, head.remote, lse_square_scale=0.1, return_lse=True, target_lists=lists, grad_scale=declared
    )
    reference = Reference(head, hidden)
    tokens, wanted_lse, z_losses = reference.losses(target, reduction="none", lse_square_scale=0.1)
    kl = divergence(reference, probabilities, mask, target)
    wanted = (0.25 * (tokens - z_losses) + 0.5 * kl + z_losses).sum() / (target >= 0).sum()
    assert distance(loss, wanted) < 3e-6 and distance(lse, wanted_lse) < 2e-6
    loss.backward()
    wanted.backward()
    assert distance(hidden.grad, reference.x.grad) < tolerance(head, hidden)
    check_weight_gradient(head, head.gradients()[0], reference.weight.grad)


def test_gradcheck(heads: Any) -> None:
    head, target = heads(), labels(3)
    target[1] = -100
    lists, *_ = teach(target)
    hidden = (0.5 * torch.randn(3, 24, dtype=torch.float64)).requires_grad_()

    def function(hidden: Tensor) -> Tensor:
        losses = linear_cross_entropy(hidden, target, head.remote, reduction="none", target_lists=lists)
        assert isinstance(losses, Tensor)
        return losses.double()

    assert torch.autograd.gradcheck(function, (hidden,), eps=1e-2, atol=1e-3, rtol=1e-3)


def test_with_shifted_labels_and_a_top_k(heads: Any) -> None:
    head, hidden, target = heads(), hidden_states(2, 6), labels(2, 6)
    shifted = torch.cat([target[:, 1:], torch.full((2, 1), -100)], 1)
    lists, probabilities, mask = teach(shifted)
    losses, values = linear_cross_entropy(
        hidden, target, head.remote, shift=True, reduction="none", top_k=3, target_lists=lists
    )
    reference = Reference(head, hidden)
    assert distance(losses, divergence(reference, probabilities, mask, shifted)) < 3e-6
    best = F.linear(reference.x, reference.weight).topk(3).indices
    assert torch.equal(values["top_tokens"][:, :5].long(), best[:, :5])


def test_divergences_of_a_session(heads: Any) -> None:
    head, hidden, target = heads(), hidden_states(9), labels(9, masked=0.3)
    lists, probabilities, mask = teach(target, weight=0.5)
    lists = lossd.TargetLists(
        lists.offsets.numpy().astype("int32"), lists.ids.numpy().astype("int16"), lists.probabilities.double(), 0.5
    )
    result = head.remote.session.compute(
        hidden.detach(), target, mode="loss", target_lists=lists, returns={"divergences"}
    )
    wanted = divergence(Reference(head, hidden), probabilities, mask, target)
    assert distance(result.divergences, wanted) < 3e-6 and distance(result.losses, 0.5 * wanted) < 3e-6
    assert result.divergence_sum == pytest.approx(float(wanted.sum()), rel=1e-5)


def test_in_a_compiled_function(heads: Any) -> None:
    head, hidden, target = heads(), hidden_states(5), labels(5)
    lists, probabilities, mask = teach(target)
    loss = torch.compile(
        lambda hidden: linear_cross_entropy(hidden, target, head.remote, target_lists=lists), backend="eager"
    )(hidden)
    assert distance(loss, divergence(Reference(head, hidden), probabilities, mask, target).mean()) < 3e-6


def test_what_is_refused(heads: Any) -> None:
    head, hidden, target = heads(), hidden_states(4), labels(4)
    lists, *_ = teach(target)
    offsets, ids, probabilities = lists.offsets, lists.ids, lists.probabilities

    def refused(error: type[Exception], message: str, *given: Any, **options: Any) -> None:
        with pytest.raises(error, match=message):
            linear_cross_entropy(hidden, target, head.remote, target_lists=lossd.TargetLists(*given), **options)

    with pytest.raises(TypeError, match="target_lists is a tuple; want lossd.TargetLists"):
        linear_cross_entropy(hidden, target, head.remote, target_lists=(offsets, ids, probabilities))
    refused(TypeError, "offsets of torch.float32", offsets.float(), ids, probabilities)
    refused(TypeError, "ids of list", offsets, ids.tolist(), probabilities)
    refused(TypeError, "probabilities of torch.int64", offsets, ids, ids)
    refused(ValueError, "want \\(5,\\)", offsets[:-1], ids, probabilities)
    refused(ValueError, "target_lists.weight is NaN", offsets, ids, probabilities, float("nan"))
    refused(ValueError, "target_lists.probabilities has shape", offsets, ids, probabilities[:-1])
    bad = lossd.InvalidArgumentError
    refused(bad, "must be equal", offsets, ids[:-1], probabilities[:-1])
    refused(bad, "target_lists.weight is -1", offsets, ids, probabilities, -1.0)
    refused(bad, "target_lists.label_weight is inf", offsets, ids, probabilities, 1.0, float("inf"))
    refused(bad, "probabilities", offsets, ids, -probabilities)
    refused(bad, "probabilities", offsets, ids, 2 * probabilities)
    refused(bad, "probabilities", offsets, ids, probabilities * float("nan"))
    refused(bad, "kept_tokens and target_lists", offsets, ids, probabilities, kept_tokens=(offsets, ids))
    refused(bad, "label_smoothing", offsets, ids, probabilities, label_smoothing=0.1)
    refused(bad, "offsets", torch.zeros(5, dtype=torch.int64), ids[:0], probabilities[:0])
    wrong = ids.clone()
    wrong[0] = VOCABULARY
    refused(bad, "ids\\[0\\] is 61", offsets, wrong, probabilities)


def test_the_bits_of_a_deterministic_session_are_the_same_in_any_cut(heads: Any) -> None:
    head, hidden, target = heads(deterministic=True), hidden_states(40), labels(40, masked=0.2)
    whole, probabilities, mask = teach(target)

    def lists(first: int, last: int) -> dict[str, Any]:
        begin, end = int(whole.offsets[first]), int(whole.offsets[last])
        offsets = whole.offsets[first : last + 1] - begin
        return {"target_lists": lossd.TargetLists(offsets, whole.ids[begin:end], whole.probabilities[begin:end])}

    gradient = weight_gradient_in_any_cut(head, hidden, target, lists)
    reference = Reference(head, hidden)
    divergence(reference, probabilities, mask, target).sum().backward()
    check_weight_gradient(head, gradient, reference.weight.grad)


def top_k(target: Tensor, k: int = 6) -> tuple[Tensor, Tensor]:
    """Ids and log-probabilities of a teacher, filled up with -1 and -inf where a token has fewer."""
    log_probs, ids = (2 * torch.randn(*target.shape, VOCABULARY)).log_softmax(-1).topk(k)
    fewer = torch.rand(*target.shape)[..., None] * k < torch.arange(k)
    fewer[..., 0] = False
    return ids.masked_fill(fewer, -1), log_probs.masked_fill(fewer, -torch.inf)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("rest", ["one", "renormalized"])
@pytest.mark.parametrize("logs", [True, False])
def test_topk_distillation(heads: Any, rest: str, temperature: float, logs: bool) -> None:
    head: TestHead = heads(softcap=4.0, logit_scale=0.5)
    hidden, target = hidden_states(3, 7), labels(3, 7, masked=0.3)
    ids, log_probs = top_k(target)
    values = log_probs.masked_fill((target < 0)[..., None], torch.nan)  # which do not matter
    given = {"teacher_log_probs": values} if logs else {"teacher_probabilities": values.exp()}
    found = topk_distillation_loss(
        hidden, target, head.remote, ids, rest=rest, temperature=temperature, grad_scale=1.0, **given
    )
    mask = torch.zeros(*target.shape, VOCABULARY + 1, dtype=torch.bool)
    mask = mask.scatter(-1, ids.where(ids >= 0, VOCABULARY), True)[..., :-1]
    dense = torch.zeros(*target.shape, VOCABULARY + 1, dtype=torch.float64)
    dense = dense.scatter_add(-1, ids.where(ids >= 0, VOCABULARY), log_probs.double().exp())[..., :-1]
    dense = dense / dense.sum(-1, keepdim=True) if rest == "renormalized" else dense
    reference = Reference(head, hidden)
    at = {"logit_scale": 0.5 / temperature, "softcap": 4.0 / temperature}
    wanted = divergence(reference, dense, mask, target, **at).sum() / (target >= 0).sum()
    assert distance(found, wanted) < 5e-6
    found.backward()
    wanted.backward()
    assert distance(hidden.grad, reference.x.grad) < tolerance(head, hidden)
    check_weight_gradient(head, head.gradients()[0], reference.weight.grad)


@pytest.mark.parametrize("rest", ["one", "renormalized"])
def test_topk_of_bfloat16_may_add_up_to_more_than_one(heads: Any, rest: str) -> None:
    head, hidden, target = heads(), hidden_states(2), torch.tensor([3, 5])
    ids = torch.tensor([[4, 9], [2, 7]])
    log_probs = torch.tensor([[0.5, 0.5], [0.9981, 0.0019]]).log().bfloat16()
    assert (log_probs.float().exp().sum(-1) > 1.001).any()
    found = topk_distillation_loss(hidden, target, head.remote, ids, teacher_log_probs=log_probs, rest=rest)
    values = log_probs.float().exp().double()
    dense = torch.zeros(2, VOCABULARY, dtype=torch.float64).scatter(-1, ids, values / values.sum(-1, keepdim=True))
    wanted = divergence(Reference(head, hidden), dense, dense > 0, target).mean()
    assert distance(found, wanted) < 2e-3
