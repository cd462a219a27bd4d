"""Losses of policy gradients: of completions that the model wrote, and of the advantages that they have."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lossd.torch.objectives._checks import divided, floats, known, positive, same_device, tokens

GRPO_LOSSES = ("dapo", "bnpo", "grpo", "dr_grpo")
LEVELS = ("token", "sequence")


@dataclass(frozen=True)
class _Clip:
    """How far a probability ratio may go before it gets no gradient."""

    low: float
    high: float
    most: float | None

    @classmethod
    def of(cls, epsilon: float, epsilon_high: float | None, delta: float | None) -> _Clip:
        high = epsilon if epsilon_high is None else epsilon_high
        for name, value in (("epsilon", epsilon), ("epsilon_high", high)):
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} is {value}; want a finite number of at least 0")
        if delta is not None and not (math.isfinite(delta) and delta > 1 + high):
            raise ValueError(
                f"delta is {delta}; want a finite number above {1 + high}, where the ratio is clipped anyway"
            )
        return cls(float(epsilon), float(high), delta)

    def losses(self, ratio: Tensor, advantages: Tensor) -> Tensor:
        """-min(r A, clip(r) A), where a negative A meets no r above `most`."""
        clipped = ratio.clamp(1 - self.low, 1 + self.high)
        if self.most is not None:
            ratio = ratio.clamp(max=self.most)
        return -torch.minimum(ratio * advantages, clipped * advantages)


@dataclass(frozen=True)
class _Completions:
    """What is known of each token, 0 where it does not count, so that nothing comes from there."""

    mask: Tensor
    log_probs: Tensor
    old: Tensor
    advantages: Tensor

    @classmethod
    def of(
        cls, log_probs: Tensor, old_log_probs: Tensor | None, advantages: Tensor, mask: Tensor, *, empty: bool
    ) -> _Completions:
        given = {"log_probs": log_probs} | ({} if old_log_probs is None else {"old_log_probs": old_log_probs})
        values, *old = floats(**given)
        counted = tokens(mask, values, "log_probs", empty=empty)
        (factors,) = floats(advantages=advantages)
        same_device("advantages", factors, "log_probs", values)
        if values.dim() == 2 and factors.shape == values.shape[:1]:
            factors = factors.unsqueeze(-1).expand_as(values)
        if factors.shape != values.shape:
            raise ValueError(
                f"advantages has shape {list(factors.shape)}; want {list(values.shape)}, the shape of log_probs"
                + (f", or {list(values.shape[:1])}, one for each sequence" if values.dim() == 2 else "")
            )
        values = values.masked_fill(~counted, 0.0)
        return cls(
            counted,
            values,
            (old[0].masked_fill(~counted, 0.0) if old else values).detach(),
            factors.detach().masked_fill(~counted, 0.0),
        )


def grpo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    ref_log_probs: Tensor | None = None,
    beta: float = 0.0,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
    loss_type: str = "dapo",
    importance_sampling_level: str = "token",
    use_bias_correction_kl: bool = True,
    max_completion_length: int | None = None,
    normalizer: float | Tensor | None = None,
) -> Tensor:
    """Group relative policy optimisation, and what was made of it, over the tokens of B completions.

        r = exp(log pi - log pi_old)
        l = -min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A) + beta k
        k = exp(log pi_ref - log pi) - (log pi_ref - log pi) - 1, times r with use_bias_correction_kl
                                                Shao et al. 2024, arXiv:2402.03300, eq. 3 and 4 (with k as it stands)

    log_probs: those of the completions' tokens [B, T] by the model; old_log_probs: by the policy that wrote them, None
        if it is this one, so that r is 1; ref_log_probs: by the reference, wanted if beta is above 0, and only then.
    advantages: [B], one for each completion, or [B, T]. Rewards less their group's mean, perhaps over its deviation.
    mask: which tokens count [B, T], booleans or integers: labels != -100.

    epsilon, epsilon_high: how far r may fall and rise; None: as far as it falls. 0.2 and 0.28 are DAPO's "clip-higher"
        (Yu et al. 2025, arXiv:2503.14476).
    delta: the largest r that a negative advantage is multiplied by, above 1 + epsilon_high: the c of dual-clip PPO (Ye
        et al. 2020, arXiv:1912.09729), and the two-sided clipping of INTELLECT-2. None: no such bound.
    loss_type: what the tokens' losses are divided by.
        "dapo", "bnpo": the number of tokens that count; normalizer: of those of the whole step, which is TRL's "dapo".
            Without one this batch's, which is TRL's "bnpo".
        "grpo": each completion's by its own number of tokens, and their sum by B; normalizer: in place of B.
        "dr_grpo": B times max_completion_length (Liu et al. 2025, arXiv:2503.20783); normalizer: in place of B.
    importance_sampling_level: "sequence": r is one for each completion, the geometric mean of its tokens' (GSPO, Zheng
        et al. 2025, arXiv:2507.18071, with loss_type="grpo").

    TRL's GRPOTrainer and Liger's LigerFusedLinearGRPOLoss have these names. Defaults are TRL's; Liger's KL is that of
    use_bias_correction_kl=False. A token that is clipped, or does not count, gets a gradient of 0, and costs the
    server nothing in backward. TypeError or ValueError for what does not fit.
    """
    clip = _Clip.of(epsilon, epsilon_high, delta)
    known("loss_type", loss_type, GRPO_LOSSES)
    known("importance_sampling_level", importance_sampling_level, LEVELS)
    _check_length(loss_type, max_completion_length)
    if isinstance(log_probs, Tensor) and log_probs.dim() != 2:
        raise ValueError(f"log_probs has shape {list(log_probs.shape)}; want [B, T], the tokens of each completion")
    given = _Completions.of(log_probs, old_log_probs, advantages, mask, empty=normalizer is not None)
    counts = given.mask.sum(-1).clamp(min=1)
    log_ratio = given.log_probs - given.old
    if importance_sampling_level == "sequence":
        log_ratio = (log_ratio.sum(-1) / counts).unsqueeze(-1)
    ratio = log_ratio.exp()
    losses = clip.losses(ratio, given.advantages)
    if (reference := _reference(ref_log_probs, beta, log_probs)) is not None:
        behind = reference.detach().masked_fill(~given.mask, 0.0) - given.log_probs
        kl = torch.expm1(behind) - behind
        losses = losses + beta * (kl * ratio if use_bias_correction_kl else kl)
    losses = losses.masked_fill(~given.mask, 0.0)
    if loss_type == "grpo":
        return divided((losses.sum(-1) / counts).sum(), len(losses), normalizer)
    if loss_type == "dr_grpo":
        assert max_completion_length is not None
        return divided(losses.sum() / max_completion_length, len(losses), normalizer)
    return divided(losses.sum(), given.mask.sum().clamp(min=1), normalizer)


def _check_length(loss_type: str, max_completion_length: int | None) -> None:
    if (loss_type == "dr_grpo") != (max_completion_length is not None):
        raise ValueError(
            f"max_completion_length is {max_completion_length} and loss_type {loss_type!r}; give it with 'dr_grpo', "
            "which divides by it, and with nothing else"
        )
    if max_completion_length is not None:
        positive("max_completion_length", max_completion_length)


def _reference(ref_log_probs: Tensor | None, beta: float, log_probs: Tensor) -> Tensor | None:
    if not (math.isfinite(beta) and beta >= 0):
        raise ValueError(f"beta is {beta}; want a finite number of at least 0")
    if (beta > 0) != (ref_log_probs is not None):
        what = "missing" if ref_log_probs is None else "given"
        raise ValueError(
            f"beta is {beta} and ref_log_probs is {what}; the KL term needs a beta above 0 and a reference"
        )
    return None if ref_log_probs is None else floats(log_probs=log_probs, ref_log_probs=ref_log_probs)[1]


def ppo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
    normalizer: float | Tensor | None = None,
) -> Tensor:
    """The policy's term of proximal policy optimisation, the mean over the tokens that count.

        -min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A),  r = exp(log pi - log pi_old)
                                                               Schulman et al. 2017, arXiv:1707.06347, eq. 7

    log_probs, old_log_probs, advantages (of a critic, by GAE), mask: one for each token, of any shape [...]; packed
        sequences [N] as well. Of [B, T] the advantages may be [B].
    epsilon, epsilon_high, delta: as of grpo_loss; TRL's and verl's cliprange is epsilon. normalizer: in place of the
        number of tokens.

    The loss of the critic is not a matter of the head. TypeError or ValueError for what does not fit.
    """
    clip = _Clip.of(epsilon, epsilon_high, delta)
    given = _Completions.of(log_probs, old_log_probs, advantages, mask, empty=normalizer is not None)
    losses = clip.losses((given.log_probs - given.old).exp(), given.advantages)
    return divided(losses.masked_fill(~given.mask, 0.0).sum(), given.mask.sum().clamp(min=1), normalizer)


def entropy_bonus(entropy: Tensor, mask: Tensor, *, normalizer: float | Tensor | None = None) -> Tensor:
    """The mean entropy [] of the tokens that count, in nats, of which a multiple is subtracted from a loss: `policy
    loss - entropy_coef * entropy_bonus(entropy, mask)`, as of TRL's GRPOTrainer.

    entropy: [...], as token_log_probs(..., entropy=True) gives it; mask: which of them count [...]. normalizer: in
        place of their number. TypeError or ValueError for what does not fit.
    """
    (values,) = floats(entropy=entropy)
    counted = tokens(mask, values, "entropy", empty=normalizer is not None)
    return divided(values.masked_fill(~counted, 0.0).sum(), counted.sum().clamp(min=1), normalizer)
