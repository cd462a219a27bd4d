"""lossd.torch.objectives by themselves: gradients, tokens that do not count, bad input. What TRL computes on the same
numbers is in tests/integrations/test_objectives_trl.py."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import nightly
from torch import Tensor

from lossd.torch.objectives import (
    dpo_loss,
    entropy_bonus,
    grpo_loss,
    kto_loss,
    orpo_loss,
    ppo_loss,
    sequence_log_probs,
    simpo_loss,
    topk_distillation_loss,
)

ROWS, TOKENS = 3, 5
MASK = torch.tensor([[1, 1, 1, 0, 0], [0, 1, 1, 1, 1], [1, 0, 1, 1, 0]]).bool()
LIKED = torch.tensor([True, False, True])


def numbers(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def log_probabilities(seed: int, *shape: int) -> Tensor:
    return -numbers(*(shape or (ROWS, TOKENS)), seed=seed).abs() - 0.05


POLICY = log_probabilities(1)
OLD = POLICY + numbers(ROWS, TOKENS, seed=2, scale=0.5)
REFERENCE = POLICY + numbers(ROWS, TOKENS, seed=3, scale=0.5)
ADVANTAGES = numbers(ROWS, seed=4)
OF_TOKENS = numbers(ROWS, TOKENS, seed=5)
SUMS = log_probabilities(6, ROWS)

# Functions of log-probabilities [ROWS, TOKENS], whatever they are made of.
OF_MASKED: dict[str, Callable[[Tensor], Tensor]] = {
    "sums": lambda p: sequence_log_probs(p, MASK).square().sum(),
    "averages": lambda p: sequence_log_probs(p, MASK, average=True).square().sum(),
    "dapo": lambda p: grpo_loss(p, OLD, ADVANTAGES, MASK, ref_log_probs=REFERENCE, beta=0.2, epsilon_high=0.3),
    "on_policy": lambda p: grpo_loss(p, None, ADVANTAGES, MASK),
    "dr_grpo": lambda p: grpo_loss(p, OLD, OF_TOKENS, MASK, loss_type="dr_grpo", max_completion_length=9, delta=1.4),
    "gspo": lambda p: grpo_loss(
        p, OLD, ADVANTAGES, MASK, ref_log_probs=REFERENCE, beta=0.2, loss_type="grpo",
        importance_sampling_level="sequence",
    ),
    "gspo_of_tokens": lambda p: grpo_loss(p, OLD, OF_TOKENS, MASK, importance_sampling_level="sequence"),
    "ppo": lambda p: ppo_loss(p, OLD, OF_TOKENS, MASK),
    "entropy": lambda p: entropy_bonus(p, MASK),
}  # fmt: skip
# And of log-probabilities of sequences [ROWS].
OF_SEQUENCES: dict[str, Callable[[Tensor], Tensor]] = {
    "dpo": lambda p: dpo_loss(p, 2 * p.flip(0), SUMS, SUMS.flip(0)),
    "ipo": lambda p: dpo_loss(p, 2 * p.flip(0), SUMS, SUMS.flip(0), loss_type="ipo"),
    "kto": lambda p: kto_loss(p, SUMS, LIKED, 0.3, desirable_weight=2.0),
    "orpo": lambda p: orpo_loss(p, 2 * p.flip(0), -p.mean()),
    "simpo": lambda p: simpo_loss(p, 2 * p.flip(0)),
}


@pytest.mark.parametrize(
    "name", sorted(OF_MASKED.keys() - {"on_policy"})
)  # differences see no policy that stays behind
def test_gradients_of_tokens(name: str) -> None:
    assert torch.autograd.gradcheck(OF_MASKED[name], POLICY.clone().requires_grad_())


@pytest.mark.parametrize("name", OF_SEQUENCES)
def test_gradients_of_sequences(name: str) -> None:
    values = torch.tensor([-0.01, -0.6, -7.0], dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(OF_SEQUENCES[name], values)


def test_the_gradient_on_policy_is_the_advantage() -> None:
    values = POLICY.clone().requires_grad_()
    loss = grpo_loss(values, None, ADVANTAGES, MASK)
    loss.backward()
    factors = (-ADVANTAGES[:, None] * MASK / MASK.sum()).double()
    torch.testing.assert_close(values.grad, factors)
    torch.testing.assert_close(loss.detach(), factors.sum())


def test_what_the_model_does_not_compute_gets_no_gradient() -> None:
    tokens = [one.clone().requires_grad_() for one in (POLICY, OLD, OF_TOKENS, REFERENCE)]
    sums = [(number * SUMS).requires_grad_() for number in (1, 2, 3, 4)]
    kl = torch.tensor(0.3).requires_grad_()
    loss = grpo_loss(tokens[0], tokens[1], tokens[2], MASK, ref_log_probs=tokens[3], beta=0.2)
    (loss + dpo_loss(*sums) + kto_loss(sums[0], sums[2], LIKED, kl)).backward()
    with_gradient = [one for one in (*tokens, *sums, kl) if one.grad is not None and one.grad.any()]
    assert [id(one) for one in with_gradient] == [id(one) for one in (tokens[0], sums[0], sums[1])]


@pytest.mark.parametrize("padding", [math.nan, math.inf, -1e9])
@pytest.mark.parametrize("name", OF_MASKED)
def test_tokens_that_do_not_count_do_not_matter(name: str, padding: float, monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> tuple[Tensor, Tensor]:
        values = POLICY.clone()
        values[~MASK] = padding_now
        values.requires_grad_()
        loss = OF_MASKED[name](values)
        loss.backward()
        return loss.detach(), values.grad

    padding_now = 0.0
    want = run()
    padding_now = padding
    for other in ("OLD", "REFERENCE", "OF_TOKENS"):
        monkeypatch.setitem(globals(), other, globals()[other].masked_fill(~MASK, padding))
    got = run()
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert not got[1][~MASK].any(), "which is what spares the server their gradients"


def test_clipped_tokens_get_no_gradient() -> None:
    ratios = torch.tensor([[0.5, 1.0, 2.0, 9.0]])
    cases: list[tuple[float, dict[str, Any], list[float]]] = [
        # The advantage, the options, by how much of the ratio each token's gradient moves it.
        (1.0, {}, [1, 1, 0, 0]),
        (-1.0, {}, [0, 1, 1, 1]),
        (1.0, {"epsilon": 0.2, "epsilon_high": 2.0}, [1, 1, 1, 0]),
        (-1.0, {"epsilon": 0.6}, [1, 1, 1, 1]),
        (-1.0, {"delta": 3.0}, [0, 1, 1, 0]),
        (1.0, {"delta": 3.0}, [1, 1, 0, 0]),
    ]
    for advantage, options, moves in cases:
        values = ratios.log().requires_grad_()
        mask = torch.ones(1, 4, dtype=torch.int64)
        grpo_loss(values, torch.zeros(1, 4), torch.tensor([advantage]), mask, normalizer=1, **options).backward()
        torch.testing.assert_close(values.grad, -advantage * ratios * torch.tensor([moves]))


def test_odds_of_certain_and_of_hopeless_sequences() -> None:
    """Either form of log(1 - p) alone has gradients of NaN at one of these."""
    chosen = torch.tensor([-1e-30, -1e-9, -1e-3, -90.0]).requires_grad_()
    rejected = torch.tensor([-1.0, -200.0, -1e-9, -1e-9]).requires_grad_()
    loss = orpo_loss(chosen, rejected, 0.0)
    loss.backward()
    assert all(one.isfinite().all() for one in (loss, chosen.grad, rejected.grad))
    wanted = [one.detach().double().requires_grad_() for one in (chosen, rejected)]
    odds = [one - torch.log(-torch.expm1(one)) for one in wanted]
    (-0.1 * torch.nn.functional.logsigmoid(odds[0] - odds[1]).mean()).backward()
    for one, other in zip((chosen, rejected), wanted, strict=True):
        torch.testing.assert_close(one.grad.double(), other.grad, rtol=1e-5, atol=1e-38)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    values = POLICY.clone().to(dtype).requires_grad_()
    loss = grpo_loss(values, OLD.to(dtype), ADVANTAGES.to(dtype), MASK.int())
    assert loss.dtype == (torch.float64 if dtype is torch.float64 else torch.float32)
    loss.backward()
    assert values.grad is not None and values.grad.dtype == dtype
    other = grpo_loss(values.double(), OLD.to(dtype).double(), ADVANTAGES.to(dtype).double(), MASK)
    torch.testing.assert_close(loss.double(), other, rtol=1e-6, atol=1e-7)


COMPILED = ["dapo", "gspo", "dpo", "kto"]
OTHERS = sorted((OF_MASKED | OF_SEQUENCES).keys() - set(COMPILED))


@pytest.mark.parametrize("name", [*COMPILED, *nightly(*OTHERS)])
def test_in_a_graph(name: str) -> None:
    function = OF_MASKED.get(name) or OF_SEQUENCES[name]
    values = (POLICY if name in OF_MASKED else SUMS).clone().requires_grad_()
    (want,) = torch.autograd.grad(function(values), values)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    (got,) = torch.autograd.grad(compiled(values), values)
    torch.testing.assert_close(got, want)


def test_normalizers() -> None:
    sums = [OF_MASKED["dapo"](POLICY) * MASK.sum()]
    for normalizer in (1, 1.0, torch.tensor(1.0), torch.tensor([1])):
        options = {"ref_log_probs": REFERENCE, "beta": 0.2, "epsilon_high": 0.3, "normalizer": normalizer}
        sums.append(grpo_loss(POLICY, OLD, ADVANTAGES, MASK, **options))
    torch.testing.assert_close(torch.stack(sums[1:]), sums[0].expand(4))
    torch.testing.assert_close(
        kto_loss(SUMS, 2 * SUMS, LIKED, 0, normalizer=12) * 4, kto_loss(SUMS, 2 * SUMS, LIKED, 0)
    )
    nothing = torch.zeros_like(MASK)
    values = POLICY.clone().requires_grad_()
    loss = grpo_loss(values, OLD, ADVANTAGES, nothing, normalizer=7) + entropy_bonus(values, nothing, normalizer=7)
    loss.backward()
    assert loss.item() == 0 and not values.grad.any(), "a micro-batch without tokens adds nothing to its step"


def grpo(**given: Any) -> Tensor:
    wanted = {"log_probs": POLICY, "old_log_probs": OLD, "advantages": ADVANTAGES, "mask": MASK}
    return grpo_loss(**{**wanted, **given})


def dpo(**given: Any) -> Tensor:
    return dpo_loss(**{"chosen": SUMS, "rejected": SUMS, "ref_chosen": SUMS, "ref_rejected": SUMS, **given})


def kto(**given: Any) -> Tensor:
    return kto_loss(**{"log_probs": SUMS, "ref_log_probs": SUMS, "desirable": LIKED, "kl": 0.0, **given})


def pairs(function: Callable[..., Tensor], **given: Any) -> Tensor:
    return function(
        **{"chosen": SUMS, "rejected": SUMS, **({"nll_loss": 0.0} if function is orpo_loss else {}), **given}
    )


def topk(**given: Any) -> Tensor:
    wanted = {"teacher_ids": IDS, "teacher_log_probs": torch.full((ROWS, TOKENS, 2), -3.0), **given}
    return topk_distillation_loss(torch.zeros(ROWS, TOKENS, 4), MASK.long(), None, **wanted)


IDS = torch.zeros(ROWS, TOKENS, 2, dtype=torch.int64)
BAD: list[tuple[Callable[..., Any], dict[str, Any], type[Exception], str]] = [
    (dpo, {"beta": 0.0}, ValueError, "beta is 0.0; want a finite number above 0"),
    (dpo, {"beta": math.nan}, ValueError, "beta is nan"),
    (dpo, {"loss_type": "hinge"}, ValueError, "loss_type is 'hinge'; want one of 'sigmoid', 'ipo'"),
    (dpo, {"rejected": SUMS[:2]}, ValueError, r"rejected has shape \[2\]; want \[3\], the shape of chosen"),
    (dpo, {"chosen": LIKED}, TypeError, "chosen is torch.bool; want a floating-point type"),
    (dpo, {"ref_chosen": 1.0}, TypeError, "ref_chosen is a float; want a torch.Tensor"),
    (dpo, dict.fromkeys(("chosen", "rejected", "ref_chosen", "ref_rejected"), POLICY), ValueError,
     r"chosen has shape \[3, 5\]; want \[B\], .*sequence_log_probs"),
    (dpo, {"normalizer": 0}, ValueError, "normalizer is 0; want a finite number above 0"),
    (dpo, {"normalizer": SUMS}, ValueError, r"normalizer has shape \[3\]; want a number"),
    (dpo, {"ref_chosen": SUMS.to("meta")}, ValueError, "ref_chosen is on meta and chosen on cpu; want both on one"),
    (kto, {"beta": -1.0}, ValueError, "beta is -1.0"),
    (kto, {"desirable": LIKED.long()}, TypeError, r"desirable is torch.int64 \[3\]; want booleans \[3\]"),
    (kto, {"desirable": LIKED[:2]}, TypeError, r"desirable is torch.bool \[2\]; want booleans \[3\]"),
    (kto, {"desirable": [True]}, TypeError, "desirable is list"),
    (kto, {"kl": SUMS}, ValueError, r"kl has shape \[3\]; want a number"),
    (kto, {"undesirable_weight": -1.0}, ValueError, "undesirable_weight is -1.0; want a finite number of at least 0"),
    (lambda **given: pairs(orpo_loss, **given), {"beta": 0}, ValueError, "beta is 0"),
    (lambda **given: pairs(orpo_loss, **given), {"nll_loss": SUMS}, ValueError, r"nll_loss has shape \[3\]"),
    (lambda **given: pairs(simpo_loss, **given), {"beta": 0}, ValueError, "beta is 0"),
    (lambda **given: pairs(simpo_loss, **given), {"gamma": -0.1}, ValueError, "gamma is -0.1; want .* at least 0"),
    (sequence_log_probs, {"log_probs": SUMS, "mask": LIKED}, ValueError, r"log_probs has shape \[3\]; want \[B, T\]"),
    (sequence_log_probs, {"log_probs": POLICY, "mask": MASK & LIKED[:, None], "average": True}, ValueError,
     r"mask counts no token of sequences \[1\], which have no mean; leave them out"),
    (grpo, {"loss_type": "cispo"}, ValueError, "loss_type is 'cispo'; want one of 'dapo', 'bnpo', 'grpo', 'dr_grpo'"),
    (grpo, {"importance_sampling_level": "word"}, ValueError, "_level is 'word'; want one of 'token'"),
    (grpo, {"loss_type": "dr_grpo"}, ValueError, "max_completion_length is None and loss_type 'dr_grpo'; give it"),
    (grpo, {"max_completion_length": 9}, ValueError, "max_completion_length is 9 and loss_type 'dapo'; give it"),
    (grpo, {"loss_type": "dr_grpo", "max_completion_length": 0}, ValueError, "max_completion_length is 0; want"),
    (grpo, {"beta": -0.1, "ref_log_probs": REFERENCE}, ValueError, "beta is -0.1; want a finite number of at least 0"),
    (grpo, {"beta": 0.1}, ValueError, "beta is 0.1 and ref_log_probs is missing; the KL term needs"),
    (grpo, {"ref_log_probs": REFERENCE}, ValueError, "beta is 0.0 and ref_log_probs is given; the KL term needs"),
    (grpo, {"beta": 0.1, "ref_log_probs": SUMS}, ValueError, r"ref_log_probs has shape \[3\]; want \[3, 5\]"),
    (grpo, {"epsilon": -0.1}, ValueError, "epsilon is -0.1; want a finite number of at least 0"),
    (grpo, {"epsilon_high": math.inf}, ValueError, "epsilon_high is inf; want a finite number"),
    (grpo, {"delta": 1.2}, ValueError, "delta is 1.2; want a finite number above 1.2"),
    (grpo, {"log_probs": SUMS}, ValueError, r"log_probs has shape \[3\]; want \[B, T\]"),
    (grpo, {"old_log_probs": POLICY[:, :4]}, ValueError, r"old_log_probs has shape \[3, 4\]; want \[3, 5\]"),
    (grpo, {"advantages": SUMS[:2]}, ValueError, r"advantages has shape \[2\]; want \[3, 5\], .*or \[3\], one "),
    (grpo, {"advantages": LIKED}, TypeError, "advantages is torch.bool; want a floating-point type"),
    (grpo, {"mask": MASK.float()}, TypeError, "mask is torch.float32; want booleans or integers, such as labels"),
    (grpo, {"mask": MASK[:2]}, ValueError, r"mask has shape \[2, 5\]; want \[3, 5\], the shape of log_probs"),
    (grpo, {"mask": None}, TypeError, "mask is a NoneType; want a torch.Tensor"),
    (grpo, {"mask": MASK & False}, ValueError, "mask counts no token, .*; leave this batch out, or give the norm"),
    (entropy_bonus, {"entropy": SUMS, "mask": LIKED & False}, ValueError, "mask counts no token"),
    (entropy_bonus, {"entropy": POLICY, "mask": LIKED}, ValueError, r"mask has shape \[3\]; .*the shape of entropy"),
    (ppo_loss, {"log_probs": SUMS, "old_log_probs": SUMS, "advantages": SUMS[:1], "mask": LIKED}, ValueError,
     r"advantages has shape \[1\]; want \[3\], the shape of log_probs$"),
    (topk, {"rest": "none"}, ValueError, "rest is 'none'; want one of 'one', 'renormalized'"),
    (topk, {"temperature": 0.0}, ValueError, "temperature is 0.0; want a finite number above 0"),
    (topk, {"teacher_log_probs": None}, ValueError, "of teacher_log_probs and teacher_probabilities none is given"),
    (topk, {"teacher_probabilities": IDS}, ValueError, "teacher_probabilities both is given; want one of them"),
    (topk, {"teacher_ids": IDS.float()}, TypeError, "teacher_ids is torch.float32; want a tensor of integers"),
    (topk, {"teacher_ids": IDS[0]}, ValueError, r"teacher_ids has shape \[5, 2\]; want \[3, 5, 'K'\], K for each"),
    (topk, {"teacher_log_probs": IDS}, TypeError, "teacher_log_probs is torch.int64; want a floating-point type"),
    (topk, {"teacher_log_probs": POLICY}, ValueError, r"teacher_log_probs has shape \[3, 5\]; want \[3, 5, 2\]"),
    (topk, {"label_smoothing": 0.1}, TypeError, r"topk_distillation_loss\(\) got an unexpected .*'label_smoothing'"),
]  # fmt: skip


@pytest.mark.parametrize("case", BAD, ids=lambda case: f"{'-'.join(case[1])}: {case[3]}"[:60])
def test_bad_input(case: tuple[Callable[..., Any], dict[str, Any], type[Exception], str]) -> None:
    function, given, error, message = case
    with pytest.raises(error, match=message):
        function(**given)
