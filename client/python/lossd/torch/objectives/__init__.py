"""Losses of post-training, as functions of log-probabilities and entropies.

    from lossd.torch import token_log_probs
    from lossd.torch.objectives import entropy_bonus, grpo_loss

    log_probs, entropy = token_log_probs(hidden, labels, head, entropy=True)            # [B, T]
    loss = grpo_loss(log_probs, old_log_probs, advantages, labels != -100)
    (loss - 0.01 * entropy_bonus(entropy, labels != -100)).backward()

Log-probabilities are natural logarithms of any floating-point type, entropies are in nats. What is computed, and the
loss [], is in fp32, or in fp64 if that is given. Only what the model computes gets a gradient: log-probabilities of a
reference or of an older policy, advantages and estimates are taken as numbers. Every loss is a mean; `normalizer` is
what its sum is divided by instead, for means over several micro-batches or ranks (1: the sum itself).
docs/objectives.md has the names that TRL and Liger give to these losses.
"""

from lossd.torch.objectives._distillation import gkd_loss, topk_distillation_loss
from lossd.torch.objectives._policy import entropy_bonus, grpo_loss, ppo_loss
from lossd.torch.objectives._preference import dpo_loss, kto_loss, orpo_loss, sequence_log_probs, simpo_loss

__all__ = [
    "dpo_loss",
    "entropy_bonus",
    "gkd_loss",
    "grpo_loss",
    "kto_loss",
    "orpo_loss",
    "ppo_loss",
    "sequence_log_probs",
    "simpo_loss",
    "topk_distillation_loss",
]
