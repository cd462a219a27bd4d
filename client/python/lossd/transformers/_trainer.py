"""transformers' Trainer with a remote head, in several processes."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from lossd.transformers._patch import is_tied, patched_head

if TYPE_CHECKING:
    from lossd.torch import RemoteHead


class RemoteHeadTrainerMixin:
    """What a Trainer needs beyond a patched model: `class MyTrainer(RemoteHeadTrainerMixin, SFTTrainer)`.

    Any Trainer steps a patched head, since the head's parameter is in its optimizer: with the Trainer's learning rate
    and weight_decay, by the server's rule; make the head with the one that the Trainer uses, e.g.
    `lossd.AdamW(betas=(args.adam_beta1, args.adam_beta2), eps=args.adam_epsilon)`. `args.max_grad_norm` clips by the
    norm of all gradients, the head's included. This adds several processes, which share one head: patch(model, ...,
    group=torch.distributed.group.WORLD, average=True).
    """

    if TYPE_CHECKING:  # attributes of the Trainer that it is mixed into
        accelerator: Any
        args: Any
        model: Any

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        remote = self._remote
        if self.accelerator.num_processes > 1 and remote is not None and remote.group is None:
            raise ValueError(
                f"head '{remote.name}' belongs to one process, and this Trainer trains in "
                f"{self.accelerator.num_processes}: patch(model, ..., group=torch.distributed.group.WORLD, "
                "average=True) on every rank"
            )
        trainer: Any = super()
        optimizer: torch.optim.Optimizer = trainer.create_optimizer(*args, **kwargs)
        return optimizer

    def _clip_grad_norm(self, model: torch.nn.Module) -> torch.Tensor:
        if self._remote is not None and self._remote.group is not None:
            self._remote.refresh_gradient()
        trainer: Any = super()
        norm: torch.Tensor = trainer._clip_grad_norm(model)
        return norm

    @functools.cached_property
    def _remote(self) -> RemoteHead | None:
        """The head that is stepped; None if it follows the embedding."""
        model = self.accelerator.unwrap_model(self.model)
        return None if is_tied(model) else patched_head(model)


def __getattr__(name: str) -> Any:
    # Trainer is imported when it is asked for: it takes seconds, and needs accelerate.
    if name == "RemoteHeadTrainer":
        return _trainer_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@functools.cache
def _trainer_class() -> type:
    from transformers import Trainer

    return type("RemoteHeadTrainer", (RemoteHeadTrainerMixin, Trainer), {"__doc__": RemoteHeadTrainerMixin.__doc__})
