"""Distillation: the loss against the distributions of another head of the server."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from lossd._batch import Distillation
from lossd.torch._function import linear_cross_entropy


def gkd_loss(
    input: Tensor,
    target: Tensor,
    head: Any,
    teacher: Any,
    teacher_input: Tensor,
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
    **options: Any,
) -> Tensor:
    """Generalised knowledge distillation: the mean divergence of the head from a teacher, a head of the same server.

        p: the teacher's distribution, q: the head's, both of logits over the temperature; m = beta p + (1 - beta) q
        0 < beta < 1: beta KL(p, m) + (1 - beta) KL(q, m)      Agarwal et al. 2023, arXiv:2306.13649, eq. 1
        beta = 0: KL(p, q), forward; beta = 1: KL(q, p), reverse

    input, target, head: as of linear_cross_entropy. The labels say which tokens count, and nothing else. Sequences that
        the model itself wrote make it on-policy; the loss is the same.
    teacher: a RemoteHead, or the name of a head. teacher_input: hidden states [..., the teacher's H].
    temperature: above 0. Hinton's factor T^2 is yours, as it is in TRL.
    options: ignore_index, shift, normalizer, grad_scale, reduction, softcap, logit_scale and bias of
        linear_cross_entropy; with grad_scale=1.0 hidden states are sent once.

    TRL's DistillationTrainer and GKDTrainer have this beta and temperature; Liger's LigerFusedLinearJSDLoss mixes the
    labels in. For that call linear_cross_entropy(distillation=lossd.Distillation(..., label_weight=...)), which this is
    a call of. Raises what that raises.
    """
    if not (math.isfinite(beta) and 0 <= beta <= 1):
        raise ValueError(
            f"beta is {beta}; want a number in [0, 1]: 0 for the forward divergence, 1 for the reverse one"
        )
    unknown = options.keys() - {
        "ignore_index", "shift", "normalizer", "grad_scale", "reduction", "softcap", "logit_scale", "bias"
    }  # fmt: skip
    if unknown:
        raise TypeError(f"gkd_loss() got an unexpected keyword argument {min(unknown)!r}")
    name = teacher if isinstance(teacher, str) else getattr(teacher, "name", None)
    if not isinstance(name, str):
        raise TypeError(f"teacher is a {type(teacher).__name__}; want a lossd.torch.RemoteHead, or the name of a head")
    divergence = {0.0: "forward_kl", 1.0: "reverse_kl"}.get(float(beta), "jensen_shannon")
    soft = Distillation(
        name,
        teacher_input,
        divergence=divergence,
        temperature=temperature,
        **({"beta": beta} if divergence == "jensen_shannon" else {}),
    )
    loss: Tensor = linear_cross_entropy(input, target, head, weight=False, distillation=soft, **options)
    return loss
