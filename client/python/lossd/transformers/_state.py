"""What a patched model carries with it."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lossd.torch.head import FrozenCopyWarning
from lossd.transformers._lm_head import RemoteLmHead
from lossd.transformers._ranks import LastBackward, SharedGradient
from lossd.transformers._tied import TiedWeight

if TYPE_CHECKING:
    from lossd.torch import RemoteHead

ATTRIBUTE = "_lossd"


class FrozenCopy:
    """A frozen head with the weights of another, made when it is needed: the server makes the gradients of hidden
    states and of weights together, so that a head whose gradient nobody wants has to be a frozen one."""

    def __init__(self) -> None:
        self._copy: RemoteHead | None = None
        self._version = 0

    def of(self, remote: RemoteHead) -> RemoteHead:
        version = remote.weight_version
        if self._copy is not None and self._version != version:
            self._copy.delete_copy()  # first: the server may not have the memory for two
            self._copy = None
        if self._copy is None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FrozenCopyWarning)
                self._copy, self._version = copy.deepcopy(remote), version
        return self._copy

    def __deepcopy__(self, memo: dict[int, Any]) -> FrozenCopy:
        return FrozenCopy()


@dataclasses.dataclass
class Patch:
    """An attribute of the model."""

    lm_head: RemoteLmHead
    original: nn.Module
    model_class: Any
    """What the model was of before."""
    tied: TiedWeight | None
    grad_scale: float | None
    shared: SharedGradient
    last_backward: LastBackward
    frozen_copy: FrozenCopy = dataclasses.field(default_factory=FrozenCopy)

    @property
    def remote(self) -> RemoteHead:
        return self.lm_head.remote

    def head_of_loss(self, hidden: torch.Tensor) -> RemoteHead:
        """The head that computes a loss of `hidden` [..., H]. Who freezes a patched model, as PEFT does, means the
        head as well. RuntimeError of a frozen head whose weight was thawed, as after merge_and_unload()."""
        remote = self.remote
        weight: Any = remote.proxy if self.tied is None else self.original.weight
        if remote.frozen and weight.requires_grad and self.lm_head.training and torch.is_grad_enabled():
            raise RuntimeError(
                f"head {remote.name!r} was made frozen, and its weight needs a gradient now: "
                "lossd.transformers.unpatch(model) and patch(model, ...) again to train it, as a head of another name, "
                "or call requires_grad_(False) of the weight"
            )
        if remote.frozen or weight.requires_grad or not (torch.is_grad_enabled() and hidden.requires_grad):
            return remote
        return self.frozen_copy.of(remote)


def aux_loss_coefficient(model: Any) -> float:
    """What a mixture of experts multiplies its auxiliary loss with, before it is added to the loss: of the model, or of
    its configuration, which has it under one of two names."""
    text = model.config.get_text_config()
    for holder in (model, text):
        for name in ("router_aux_loss_coef", "aux_loss_coef"):
            found = getattr(holder, name, None)
            if found is not None:
                return float(found)
    return 0.0


def patch_of(model: nn.Module) -> Patch | None:
    """None: the model is not patched."""
    found: Patch | None = model.__dict__.get(ATTRIBUTE)
    return found


def find_patched(model: nn.Module) -> nn.Module | None:
    """The patched model that `model` is, or has in it: DistributedDataParallel and PeftModel wrap it."""
    return next((module for module in model.modules() if patch_of(module) is not None), None)


def require_patched(model: nn.Module) -> tuple[Any, Patch]:
    """find_patched(model), and what it carries. Raises ValueError if there is none."""
    found = find_patched(model)
    state = None if found is None else patch_of(found)
    if state is None:
        raise ValueError(f"{type(model).__name__} is not patched: call lossd.transformers.patch(model, ...) first")
    return found, state
