"""An embedding that is the head's weight as well: it stays with the trainer, the head follows it.

The trainer's optimizer updates the parameter, so its `.grad` has to hold both gradients before anything is done with
it. They come together at the end of a backward pass: the embedding is the first layer, so when its own gradient is
in `.grad`, the server has had every token of that pass, and what it gathered is flushed into the same `.grad`. Weights
that have changed since are written to the server before the next forward.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch
from torch import nn

from lossd.transformers._weights import bias_of

if TYPE_CHECKING:
    from lossd.torch import RemoteHead


class TiedWeight:
    """Keeps a remote head and the parameter [V, H] that it is tied to the same."""

    def __init__(self, remote: RemoteHead, linear: nn.Linear, *, automatic: bool) -> None:
        """`linear` has the weight, which the server has too by now."""
        self._remote = remote
        self._linear = linear
        self._written: tuple[int, int] | None = self._state()
        self._hook = None
        if automatic and linear.weight.requires_grad:
            self._hook = linear.weight.register_post_accumulate_grad_hook(self._after_backward)

    def refresh(self) -> None:
        """Writes the weights to the server if they may have changed since the last time."""
        state = self._state()
        if state != self._written:
            self._remote.write_weights(self._linear.weight, bias_of(self._linear))
            self._written = state

    def flush(self) -> None:
        """Adds what the server has gathered to the parameter's `.grad`; the next window begins."""
        from lossd.torch import flush_into

        flush_into(self._remote, self._linear.weight, to="grad", bias=self._linear.bias)
        # An optimizer that writes to `.data` leaves the parameter's version alone.
        self._written = None

    def close(self) -> None:
        if self._hook is not None:
            self._hook.remove()

    def _state(self) -> tuple[int, int]:
        return self._linear.weight.data_ptr(), self._linear.weight._version

    def _after_backward(self, _: torch.Tensor) -> None:
        if _last_backward_of_step():
            self.flush()


def _last_backward_of_step() -> bool:
    """False only where accelerate (and with it transformers' Trainer) accumulates gradients and more are to come."""
    accelerate = sys.modules.get("accelerate.state")
    return accelerate is None or accelerate.GradientState().sync_gradients
