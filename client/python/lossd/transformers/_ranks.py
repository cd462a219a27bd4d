"""Data-parallel ranks whose model is patched: they share a head, and its gradient."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

from lossd.torch.distributed import active_wrapper

if TYPE_CHECKING:
    from lossd.torch import RemoteHead


class LastBackward:
    """Tells the last backward pass of a step from those before it. Gradients are complete there, and ranks meet there:
    under DistributedDataParallel they may come to it by different numbers of passes in no_sync()."""

    def __init__(self) -> None:
        self._synchronized = True

    @torch.compiler.disable
    def note_forward(self) -> None:
        """To be called in each forward pass, whose no_sync() counts for DistributedDataParallel, too."""
        wrapper = active_wrapper()
        if torch.is_grad_enabled():
            self._synchronized = wrapper is None or wrapper.require_backward_grad_sync

    def __bool__(self) -> bool:
        """Not where accelerate (and with it transformers' Trainer) accumulates gradients, or no_sync() does."""
        accelerate = sys.modules.get("accelerate.state")
        return self._synchronized and (accelerate is None or accelerate.GradientState().sync_gradients)


class SharedGradient:
    """Asks for the gradient of a head that ranks share when it is complete, so that whoever clips by it, or logs it,
    finds its norm. That is collective, as the end of a step's last backward pass is under DistributedDataParallel."""

    def __init__(self, remote: RemoteHead | None, last: LastBackward) -> None:
        self._hook = None
        self._last = last
        if remote is not None and remote.group is not None and remote.proxy.requires_grad:
            self._hook = remote.proxy.register_post_accumulate_grad_hook(lambda _: self._after_backward(remote))

    def close(self) -> None:
        if self._hook is not None:
            self._hook.remove()

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedGradient:
        return SharedGradient(None, LastBackward())  # the copy of a head is frozen

    def _after_backward(self, remote: RemoteHead) -> None:
        if self._last:
            remote.refresh_gradient()


@torch.compiler.disable
def require_group(remote: RemoteHead, *, tied: bool) -> None:
    """Raises ValueError if DistributedDataParallel runs the model, and the head is not shared as its gradients are."""
    wrapper = active_wrapper()
    if wrapper is None or not remote.proxy.requires_grad or not torch.is_grad_enabled():
        return
    ranks = torch.distributed.get_world_size(wrapper.process_group)
    # A tied head's gradient goes to the embedding's of one rank, and is averaged with that.
    if ranks == 1 or (remote.group is not None and remote.average != tied):
        return
    wanted = "group=torch.distributed.group.WORLD" + ("" if tied else ", average=True")
    raise ValueError(
        f"DistributedDataParallel averages the gradients of {ranks} ranks, and head {remote.name!r} does not fit in: "
        f"call patch(model, ..., {wanted}) on every rank" + (", without average" if tied else "")
    )
