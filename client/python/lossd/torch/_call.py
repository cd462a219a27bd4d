"""What one call of the loss wants, and its two meetings with the server."""

from __future__ import annotations

import itertools
import math
import secrets
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lossd._batch import Distillation, TargetLists
from lossd.torch._dtypes import dtype_of
from lossd.torch._moved import require_own_value
from lossd.torch._options import LossOptions
from lossd.torch._passes import Tokens, Values, class_weights_count, forward_pass
from lossd.torch._tokens import class_weight_sum
from lossd.torch._window import window_of

# Numbers of batches between their two passes. Another process that goes on with this one's session has others.
_holds = itertools.count(1 + secrets.randbits(48))


@dataclass(frozen=True)
class LossCall:
    """What one call wants, beside its tensors. `head`: a RemoteHead, whose session is looked up for every pass."""

    head: Any
    options: LossOptions
    declared: float | None
    return_lse: bool
    return_z_loss: bool
    wire_dtype: torch.dtype
    class_weight_sum: float | None = None  # of the labels, if it is known
    distillation: Distillation | None = None
    return_values: tuple[str, ...] = ()
    return_entropy: bool = False
    top_k: int = 0
    kept_tokens: tuple[Tensor, Tensor] | None = None
    target_lists: TargetLists | None = None
    could_declare: bool = False
    """Whether a grad_scale, which nobody gave, would have saved a pass."""

    @property
    def frozen(self) -> bool:
        return bool(self.head.head.config.frozen)

    @property
    def returns(self) -> frozenset[str]:
        by_token = self.options.reduction == "none"
        wanted = {"log_sum_exp"} if self.return_lse or (self.return_z_loss and by_token) else set()
        wanted |= {"z_losses"} if self.return_z_loss and by_token else set()
        wanted |= {"entropies"} if self.return_entropy else set()
        return frozenset(wanted | set(self.return_values))

    def tokens(self, hidden: Tensor, labels: Tensor, weights: Tensor | None) -> Tokens:
        states = arrived(hidden.detach()).to(self.wire_dtype)
        return Tokens(states, arrived(labels), weights, self.distillation, self.kept_tokens, self.target_lists)

    def forward(
        self,
        hidden: Tensor,
        labels: Tensor,
        weights: Tensor | None,
        declared: float | None,
        dx_dtype: torch.dtype | None,
        again: bool = False,
    ) -> Values:
        """`again`: whether the same tokens probably come back for their gradients."""
        if not self.frozen:
            require_own_value(self.head.proxy)
            if again:
                window_of(self.head).require_no_join()
        tokens = self.tokens(hidden, labels, weights)
        hold = next(_holds) if again and declared is None and self._holds() else 0
        return forward_pass(
            self.head, tokens, self.options, self.class_weight_sum, self.returns, declared, dx_dtype, self.top_k, hold
        )

    def _holds(self) -> bool:
        """Whether anything of a first pass may be kept for a second."""
        return bool(self.head.head.config.held_bytes > 0 or self.head.session.held_hidden_bytes > 0)

    def outputs(self, values: Values, device: torch.device) -> tuple[Tensor | None, ...]:
        """The loss, the log-sum-exps, the z-loss, the entropies, and the values asked for."""
        told = dict(values.by_token)
        if self.return_entropy:  # values have no gradient, and must not be the tensor that has one
            told["entropies"] = told["entropies"].clone()
        entropies = values.entropies if self.return_entropy else None
        return *self._losses(values, device), entropies, *(told[name] for name in self.return_values)

    def _losses(self, values: Values, device: torch.device) -> tuple[Tensor | None, ...]:
        lse = values.log_sum_exp if self.return_lse else None
        if self.options.reduction == "none":
            assert values.losses is not None
            return values.losses, lse, values.z_losses
        # torch.full is a kernel, where torch.tensor would be a copy that waits.
        loss = torch.full((), values.loss(self.options), dtype=torch.float32, device=device)
        if not self.return_z_loss:
            return loss, lse, None
        return loss, lse, torch.full((), values.z_loss(self.options), dtype=torch.float32, device=device)


def arrived(tensor: Tensor) -> Tensor:
    """The result of a collective that may still be under way."""
    return tensor.trigger_wait() if hasattr(tensor, "trigger_wait") else tensor


def make_call(
    head: Any,
    options: LossOptions,
    labels: Tensor,
    *,
    hidden_dtype: torch.dtype,
    autocast: torch.dtype | None,
    class_weights: Tensor | None,
    grad_scale: float | Tensor | None,
    return_lse: bool,
    return_z_loss: bool,
    distillation: Distillation | None,
    return_entropy: bool = False,
    return_values: tuple[str, ...] = (),
    top_k: int = 0,
    kept_tokens: tuple[Tensor, Tensor] | None = None,
    target_lists: TargetLists | None = None,
) -> LossCall:
    """head: a RemoteHead. hidden_dtype: the input's. autocast: what autocast casts to, where it is on. class_weights:
    [V], the head's own. distillation: with hidden states that need no gradient."""
    weight_sum = None
    if class_weights is not None:
        weight_sum = class_weight_sum(class_weights, labels, options.ignore_index)
    # A mean over a count that the server has to tell first takes two passes.
    unknown_count = class_weights_count(head, options) and not weight_sum
    two_passes = unknown_count and options.reduction == "mean" and options.normalizer is None
    return LossCall(
        head=head,
        options=options,
        class_weight_sum=weight_sum,
        declared=_declared(grad_scale, options, two_passes),
        could_declare=grad_scale is None and not two_passes and head.training and head.grad_scale is None,
        return_lse=return_lse,
        return_z_loss=return_z_loss,
        wire_dtype=_wire_dtype(hidden_dtype, autocast, head),
        distillation=distillation,
        return_values=return_values,
        return_entropy=return_entropy,
        top_k=top_k,
        kept_tokens=kept_tokens,
        target_lists=target_lists,
    )


def checked_grad_scale(grad_scale: float | Tensor | None) -> float | None:
    """As a number. ValueError if it is not finite."""
    if grad_scale is None:
        return None
    declared = float(grad_scale)
    if not math.isfinite(declared):
        raise ValueError(f"grad_scale is {declared}; want a finite number, such as 1.0 for loss.backward()")
    return declared


def _declared(grad_scale: float | Tensor | None, options: LossOptions, two_passes: bool) -> float | None:
    declared = checked_grad_scale(grad_scale)
    if declared is None:
        return None
    if options.reduction == "none":
        raise ValueError(
            f"grad_scale is {declared}, but reduction is 'none': each token has a gradient, which only backward knows"
        )
    return None if two_passes or declared == 0 or options.normalizer == 0 else declared


def _wire_dtype(hidden: torch.dtype, autocast: torch.dtype | None, head: Any) -> torch.dtype:
    """What the hidden states are sent as. The server rounds them to the head's dtype, so nothing is lost by doing that
    to wide ones here."""
    if hidden in (torch.bfloat16, torch.float16):
        return hidden
    dtype = dtype_of(head.head.dtype)
    return autocast if dtype is torch.float32 and autocast is not None else dtype
