"""lossd.torch.objectives with a server: a model with a remote head trains as the same model with a local one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from problem import HIDDEN, VOCABULARY, hidden_states, labels
from torch import Tensor, nn

import lossd
from lossd.torch import RemoteHead, linear_cross_entropy, token_log_probs
from lossd.torch.objectives import (
    dpo_loss,
    entropy_bonus,
    gkd_loss,
    grpo_loss,
    sequence_log_probs,
    topk_distillation_loss,
)

ROWS, TOKENS, STEPS = 8, 11, 6
FORWARD, BACKWARD = ("loss", False), ("gradients", True)


class Model(nn.Module):
    """Each position sees the mean of the tokens up to it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.layer = nn.Linear(HIDDEN, HIDDEN)
        self.lm_head: nn.Module = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def hidden(self, tokens: Tensor) -> Tensor:
        sums = self.embedding(tokens).cumsum(1)
        return torch.tanh(self.layer(sums / torch.arange(1, tokens.shape[1] + 1)[:, None])) * 2

    def log_probs(self, tokens: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.hidden(tokens)
        if isinstance(self.lm_head, RemoteHead):
            log_probs, entropy = token_log_probs(hidden, target, self.lm_head, entropy=True)
            return log_probs, entropy
        log_p = F.log_softmax(self.lm_head(hidden), -1)
        ignored = target == -100
        log_probs = log_p.gather(-1, target.clamp(min=0)[..., None])[..., 0]
        entropy = -(log_p.exp() * log_p).sum(-1)
        return log_probs.masked_fill(ignored, 0.0), entropy.masked_fill(ignored, 0.0)


def made(passes: list[Any]) -> list[tuple[str, bool]]:
    """What each was for, and whether dX came back."""
    return [(one.mode, one.dx) for one in passes]


def data(seed: int) -> tuple[Tensor, Tensor]:
    """Tokens and the labels of completions, each the token that comes next."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (ROWS, TOKENS + 1), generator=generator)
    target = tokens[:, 1:].clone()
    target[:, :3] = -100
    target[::2, -2:] = -100
    return tokens[:, :-1], target


def dpo_losses(model: Model, step: Callable[[Tensor], None]) -> list[Tensor]:
    """The rows' first half is preferred to the second."""
    losses = []
    reference = [model.log_probs(*data(seed))[0].detach() for seed in range(2)]
    for number in range(STEPS):
        tokens, target = data(number % 2)
        mask = target != -100
        log_probs, _ = model.log_probs(tokens, target)
        chosen, rejected = sequence_log_probs(log_probs, mask).chunk(2)
        ref_chosen, ref_rejected = sequence_log_probs(reference[number % 2], mask).chunk(2)
        losses.append(dpo_loss(chosen, rejected, ref_chosen, ref_rejected, beta=0.2))
        step(losses[-1])
    return losses


def grpo_losses(model: Model, step: Callable[[Tensor], None]) -> list[Tensor]:
    """Two steps on each batch of completions, with a reference, an entropy bonus and ratios that are clipped."""
    losses = []
    reference = [model.log_probs(*data(seed))[0].detach() for seed in range(STEPS // 2)]
    for number in range(STEPS):
        tokens, target = data(number // 2)
        mask = target != -100
        log_probs, entropy = model.log_probs(tokens, target)
        if number % 2 == 0:
            old = log_probs.detach()
        advantages = 0.5 + torch.randn(ROWS, generator=torch.Generator().manual_seed(number))
        loss = grpo_loss(
            log_probs, old, advantages, mask, ref_log_probs=reference[number // 2], beta=0.04, epsilon_high=0.28
        )
        losses.append(loss - 0.01 * entropy_bonus(entropy, mask))
        step(losses[-1])
    return losses


def train(model: Model, losses: Callable[..., list[Tensor]]) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)

    def step(loss: Tensor) -> None:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return [loss.item() for loss in losses(model, step)]


@pytest.mark.parametrize("losses", [dpo_losses, grpo_losses])
def test_a_remote_head_trains_as_a_local_one(
    client: lossd.Client, passes: list[Any], losses: Callable[..., list[Tensor]]
) -> None:
    local = Model()
    model = copy.deepcopy(local)
    name = f"objectives-{losses.__name__}"
    model.lm_head = RemoteHead.from_linear(client, model.lm_head, name, optimizer=lossd.SGD())
    before = client.traffic()
    got, want = train(model, losses), train(local, losses)
    sent = client.traffic().bytes_sent - before.bytes_sent
    assert got == pytest.approx(want, rel=1e-6)
    assert abs(got[-1] - got[0]) > 1e-3 * abs(got[0]), "it has learned something"
    torch.testing.assert_close(model.lm_head.read_weights()[0], local.lm_head.weight.detach(), rtol=1e-5, atol=1e-6)
    # Log-probabilities and entropies come from one pass; no token that does not count is sent in any.
    references = 2 if losses is dpo_losses else STEPS // 2
    assert made(passes) == [FORWARD] * references + [FORWARD, BACKWARD] * STEPS
    counted = int((data(0)[1] != -100).sum()) * HIDDEN * 4
    assert sent < 1.25 * counted * len(passes)
    model.lm_head.close()
    client.delete_head(name, discard_gradient=True)


def test_a_step_on_policy_in_one_pass(heads: Any, passes: list[Any]) -> None:
    """What docs/objectives.md says of completions that are used once: cross-entropy with weights has that gradient."""
    head, target = heads(), labels(4, 7, masked=0.3)
    states, advantages = hidden_states(4, 7), torch.randn(4)
    found = []
    for once in (False, True):
        hidden, mask = states.detach().clone().requires_grad_(), target != -100
        passes.clear()
        if once:
            linear_cross_entropy(
                hidden, target, head.remote, token_weights=advantages[:, None].expand(4, 7), grad_scale=1.0
            ).backward()
        else:
            grpo_loss(token_log_probs(hidden, target, head.remote), None, advantages, mask).backward()
        assert made(passes) == [BACKWARD] if once else [FORWARD, BACKWARD]
        found.append((hidden.grad, head.gradients()[0]))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-7)


def test_completions_without_an_advantage_are_not_sent_again(heads: Any) -> None:
    head, target = heads(), labels(4, 7)
    advantages = torch.tensor([0.0, 1.0, 0.0, -1.0])
    log_probs = token_log_probs(hidden_states(4, 7), target, head.remote)
    grpo_loss(log_probs, None, advantages, target != -100).backward()
    assert head.remote.head.info().window_tokens == 14


@pytest.mark.parametrize("declared", [None, 1.0])
def test_distillation_is_one_pass_if_its_gradient_is_known(
    heads: Any, passes: list[Any], declared: float | None
) -> None:
    teacher, target = heads(frozen=True), labels(9, masked=0.3)
    hidden = hidden_states(9)
    gkd_loss(hidden, target, heads().remote, teacher.remote, hidden_states(9), grad_scale=declared).backward()
    assert made(passes) == ([FORWARD, BACKWARD] if declared is None else [BACKWARD])
    assert hidden.grad[target != -100].any(-1).all() and not hidden.grad[target == -100].any()


@pytest.mark.parametrize("declared", [None, 1.0])
def test_distillation_of_a_top_k_is_one_pass_if_its_gradient_is_known(
    heads: Any, passes: list[Any], declared: float | None
) -> None:
    target, hidden = labels(9, masked=0.3), hidden_states(9)
    log_probs, ids = torch.randn(9, 61).log_softmax(-1).topk(4)
    topk_distillation_loss(
        hidden, target, heads().remote, ids, teacher_log_probs=log_probs, grad_scale=declared
    ).backward()
    assert made(passes) == ([FORWARD, BACKWARD] if declared is None else [BACKWARD])
    assert hidden.grad[target != -100].any(-1).all() and not hidden.grad[target == -100].any()


def test_a_mean_divergence_is_over_tokens_whatever_classes_weigh(heads: Any) -> None:
    teacher, target, states, of_teacher = heads(frozen=True), labels(9), hidden_states(9), hidden_states(9)
    losses = [
        gkd_loss(states, target, heads(**config).remote, teacher.remote, of_teacher)
        for config in ({}, {"class_weights": True})
    ]
    assert losses[0].item() > 0
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=0)


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"beta": 1.5}, ValueError, r"beta is 1.5; want a number in \[0, 1\]: 0 for the forward divergence"),
    ({"temperature": 0.0}, ValueError, "temperature is 0"),
    ({"teacher": 3}, TypeError, "teacher is a int; want a lossd.torch.RemoteHead, or the name of a head"),
    ({"teacher": "nobody"}, lossd.NotFoundError, "nobody"),
    ({"label_smoothing": 0.1}, TypeError, r"gkd_loss\(\) got an unexpected keyword argument 'label_smoothing'"),
    ({"teacher_input": torch.zeros(4, HIDDEN)}, ValueError, "hidden"),
]


@pytest.mark.parametrize(("given", "error", "message"), BAD, ids=[next(iter(case[0])) for case in BAD])
def test_bad_input_of_distillation(heads: Any, given: dict[str, Any], error: type[Exception], message: str) -> None:
    wanted = {"teacher": heads(frozen=True).remote, "teacher_input": hidden_states(9), **given}
    with pytest.raises(error, match=message):
        gkd_loss(hidden_states(9), labels(9), heads().remote, **wanted)
