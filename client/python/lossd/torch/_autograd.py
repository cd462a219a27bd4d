"""The loss as a node of autograd's graph."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lossd._batch import Distillation
from lossd.torch._options import LossOptions
from lossd.torch._passes import Coefficients, Tokens, Values, forward_pass, gradient_pass, minus

_MOST_OUTWEIGHED = 4.0  # times the wanted gradient may be what was declared, for one pass to correct it


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

    @property
    def frozen(self) -> bool:
        return bool(self.head.head.config.frozen)

    @property
    def returns(self) -> frozenset[str]:
        by_token = self.options.reduction == "none"
        wanted = {"log_sum_exp"} if self.return_lse or (self.return_z_loss and by_token) else set()
        return frozenset(
            wanted | set(self.return_values) | ({"z_losses"} if self.return_z_loss and by_token else set())
        )

    def tokens(self, hidden: Tensor, labels: Tensor, weights: Tensor | None) -> Tokens:
        return Tokens(arrived(hidden.detach()).to(self.wire_dtype), arrived(labels), weights, self.distillation)

    def forward(
        self,
        hidden: Tensor,
        labels: Tensor,
        weights: Tensor | None,
        declared: float | None,
        dx_dtype: torch.dtype | None,
    ) -> Values:
        tokens = self.tokens(hidden, labels, weights)
        return forward_pass(self.head, tokens, self.options, self.class_weight_sum, self.returns, declared, dx_dtype)

    def outputs(self, values: Values, device: torch.device) -> tuple[Tensor | None, ...]:
        """The loss, the log-sum-exps, the z-loss, and the values asked for."""
        return *self._losses(values, device), *(values.by_token[name] for name in self.return_values)

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


def evaluate(call: LossCall, hidden: Tensor, labels: Tensor, weights: Tensor | None) -> tuple[Tensor | None, ...]:
    """The outputs, without a graph; nothing is added at the server."""
    with torch.no_grad():
        values = call.forward(hidden, labels, weights, None, None)
        return call.outputs(values, hidden.device)


class RemoteLoss(torch.autograd.Function):
    """apply(hidden, proxy, labels, weights, call) -> the loss, the log-sum-exps or None, the z-loss or None, and what
    `call` returns without a gradient.

    `proxy` is the head's parameter, a leaf of one element that makes the loss differentiable where the hidden states
    are not; its gradient is 0, or NaN where the loss or its upstream gradient is not finite, so that whoever looks for
    such gradients before a step finds it.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, proxy: Tensor | None, labels: Tensor, weights: Tensor | None, call: LossCall
    ) -> tuple[Tensor | None, ...]:
        # Inside of a backward pass it is a checkpoint's recomputation, whose graph may be thrown away.
        declared = None if torch._C._current_graph_task_id() >= 0 else call.declared
        dx_dtype = _dx_dtype(hidden) if ctx.needs_input_grad[0] else None
        values = call.forward(hidden, labels, weights, declared, dx_dtype)
        ctx.set_materialize_grads(False)
        # The same tensors in every mode, as checkpoints compare them. dX is none of them: it cannot be recomputed.
        ctx.save_for_backward(hidden, labels, weights, values.log_sum_exp)
        ctx.call, ctx.declared, ctx.dx, ctx.hidden_dtype = call, declared, values.dx, hidden.dtype
        ctx.values = replace(values, losses=None, log_sum_exp=None, z_losses=None, dx=None, by_token={})
        outputs = call.outputs(values, hidden.device)
        ctx.mark_non_differentiable(*outputs[3:])
        return outputs

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "lossd.torch.linear_cross_entropy has no second derivative; call backward() without create_graph=True"
            )
        dx, finite = _gradient(ctx, *upstream[:3])
        marker = None
        if ctx.needs_input_grad[1]:
            finite = finite and math.isfinite(ctx.values.loss_sum)
            marker = torch.full_like(ctx.call.head.proxy, 0.0 if finite else math.nan, requires_grad=False)
        return dx, marker, None, None, None


def _dx_dtype(hidden: Tensor) -> torch.dtype:
    return torch.float32 if hidden.dtype == torch.float64 else hidden.dtype


def _gradient(ctx: Any, d_loss: Tensor | None, d_lse: Tensor | None, d_z: Tensor | None) -> tuple[Tensor | None, bool]:
    """dX, or None if it is not wanted, and whether the upstream gradients are finite."""
    call, values = ctx.call, ctx.values
    by_token = call.options.reduction == "none" or d_lse is not None
    scalars = None if by_token else _scalars(call.options, values, d_loss, d_z)
    if scalars is not None and ctx.declared is not None and _same(scalars, _declared(ctx)):
        dx, ctx.declared, ctx.dx = ctx.dx, None, None
        return None if dx is None else dx.to(ctx.hidden_dtype), True
    hidden, labels, weights, lse = ctx.saved_tensors
    rows = None
    if scalars is None:
        scalars, rows = _by_token(call, values, labels, weights, lse, d_loss, d_lse, d_z)
    elif not scalars.finite:
        scalars, rows = Coefficients(0.0, 0.0), labels != call.options.ignore_index
    dx = _exact(ctx, call.tokens(hidden, labels, weights), scalars, hidden)
    if rows is None or not bool(rows.any()):
        return dx, True
    return None if dx is None else dx.masked_fill_(rows.unsqueeze(-1), math.nan), False


def _same(found: Coefficients, declared: Coefficients) -> bool:
    """But for the rounding of a few operations in fp32, by which upstream gradients are made."""
    scales = ((found.scale, declared.scale), (found.z_scale, declared.z_scale))
    return all(math.isclose(one, other, rel_tol=2.0**-22) for one, other in scales)


def _declared(ctx: Any) -> Coefficients:
    values = ctx.values
    if values.empty_mean:
        return Coefficients(0.0, 0.0)
    return Coefficients(ctx.declared / values.count, ctx.declared / values.z_count)


def _scalars(options: LossOptions, values: Values, d_loss: Tensor | None, d_z: Tensor | None) -> Coefficients:
    # This reads the device's numbers. It waits for little: the forward pass has waited for all that came before it.
    loss = 0.0 if d_loss is None else float(d_loss)
    z_loss = 0.0 if d_z is None or options.lse_square_scale == 0 else float(d_z)
    if values.valid_tokens == 0 or values.empty_mean:
        return Coefficients(0.0, 0.0)
    return Coefficients(loss / values.count, (loss + z_loss) / values.z_count)


def _by_token(
    call: LossCall,
    values: Values,
    labels: Tensor,
    weights: Tensor | None,
    lse: Tensor | None,
    d_loss: Tensor | None,
    d_lse: Tensor | None,
    d_z: Tensor | None,
) -> tuple[Coefficients, Tensor]:
    """Coefficients with 0 where they are not finite, and those rows."""
    valid = labels != call.options.ignore_index
    ones = torch.ones(labels.shape, dtype=torch.float32, device=labels.device) if weights is None else weights
    tokens, lses = torch.zeros_like(ones), torch.zeros_like(ones)
    z_extra: Tensor | float | None = d_z
    if call.options.reduction == "none":
        tokens = tokens if d_loss is None else ones * d_loss
    else:
        scalars = _scalars(call.options, values, d_loss, d_z)
        tokens, z_extra = ones * scalars.scale, scalars.z_scale - scalars.scale
    if d_lse is not None:
        lses = lses + d_lse
    if z_extra is not None and call.options.lse_square_scale > 0:
        assert lse is not None
        lses = lses + ones * z_extra * (2 * call.options.lse_square_scale) * lse
    rows = valid & ~(torch.isfinite(tokens) & torch.isfinite(lses))
    wanted = valid & ~rows
    return Coefficients(1.0, 1.0, tokens.where(wanted, 0.0), lses.where(wanted, 0.0)), rows


def _exact(ctx: Any, tokens: Tokens, wanted: Coefficients, hidden: Tensor) -> Tensor | None:
    """dX of `wanted`; and the server's window holds it, whatever the forward pass has put there."""
    dx_dtype = _dx_dtype(hidden) if ctx.needs_input_grad[0] else None
    dx: Tensor | None = None
    if wanted.zero or ctx.values.valid_tokens == 0:
        if ctx.declared is not None:
            _undo(ctx, tokens)
        if dx_dtype is not None:
            dx = torch.zeros(hidden.shape, dtype=hidden.dtype, device=hidden.device)
        return dx
    call, values = ctx.call, ctx.values
    if ctx.declared is not None and _proportional(wanted, _declared(ctx), call.options) and not call.frozen:
        # One pass adds what is missing, and its dX, in fp32, is that of `wanted` but for a factor.
        missing = minus(wanted, _declared(ctx))
        dx = gradient_pass(call.head, tokens, call.options, values, missing, dx_dtype and torch.float32)
        ctx.declared = ctx.dx = None
        return None if dx is None else dx.mul_(wanted.scale / missing.scale).to(hidden.dtype)
    if ctx.declared is not None:
        _undo(ctx, tokens)
    dx = gradient_pass(call.head, tokens, call.options, values, wanted, dx_dtype)
    return None if dx is None else dx.to(hidden.dtype)


def _proportional(wanted: Coefficients, declared: Coefficients, options: LossOptions) -> bool:
    """Whether one pass can make `wanted` of `declared`, and leave no more rounding behind than `wanted` has anyway: a
    server's GPU rounds operands to 16 bits after they were scaled."""
    if wanted.by_token or abs(declared.scale) > _MOST_OUTWEIGHED * abs(wanted.scale):
        return False
    if options.lse_square_scale == 0:
        return True
    return math.isclose(wanted.scale * declared.z_scale, wanted.z_scale * declared.scale, rel_tol=1e-12)


def _undo(ctx: Any, tokens: Tokens) -> None:
    """Takes what the forward pass added out of the window again."""
    call, values = ctx.call, ctx.values
    if not call.frozen and values.valid_tokens > 0 and not values.empty_mean:
        declared = _declared(ctx)
        opposite = Coefficients(-declared.scale, -declared.z_scale)
        gradient_pass(call.head, tokens, call.options, values, opposite, None)
    ctx.declared = ctx.dx = None
