"""What a remote linear cross-entropy may be told, checked once."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from lossd._batch import LossNumbers
from lossd.head import Head

REDUCTIONS = ("none", "mean", "sum")
SESSION_OPTIONS = tuple(
    name for name in inspect.signature(Head.open_session).parameters if name not in ("self", "rank")
)


def check_session_options(names: Iterable[str]) -> None:
    """The session is opened with the first loss, which would be late to hear of a name that is none."""
    for name in names:
        if name not in SESSION_OPTIONS:
            close = difflib.get_close_matches(name, SESSION_OPTIONS, n=1)
            meant = f" (did you mean {close[0]}?)" if close else ""
            raise TypeError(f"{name!r} is no option of a session{meant}: want one of {', '.join(SESSION_OPTIONS)}")


@dataclass(frozen=True)
class LossOptions(LossNumbers):
    """The options of one loss."""

    ignore_index: int = -100
    reduction: str = "mean"
    class_weights: str = "head"  # or "ignore", "use"
    bias: str = "head"  # or "ignore", "use"
    normalizer: float | None = None
    z_normalizer: float | None = None
    torch_compat: bool = True

    def __post_init__(self) -> None:
        if self.reduction not in REDUCTIONS:
            raise ValueError(f"reduction is {self.reduction!r}; want one of {', '.join(map(repr, REDUCTIONS))}")
        self.check()
        for name in ("normalizer", "z_normalizer"):
            self._check_count(name, getattr(self, name))
        if self.z_normalizer is not None and self.normalizer is None:
            raise ValueError(f"z_normalizer is {self.z_normalizer} and normalizer is None; give both, or none")

    def _check_count(self, name: str, count: float | None) -> None:
        if count is None:
            return
        if self.reduction != "mean":
            raise ValueError(f"{name} is {count}, but reduction is {self.reduction!r}; only a mean is divided by it")
        # Both are 0 if the whole step has no labels: its mean is over nothing, which is allowed.
        empty = count == 0 and self.normalizer == 0
        if not (math.isfinite(count) and (count > 0 or empty)):
            raise ValueError(f"{name} is {count}; want a finite number above 0")

    def compute_arguments(self) -> dict[str, Any]:
        """The arguments for Session.compute, without the reduction, which is made here."""
        return {
            **self.numbers(),
            "ignore_index": self.ignore_index,
            "class_weights": self.class_weights,
            "bias": self.bias,
        }
