"""Data-parallel ranks whose model is patched: they share a head, and its gradient."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from lossd.torch import RemoteHead


class SharedGradient:
    """Asks for the gradient of a head that ranks share when it is complete, so that whoever clips by it, or logs it,
    finds its norm. That is collective, as the end of a step's last backward pass is under DistributedDataParallel."""

    def __init__(self, remote: RemoteHead | None) -> None:
        self._hook = None
        if remote is not None and remote.group is not None and remote.proxy.requires_grad:
            self._hook = remote.proxy.register_post_accumulate_grad_hook(lambda _: self._after_backward(remote))

    def close(self) -> None:
        if self._hook is not None:
            self._hook.remove()

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedGradient:
        return SharedGradient(None)  # the copy of a head is frozen

    @staticmethod
    def _after_backward(remote: RemoteHead) -> None:
        if last_backward_of_step():
            remote.refresh_gradient()


def last_backward_of_step() -> bool:
    """False only where accelerate (and with it transformers' Trainer) accumulates gradients and more are to come."""
    accelerate = sys.modules.get("accelerate.state")
    return accelerate is None or accelerate.GradientState().sync_gradients


@torch.compiler.disable
def require_group(remote: RemoteHead, *, tied: bool) -> None:
    """Raises ValueError if DistributedDataParallel runs the model, and the head is not shared as its gradients are."""
    wrapper = getattr(DistributedDataParallel, "_active_ddp_module", None)
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
