"""One optimizer to a trainer that knows of one: the local parameters' and the remote heads'."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer


class JointOptimizer(Optimizer):
    """Steps several optimizers together. Its `param_groups` are theirs, the same dicts, so that schedulers reach all.

    A step that raises can be called again, and goes on: who has stepped is left alone, and the closure is not evaluated
    again. zero_grad() gives such a step up. Remote heads are stepped first, so that where they cannot be, the local
    parameters are as they were. `state_dict()` is {"optimizers": [one for each, in order]}; `state` is empty, theirs
    have it. Not thread-safe.
    """

    def __init__(self, *optimizers: Optimizer) -> None:
        if not optimizers:
            raise ValueError("JointOptimizer needs at least one optimizer")
        from lossd.torch import RemoteOptimizer

        self.optimizers = optimizers
        self._in_order = sorted(optimizers, key=lambda one: not isinstance(one, RemoteOptimizer))
        self._left: list[Optimizer] | None = None
        """Those that have not stepped yet, if an error ended a step."""
        self._loss: Any = None
        super().__init__(self._groups(), {})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Each optimizer's step; `closure` (or None) is evaluated once, before them. Returns what that returned."""
        if self._left is None:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            self._left, self._loss = list(self._in_order), loss
        while self._left:
            self._left[0].step()
            del self._left[0]
        loss = self._loss
        self._give_up()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._give_up()
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        states = state_dict.get("optimizers")
        if not isinstance(states, list) or len(states) != len(self.optimizers):
            raise ValueError(
                f"state_dict is not that of a JointOptimizer of {len(self.optimizers)} optimizers: it has the keys "
                f"{sorted(state_dict)}"
            )
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(state)
        self.param_groups[:] = self._groups()

    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def _give_up(self) -> None:
        self._left = self._loss = None
