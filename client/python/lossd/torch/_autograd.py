"""The loss as a node of autograd's graph."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lossd.torch._call import LossCall
from lossd.torch._options import LossOptions
from lossd.torch._passes import Coefficients, Tokens, Values, gradient_pass, minus
from lossd.torch._proxy import GradientMark
from lossd.torch._window import window_of

_MOST_OUTWEIGHED = 4.0  # times the wanted gradient may be what was declared, for one pass to correct it


def evaluate(call: LossCall, hidden: Tensor, labels: Tensor, weights: Tensor | None) -> tuple[Tensor | None, ...]:
    """The outputs, without a graph; nothing is added at the server."""
    with torch.no_grad():
        values = call.forward(hidden, labels, weights, None, None)
        return call.outputs(values, hidden.device)


class RemoteLoss(torch.autograd.Function):
    """apply(hidden, proxy, labels, weights, call) -> the loss, the log-sum-exps or None, the z-loss or None, the
    entropies or None, and what `call` returns without a gradient.

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
        wanted = dx_dtype(hidden) if ctx.needs_input_grad[0] else None
        windows = window_of(call.head).windows_gone
        values = call.forward(hidden, labels, weights, declared, wanted, again=True)
        ctx.set_materialize_grads(False)
        # The same tensors in every mode, as checkpoints compare them. dX is none of them: it cannot be recomputed.
        ctx.save_for_backward(hidden, labels, weights, values.log_sum_exp)
        ctx.left = Left(
            call=call,
            values=replace(values, losses=None, log_sum_exp=None, z_losses=None, entropies=None, dx=None, by_token={}),
            declared=declared,
            dx=values.dx,
            hidden_dtype=hidden.dtype,
            wants_dx=ctx.needs_input_grad[0],
            windows=windows,
        )
        outputs = call.outputs(values, hidden.device)
        ctx.mark_non_differentiable(*outputs[4:])
        return outputs

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "lossd.torch.linear_cross_entropy has no second derivative; call backward() without create_graph=True"
            )
        left: Left = ctx.left
        dx, finite = left.gradient(lambda: ctx.saved_tensors, *upstream[:4])
        marker = None
        if ctx.needs_input_grad[1]:
            marker = left.marker(finite)
        return dx, marker, None, None, None


Saved = Callable[[], tuple[Tensor, Tensor, Tensor | None, Tensor | None]]
"""Hidden states, labels, token weights, log-sum-exps, as a forward pass saved them; asked for if they are needed."""


@dataclass
class Left:
    """What a forward pass has left for backward, beside what it saved. `declared`: the upstream gradient that dW at the
    server and `dx` are of; both are None once a backward pass has used them up, or without."""

    call: LossCall
    values: Values
    declared: float | None
    dx: Tensor | None
    hidden_dtype: torch.dtype
    wants_dx: bool
    windows: int
    """HeadWindow.windows_gone when the forward pass began."""

    @property
    def coefficients(self) -> Coefficients:
        """Those of `declared`."""
        assert self.declared is not None
        if self.values.empty_mean:
            return Coefficients(0.0, 0.0)
        return Coefficients(self.declared / self.values.count, self.declared / self.values.z_count)

    def marker(self, finite: bool) -> Tensor:
        """The gradient of the head's parameter: 0, or NaN if the loss or what came back to it is not `finite`. The
        window is told which backward pass gave it."""
        finite = finite and math.isfinite(self.values.loss_sum)
        head = self.call.head
        window_of(head).given = torch._C._current_graph_task_id()
        return GradientMark.of(0.0 if finite else math.nan, head.name, head.proxy.device)

    def gradient(
        self,
        saved: Saved,
        d_loss: Tensor | None,
        d_lse: Tensor | None,
        d_z: Tensor | None,
        d_entropy: Tensor | None,
    ) -> tuple[Tensor | None, bool]:
        """dX, or None if it is not wanted, and whether the upstream gradients are finite."""
        call, values = self.call, self.values
        if self.windows != window_of(call.head).windows_gone:  # what was added has been stepped, or dropped
            self.declared = self.dx = None
        by_token = call.options.reduction == "none" or d_lse is not None or d_entropy is not None
        scalars = None if by_token else _scalars(call.options, values, d_loss, d_z)
        if scalars is not None and call.could_declare and d_loss is not None and float(d_loss) == 1.0:
            window_of(call.head).notice_undeclared()
        if scalars is not None and self.declared is not None and _same(scalars, self.coefficients):
            dx, self.declared, self.dx = self.dx, None, None
            return None if dx is None else dx.to(self.hidden_dtype), True
        hidden, labels, weights, lse = saved()
        rows = None
        if scalars is None:
            scalars, rows = _by_token(call, values, labels, weights, lse, d_loss, d_lse, d_z, d_entropy)
        elif not scalars.finite:
            scalars, rows = Coefficients(0.0, 0.0), labels != call.options.ignore_index
        dx = self._exact(call.tokens(hidden, labels, weights), scalars, hidden)
        if rows is None or not bool(rows.any()):
            return dx, True
        return None if dx is None else dx.masked_fill_(rows.unsqueeze(-1), math.nan), False

    def _exact(self, tokens: Tokens, wanted: Coefficients, hidden: Tensor) -> Tensor | None:
        """dX of `wanted`; and the server's window holds it, whatever the forward pass has put there."""
        dtype = dx_dtype(hidden) if self.wants_dx else None
        dx: Tensor | None = None
        if wanted.zero or self.values.valid_tokens == 0:
            if self.declared is not None:
                self._undo(tokens)
            if dtype is not None:
                dx = torch.zeros(hidden.shape, dtype=hidden.dtype, device=hidden.device)
            return dx
        call, values = self.call, self.values
        if self.declared is not None and _proportional(wanted, self.coefficients, call.options) and not call.frozen:
            # One pass adds what is missing, and its dX, in fp32, is that of `wanted` but for a factor.
            missing = minus(wanted, self.coefficients)
            dx = gradient_pass(call.head, tokens, call.options, values, missing, dtype and torch.float32)
            self.declared = self.dx = None
            return None if dx is None else dx.mul_(wanted.scale / missing.scale).to(hidden.dtype)
        if self.declared is not None:
            self._undo(tokens)
        dx = gradient_pass(call.head, tokens, call.options, values, wanted, dtype)
        return None if dx is None else dx.to(hidden.dtype)

    def _undo(self, tokens: Tokens) -> None:
        """Takes what the forward pass added out of the window again."""
        call, values = self.call, self.values
        if not call.frozen and values.valid_tokens > 0 and not values.empty_mean:
            declared = self.coefficients
            opposite = Coefficients(-declared.scale, -declared.z_scale)
            gradient_pass(call.head, tokens, call.options, values, opposite, None)
        self.declared = self.dx = None


def dx_dtype(hidden: Tensor) -> torch.dtype:
    """What dX is asked for as, of such hidden states."""
    return torch.float32 if hidden.dtype == torch.float64 else hidden.dtype


def _same(found: Coefficients, declared: Coefficients) -> bool:
    """But for the rounding of a few operations in fp32, by which upstream gradients are made."""
    scales = ((found.scale, declared.scale), (found.z_scale, declared.z_scale))
    return all(math.isclose(one, other, rel_tol=2.0**-22) for one, other in scales)


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
    d_entropy: Tensor | None,
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
    finite = torch.isfinite(tokens) & torch.isfinite(lses)
    if d_entropy is not None:
        finite = finite & torch.isfinite(d_entropy)
    rows = valid & ~finite
    wanted = valid & ~rows
    entropies = None
    if d_entropy is not None and bool(d_entropy.any()):  # batches with and without go apart at the server
        entropies = d_entropy.float().where(wanted, 0.0)
    return Coefficients(1.0, 1.0, tokens.where(wanted, 0.0), lses.where(wanted, 0.0), entropies), rows


def _proportional(wanted: Coefficients, declared: Coefficients, options: LossOptions) -> bool:
    """Whether one pass can make `wanted` of `declared`, and leave no more rounding behind than `wanted` has anyway: a
    server's GPU rounds operands to 16 bits after they were scaled."""
    if wanted.by_token or abs(declared.scale) > _MOST_OUTWEIGHED * abs(wanted.scale):
        return False
    if options.lse_square_scale == 0:
        return True
    return math.isclose(wanted.scale * declared.z_scale, wanted.z_scale * declared.scale, rel_tol=1e-12)
