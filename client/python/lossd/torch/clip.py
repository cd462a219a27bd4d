"""The norm of a gradient that lies partly here and partly at servers."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from lossd.torch._proxy import GradientProxy
from lossd.torch.head import RemoteHead


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    heads: RemoteHead | Iterable[RemoteHead] = (),
) -> torch.Tensor:
    """torch.nn.utils.clip_grad_norm_ over local parameters and heads together; returns the norm of all of it before.

    parameters: those of the model, heads' among them. heads: more of them. Local gradients are scaled in place, heads'
    by their next step or flush (through their proxies, so that a factor of GradScaler.unscale_ counts already).
    norm_type: 2 or inf with heads. The heads' norms are asked for, without moving or freezing anything; collective of
    heads with a process group. Call it once, behind the last backward of the step.
    """
    given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    heads = [heads] if isinstance(heads, RemoteHead) else list(heads)
    heads += [p.head for p in given if isinstance(p, GradientProxy) and all(p.head is not head for head in heads)]
    heads = [head for head in heads if not head.frozen]
    local = [p for p in given if not isinstance(p, GradientProxy)]
    named = [head.proxy for head in heads]
    if not heads:
        return torch.nn.utils.clip_grad_norm_(local, max_norm, norm_type, error_if_nonfinite, foreach)
    if norm_type not in (2, math.inf):
        raise ValueError(f"norm_type is {norm_type}; heads know the 2-norm and the largest magnitude (2 or math.inf)")
    grads = [p.grad for p in local if p.grad is not None]
    parts = [_norm_of(head, norm_type) for head in heads]
    if grads:  # without any, torch's answer has the default dtype and device
        own = torch.nn.utils.get_total_norm(grads, norm_type, False, foreach)
        parts.insert(0, own.full_tensor() if hasattr(own, "full_tensor") else own)
    # The widest dtype of all: half precision has no room for a head's norm.
    total = torch.linalg.vector_norm(torch.stack([part.to(parts[0].device) for part in parts]), norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(
            f"the total norm of order {norm_type} is {float(total)}; it cannot be clipped. With "
            f"error_if_nonfinite=False the gradients are scaled by it all the same"
        )
    torch.nn.utils.clip_grads_with_norm_([*local, *named], max_norm, total, foreach)
    return total


def _norm_of(head: RemoteHead, norm_type: float) -> torch.Tensor:
    if head.group is not None:  # each rank asks, whatever it knows, and what was done to it so far goes on
        factor = head.proxy.factor
        head.refresh_gradient().mul_(factor)
    grad = head.proxy.grad
    if grad is None:
        return torch.zeros((), dtype=torch.float32, device="cpu")
    if norm_type == 2 or not bool(torch.isfinite(grad).all()):
        return grad.as_subclass(torch.Tensor).reshape(())
    return torch.tensor(head.gradient_stats().largest, dtype=torch.float32, device="cpu")
