"""token_log_probs: log-probabilities and entropies with gradients, against log_softmax in fp64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from problem import (
    HIDDEN,
    VOCABULARY,
    Reference,
    TestHead,
    check_weight_gradient,
    distance,
    hidden_states,
    labels,
    tolerance,
)
from torch import Tensor

from lossd.torch import linear_cross_entropy, token_log_probs

OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # name: (the head's configuration, token_log_probs' options)
    "plain": ({}, {}),
    "scale": ({}, {"logit_scale": 2.0}),
    "head_scale": ({"logit_scale": 0.5}, {}),
    "softcap": ({}, {"softcap": 3.0}),
    "no_softcap": ({"softcap": 5.0}, {"softcap": 0.0}),
    "bias": ({"bias": True}, {}),
    "no_bias": ({"bias": True}, {"bias": False}),
    "all": ({"bias": True, "softcap": 5.0, "logit_scale": 0.5, "class_weights": True}, {}),
}
Objective = Callable[[Tensor, Tensor], Tensor]


def reference_of(reference: Reference, target: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the labels and entropies, in fp64, 0 where tokens are ignored."""
    spec = reference.head.spec
    cap = options.get("softcap", spec.softcap)
    bias = None if options.get("bias") is False else reference.bias
    logits = F.linear(reference.x, reference.weight, bias) * options.get("logit_scale", spec.logit_scale)
    logits = cap * torch.tanh(logits / cap) if cap else logits
    log_p = logits.log_softmax(-1)
    ignored = target == -100
    log_probs = log_p.gather(-1, target.clamp(min=0)[..., None])[..., 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    return log_probs.masked_fill(ignored, 0.0), entropy.masked_fill(ignored, 0.0)


def check(head: TestHead, hidden: Tensor, target: Tensor, objective: Objective, **options: Any) -> None:
    """Both outputs are those of the reference, and so are dX, dW and db of objective(log_probs, entropy)."""
    found = token_log_probs(hidden, target, head.remote, entropy=True, **options)
    reference = Reference(head, hidden)
    wanted = reference_of(reference, target, **options)
    for output, want in zip(found, wanted, strict=True):
        assert output.dtype == torch.float32 and output.shape == target.shape and output.requires_grad
        assert distance(output, want) < 2e-6
    objective(*found).backward()
    objective(*wanted).backward()
    assert hidden.grad is not None and hidden.grad.dtype == hidden.dtype
    assert distance(hidden.grad, reference.x.grad) < tolerance(head, hidden)
    found_weight, found_bias = head.gradients()
    check_weight_gradient(head, found_weight, reference.weight.grad)
    if found_bias is not None and reference.bias.grad is not None:
        check_weight_gradient(head, found_bias, reference.bias.grad)


def policy(log_probs: Tensor, entropy: Tensor) -> Tensor:
    """As of a policy gradient with an entropy bonus."""
    generator = torch.Generator().manual_seed(1)
    advantages = torch.randn(log_probs.shape, generator=generator).to(log_probs.dtype)
    old = log_probs.detach() + 0.1 * torch.randn(log_probs.shape, generator=generator).to(log_probs.dtype)
    return -((log_probs - old).exp() * advantages).mean() - 0.3 * (entropy.square()).mean()


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_of_both(heads: Any, name: str) -> None:
    config, options = OPTIONS[name]
    check(heads(**config), hidden_states(3, 7), labels(3, 7, masked=0.3), policy, **options)


@pytest.mark.parametrize("input_dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("head_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(heads: Any, head_dtype: torch.dtype, input_dtype: torch.dtype) -> None:
    check(heads(dtype=head_dtype), hidden_states(11, dtype=input_dtype), labels(11, masked=0.2), policy)


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_entropy_alone(heads: Any, deterministic: bool) -> None:
    weights = torch.rand(9)
    head = heads(deterministic=deterministic)
    check(head, hidden_states(9), labels(9), lambda _, entropy: (entropy * weights).sum())


def test_log_probabilities_alone_send_no_gradients_of_entropies(heads: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import lossd

    sent: list[Any] = []
    compute = lossd.Session.compute

    def recorded(self: lossd.Session, *arguments: Any, **options: Any) -> Any:
        sent.append(options.get("entropy_gradients"))
        return compute(self, *arguments, **options)

    monkeypatch.setattr(lossd.Session, "compute", recorded)
    check(heads(), hidden_states(9), labels(9), lambda log_probs, _: log_probs.sum())
    assert sent == [None, None]
    check(heads(), hidden_states(9), labels(9), lambda log_probs, entropy: (log_probs + 0.0 * entropy).sum())
    assert sent[2:] == [None, None], "of zeros neither"


def test_both_passes_name_what_the_first_has_left(heads: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the head can keep it, and under another number in each batch; results are those of any head."""
    import lossd

    sent: list[Any] = []
    compute = lossd.Session.compute

    def recorded(self: lossd.Session, *arguments: Any, **options: Any) -> Any:
        sent.append(options["hold"])
        return compute(self, *arguments, **options)

    monkeypatch.setattr(lossd.Session, "compute", recorded)
    head = heads(held_bytes=1 << 20)
    assert head.remote.head.config.held_bytes == 1 << 20
    for _ in range(2):
        check(head, hidden_states(9), labels(9, masked=0.2), policy)
    first, again, second, also = sent
    assert first == again != 0 and second == also != 0 and first != second
    with torch.no_grad():
        token_log_probs(hidden_states(9), labels(9), head.remote)
    assert sent[4:] == [0], "no second pass comes of it"
    check(heads(), hidden_states(9), labels(9), policy)
    assert sent[5:] == [0, 0], "the head has no room"
    check(heads(held_hidden_bytes=1 << 16), hidden_states(9), labels(9), policy)
    assert sent[7] == sent[8] != 0, "its session has, for hidden states"


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("tokens_held", [9, 4])
def test_hidden_states_that_are_held_change_nothing(heads: Any, tokens_held: int, deterministic: bool) -> None:
    head = heads(held_hidden_bytes=4 * HIDDEN * tokens_held, deterministic=deterministic)
    assert head.remote.session.held_hidden_bytes == 4 * HIDDEN * tokens_held
    for _ in range(2):
        check(head, hidden_states(9), labels(9), policy)


def test_two_batches_between_their_passes(heads: Any) -> None:
    head = heads(held_hidden_bytes=1 << 16)
    first, second = hidden_states(9), hidden_states(7)
    target = labels(16)
    reference = Reference(head, torch.cat([first, second]).detach().requires_grad_())
    losses = [
        -token_log_probs(hidden, part, head.remote).sum()
        for hidden, part in ((first, target[:9]), (second, target[9:]))
    ]
    (2.0 * losses[0] + losses[1]).backward()
    log_probs, _ = reference_of(reference, target)
    (-2.0 * log_probs[:9].sum() - log_probs[9:].sum()).backward()
    assert distance(torch.cat([first.grad, second.grad]), reference.x.grad) < tolerance(head, first)
    check_weight_gradient(head, head.gradients()[0], reference.weight.grad)


def test_gradcheck(heads: Any) -> None:
    """Autograd's own check of the function: all gradients of all outputs, one by one, against differences."""
    head, target = heads(), labels(3)
    target[1] = -100
    hidden = (0.5 * torch.randn(3, 24, dtype=torch.float64)).requires_grad_()

    def function(hidden: Tensor) -> tuple[Tensor, ...]:
        log_probs, entropy = token_log_probs(hidden, target, head.remote, entropy=True)
        return log_probs.double(), entropy.double()

    # Values come in fp32.
    assert torch.autograd.gradcheck(function, (hidden,), eps=1e-2, atol=1e-3, rtol=1e-3)


def test_with_other_outputs_of_a_loss(heads: Any) -> None:
    """Upstream gradients for the loss, the log-sum-exp and the entropy at once, of a mean."""
    head, hidden, target = heads(), hidden_states(8), labels(8, masked=0.2)
    weights = torch.randn(8)
    loss, lse, entropy = linear_cross_entropy(
        hidden, target, head.remote, label_smoothing=0.1, return_lse=True, return_entropy=True
    )
    reference = Reference(head, hidden)
    wanted_loss, wanted_lse, _ = reference.losses(target, label_smoothing=0.1)
    _, wanted_entropy = reference_of(reference, target)
    assert distance(entropy, wanted_entropy) < 2e-6
    (1.5 * loss + (weights * lse).sum() + (weights.flip(0) * entropy).sum()).backward()
    (1.5 * wanted_loss + (weights * wanted_lse).sum() + (weights.flip(0) * wanted_entropy).sum()).backward()
    assert distance(hidden.grad, reference.x.grad) < tolerance(head, hidden)
    check_weight_gradient(head, head.gradients()[0], reference.weight.grad)


@pytest.mark.parametrize("declared", [1.0, 2.0])
def test_a_declared_loss_is_corrected(heads: Any, declared: float) -> None:
    head, hidden, target = heads(), hidden_states(8), labels(8)
    loss, entropy = linear_cross_entropy(hidden, target, head.remote, grad_scale=declared, return_entropy=True)
    reference = Reference(head, hidden)
    wanted_loss, _, _ = reference.losses(target)
    _, wanted_entropy = reference_of(reference, target)
    (loss - 0.1 * entropy.sum()).backward()
    (wanted_loss - 0.1 * wanted_entropy.sum()).backward()
    assert distance(hidden.grad, reference.x.grad) < tolerance(head, hidden)
    check_weight_gradient(head, head.gradients()[0], reference.weight.grad, slack=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_has_the_same_numbers_beside_any_others(heads: Any, dtype: torch.dtype) -> None:
    """A sampler computes it in a small batch, a trainer in a large one: a ratio of the two has to be 1."""
    head, hidden, target = heads(dtype=dtype), hidden_states(37), labels(37)
    with torch.no_grad():
        log_probs, entropy = token_log_probs(hidden, target, head.remote, entropy=True)
        logits = head.remote.logits(hidden)
        for size in (1, 5, 36):
            for order in (torch.arange(37), torch.arange(37).flip(0)):
                for part in order.split(size):
                    found = token_log_probs(hidden[part], target[part], head.remote, entropy=True)
                    assert torch.equal(found[0], log_probs[part]) and torch.equal(found[1], entropy[part])
                    assert torch.equal(head.remote.logits(hidden[part]), logits[part])


def test_clipped_tokens_cost_nothing_in_backward(heads: Any) -> None:
    head, hidden, target = heads(), hidden_states(10), labels(10)
    kept = torch.tensor([1, 0, 0, 1, 0, 0, 0, 1, 0, 1])
    log_probs, entropy = token_log_probs(hidden, target, head.remote, entropy=True)
    (kept * (log_probs + 0.1 * entropy)).sum().backward()
    assert torch.equal(hidden.grad.abs().sum(1) > 0, kept.bool())
    assert head.remote.head.info().window_tokens == 4, "the others were not even sent"
    found = head.gradients()[0]
    log_probs, entropy = token_log_probs(hidden[kept.bool()], target[kept.bool()], head.remote, entropy=True)
    (log_probs + 0.1 * entropy).sum().backward()
    torch.testing.assert_close(found, head.gradients()[0], rtol=0, atol=0)


@pytest.mark.parametrize("of_entropy", [False, True])
def test_upstream_gradients_that_are_not_finite(heads: Any, of_entropy: bool) -> None:
    head, hidden, target = heads(), hidden_states(5), labels(5)
    factors = torch.tensor([1.0, math.nan, 1.0, math.inf, 0.0])
    log_probs, entropy = token_log_probs(hidden, target, head.remote, entropy=True)
    ((entropy if of_entropy else log_probs) * factors).sum().backward()
    assert hidden.grad.isnan().any(1).tolist() == [False, True, False, True, False]
    assert head.remote.proxy.marker.isnan().all()
    assert head.gradients()[0].isfinite().all(), "nothing of them was added"


@pytest.mark.parametrize("entropy", [False, True])
def test_values_of_tokens(heads: Any, entropy: bool) -> None:
    head, hidden, target = heads(), hidden_states(4, 6), labels(4, 6, masked=0.3)
    log_probs, *more, values = token_log_probs(
        hidden,
        target,
        head.remote,
        entropy=entropy,
        return_values=("accuracy", "target_ranks", "entropies"),
        top_k=3,
    )
    assert len(more) == entropy and log_probs.requires_grad
    assert set(values) == {"accuracy", "target_ranks", "entropies", "top_tokens", "top_log_probabilities"}
    assert not any(value.requires_grad for value in values.values())
    counted, log_p = target != -100, head.remote.logits(hidden, dtype="float32").log_softmax(-1)
    right = (log_p.argmax(-1) == target)[counted]
    torch.testing.assert_close(values["accuracy"], right.float().mean())
    best = log_p.topk(3)
    assert torch.equal(values["top_tokens"][counted].long(), best.indices[counted])
    torch.testing.assert_close(values["top_log_probabilities"][counted], best.values[counted], rtol=1e-5, atol=1e-5)
    own = log_p.gather(-1, target.clamp(min=0)[..., None])
    assert torch.equal(values["target_ranks"][counted].long(), (log_p > own).sum(-1)[counted])
    if entropy:
        torch.testing.assert_close(values["entropies"], more[0].detach(), rtol=0, atol=0)
        more[0].sum().backward()
        assert hidden.grad.isfinite().all() and hidden.grad.any()


def test_shift_and_no_grad(heads: Any) -> None:
    head, hidden, target = heads(), hidden_states(2, 6), labels(2, 6)
    with torch.no_grad():
        log_probs, values = token_log_probs(hidden, target, head.remote, shift=True, return_values=["accuracy"])
    assert not log_probs.requires_grad and not log_probs[:, -1].any()
    log_p = head.remote.logits(hidden, dtype="float32").log_softmax(-1)[:, :-1]
    wanted = log_p.gather(-1, target[:, 1:, None])[..., 0]
    torch.testing.assert_close(log_probs[:, :-1], wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(values["accuracy"], (log_p.argmax(-1) == target[:, 1:]).float().mean())
    assert not head.gradients()[0].any()


def test_in_a_graph(heads: Any) -> None:
    head, hidden, target = heads(), hidden_states(9), labels(9, masked=0.2)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(hidden: Tensor) -> Tensor:
        log_probs, entropy = token_log_probs(hidden * 1.0, target, head.remote, entropy=True)
        return policy_of(log_probs, entropy)

    def policy_of(log_probs: Tensor, entropy: Tensor) -> Tensor:
        return (log_probs.exp() * 0.7).sum() + (entropy * entropy).sum()

    step(hidden).backward()
    reference = Reference(head, hidden)
    policy_of(*reference_of(reference, target)).backward()
    assert distance(hidden.grad, reference.x.grad) < tolerance(head, hidden)
    check_weight_gradient(head, head.gradients()[0], reference.weight.grad)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"return_values": "accuracy"}, TypeError, "return_values is 'accuracy'; want a collection of names"),
        ({"return_values": ["best"]}, ValueError, "return_values names 'best'; there are"),
        ({"top_k": 65}, ValueError, "top_k is 65; want an integer from 1 to 64"),
        ({"reduction": "mean"}, TypeError, "unexpected keyword argument 'reduction'"),
    ],
)
def test_wrong_arguments(heads: Any, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        token_log_probs(hidden_states(3), labels(3), heads().remote, **options)


def test_labels_are_any_of_the_vocabulary(heads: Any) -> None:
    check(heads(), hidden_states(4), torch.tensor([0, VOCABULARY - 1, 0, VOCABULARY - 1]), policy)
