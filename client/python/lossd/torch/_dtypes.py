"""lossd's names of dtypes and PyTorch's own."""

from __future__ import annotations

import torch

from lossd._tensors import DTYPES

TORCH: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPES}
NAMES = {dtype: name for name, dtype in TORCH.items()}


def name_of(dtype: torch.dtype) -> str:
    """ "float32", "bfloat16" or "float16"; of other dtypes what PyTorch calls them."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    return TORCH[name]
