"""Refuses wrappers that would leave a head where it stands: they step copies of parameters, not the parameters.

DeepSpeed's ZeRO, FSDP1, masters in fp32 and optimizers that offload take `.grad` away and step a tensor of their own.
The `.grad` of a head's parameter is the norm of a gradient at the server, so that no such step would reach the head."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch.multiprocessing.reductions import StorageWeakRef

if TYPE_CHECKING:
    from lossd.torch._proxy import GradientProxy

KEEP_OUT = (
    "Keep it from wrappers that shard or flatten parameters. FSDP1: FullyShardedDataParallel(model, "
    "ignored_modules=[model.lm_head]). FSDP2: fully_shard(model, ignored_params=set(model.lm_head.parameters())). "
    "DeepSpeed: ZeRO 1 or 2, with an optimizer of the other parameters only, and head.step(lr) behind engine.step(); "
    "ZeRO 3 cannot have a head. Masters and offloaded gradients: step the head's parameter itself by an optimizer of "
    "torch.optim. Optimizers of another model: call head.zero_grad() before they step. See docs/sharded.md"
)

proxies: weakref.WeakValueDictionary[int, GradientProxy] = weakref.WeakValueDictionary()
"""The parameters of all heads of this process, by id()."""


class MovedGradientError(RuntimeError):
    """A wrapper takes a head's gradient, or its parameter, elsewhere, and would never step the head."""


class Taken:
    """How the gradient of a head's parameter was taken from there since its window began, and where its copies are."""

    def __init__(self) -> None:
        self.how = ""
        """"" if it was not taken."""
        self._copies_alone = False
        self._storages: list[StorageWeakRef] = []

    def copied(self, how: str, copies: Iterable[torch.Tensor]) -> None:
        self.how = how
        self._storages += [StorageWeakRef(one.untyped_storage()) for one in copies]

    def dropped(self) -> None:
        """To be called when `.grad` was read, and set to None by other code than zero_grad()."""
        self.how = self.how or "read, and .grad set to None"
        self._copies_alone = bool(self._storages)

    def is_stepped_by(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the gradient of a parameter of `optimizer` is one of the copies, or a part of one; any may be, once
        copies are all that there is."""
        held = (one.grad for group in optimizer.param_groups for one in group["params"] if id(one) not in proxies)
        grads = [grad for grad in held if grad is not None]
        if self._copies_alone:
            return bool(grads)
        own = [StorageWeakRef(grad.untyped_storage()) for grad in grads if has_storage(grad)]
        return any(one == copy for one in own for copy in self._storages)


def has_storage(tensor: torch.Tensor) -> bool:
    """Not a wrapper, such as a DTensor, nor a tensor of another layout."""
    return tensor.layout is torch.strided and type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def require_own_value(proxy: GradientProxy) -> None:
    """MovedGradientError if the parameter became a part of somebody's buffer, was emptied, or is no longer 0."""
    name = proxy.head.name
    if proxy.shape != (1, 1) or proxy.untyped_storage().nbytes() != proxy.element_size():
        raise MovedGradientError(
            f"the parameter of head '{name}' was moved into a buffer of other parameters, or emptied (DeepSpeed's ZeRO "
            "and bf16 or fp16 optimizers, FSDP1, parameters_as_bucket_view=True): steps of that buffer would never "
            "reach the head, whose weights are at a server. After vector_to_parameters(), which moves it once: "
            f"head.proxy.data = head.proxy.data.clone(). {KEEP_OUT}"
        )
    if bool(proxy.detach().any()):
        proxy.taken = Taken()
        with torch.no_grad():
            proxy.zero_()
        raise MovedGradientError(
            f"the parameter of head '{name}' was changed in place (initialised, perturbed as SAM does, or stepped by a "
            "rule of the trainer's own, as fused backward updates do): its weights are at a server, and have not "
            "changed. Leave the parameter out there: an optimizer of torch.optim, or head.step(lr), steps the head, "
            "and head.write_weights() writes its weights. Or keep the weights here, with lossd.torch.LocalWeight"
        )


def refuse_moved(optimizer: torch.optim.Optimizer) -> None:
    """To be called before `optimizer` steps. MovedGradientError if it is about to step a copy of a head's gradient, and
    no optimizer has stepped that head before; a warning, once, if one has."""
    if not _moved_to(optimizer):
        return
    gc.collect()  # heads that nobody has any more
    for proxy in _moved_to(optimizer):
        said = (
            f"{type(optimizer).__name__} steps while the gradient of head '{proxy.head.name}' was taken from its "
            f"parameter ({proxy.taken.how}): .grad is only the norm of a gradient at the server, and this step would "
            f"not reach the head. {KEEP_OUT}"
        )
        proxy.taken = Taken()  # another model of the process, after this error, goes on
        if proxy.window.windows_stepped == 0:
            raise MovedGradientError(said)
        warnings.warn(said, stacklevel=5)


def _moved_to(optimizer: torch.optim.Optimizer) -> list[GradientProxy]:
    """The parameters of heads whose gradients `optimizer` is about to step elsewhere."""
    alive = [one for reference in proxies.valuerefs() if (one := reference()) is not None]  # others make heads now
    own = {id(one) for group in optimizer.param_groups for one in group["params"]} if alive else set()
    elsewhere = [one for one in alive if id(one) not in own and not one.head.frozen and not one.held]
    if elsewhere:
        _notice_masters(optimizer, {id(one) for one in alive})
    return [one for one in elsewhere if one.taken.how and one.taken.is_stepped_by(optimizer)]


def _notice_masters(optimizer: torch.optim.Optimizer, heads: set[int]) -> None:
    """Marks heads whose very `.grad` is that of another parameter, as `master.grad = p.grad.float()` leaves it.
    `heads`: their parameters, by id(), which are not asked."""
    for group in optimizer.param_groups:
        for one in group["params"]:
            grad = None if id(one) in heads else one.grad
            if grad is None or type(grad) is torch.Tensor:  # nearly all of thousands
                continue
            reference = getattr(grad, "proxy", None)  # of a GradientNorm
            proxy = reference() if reference is not None else None
            if proxy is not None:
                proxy.taken.copied("as the .grad of another parameter", [grad])
