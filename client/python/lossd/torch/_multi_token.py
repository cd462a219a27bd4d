"""Multi-token prediction: the losses of several depths, which share one head, in one call of the server."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lossd.torch._function import linear_cross_entropy
from lossd.torch._tokens import class_weight_sum, shift_labels


def multi_token_cross_entropy(
    hidden: Tensor | Sequence[Tensor],
    target: Tensor | Sequence[Tensor],
    head: Any,
    *,
    shifts: Sequence[int] | None = None,
    weights: float | Sequence[float] | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    normalizers: Sequence[float | Tensor] | None = None,
    token_weights: Tensor | Sequence[Tensor] | None = None,
    weight: Tensor | bool | None = None,
    lse_square_scale: float = 0.0,
    grad_scale: float | Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """The sum over depths k of w[k] * linear_cross_entropy(hidden[k], target, head, shift=1 + k), of which the server
    sees one batch, the tokens of all depths.

        loss, by_depth = multi_token_cross_entropy([main, *mtp], labels, head, weights=[1.0, 0.1, 0.1])

    hidden: D tensors [..., T, H], or one [D, ..., T, H], which spares a copy; dtypes and devices are
        linear_cross_entropy's. target: labels [..., T], of which depth k predicts that of 1 + k tokens on; or D
        tensors, or one [D, ..., T], the labels of each depth, which are not shifted.
    shifts: of each depth, in place of 1, 2, .., D (of labels for each depth 0).
    weights: of each depth's mean; a number w is w / D for each; None is 1.
    reduction: "mean": each depth's loss is the mean over its own tokens that count. "sum": their sum. "none": below.
    normalizers: what each depth's mean is divided by, for means over more than this batch. 0: the depth counts 0.
    token_weights: of all depths' tokens [..., T], or of each depth's, as hidden.
    weight: class weights, as linear_cross_entropy's. With them a "mean" needs the tensor [V], or normalizers.
    grad_scale: the gradient that will come back to the loss, if it is known. The tokens are sent once, then; otherwise
        once by forward and again by backward. weights must not be 0 then.
    options: label_smoothing, softcap, logit_scale, bias, train_head of linear_cross_entropy.

    Returns (loss, by_depth): the weighted sum, [], fp32, and the depths' losses [D], fp32, without their weights and
    without a graph. A depth without tokens that count, as of sequences no longer than its shift, counts 0. Of "none":
    the losses of each depth's tokens [D, ..., T], with a graph, and their detached sums [D].

    Raises what linear_cross_entropy raises; ValueError if numbers of depths differ."""
    hidden, depths = _stacked(hidden)
    labels, token_weights = _labels(target, token_weights, hidden, shifts, ignore_index)
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"reduction is {reduction!r}; want one of 'none', 'mean', 'sum'")
    if reduction != "mean" and normalizers is not None:
        raise ValueError(f"normalizers are given, but reduction is {reduction!r}; only a mean is divided by them")
    options |= {"ignore_index": ignore_index, "weight": weight, "lse_square_scale": lse_square_scale}
    if reduction == "none":
        if weights is not None:
            raise ValueError("weights are of means and sums; multiply the losses that reduction='none' returns")
        losses = linear_cross_entropy(
            hidden, labels, head, reduction="none", token_weights=token_weights, grad_scale=grad_scale, **options
        )
        return losses, losses.detach().reshape(depths, -1).sum(1)
    factors = _factors(weights, depths)
    if grad_scale is not None and 0.0 in factors:
        raise ValueError(f"weights is {factors}: leave depths with weight 0 out if grad_scale is given")
    if reduction == "mean":
        counts = _counts(labels, ignore_index, normalizers, weight, head, lse_square_scale)
        divisors = counts.where(counts != 0, math.inf).to(labels.device)
    else:
        divisors = torch.ones(depths, dtype=torch.float64, device=labels.device)
    wanted = torch.tensor(factors, dtype=torch.float64, device=labels.device)
    scales = wanted / divisors
    of_depth = (depths, *[1] * (labels.dim() - 1))
    if grad_scale is None:
        losses = linear_cross_entropy(hidden, labels, head, reduction="none", token_weights=token_weights, **options)
        by_depth = (losses.reshape(depths, -1).sum(1, dtype=torch.float64) / divisors).float()
        return (losses.reshape(depths, -1) * scales.float()[:, None]).sum(), by_depth.detach()
    folded = scales.float().view(of_depth).expand(labels.shape)
    loss, values = linear_cross_entropy(
        hidden,
        labels,
        head,
        reduction="sum",
        token_weights=folded if token_weights is None else folded * token_weights,
        grad_scale=grad_scale,
        return_values=("losses",),
        **options,
    )
    own = values["losses"].reshape(depths, -1).sum(1, dtype=torch.float64) / wanted
    return loss, own.float()


def _stacked(tensors: Tensor | Sequence[Tensor]) -> tuple[Tensor, int]:
    """[D, ..., H], and D."""
    if not isinstance(tensors, Tensor):
        tensors = list(tensors)
        if not tensors or any(not isinstance(one, Tensor) or one.shape != tensors[0].shape for one in tensors):
            shapes = [list(one.shape) if isinstance(one, Tensor) else type(one).__name__ for one in tensors]
            raise ValueError(f"hidden is {shapes}; want one tensor for each depth, of one shape")
        tensors = torch.stack(tensors) if len(tensors) > 1 else tensors[0].unsqueeze(0)
    if tensors.dim() < 2 or tensors.shape[0] == 0:
        raise ValueError(f"hidden has shape {list(tensors.shape)}; want [depths, ..., H], or a tensor for each depth")
    return tensors, tensors.shape[0]


def _labels(
    target: Tensor | Sequence[Tensor],
    token_weights: Tensor | Sequence[Tensor] | None,
    hidden: Tensor,
    shifts: Sequence[int] | None,
    ignore_index: int,
) -> tuple[Tensor, Tensor | None]:
    """Labels and weights of all depths, [D, ..., T]."""
    depths = hidden.shape[0]
    labels = _by_depth("target", target, hidden)
    if shifts is None:
        shifts = range(1, depths + 1) if isinstance(target, Tensor) and _is_shared(target, hidden) else [0] * depths
    if len(shifts) != depths:
        raise ValueError(f"shifts has {len(shifts)} entries, and hidden {depths} depths")
    if any(int(shift) for shift in shifts) or not isinstance(target, Tensor) or _is_shared(target, hidden):
        pairs = zip(labels, shifts, strict=True)
        stacked = torch.stack([shift_labels(one.detach(), int(shift), ignore_index) for one, shift in pairs])
    else:
        stacked = target.detach()
    if token_weights is None:
        return stacked, None
    return stacked, torch.stack(list(_by_depth("token_weights", token_weights, hidden)))


def _is_shared(given: Tensor, hidden: Tensor) -> bool:
    return bool(given.shape == hidden.shape[1:-1])


def _by_depth(name: str, given: Tensor | Sequence[Tensor], hidden: Tensor) -> Sequence[Tensor]:
    if isinstance(given, Tensor):
        if _is_shared(given, hidden):
            return [given] * hidden.shape[0]
        if given.shape == hidden.shape[:-1]:
            return list(given.unbind(0))
        shape = list(given.shape)
    else:
        given = list(given)
        if len(given) == hidden.shape[0] and all(isinstance(one, Tensor) and _is_shared(one, hidden) for one in given):
            return given
        shape = [list(getattr(one, "shape", ())) for one in given]
    raise ValueError(
        f"{name} has shape {shape}; want {list(hidden.shape[1:-1])}, or that for each of {hidden.shape[0]} depths, as "
        f"hidden is {list(hidden.shape)}"
    )


def _factors(weights: float | Sequence[float] | None, depths: int) -> list[float]:
    weights = 1.0 if weights is None else weights
    if isinstance(weights, (int, float)):
        factors = [float(weights) / depths] * depths
    else:
        factors = [float(one) for one in weights]
    if len(factors) != depths:
        raise ValueError(f"weights has {len(factors)} entries, and hidden {depths} depths")
    if not all(math.isfinite(one) for one in factors):
        raise ValueError(f"weights is {factors}; want finite numbers")
    return factors


def _counts(
    labels: Tensor,
    ignore_index: int,
    normalizers: Sequence[float | Tensor] | None,
    weight: Tensor | bool | None,
    head: Any,
    lse_square_scale: float,
) -> Tensor:
    """What each depth's mean is divided by, [D], fp64."""
    depths = labels.shape[0]
    weighted = weight is not False and bool(head.head.config.has_class_weights)
    if weighted and lse_square_scale > 0:
        raise ValueError(
            f"head {head.name!r} has class weights, and lse_square_scale is {lse_square_scale}: cross-entropy and "
            "z-loss have different counts; take reduction='sum' and divide, or weight=False"
        )
    if normalizers is not None:
        given = [float(one) for one in normalizers]
        if len(given) != depths:
            raise ValueError(f"normalizers has {len(given)} entries, and hidden {depths} depths")
        if not all(math.isfinite(one) and one >= 0 for one in given):
            raise ValueError(f"normalizers is {given}; want finite numbers that are not below 0")
        return torch.tensor(given, dtype=torch.float64, device="cpu")
    if not weighted:
        return (labels != ignore_index).reshape(depths, -1).sum(1).double()
    if not isinstance(weight, Tensor):
        raise ValueError(
            f"head {head.name!r} has class weights: give them as `weight`, or the sums of those of each depth's labels "
            "as normalizers, or weight=False"
        )
    sums = [class_weight_sum(weight, one, ignore_index) for one in labels]
    return torch.tensor(sums, dtype=torch.float64, device="cpu")
