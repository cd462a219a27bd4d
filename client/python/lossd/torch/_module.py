"""linear_cross_entropy as a module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lossd.torch._function import linear_cross_entropy
from lossd.torch.head import RemoteHead
from lossd.torch.state import attach_state


class RemoteLinearCrossEntropy(nn.Module):
    """Takes the place of a model's lm_head and loss: forward(hidden states [..., H], labels [...]) -> loss.

    `options` are linear_cross_entropy's. Called with others these hold for that call. eval() computes the loss alone:
    nothing is added to dW, and the loss has no gradient. state_dict() and load_state_dict() have the head's "weight",
    and its "bias" if it has one, as a Linear in its place would.
    """

    def __init__(self, head: RemoteHead, **options: Any) -> None:
        super().__init__()
        self.head = head
        self.options = options
        attach_state(self, head)

    def forward(self, input: Tensor, target: Tensor, **options: Any) -> Any:
        """As linear_cross_entropy returns."""
        chosen = {**self.options, **options}
        if self.training:
            return linear_cross_entropy(input, target, self.head, **chosen)
        with torch.no_grad():
            return linear_cross_entropy(input, target, self.head, **chosen)

    def extra_repr(self) -> str:
        parts = [
            f"head={self.head.head.name!r}, hidden_size={self.head.hidden_size}, vocab_size={self.head.vocab_size}"
        ]
        return ", ".join(parts + [f"{name}={value!r}" for name, value in self.options.items()])
