"""transformers' Trainer with what it cannot do by itself of a model whose head is at a server."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from lossd.transformers._state import find_patched

if TYPE_CHECKING:
    import torch


class RemoteHeadTrainerMixin:
    """Label smoothing without logits. `class MyTrainer(RemoteHeadTrainerMixin, SFTTrainer)`.

    A Trainer, or one of TRL's, trains a patched model as it is: its optimizer steps the head. Of
    `args.label_smoothing_factor` it wants logits with a gradient, which a remote head does not give; with this mixin
    the server smooths the labels, by the same formula. Without a label_smoothing_factor, or with a model that is not
    patched, nothing is changed.
    """

    if TYPE_CHECKING:  # of the Trainer that it is mixed into
        args: Any
        label_smoother: Any
        router_aux_loss_coef: float | None

    def compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        trainer: Any = super()
        smoother = self.label_smoother
        # SFTTrainer smooths one of its losses, and leaves the auxiliary one of experts out of it, but not of metrics.
        smooths = getattr(self.args, "loss_type", "nll") == "nll"
        if smoother is None or not smooths or inputs.get("labels") is None or find_patched(model) is None:
            return trainer.compute_loss(model, inputs, *args, **kwargs)
        coefficient = getattr(self, "router_aux_loss_coef", None)
        self.label_smoother, self.router_aux_loss_coef = None, 0.0
        try:
            return trainer.compute_loss(model, {**inputs, "label_smoothing": smoother.epsilon}, *args, **kwargs)
        finally:
            self.label_smoother, self.router_aux_loss_coef = smoother, coefficient


def __getattr__(name: str) -> Any:
    # Trainer is imported when it is asked for: it takes seconds, and needs accelerate.
    if name == "RemoteHeadTrainer":
        return _trainer_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@functools.cache
def _trainer_class() -> type:
    from transformers import Trainer

    return type("RemoteHeadTrainer", (RemoteHeadTrainerMixin, Trainer), {"__doc__": RemoteHeadTrainerMixin.__doc__})
