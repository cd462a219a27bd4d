"""An embedding that is the head's weight as well: it stays with the trainer, the head follows it.

The trainer's optimizer updates the parameter, so its `.grad` has to hold both gradients before anything is done with
it. They come together at the end of a backward pass: the embedding is the first layer, so when its own gradient is
in `.grad`, the server has had every token of that pass, and what it gathered is flushed into the same `.grad`. Weights
that have changed since are written to the server before the next forward. Unchanged ones are not: they keep their
version, on which a loss may depend whose backward pass is still to come.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lossd.torch.distributed import gather_objects
from lossd.transformers._ranks import last_backward_of_step
from lossd.transformers._weights import bias_of

if TYPE_CHECKING:
    from lossd.torch import RemoteHead

# Integers that a digest multiplies at once.
_DIGEST_VALUES = 1 << 21


class TiedWeight:
    """Keeps a remote head and the parameter [V, H] that it is tied to the same."""

    def __init__(self, remote: RemoteHead, linear: nn.Linear, *, automatic: bool) -> None:
        """`linear` has the weight, which the server has too by now."""
        self._remote = remote
        self._linear = linear
        self._written = self._state()
        self._digest = _digest(linear.weight)
        self._in_doubt = False
        self._hook = None
        if automatic and linear.weight.requires_grad:
            self._hook = linear.weight.register_post_accumulate_grad_hook(self._after_backward)

    @torch.compiler.disable
    def refresh(self) -> None:
        """Writes the weights to the server if they have changed since the last time. Collective with a group."""
        state = self._state()
        changed = state != self._written or (self._in_doubt and _digest(self._linear.weight) != self._digest)
        if not any(gather_objects(changed, self._remote.group)):
            return
        self._remote.write_weights(self._linear.weight, bias_of(self._linear))
        self._written, self._digest, self._in_doubt = state, _digest(self._linear.weight), False

    def flush(self) -> None:
        """Adds what the server has gathered to the parameter's `.grad`; the next window begins."""
        from lossd.torch import flush_into

        flush_into(self._remote, self._linear.weight, to="grad", bias=self._linear.bias)
        # Now weights may change, and an optimizer that writes to `.data` leaves the parameter's version alone.
        self._in_doubt = True

    def close(self) -> None:
        if self._hook is not None:
            self._hook.remove()

    def __deepcopy__(self, memo: dict[int, Any]) -> TiedWeight:
        """For a copied model, whose head is a frozen copy: it follows the copied embedding, and has no gradient."""
        return TiedWeight(copy.deepcopy(self._remote, memo), copy.deepcopy(self._linear, memo), automatic=False)

    def _state(self) -> tuple[int, int]:
        return self._linear.weight.data_ptr(), self._linear.weight._version

    def _after_backward(self, _: torch.Tensor) -> None:
        if last_backward_of_step():
            self.flush()


def _digest(weight: torch.Tensor) -> int:
    """A digest of the bits of `weight` [V, H], modulo 2**64: their sum with random factors of rows and columns."""
    bits = _bits(weight.detach())
    rows, columns = (_factors(size, bits.device) for size in bits.shape)
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    at_once = max(1, _DIGEST_VALUES // bits.shape[1])
    for part, factors in zip(bits.split(at_once), rows.split(at_once), strict=True):
        total += ((part * columns).sum(dim=1) * factors).sum()
    return int(total)


def _bits(weight: torch.Tensor) -> torch.Tensor:
    """As integers, of 8 bytes where rows can be divided into such: the fewer there are, the faster is their sum."""
    size = weight.element_size()
    if weight.is_contiguous() and all(count * size % 8 == 0 for count in (weight.shape[1], weight.storage_offset())):
        return weight.view(torch.int64)
    return weight.view({4: torch.int32, 2: torch.int16}[size])


def _factors(size: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(size)
    return torch.randint(-(1 << 62), 1 << 62, (size,), generator=generator).bitwise_or(1).to(device)
