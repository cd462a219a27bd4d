"""kept_tokens: losses, log-probabilities and entropies over lists of tokens, against a masked log_softmax in fp64."""

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
from lossd.torch import linear_cross_entropy, token_log_probs

Lists = tuple[Tensor, Tensor]


def keep(target: Tensor, share: float = 0.3) -> tuple[Lists, Tensor]:
    """Lists of each label and about `share` of the other tokens, in any order; and the same as a mask [N, V]."""
    flat = target.reshape(-1)
    mask = torch.rand(len(flat), VOCABULARY) < share
    valid = flat >= 0
    mask[valid, flat[valid]] = True
    mask[~valid] = False
    rows = [torch.nonzero(row)[:, 0][torch.randperm(int(row.sum()))] for row in mask]
    offsets = torch.tensor([0, *(len(row) for row in rows)]).cumsum(0)
    return (offsets, torch.cat(rows)), mask


def masked(reference: Reference, mask: Tensor, target: Tensor, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities, entropies and log-sum-exps; 0 where tokens are ignored."""
    spec = reference.head.spec
    logits = F.linear(reference.x, reference.weight, reference.bias) * options.get("logit_scale", spec.logit_scale)
    cap = options.get("softcap", spec.softcap)
    logits = cap * torch.tanh(logits / cap) if cap else logits
    ignored = target < 0
    kept = mask.reshape(*target.shape, VOCABULARY) | ignored[..., None]
    log_p = logits.masked_fill(~kept, -torch.inf).log_softmax(-1)
    finite = log_p.masked_fill(~kept, 0.0)
    log_probs = finite.gather(-1, target.clamp(min=0)[..., None])[..., 0]
    entropy = -(log_p.exp() * finite).sum(-1)
    lse = logits.masked_fill(~kept, -torch.inf).logsumexp(-1)
    return tuple(one.masked_fill(ignored, 0.0) for one in (log_probs, entropy, lse))  # type: ignore[return-value]


def policy(log_probs: Tensor, entropy: Tensor) -> Tensor:
    advantages = torch.linspace(-1, 2, log_probs.numel()).reshape(log_probs.shape).to(log_probs.dtype)
    return -(log_probs.exp() * advantages).mean() - 0.3 * entropy.square().mean()


@pytest.mark.parametrize("name", LIST_CONFIGS)
def test_log_probabilities_of_a_kept_set(heads: Any, name: str) -> None:
    config, options = LIST_CONFIGS[name]
    head: TestHead = heads(**config)
    hidden, target = hidden_states(3, 7), labels(3, 7, masked=0.3)
    lists, mask = keep(target)
    found = token_log_probs(hidden, target, head.remote, entropy=True, kept_tokens=lists, **options)
    reference = Reference(head, hidden)
    wanted = masked(reference, mask, target, **options)
    for output, want in zip(found, wanted[:2], strict=True):
        assert output.shape == target.shape and output.requires_grad
        assert distance(output, want) < 2e-6
    policy(*found).backward()
    policy(*wanted[:2]).backward()
    assert distance(hidden.grad, reference.x.grad) < tolerance(head, hidden)
    weight, bias = head.gradients()
    check_weight_gradient(head, weight, reference.weight.grad)
    if bias is not None:
        check_weight_gradient(head, bias, reference.bias.grad)


@pytest.mark.parametrize("declared", [None, 1.0, 2.0])
def test_a_mean_loss_with_a_z_loss(heads: Any, declared: float | None) -> None:
    head, hidden, target = heads(), hidden_states(8), labels(8, masked=0.2)
    lists, mask = keep(target)
    loss, lse = linear_cross_entropy(
        hidden, target, head.remote, lse_square_scale=0.1, return_lse=True, kept_tokens=lists, grad_scale=declared
    )
    reference = Reference(head, hidden)
    log_probs, _, wanted_lse = masked(reference, mask, target)
    wanted = (0.1 * wanted_lse.square() - log_probs).sum() / (target >= 0).sum()
    assert distance(loss, wanted) < 2e-6 and distance(lse, wanted_lse) < 2e-6
    loss.backward()
    wanted.backward()
    assert distance(hidden.grad, reference.x.grad) < tolerance(head, hidden)
    check_weight_gradient(head, head.gradients()[0], reference.weight.grad)


def test_gradcheck(heads: Any) -> None:
    head, target = heads(), labels(3)
    target[1] = -100
    lists, _ = keep(target)
    hidden = (0.5 * torch.randn(3, 24, dtype=torch.float64)).requires_grad_()

    def function(hidden: Tensor) -> tuple[Tensor, ...]:
        log_probs, entropy = token_log_probs(hidden, target, head.remote, entropy=True, kept_tokens=lists)
        return log_probs.double(), entropy.double()

    assert torch.autograd.gradcheck(function, (hidden,), eps=1e-2, atol=1e-3, rtol=1e-3)


def test_in_a_compiled_function(heads: Any) -> None:
    head, hidden, target = heads(), hidden_states(5), labels(5)
    lists, mask = keep(target)
    loss = torch.compile(
        lambda hidden: linear_cross_entropy(hidden, target, head.remote, kept_tokens=lists), backend="eager"
    )(hidden)
    reference = Reference(head, hidden)
    assert distance(loss, -masked(reference, mask, target)[0].mean()) < 2e-6


def test_what_is_refused(heads: Any) -> None:
    head, hidden, target = heads(), hidden_states(4), labels(4)
    (offsets, ids), _ = keep(target)
    with pytest.raises(TypeError, match="not a pair"):
        linear_cross_entropy(hidden, target, head.remote, kept_tokens=offsets)
    with pytest.raises(TypeError, match="ids of torch.float32"):
        linear_cross_entropy(hidden, target, head.remote, kept_tokens=(offsets, ids.float()))
    with pytest.raises(ValueError, match="want \\(5,\\)"):
        linear_cross_entropy(hidden, target, head.remote, kept_tokens=(offsets[:-1], ids))
    with pytest.raises(ValueError, match="beyond int32"):
        linear_cross_entropy(hidden, target, head.remote, kept_tokens=(offsets, ids + 2**40))
    with pytest.raises(lossd.InvalidArgumentError, match="label_smoothing is 0.1"):
        linear_cross_entropy(hidden, target, head.remote, kept_tokens=(offsets, ids), label_smoothing=0.1)
    wrong = ids.clone()
    wrong[0] = VOCABULARY
    with pytest.raises(lossd.InvalidArgumentError, match="ids\\[0\\] is 61"):
        linear_cross_entropy(hidden, target, head.remote, kept_tokens=(offsets, wrong))


def test_the_bits_of_a_deterministic_session_are_the_same_in_any_cut(heads: Any) -> None:
    head, hidden, target = heads(deterministic=True), hidden_states(40), labels(40, masked=0.2)
    (offsets, ids), mask = keep(target)

    def lists(first: int, last: int) -> dict[str, Any]:
        return {"kept_tokens": (offsets[first : last + 1] - offsets[first], ids[offsets[first] : offsets[last]])}

    gradient = weight_gradient_in_any_cut(head, hidden, target, lists)
    reference = Reference(head, hidden)
    (-masked(reference, mask, target)[0]).sum().backward()
    check_weight_gradient(head, gradient, reference.weight.grad)
