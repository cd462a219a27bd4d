"""The loss of hidden states that are a DTensor: each rank sends its tokens, and the result is that of all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

from lossd.torch._tokens import shift_labels

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement

    from lossd._batch import Distillation


def is_dtensor(value: Any) -> TypeGuard[DTensor]:
    """Without importing what knows it, which takes its time."""
    return isinstance(value, Tensor) and hasattr(value, "placements") and hasattr(value, "device_mesh")


def sharded_loss(
    compute: Callable[..., Any],
    input: DTensor,
    target: Tensor,
    head: Any,
    *,
    weight: Tensor | bool | None,
    ignore_index: int,
    reduction: str,
    shift: bool | int,
    token_weights: Tensor | None,
    normalizer: float | Tensor | None,
    z_normalizer: float | Tensor | None,
    distillation: Distillation | None,
    return_lse: bool,
    return_z_loss: bool,
    return_entropy: bool,
    **options: Any,
) -> Any:
    """compute: linear_cross_entropy, for tensors of this rank. What it returns for the whole batch, as DTensors."""
    tokens = _Tokens(input)
    if head.average is True and tokens.ranks > 1:
        raise ValueError(
            f"average=True of head {head.traced.name!r} divides its gradient by all ranks of the group, but the "
            f"{tokens.ranks} ranks of this DTensor's mesh share one batch: say how many batches there are, such as "
            "average=1, or the number of data-parallel ranks"
        )
    if shift:
        target, shift = tokens.shifted(target, int(shift), ignore_index), 0
    labels = tokens.own("target", target)
    if reduction == "mean" and normalizer is None:
        if weight is not False and head.traced.has_class_weights and not isinstance(weight, Tensor):
            raise ValueError(
                "a mean with class weights over a DTensor is divided by what only the server knows of each rank: give "
                "`normalizer`, the sum of the labels' weights on all ranks, or `weight`, the head's weights"
            )
        valid = labels != ignore_index
        z_normalizer = normalizer = tokens.total(valid.sum())
        if isinstance(weight, Tensor):
            counted = weight.to(labels.device, torch.float64)[labels.long().where(valid, 0)] * valid
            normalizer = tokens.total(counted.sum())
    if distillation is not None and isinstance(distillation.hidden, Tensor):
        distillation = replace(distillation, hidden=tokens.own("distillation.hidden", distillation.hidden, 1))
    found = compute(
        tokens.local,
        labels,
        head,
        weight=weight,
        ignore_index=ignore_index,
        reduction=reduction,
        token_weights=None if token_weights is None else tokens.own("token_weights", token_weights),
        normalizer=normalizer,
        z_normalizer=z_normalizer,
        distillation=distillation,
        return_lse=return_lse,
        return_z_loss=return_z_loss,
        return_entropy=return_entropy,
        **options,
    )
    parts = list(found) if isinstance(found, tuple) else [found]
    by_token = reduction == "none"
    per_token = [by_token] + [True] * return_lse + [by_token] * return_z_loss + [True] * return_entropy
    whole = [tokens.joined(part) if each else tokens.summed(part) for part, each in zip(parts, per_token, strict=True)]
    return tuple(whole) if len(whole) > 1 else whole[0]


class _Tokens:
    """How the tokens of `input` [..., H] are spread over the ranks of its mesh."""

    def __init__(self, input: DTensor) -> None:
        from torch.distributed.tensor import Replicate

        self.mesh = input.device_mesh
        self.shape = input.shape[:-1]
        self.placements: tuple[Placement, ...] = tuple(input.placements)
        for placement in self.placements:
            self._check(placement, len(self.shape))
        # Where ranks have the same tokens each takes a part of them, so that every token counts once.
        sharded = {p.dim for p in self.placements if not isinstance(p, Replicate)}
        free = [dim for dim in range(len(self.shape)) if dim not in sharded] or list(range(len(self.shape)))
        cut = max(free, key=lambda dim: int(self.shape[dim]))
        self.cut = tuple(_shard(cut) if isinstance(p, Replicate) else p for p in self.placements)
        self.whole_shape = input.to_local().shape[:-1]
        self.local: Tensor = self._cut(input)

    @staticmethod
    def _check(placement: Placement, dims: int) -> None:
        from torch.distributed.tensor import Replicate, Shard

        if isinstance(placement, Replicate):
            return
        if type(placement) is not Shard or placement.dim >= dims:
            raise ValueError(
                f"input is a DTensor that is placed {placement}: a token's hidden state has to be whole on one rank, "
                f"Shard of a dimension of the tokens (0 to {dims - 1}) or Replicate(); redistribute it first: "
                "input.redistribute(placements=[Replicate()])"
            )

    @property
    def ranks(self) -> int:
        return int(self.mesh.size())

    def _cut(self, value: DTensor) -> Tensor:
        local: Tensor = value.redistribute(placements=self.cut).to_local(grad_placements=self.cut)
        return local

    def own(self, name: str, value: Tensor, more: int = 0) -> Tensor:
        """This rank's part of `value` [tokens..., and `more` dimensions], a DTensor, or a tensor with the tokens that
        this rank has of input."""
        from torch.distributed.tensor import DTensor

        value = value.detach()
        if not is_dtensor(value):
            shape = value.shape[: value.dim() - more]
            if shape != self.whole_shape:
                raise ValueError(
                    f"{name} has shape {list(value.shape)}; beside input, a DTensor {self.placements} of "
                    f"{list(self.shape)} tokens, want a DTensor, or this rank's part, {list(self.whole_shape)}"
                )
            shape = (*self.shape, *value.shape[value.dim() - more :])
            value = DTensor.from_local(
                value, self.mesh, self.placements, shape=torch.Size(shape), stride=_strides(shape), run_check=False
            )
        elif value.shape[: value.dim() - more] != self.shape or value.device_mesh != self.mesh:
            raise ValueError(
                f"{name} is a DTensor {list(value.shape)}; want the tokens of input, {list(self.shape)}, on its mesh"
            )
        return self._cut(value)

    def shifted(self, target: Tensor, shift: int, ignore_index: int) -> Tensor:
        last = len(self.shape) - 1
        if is_dtensor(target):
            from torch.distributed.tensor import DTensor, Replicate

            whole = shift_labels(target.detach().full_tensor(), shift, ignore_index)
            return DTensor.from_local(whole, self.mesh, [Replicate()] * self.mesh.ndim, run_check=False)
        if any(getattr(placement, "dim", None) == last for placement in self.placements):
            raise ValueError(
                f"shift is {shift}, and sequences are spread over ranks: the labels of the tokens at a cut are on "
                "another one. Give target as a DTensor, or shift the labels before they are cut (shift_labels)"
            )
        return shift_labels(target.detach(), shift, ignore_index)

    def total(self, count: Tensor) -> Tensor:
        """The sum over all ranks."""
        return self.summed(count).to_local()

    def summed(self, part: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor, Partial, Replicate

        partial = DTensor.from_local(part, self.mesh, [Partial()] * self.mesh.ndim, run_check=False)
        return partial.redistribute(placements=[Replicate()] * self.mesh.ndim)

    def joined(self, part: Tensor) -> Tensor:
        """Values of this rank's tokens as a DTensor that is placed as the tokens of input are."""
        from torch.distributed.tensor import DTensor

        own = DTensor.from_local(
            part, self.mesh, self.cut, shape=torch.Size(self.shape), stride=_strides(self.shape), run_check=False
        )
        return own.redistribute(placements=self.placements)


def _shard(dim: int) -> Placement:
    from torch.distributed.tensor import Shard

    return Shard(dim)


def _strides(shape: Any) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(int(size), 1))
    return tuple(reversed(strides))
