"""transformers' Trainer with a remote head: one optimizer, one learning rate schedule, one norm to clip by."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from lossd.transformers._optimizers import JointOptimizer
from lossd.transformers._patch import is_tied, patched_head

if TYPE_CHECKING:
    from lossd.torch import RemoteHead


class RemoteHeadTrainerMixin:
    """What a Trainer needs to train a model with a patched head. `class MyTrainer(RemoteHeadTrainerMixin, SFTTrainer)`.

    The head is stepped with the local parameters, with the first group's learning rate (so the Trainer's schedule) and
    `args.weight_decay`, by the server's optimizer; make the head with the one that the Trainer uses, e.g.
    `lossd.AdamW(betas=(args.adam_beta1, args.adam_beta2), eps=args.adam_epsilon)`. `args.max_grad_norm` clips by the
    norm of all gradients, the head's included. A tied head needs none of this: the embedding's parameter is the
    optimizer's. A gradient that stays at the server because a GradScaler skipped the step is dropped when the step
    ends, as the Trainer drops the local gradients. One process; of several, each with a session of one head, see
    docs/trainers.md.
    """

    if TYPE_CHECKING:  # attributes of the Trainer that it is mixed into
        accelerator: Any
        add_callback: Any
        args: Any
        model: Any

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        trainer: Any = super()
        local: torch.optim.Optimizer = trainer.create_optimizer(*(() if model is None else (model,)))
        # When a Trainer trains again, accelerate has wrapped it.
        if self._remote is None or isinstance(getattr(local, "optimizer", local), JointOptimizer):
            return local
        self._check()
        from lossd.torch import RemoteOptimizer

        lr = local.param_groups[0]["lr"]
        self.optimizer = JointOptimizer(
            local, RemoteOptimizer([self._remote], lr=lr, weight_decay=self.args.weight_decay)
        )
        self.add_callback(_clearing(self._remote))
        return self.optimizer

    def _check(self) -> None:
        if self.accelerator.num_processes > 1:
            raise ValueError(
                "RemoteHeadTrainer trains in one process; of several, step the head as docs/trainers.md says"
            )
        if self.args.max_grad_norm and not hasattr(super(), "_clip_grad_norm"):
            raise RuntimeError(
                f"max_grad_norm is {self.args.max_grad_norm:g}, but this version of transformers clips in a way that "
                "leaves the head out; install transformers >= 5.3, or set max_grad_norm=0"
            )

    def _clip_grad_norm(self, model: torch.nn.Module) -> torch.Tensor:
        if self._remote is None:
            trainer: Any = super()
            norm: torch.Tensor = trainer._clip_grad_norm(model)
            return norm
        from lossd.torch import clip_grad_norm_

        self.accelerator.unscale_gradients()
        return clip_grad_norm_(model.parameters(), self.args.max_grad_norm, heads=[self._remote])

    @functools.cached_property
    def _remote(self) -> RemoteHead | None:
        """The head that has to be stepped; None if it follows the embedding."""
        model = self.accelerator.unwrap_model(self.model)
        return None if is_tied(model) else patched_head(model)


def _clearing(remote: RemoteHead) -> Any:
    """A callback that does for the head what the Trainer's model.zero_grad() does for parameters."""
    from transformers import TrainerCallback

    class Clearing(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            remote.zero_grad()  # sends nothing behind a step that was taken

    return Clearing()


def __getattr__(name: str) -> Any:
    # Trainer is imported when it is asked for: it takes seconds, and needs accelerate.
    if name == "RemoteHeadTrainer":
        return _trainer_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@functools.cache
def _trainer_class() -> type:
    from transformers import Trainer

    return type("RemoteHeadTrainer", (RemoteHeadTrainerMixin, Trainer), {"__doc__": RemoteHeadTrainerMixin.__doc__})
