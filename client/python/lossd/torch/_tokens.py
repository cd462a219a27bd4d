"""Labels: their shift, and what they weigh."""

from __future__ import annotations

import torch
from torch import Tensor


def shift_labels(target: Tensor, shift: int, ignore_index: int = -100) -> Tensor:
    """Labels [..., T] for the prediction of the token `shift` places on: result[..., i] = target[..., i + shift], and
    ignore_index at the end of each sequence. The hidden states stay as they are: ignored tokens are not sent."""
    if shift < 0:
        raise ValueError(f"shift is {shift}; want at least 0")
    if shift == 0:
        return target
    if target.dim() == 0:
        raise ValueError(f"shift is {shift}, but target has no sequence: its shape is []")
    if not _fits(ignore_index, target.dtype):
        target = target.long()
    shifted = torch.full_like(target, ignore_index)
    if shift < target.shape[-1]:
        shifted[..., :-shift] = target[..., shift:]
    return shifted


def _fits(value: int, dtype: torch.dtype) -> bool:
    info = torch.iinfo(dtype)
    return bool(info.min <= value <= info.max)


def class_weight_sum(weight: Tensor, target: Tensor, ignore_index: int = -100) -> float:
    """The sum of the labels' weights, which is what a mean with class weights is over. On the CPU, so that a label out
    of range is an error of its own."""
    labels = target.detach().cpu().long()
    labels = labels[labels != ignore_index]
    lowest, highest = (int(labels.min()), int(labels.max())) if labels.numel() > 0 else (0, 0)
    if lowest < 0 or highest >= weight.shape[0]:
        raise ValueError(
            f"target holds labels from {lowest} to {highest}; want 0 to {weight.shape[0] - 1}, or ignore_index "
            f"({ignore_index})"
        )
    return float(weight.detach().cpu().double()[labels].sum())
