"""Refuses wrappers that would leave a head where it stands: they step copies of parameters, not the parameters.

DeepSpeed's ZeRO, FSDP1, masters in fp32 and optimizers that offload take `.grad` away and step a tensor of their own.
The `.grad` of a head's parameter is the norm of a gradient at the server, so that no such step would reach the head."""

from __future__ import annotations

import warnings
import weakref
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from lossd.torch._proxy import GradientProxy

KEEP_OUT = (
    "Keep it from wrappers that shard or flatten parameters. FSDP1: FullyShardedDataParallel(model, "
    "ignored_modules=[model.lm_head]). FSDP2: fully_shard(model, ignored_params=set(model.lm_head.parameters())). "
    "DeepSpeed: ZeRO 1 or 2, with an optimizer of the other parameters only, and head.step(lr) behind engine.step(); "
    "ZeRO 3 cannot have a head. Masters and offloaded gradients: step the head's parameter itself by an optimizer of "
    "torch.optim. See docs/sharded.md"
)

proxies: weakref.WeakValueDictionary[int, GradientProxy] = weakref.WeakValueDictionary()
"""The parameters of all heads of this process, by id()."""


class MovedGradientError(RuntimeError):
    """A wrapper takes a head's gradient, or its parameter, elsewhere, and would never step the head."""


def require_own_storage(proxy: GradientProxy) -> None:
    """MovedGradientError if the parameter became a part of somebody's buffer, or was emptied."""
    if proxy.shape == (1, 1) and proxy.untyped_storage().nbytes() == proxy.element_size():
        return
    raise MovedGradientError(
        f"the parameter of head '{proxy.head.name}' was moved into a buffer of other parameters, or emptied "
        f"(DeepSpeed's ZeRO and bf16 or fp16 optimizers, FSDP1, parameters_as_bucket_view=True): steps of that buffer "
        f"would never reach the head, whose weights are at a server. {KEEP_OUT}"
    )


def refuse_moved(optimizer: torch.optim.Optimizer) -> None:
    """To be called before `optimizer` steps. MovedGradientError if it is about to step a copy of a head's gradient, and
    no optimizer has stepped that head before; a warning, once, if one has."""
    alive = list(proxies.values())
    if not alive:
        return
    own = {id(one) for group in optimizer.param_groups for one in group["params"]}
    elsewhere = [proxy for proxy in alive if id(proxy) not in own and not proxy.head.frozen]
    if elsewhere:
        _notice_masters(optimizer)
    for proxy in elsewhere:
        taken = proxy.taken
        if not taken or proxy.held:
            continue
        said = (
            f"{type(optimizer).__name__} steps while the gradient of head '{proxy.head.name}' was taken from its "
            f"parameter ({taken}): .grad is only the norm of a gradient at the server, and this step would not reach "
            f"the head. {KEEP_OUT}"
        )
        proxy.taken = ""  # another model of the process, after this error, goes on
        if proxy.window.windows_stepped == 0:
            raise MovedGradientError(said)
        warnings.warn(said, stacklevel=5)


def _notice_masters(optimizer: torch.optim.Optimizer) -> None:
    """Marks heads whose very `.grad` is that of another parameter, as `master.grad = p.grad.float()` leaves it."""
    for group in optimizer.param_groups:
        for one in group["params"]:
            reference = None if id(one) in proxies else getattr(one.grad, "proxy", None)
            proxy = reference() if reference is not None else None
            if proxy is not None:
                proxy.taken = "as the .grad of another parameter"
