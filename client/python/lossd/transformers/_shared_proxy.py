"""The parameter of a head that ranks share, where a patched model has it."""

from __future__ import annotations

from typing import Any

import torch
from torch._guards import TracingContext
from torch.utils._pytree import tree_leaves

from lossd.torch._proxy import GradientProxy


class SharedProxy(GradientProxy):
    """A GradientProxy that may be asked whether it has a gradient before the ranks have asked for its norm together.

    DistributedDataParallel's zero_grad() asks so, and Trainer calls it when it begins anew: with other batches
    (auto_find_batch_size), or after an interruption. What is answered then can be set to None, which all ranks do;
    anything else is a RuntimeError. patch() makes the proxy one by its `__class__`: the head stays the one that it is
    part of.
    """

    @property
    def grad(self) -> torch.Tensor | None:
        window = self.window
        waits = window.dirty or self.marker is not None  # one or the other on every rank that had a backward pass
        unknown = self._norm is None or self._seen != window.contributions()
        if TracingContext.try_get() is None and window.group is not None and waits and unknown and not self.head.frozen:
            return _UnknownGradient.of(self)
        found: torch.Tensor | None = _OF_ONE.fget(self)
        return found

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        _OF_ONE.fset(self, value)


class _UnknownGradient(torch.Tensor):
    """That there is one, and an error for whoever wants more."""

    head_name: str

    @classmethod
    def of(cls, proxy: SharedProxy) -> _UnknownGradient:
        made: _UnknownGradient = torch.zeros(1, 1, device=proxy.device).as_subclass(cls)
        made.head_name = proxy.head.name
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = next(one.head_name for one in tree_leaves((args, kwargs)) if isinstance(one, cls))
        raise RuntimeError(
            f"the gradient of head '{name}' is that of all ranks, which have not asked for its norm: have every rank "
            "call head.refresh_gradient() behind its last backward, or head.zero_grad() on every rank to drop it"
        )


_OF_ONE: Any = GradientProxy.grad
