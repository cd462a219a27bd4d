"""Distillation: losses against the distributions of a teacher, a head of the server or one that sent its top k."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lossd._batch import Distillation, TargetLists
from lossd.torch._function import INTEGERS, linear_cross_entropy
from lossd.torch._tokens import shift_labels
from lossd.torch.objectives._checks import floats, known, positive, same_device

_OPTIONS = {"ignore_index", "shift", "normalizer", "grad_scale", "reduction", "softcap", "logit_scale", "bias"}


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
    _check_options("gkd_loss", options)
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


def topk_distillation_loss(
    input: Tensor,
    target: Tensor,
    head: Any,
    teacher_ids: Tensor,
    *,
    teacher_log_probs: Tensor | None = None,
    teacher_probabilities: Tensor | None = None,
    rest: str = "one",
    temperature: float = 1.0,
    **options: Any,
) -> Tensor:
    """Distillation from the K likeliest tokens of a teacher that is elsewhere, as an inference server sends them: the
    mean divergence KL(teacher, head), forward, of

        D = sum_L q log(q / p) + R log(R / P_R)      L: the token's list, R = 1 - sum_L q, P_R = 1 - sum_L p

    q: the teacher's probabilities of the list's tokens; p: the head's of the whole vocabulary.

    input, target, head: as of linear_cross_entropy. The labels say which tokens count, and nothing else.
    teacher_ids: [..., K] integers in [0, V), of each token of input (and not of its label: with `shift`, too) the
        teacher's likeliest next tokens, in any order, none twice. Below 0: no entry, as in lists that are filled up to
        K with -1. A token that counts has one entry at least.
    teacher_log_probs, teacher_probabilities: [..., K] floats, one of the two: natural logarithms (-inf is 0), or the
        probabilities themselves. Those of a token add up to at most 1.
    rest: what becomes of R. "one": all tokens that are not in the list are one. "renormalized": the list's are divided
        by their sum, so that R is 0, and D asks for the whole probability on the list.
    temperature: above 0, which the head's logits are divided by: logit_scale and softcap are those of the head, or of
        options, over it. The teacher's probabilities have to be of the same temperature: they cannot be brought to
        another one without those of all tokens. Hinton's factor T^2 is yours, as it is in TRL.
    options: ignore_index, shift, normalizer, grad_scale, reduction, softcap, logit_scale and bias of
        linear_cross_entropy; with grad_scale=1.0 hidden states are sent once.

    rest="one" is TRL's AsyncDistillationTrainer with beta=0 and add_tail_bucket; without the bucket that renormalises
    the head's probabilities as well, which is another loss. To mix in the cross-entropy of the labels call
    linear_cross_entropy(target_lists=lossd.TargetLists(..., label_weight=...)), which this is a call of. Raises what
    that raises; UnimplementedError for heads over several devices.
    """
    _check_options("topk_distillation_loss", options)
    known("rest", rest, ("one", "renormalized"))
    positive("temperature", temperature)
    if (teacher_log_probs is None) == (teacher_probabilities is None):
        given = "both" if teacher_log_probs is not None else "none"
        raise ValueError(f"of teacher_log_probs and teacher_probabilities {given} is given; want one of them")
    if not isinstance(teacher_ids, Tensor) or teacher_ids.dtype not in INTEGERS:
        found = teacher_ids.dtype if isinstance(teacher_ids, Tensor) else type(teacher_ids).__name__
        raise TypeError(f"teacher_ids is {found}; want a tensor of integers")
    ids = teacher_ids.detach()
    if ids.dim() > 0 and ids.shape[-1] == 0:
        raise ValueError(f"teacher_ids has shape {list(ids.shape)}; want one id for each label at least")
    if isinstance(target, Tensor) and (ids.dim() != target.dim() + 1 or ids.shape[:-1] != target.shape):
        raise ValueError(f"teacher_ids has shape {list(ids.shape)}; want {[*target.shape, 'K']}, K for each label")
    name = "teacher_probabilities" if teacher_log_probs is None else "teacher_log_probs"
    (values,) = floats(**{name: teacher_probabilities if teacher_log_probs is None else teacher_log_probs})
    if values.shape != ids.shape:
        raise ValueError(f"{name} has shape {list(values.shape)}; want {list(ids.shape)}, the shape of teacher_ids")
    same_device(name, values, "teacher_ids", ids)
    probabilities = values.detach() if teacher_log_probs is None else values.detach().exp()
    if temperature != 1:
        options = {**options, **_at_temperature(head, temperature, options)}
    lists = _lists(ids, probabilities, target, rest, options)
    loss: Tensor = linear_cross_entropy(input, target, head, weight=False, target_lists=lists, **options)
    return loss


def _check_options(function: str, options: dict[str, Any]) -> None:
    unknown = options.keys() - _OPTIONS
    if unknown:
        raise TypeError(f"{function}() got an unexpected keyword argument {min(unknown)!r}")


def _at_temperature(head: Any, temperature: float, options: dict[str, Any]) -> dict[str, float]:
    """The scale and the softcap of logits over the temperature: cap * tanh(scale * z / cap) / T."""
    config = getattr(getattr(head, "head", None), "config", None)
    own = {name: getattr(config, name, default) for name, default in (("logit_scale", 1.0), ("softcap", 0.0))}
    given = {name: own[name] if options.get(name) is None else options[name] for name in own}
    return {name: float(value) / temperature for name, value in given.items()}


def _lists(ids: Tensor, probabilities: Tensor, target: Tensor, rest: str, options: dict[str, Any]) -> TargetLists:
    """The entries that there are, of tokens that count; what lies in the others does not matter."""
    ignore_index = options.get("ignore_index", -100)
    labels = shift_labels(target.detach(), int(options.get("shift", False)), ignore_index)
    entries = (ids >= 0) & (labels != ignore_index).to(ids.device)[..., None]
    probabilities = probabilities.where(entries, 0.0)
    sums = probabilities.sum(-1, keepdim=True)
    # Those of 16 bits may add up to more than 1.
    probabilities = probabilities / (sums if rest == "renormalized" else sums.clamp(min=1.0))
    sizes = entries.reshape(-1, ids.shape[-1]).sum(-1)
    offsets = torch.nn.functional.pad(sizes.cumsum(0), (1, 0))
    return TargetLists(offsets, ids[entries], probabilities[entries])
