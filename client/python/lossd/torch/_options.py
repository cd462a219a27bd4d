"""What a remote linear cross-entropy may be told, checked once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

REDUCTIONS = ("none", "mean", "sum")


@dataclass(frozen=True)
class LossOptions:
    """The options of one loss. What is None is as the head has it; formulas: docs/numerics.md."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    reduction: str = "mean"
    softcap: float | None = None  # 0: none
    lse_square_scale: float = 0.0
    logit_scale: float | None = None
    class_weights: str = "head"  # or "ignore", "use"
    bias: str = "head"  # or "ignore", "use"
    normalizer: float | None = None
    z_normalizer: float | None = None
    torch_compat: bool = True

    def __post_init__(self) -> None:
        if self.reduction not in REDUCTIONS:
            raise ValueError(f"reduction is {self.reduction!r}; want one of {', '.join(map(repr, REDUCTIONS))}")
        if not 0 <= self.label_smoothing <= 1:
            raise ValueError(f"label_smoothing is {self.label_smoothing}; want a number in [0, 1]")
        if not (math.isfinite(self.lse_square_scale) and self.lse_square_scale >= 0):
            raise ValueError(f"lse_square_scale is {self.lse_square_scale}; want a finite number of at least 0")
        if self.softcap is not None and not (math.isfinite(self.softcap) and self.softcap >= 0):
            raise ValueError(f"softcap is {self.softcap}; want a finite number above 0, or 0 for none")
        if self.logit_scale is not None and not (math.isfinite(self.logit_scale) and self.logit_scale > 0):
            raise ValueError(f"logit_scale is {self.logit_scale}; want a finite number above 0")
        for name in ("normalizer", "z_normalizer"):
            self._check_count(name, getattr(self, name))
        if self.z_normalizer is not None and self.normalizer is None:
            raise ValueError(f"z_normalizer is {self.z_normalizer} and normalizer is None; give both, or none")

    def _check_count(self, name: str, count: float | None) -> None:
        if count is None:
            return
        if self.reduction != "mean":
            raise ValueError(f"{name} is {count}, but reduction is {self.reduction!r}; only a mean is divided by it")
        # A mean over nothing, of the whole step: what a count of its labels tells if there are none.
        empty = count == 0 and self.normalizer == 0
        if not (math.isfinite(count) and (count > 0 or empty)):
            raise ValueError(f"{name} is {count}; want a finite number above 0")

    def compute_arguments(self) -> dict[str, Any]:
        """The arguments for Session.compute, without the reduction, which is made here."""
        return {
            "ignore_index": self.ignore_index,
            "label_smoothing": self.label_smoothing,
            "lse_square_scale": self.lse_square_scale,
            "logit_scale": self.logit_scale,
            "softcap": self.softcap,
            "class_weights": self.class_weights,
            "bias": self.bias,
        }
