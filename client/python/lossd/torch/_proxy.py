"""A parameter that stands for a head's gradient where code of trainers looks at `p.grad`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from lossd.torch.head import RemoteHead


class GradientProxy(torch.nn.Parameter):
    """[1], fp32. Its `.grad` is the Frobenius norm of the gradient that waits at the server (of dW and db together),
    and NaN if an element of that is not finite.

    A factor that multiplies `.grad` in place multiplies the head's next step or flush, too: GradScaler.unscale_,
    torch.nn.utils.clip_grad_norm_ (whose 2-norm over local parameters and proxies is the global one), or `grad.mul_`.
    The factor is `.grad` over what it was when it was read; it ends with the window.

    `.grad` is asked for (GradientStats) when it is first looked at, and again once more was added; None while nothing
    waits, as of a parameter after zero_grad(set_to_none=True). Of a head with a process group it is not asked for by
    itself, as that is collective: every rank calls RemoteHead.refresh_gradient() behind its last backward."""

    head: RemoteHead

    def __new__(cls, head: RemoteHead, device: torch.device | None = None) -> GradientProxy:
        proxy: GradientProxy = torch.Tensor._make_subclass(cls, torch.zeros(1, device=device), True)
        proxy.head = head
        proxy.forget()
        return proxy

    def __init__(self, head: RemoteHead, device: torch.device | None = None) -> None:
        pass  # __new__ has done it, as torch.nn.Parameter's does

    def forget(self) -> None:
        """Begins anew: of another window, or of one that goes on."""
        self._grad: torch.Tensor | None = None
        self._read = 0.0
        self._seen: object = None

    def put(self, norm: float, seen: object) -> torch.Tensor:
        """`norm` as read while the head's contributions were `seen`; NaN if an element is not finite. Returns what is
        `.grad` now."""
        self._grad = torch.full((1,), norm, device=self.data.device)
        self._read = float(self._grad)
        self._seen = seen
        return self._grad

    @property
    def factor(self) -> float:
        """What the gradient is multiplied with so far. 1 unless somebody changed `.grad`."""
        if self._grad is None:
            return 1.0
        now = float(self._grad)
        if not math.isfinite(self._read):  # it cannot be told from the quotient; the step looks at the elements itself
            return 1.0
        if not math.isfinite(now):  # a norm that is not finite was multiplied with; nothing is left of a gradient
            return math.nan
        if now == self._read or self._read == 0.0:
            return 1.0
        return now / self._read

    @property
    def grad(self) -> torch.Tensor | None:
        if self._grad is None or self._seen != self.head.contributions():
            self._refresh()
        return self._grad

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if value is not None:
            raise ValueError("a head's gradient is at the server: multiply .grad in place, or set it to None")
        self.forget()

    def _refresh(self) -> None:
        head = self.head
        if head.frozen or (head.group is None and not head.dirty and head.anchor.grad is None):
            self.forget()
        elif head.group is None:
            head.refresh_gradient()
        elif head.dirty:  # and nothing is known of it, or not of all of it
            raise RuntimeError(
                f"the gradient of head '{head.name}' is that of all ranks: have every rank call refresh_gradient() "
                f"before anything looks at the proxy's .grad"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> GradientProxy:
        return self

    def __reduce_ex__(self, protocol: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        raise TypeError("a GradientProxy cannot be pickled: it stands for a head of a running server")
