"""Rows (tokens) that tensor-parallel ranks share out, and gather again.

Every rank computes the same loss of all tokens, so the gradients that come back to gathered losses are the same on all
ranks, and each takes those of its own rows. What all ranks had before the rows were shared out needs its whole gradient
on every rank, and is gathered."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def share_of(rows: int, group: dist.ProcessGroup) -> tuple[int, int]:
    """First row of this rank and the row behind its last. Ranks at the end may have fewer, or none."""
    piece = -(-rows // dist.get_world_size(group))
    first = min(dist.get_rank(group) * piece, rows)
    return first, min(first + piece, rows)


def gathered(own: Tensor, rows: int, group: dist.ProcessGroup) -> Tensor:
    """[rows, ...] of each rank's share. Collective, without autograd."""
    ranks = dist.get_world_size(group)
    piece = -(-rows // ranks)
    padded = own.new_zeros((piece, *own.shape[1:]))
    padded[: own.shape[0]] = own
    whole = own.new_empty((ranks * piece, *own.shape[1:]))
    dist.all_gather_into_tensor(whole, padded, group=group)
    return whole[:rows]


class GatherRows(torch.autograd.Function):
    """apply(own [n, ...], rows, group) -> [rows, ...]; its gradient is that of the own rows."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, rows: int, group: dist.ProcessGroup) -> Tensor:
        ctx.share = share_of(rows, group)
        return gathered(own, rows, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        first, end = ctx.share
        return grad[first:end], None, None


class ShareRows(torch.autograd.Function):
    """apply(whole [rows, ...], group) -> this rank's share; its gradient is gathered, and the same on all ranks."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.rows, ctx.group = whole.shape[0], group
        first, end = share_of(ctx.rows, group)
        return whole[first:end].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return gathered(grad, ctx.rows, ctx.group), None
