"""What the objectives may be given, and what their sums are divided by."""

from __future__ import annotations

import math
from collections.abc import Collection

import torch
from torch import Tensor


def floats(**tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in fp32 or, where they are in it, fp64. All have the shape and the device of the first."""
    (first_name, first), *_ = tensors.items()
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} is a {type(value).__name__}; want a torch.Tensor")
        if not value.is_floating_point():
            raise TypeError(f"{name} is {value.dtype}; want a floating-point type, such as torch.float32")
        if value.shape != first.shape:
            raise ValueError(
                f"{name} has shape {list(value.shape)}; want {list(first.shape)}, the shape of {first_name}"
            )
        same_device(name, value, first_name, first)
    return tuple(value if value.dtype == torch.float64 else value.float() for value in tensors.values())


def same_device(name: str, value: Tensor, other_name: str, other: Tensor) -> None:
    if value.device != other.device:
        raise ValueError(f"{name} is on {value.device} and {other_name} on {other.device}; want both on one device")


def sequences(name: str, value: Tensor) -> None:
    """Raises ValueError for what is not one number for each sequence."""
    if value.dim() != 1 or value.numel() == 0:
        raise ValueError(
            f"{name} has shape {list(value.shape)}; want [B], one number for each of at least one sequence: "
            "sequence_log_probs(log_probs, mask) adds those of its tokens"
        )


def tokens(mask: Tensor, values: Tensor, values_name: str, *, empty: bool) -> Tensor:
    """The mask as booleans. ValueError if it counts no token, unless that is allowed (`empty`)."""
    if not isinstance(mask, Tensor):
        raise TypeError(f"mask is a {type(mask).__name__}; want a torch.Tensor, such as labels != -100")
    if mask.is_floating_point() or mask.is_complex():
        raise TypeError(f"mask is {mask.dtype}; want booleans or integers, such as labels != -100")
    if mask.shape != values.shape:
        raise ValueError(f"mask has shape {list(mask.shape)}; want {list(values.shape)}, the shape of {values_name}")
    same_device("mask", mask, values_name, values)
    mask = mask.bool()
    # In a graph no branch may depend on it; a mean over nothing is 0 there.
    if not empty and not torch.compiler.is_compiling() and not bool(mask.any()):
        raise ValueError(
            "mask counts no token, so there is no mean over them; leave this batch out, or give the normalizer of the "
            "whole step"
        )
    return mask


def positive(name: str, value: float, why: str = "") -> float:
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} is {value}; want a finite number above 0{why}")
    return float(value)


def known(name: str, value: str, names: Collection[str]) -> str:
    if value not in names:
        raise ValueError(f"{name} is {value!r}; want one of {', '.join(map(repr, names))}")
    return value


def divided(total: Tensor, count: int | Tensor, normalizer: float | Tensor | None) -> Tensor:
    """`total` [] over the normalizer or, without one, over `count`."""
    if normalizer is None:
        return total / count
    if isinstance(normalizer, Tensor):
        if normalizer.numel() != 1:
            raise ValueError(
                f"normalizer has shape {list(normalizer.shape)}; want a number, or a tensor of one element"
            )
        return total / normalizer.detach().reshape(())
    return total / positive("normalizer", normalizer)
