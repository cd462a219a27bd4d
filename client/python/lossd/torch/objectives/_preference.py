"""Losses of preferences: of sequences that people, or a judge, liked or did not like."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from lossd.torch.objectives._checks import divided, floats, known, positive, same_device, sequences, tokens

DPO_LOSSES = ("sigmoid", "ipo")


def sequence_log_probs(log_probs: Tensor, mask: Tensor, *, average: bool = False) -> Tensor:
    """log pi(y|x) of each sequence [B]: the sum over its tokens or, with `average`, their mean.

    log_probs: those of the tokens [B, T], as token_log_probs gives them. mask: which of them count [B, T], booleans or
        integers: labels != -100, of shifted labels if the log-probabilities are of such.

    The sum over no tokens is 0. What tokens have that do not count does not matter, and they get no gradient. TRL's
    get_batch_logps(logits, labels, average_log_prob=average). TypeError or ValueError for tensors that do not fit, and
    for a mean over no tokens.
    """
    (values,) = floats(log_probs=log_probs)
    if values.dim() != 2:
        raise ValueError(f"log_probs has shape {list(values.shape)}; want [B, T], the tokens of each sequence")
    counted = tokens(mask, values, "log_probs", empty=True)
    sums = values.masked_fill(~counted, 0.0).sum(-1)
    if not average:
        return sums
    lengths = counted.sum(-1)
    if not torch.compiler.is_compiling() and not bool(lengths.all()):
        without = (lengths == 0).nonzero().flatten().tolist()
        raise ValueError(f"mask counts no token of sequences {without}, which have no mean; leave them out")
    return sums / lengths.clamp(min=1)


def dpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    beta: float = 0.1,
    loss_type: str = "sigmoid",
    normalizer: float | Tensor | None = None,
) -> Tensor:
    """Direct preference optimisation, the mean over B pairs.

        d = (log pi(y_w|x) - log pi_ref(y_w|x)) - (log pi(y_l|x) - log pi_ref(y_l|x))
        "sigmoid": -log sigmoid(beta d)          Rafailov et al. 2023, arXiv:2305.18290, eq. 7
        "ipo":     (d - 1 / (2 beta))^2          Azar et al. 2023, arXiv:2310.12036, eq. 17, beta for its tau

    chosen, rejected: log pi of the preferred and of the other sequence of each pair [B], by the model;
        ref_chosen, ref_rejected: by the reference. "sigmoid" is of sums, "ipo" of means over tokens, as its authors
        have it: sequence_log_probs(log_probs, mask, average=True).
    beta: above 0; how close the model stays to the reference. normalizer: in place of B.

    TRL's DPOTrainer with this loss_type, Liger's LigerFusedLinearDPOLoss. With averages "sigmoid" is TRL's
    "sigmoid_norm". TypeError or ValueError for what does not fit.
    """
    beta = positive("beta", beta)
    known("loss_type", loss_type, DPO_LOSSES)
    chosen, rejected, ref_chosen, ref_rejected = floats(
        chosen=chosen, rejected=rejected, ref_chosen=ref_chosen, ref_rejected=ref_rejected
    )
    sequences("chosen", chosen)
    margin = (chosen - ref_chosen.detach()) - (rejected - ref_rejected.detach())
    losses = -F.logsigmoid(beta * margin) if loss_type == "sigmoid" else (margin - 1 / (2 * beta)).square()
    return divided(losses.sum(), len(losses), normalizer)


def kto_loss(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    desirable: Tensor,
    kl: float | Tensor,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    normalizer: float | Tensor | None = None,
) -> Tensor:
    """Kahneman-Tversky optimisation, the mean over B sequences, of which each is liked or not.

        r = log pi(y|x) - log pi_ref(y|x),  z = max(kl, 0)
        desirable:   desirable_weight   (1 - sigmoid(beta (r - z)))
        undesirable: undesirable_weight (1 - sigmoid(beta (z - r)))      Ethayarajh et al. 2024, arXiv:2402.01306, eq. 7

    log_probs, ref_log_probs: log pi(y|x) of each sequence [B] by the model and by the reference, sums over its tokens.
    desirable: which sequences are liked [B], booleans.
    kl: the estimate of KL(pi, pi_ref), a number or a tensor []: the mean of r over completions y' that belong to other
        prompts, over all ranks. 0: TRL's loss_type "apo_zero_unpaired".
    beta: above 0; the weights: at least 0. normalizer: in place of B.

    TRL's KTOTrainer with loss_type "kto", Liger's LigerFusedLinearKTOLoss. TypeError or ValueError for what does not
    fit.
    """
    beta = positive("beta", beta)
    for name, weight in (("desirable_weight", desirable_weight), ("undesirable_weight", undesirable_weight)):
        if not (math.isfinite(weight) and weight >= 0):
            raise ValueError(f"{name} is {weight}; want a finite number of at least 0")
    values, reference = floats(log_probs=log_probs, ref_log_probs=ref_log_probs)
    sequences("log_probs", values)
    if not isinstance(desirable, Tensor) or desirable.dtype != torch.bool or desirable.shape != values.shape:
        got = (
            f"{desirable.dtype} {list(desirable.shape)}" if isinstance(desirable, Tensor) else type(desirable).__name__
        )
        raise TypeError(f"desirable is {got}; want booleans {list(values.shape)}, one for each sequence")
    same_device("desirable", desirable, "log_probs", values)
    if isinstance(kl, Tensor) and kl.numel() != 1:
        raise ValueError(f"kl has shape {list(kl.shape)}; want a number, the mean over all sequences")
    anchor = kl.detach().reshape(()).clamp(min=0) if isinstance(kl, Tensor) else max(float(kl), 0.0)
    gains = beta * (values - reference.detach() - anchor)
    losses = torch.where(desirable, desirable_weight * torch.sigmoid(-gains), undesirable_weight * torch.sigmoid(gains))
    return divided(losses.sum(), len(losses), normalizer)


def orpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    nll_loss: float | Tensor,
    *,
    beta: float = 0.1,
    normalizer: float | Tensor | None = None,
) -> Tensor:
    """Odds ratio preference optimisation: nll_loss and the mean over B pairs of a term that needs no reference.

        -beta log sigmoid(log odds(y_w|x) - log odds(y_l|x)),  log odds = log p - log(1 - p),
        log p = log pi(y|x) / |y|                              Hong et al. 2024, arXiv:2403.07691, eq. 4, 6, 7

    chosen, rejected: means of the log-probabilities of the tokens of each sequence [B], below 0:
        sequence_log_probs(log_probs, mask, average=True).
    nll_loss: the cross-entropy of the preferred sequences, [], which is added as it is: a mean over tokens, in TRL
        those of prompts and completions, in Liger those that have labels. 0: the term alone.
    beta: above 0, the lambda of the paper. normalizer: in place of B; nll_loss is divided by whoever computes it.

    TRL's ORPOTrainer, Liger's LigerFusedLinearORPOLoss. TypeError or ValueError for what does not fit.
    """
    beta = positive("beta", beta)
    chosen, rejected = floats(chosen=chosen, rejected=rejected)
    sequences("chosen", chosen)
    if isinstance(nll_loss, Tensor) and nll_loss.numel() != 1:
        raise ValueError(f"nll_loss has shape {list(nll_loss.shape)}; want a number, the mean over tokens")
    log_odds = (chosen - rejected) - (_log1mexp(chosen) - _log1mexp(rejected))
    nll = nll_loss.reshape(()) if isinstance(nll_loss, Tensor) else nll_loss
    return nll - beta * divided(F.logsigmoid(log_odds).sum(), len(log_odds), normalizer)


def _log1mexp(x: Tensor) -> Tensor:
    """log(1 - e^x) of x < 0, by whichever form keeps its digits. Neither form sees what is the other's: its gradient
    there would be infinite, and a NaN in the sum."""
    near = x > -math.log(2)
    return torch.where(
        near,
        torch.log(-torch.expm1(torch.where(near, x, -1.0))),
        torch.log1p(-torch.exp(torch.where(near, -1.0, x))),
    )


def simpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    *,
    beta: float = 0.1,
    gamma: float = 0.5,
    normalizer: float | Tensor | None = None,
) -> Tensor:
    """Simple preference optimisation, the mean over B pairs; it needs no reference.

        -log sigmoid(beta (log pi(y_w|x) / |y_w| - log pi(y_l|x) / |y_l|) - gamma)
                                                               Meng et al. 2024, arXiv:2405.14734, eq. 6

    chosen, rejected: means of the log-probabilities of the tokens of each sequence [B]:
        sequence_log_probs(log_probs, mask, average=True).
    beta: above 0. gamma: the margin that is aimed at, at least 0. Defaults are TRL's and Liger's; the paper has a beta
        of 2 and more, and a gamma of about half of it. normalizer: in place of B.

    TRL's CPOTrainer with loss_type "simpo", simpo_gamma and cpo_alpha=0, Liger's LigerFusedLinearSimPOLoss. TypeError
    or ValueError for what does not fit.
    """
    beta = positive("beta", beta)
    if not (math.isfinite(gamma) and gamma >= 0):
        raise ValueError(f"gamma is {gamma}; want a finite number of at least 0")
    chosen, rejected = floats(chosen=chosen, rejected=rejected)
    sequences("chosen", chosen)
    losses = -F.logsigmoid(beta * (chosen - rejected) - gamma)
    return divided(losses.sum(), len(losses), normalizer)
