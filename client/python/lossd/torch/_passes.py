"""The two ways in which a loss meets the server: for values alone, and for gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lossd._batch import TOP, Distillation, TargetLists
from lossd.errors import FailedPreconditionError
from lossd.torch._options import LossOptions
from lossd.torch._window import window_of


@dataclass(frozen=True)
class Tokens:
    """One batch: hidden states [..., H] as they are sent, labels [...], weights of the tokens [...] or None, soft
    targets or None, lists of kept tokens (offsets, ids) or None, soft targets on lists or None."""

    hidden: Tensor
    labels: Tensor
    weights: Tensor | None
    distillation: Distillation | None = None
    kept: tuple[Tensor, Tensor] | None = None
    targets: TargetLists | None = None


@dataclass(frozen=True)
class Values:
    """What a forward pass brought. The sums and counts are of the batch, over its valid tokens."""

    loss_sum: float
    z_loss_sum: float
    valid_tokens: int
    count: float  # what the cross-entropy of a mean is divided by
    z_count: float
    weight_version: int
    hold: int = 0  # the number by which the server may have kept what a second pass can use; 0: none
    losses: Tensor | None = None
    log_sum_exp: Tensor | None = None
    z_losses: Tensor | None = None
    entropies: Tensor | None = None
    dx: Tensor | None = None
    by_token: dict[str, Tensor] = field(default_factory=dict)

    def loss(self, options: LossOptions) -> float:
        """Reduced, of "sum" and "mean"."""
        if options.reduction == "sum":
            return self.loss_sum
        if self.empty_mean:
            return math.nan if options.torch_compat and not options.normalizer else 0.0
        return (self.loss_sum - self.z_loss_sum) / self.count + self.z_loss_sum / self.z_count

    def z_loss(self, options: LossOptions) -> float:
        if options.reduction == "sum":
            return self.z_loss_sum
        if self.empty_mean:
            return math.nan if options.torch_compat and not options.normalizer else 0.0
        return self.z_loss_sum / self.z_count

    @property
    def empty_mean(self) -> bool:
        return self.count == 0 or self.valid_tokens == 0


@dataclass(frozen=True)
class Coefficients:
    """The upstream gradient of every token: of its loss without z-loss `scale`, of its z-loss `z_scale`, or by token
    (`scale` is 1 then): `tokens` of its loss with its z-loss, `log_sum_exps` of its log-sum-exp, `entropies` of its
    entropy."""

    scale: float
    z_scale: float
    tokens: Tensor | None = None
    log_sum_exps: Tensor | None = None
    entropies: Tensor | None = None

    @property
    def by_token(self) -> bool:
        return self.tokens is not None

    @property
    def finite(self) -> bool:
        """As fp32, which they are sent as."""
        return all(abs(scale) <= torch.finfo(torch.float32).max for scale in (self.scale, self.z_scale))

    @property
    def zero(self) -> bool:
        return not self.by_token and self.scale == 0 and self.z_scale == 0


def class_weights_count(head: Any, options: LossOptions) -> bool:
    """`head`: a RemoteHead."""
    return options.class_weights == "use" or (options.class_weights == "head" and head.head.config.has_class_weights)


def forward_pass(
    head: Any,
    tokens: Tokens,
    options: LossOptions,
    class_weight_sum: float | None,
    returns: frozenset[str],
    declared: float | None,
    dx_dtype: torch.dtype | None,
    top_k: int = 0,
    hold: int = 0,
) -> Values:
    """Values, of each token too what `returns` names; if `declared` is a number also dW of that times the loss, added
    at the server, and dX as `dx_dtype` unless that is None. `class_weight_sum`: of the labels, if the caller knows the
    head's class weights. `hold`: as Values has it."""
    counted = class_weights_count(head, options)
    if counted and options.lse_square_scale > 0 and options.normalizer is not None and options.z_normalizer is None:
        raise ValueError(
            f"normalizer is {options.normalizer} and z_normalizer is None, but with class weights the z-loss has "
            "another count, the number of valid tokens: give it as z_normalizer"
        )
    arguments = options.compute_arguments()
    if declared is not None:
        arguments |= {"gradient_scale": declared} | _declared_mean(options, tokens, class_weight_sum)
    if declared is not None:
        window_of(head).before_gradient()
    by_token = options.reduction == "none" or "losses" in returns
    result = head.session.compute(
        tokens.hidden,
        tokens.labels,
        mode="loss" if declared is None else "gradients",
        dx=declared is not None and dx_dtype is not None,
        dx_dtype=dx_dtype,
        losses=by_token,
        token_weights=tokens.weights,
        distillation=tokens.distillation,
        kept_tokens=tokens.kept,
        target_lists=tokens.targets,
        returns=returns - {"losses", *TOP},
        top_k=top_k,
        hold=hold,
        **arguments,
    )
    if class_weight_sum is not None and not math.isclose(result.class_weight_sum, class_weight_sum, rel_tol=1e-4):
        raise ValueError(
            f"the labels' class weights add up to {class_weight_sum} by `weight`, and to {result.class_weight_sum} at "
            f"the server; give what head {head.head.name!r} was created with, or weight=None"
        )
    count, z_count = _counts(result, options, counted)
    return Values(
        loss_sum=result.loss_sum,
        z_loss_sum=result.z_loss_sum,
        valid_tokens=result.valid_tokens,
        count=count,
        z_count=z_count,
        weight_version=result.weight_version,
        hold=hold,
        losses=result.losses if by_token else None,
        log_sum_exp=result.log_sum_exp if "log_sum_exp" in returns else None,
        z_losses=result.z_losses if "z_losses" in returns else None,
        entropies=result.entropies if "entropies" in returns else None,
        dx=result.dx if declared is not None and dx_dtype is not None else None,
        by_token={name: _apart(getattr(result, name), options) for name in sorted(returns)},
    )


def _apart(value: Tensor, options: LossOptions) -> Tensor:
    """A value without a gradient, which must not be the tensor that has one."""
    return value.clone() if options.reduction == "none" else value


def _declared_mean(options: LossOptions, tokens: Tokens, class_weight_sum: float | None) -> dict[str, Any]:
    if options.reduction != "mean":
        return {}
    count, z_count = options.normalizer, options.z_normalizer
    if count is None and class_weight_sum:
        count, z_count = class_weight_sum, float((tokens.labels != options.ignore_index).sum())
    return {"reduction": "mean", "normalizer": count, "z_normalizer": z_count}


def _counts(result: Any, options: LossOptions, class_weights: bool) -> tuple[float, float]:
    """What the cross-entropy and the z-loss of a mean are divided by; (1, 1) of another reduction."""
    if options.reduction != "mean":
        return 1.0, 1.0
    if options.normalizer is None or options.normalizer == 0:
        count = result.class_weight_sum if class_weights else result.valid_tokens
        if options.normalizer == 0 and count > 0:
            raise ValueError(
                f"normalizer is 0, but {result.valid_tokens} tokens of this batch count; count all of them"
            )
        return float(count), float(result.valid_tokens)
    return options.normalizer, options.normalizer if options.z_normalizer is None else options.z_normalizer


def gradient_pass(
    head: Any,
    tokens: Tokens,
    options: LossOptions,
    values: Values,
    coefficients: Coefficients,
    dx_dtype: torch.dtype | None,
) -> Tensor | None:
    """Adds dW of the coefficients to the server's window. Returns dX as `dx_dtype`, None if that is None."""
    if values.weight_version == 0:
        raise FailedPreconditionError(
            "the head's weights were replaced while the loss was computed, so that its tokens met different ones and "
            "it has no gradient; compute it again, and write weights between steps"
        )
    arguments = options.compute_arguments()
    weights = tokens.weights
    if coefficients.by_token:
        arguments |= {"lse_gradients": coefficients.log_sum_exps, "entropy_gradients": coefficients.entropies}
        weights = coefficients.tokens
    else:
        arguments |= {"gradient_scale": coefficients.scale}
        if options.lse_square_scale > 0 and coefficients.z_scale != coefficients.scale:
            arguments |= {"z_gradient_scale": coefficients.z_scale}
    window_of(head).before_gradient()
    result = head.session.compute(
        tokens.hidden,
        tokens.labels,
        mode="gradients",
        dx=dx_dtype is not None,
        dx_dtype=dx_dtype,
        losses=False,
        token_weights=weights,
        distillation=tokens.distillation,
        kept_tokens=tokens.kept,
        target_lists=tokens.targets,
        weight_version=values.weight_version,
        hold=values.hold,
        **arguments,
    )
    return result.dx if dx_dtype is not None else None


def minus(coefficients: Coefficients, other: Coefficients) -> Coefficients:
    """The difference of two that are not by token."""
    return replace(coefficients, scale=coefficients.scale - other.scale, z_scale=coefficients.z_scale - other.z_scale)
