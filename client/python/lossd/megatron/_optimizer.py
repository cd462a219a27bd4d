"""Steps a head together with Megatron's optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from megatron.core import parallel_state
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer import ChainedOptimizer, FP32Optimizer, MixedPrecisionOptimizer

from lossd.megatron._layer import RemoteOutputLayer
from lossd.torch.distributed import all_do

try:
    from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer as _LayerWise
except ModuleNotFoundError:  # of a Megatron-Core before it
    _LayerWise = None

_KNOWN = [one for one in (ChainedOptimizer, FP32Optimizer, MixedPrecisionOptimizer, _LayerWise) if one is not None]
"""Whose step() is what OptimizerWithHead does in its place."""

T = TypeVar("T")


@dataclass(frozen=True)
class _Ready:
    """A step of which only the head's, and then the parameters', is left. factor: of the gradient as it was reduced."""

    skipped: bool = False
    norm: float = 0.0
    zeros: int | None = None
    factor: float = 1.0
    lr: float = 0.0
    weight_decay: float = 0.0


class OptimizerWithHead:
    """Megatron's optimizer, whose step() steps the head of a RemoteOutputLayer as well; all else is the optimizer's.

        optimizer = OptimizerWithHead(get_megatron_optimizer(config, model_chunks), layer)
        scheduler = OptimizerParamScheduler(optimizer, ...)

    layer: of the last pipeline stage; None on the others, which have to make one as well, as norms are of the whole
    model. The head's gradient is part of the norm that is clipped and returned, of the loss scale, and of what makes a
    step be skipped; its learning rate (decoupled_lr, if the config has it) and weight decay are those of a group of its
    own, last in param_groups, which schedulers treat as the others. zero_grad() drops what waits at the server. Saved
    states have nothing of it."""

    def __init__(self, optimizer: Any, layer: RemoteOutputLayer | None) -> None:
        if layer is not None and layer.own is not None:
            raise ValueError("the layer's weight is a parameter of the model, which its optimizer steps already")
        if layer is not None and layer.head.frozen:
            raise ValueError(f"head '{layer.head.name}' is frozen, so the model's optimizer is all that steps")
        if all(getattr(type(optimizer), "step", None) is not one.step for one in _KNOWN):
            raise TypeError(
                f"{type(optimizer).__name__} has a step() of its own, and the head's has to come in the middle of it: "
                f"give an optimizer of Megatron's whose step() is that of {' or '.join(one.__name__ for one in _KNOWN)}"
            )
        self.inner = optimizer
        self.layer = layer
        self._under_way: _Ready | None = None
        config = optimizer.config
        decoupled = getattr(config, "decoupled_lr", None) is not None
        lr = config.decoupled_lr if decoupled else config.lr
        own_min_lr = decoupled and config.decoupled_min_lr is not None
        min_lr = config.decoupled_min_lr if own_min_lr else config.min_lr
        self.head_group: dict[str, Any] = {
            "params": [],
            "lr": lr,
            "max_lr": lr,
            "min_lr": min_lr if min_lr is not None else 0.0,
            "weight_decay": config.weight_decay,
            "wd_mult": 1.0,
            "lr_mult": 1.0,
            "is_expert_parallel": False,
            "is_decoupled_lr": decoupled,
        }

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # of one that is being copied
            raise AttributeError(name)
        return getattr(self.inner, name)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of the optimizer, and the head's."""
        groups: list[dict[str, Any]] = list(self.inner.param_groups)
        return groups if self.layer is None else [*groups, self.head_group]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Collective."""
        self._under_way = None
        self.inner.zero_grad(set_to_none)
        if self.layer is not None:
            self.layer.drop_gradient()

    @torch.no_grad()
    def step(self) -> tuple[bool, float | None, int | None]:
        """(whether it was taken, the gradient's norm over model and head, zeros in the model's gradient or None).
        Collective over all ranks. An error of the server is raised on all pipeline stages before anything is stepped
        here. Calling step() again then goes on with the same step; zero_grad() gives it up."""
        outcome = self._step_once()
        if _LayerWise is not None and isinstance(self.inner, _LayerWise):  # each rank has stepped parameters of its own
            self.inner.allgather_params()
        return outcome

    def _step_once(self) -> tuple[bool, float | None, int | None]:
        if self._under_way is None:
            self._under_way = self._prepared()
        ready = self._under_way
        self._on_all_stages(lambda: self._end_window(ready))
        self._under_way = None
        if ready.skipped:
            return False, None, None
        return bool(self.inner.step_with_ready_grads()), ready.norm, ready.zeros

    def _prepared(self) -> _Ready:
        """Everything before the head's step. It is not to be done twice: gradients are scaled and clipped in place."""
        config = self.inner.config
        scale = 1.0 / float(self.inner.get_loss_scale())  # of this step's losses; what follows may change it
        norms = self._on_all_stages(self._own_head_norm)
        head_norm = max(norms) * scale if all(math.isfinite(norm) for norm in norms) else math.nan
        if not math.isfinite(head_norm):
            # prepare_grads() would tell the grad scalers of the model's gradient alone.
            for optimizer in self._parts():
                scaler = getattr(optimizer, "grad_scaler", None)
                if scaler is not None:
                    scaler.update(True)
            return _Ready(skipped=True)
        if self.inner.prepare_grads():
            return _Ready(skipped=True)
        norm = math.hypot(float(self.inner.get_grad_norm() or 0.0), head_norm)
        factor = 1.0
        if config.clip_grad > 0.0:
            factor = min(1.0, config.clip_grad / (norm + 1e-6))
            self._clip(norm)
        zeros = self.inner.count_zeros() if config.log_num_zeros_in_grad else None
        group = self.head_group
        return _Ready(norm=norm, zeros=zeros, factor=scale * factor, lr=group["lr"], weight_decay=group["weight_decay"])

    def _own_head_norm(self) -> float:
        """The norm of the gradient as it was reduced, before the loss scale is taken out; NaN if it is not finite, 0 on
        other pipeline stages."""
        if self.layer is None:
            return 0.0
        return float(self.layer.head.refresh_gradient()) * self.layer.gradient_scale

    def _end_window(self, ready: _Ready) -> None:
        if self.layer is None:
            return
        if ready.skipped:
            self.layer.drop_gradient()
            return
        self.layer.head.step(
            ready.lr, gradient_scale=self.layer.gradient_scale * ready.factor, weight_decay=ready.weight_decay
        )

    def _on_all_stages(self, work: Callable[[], T]) -> list[T]:
        """work() on every pipeline stage, of which each gets all answers. An error of the last one is raised on all:
        the others would wait for it in their next collective."""
        stages = parallel_state.get_pipeline_model_parallel_world_size()
        return all_do(work, None if stages == 1 else parallel_state.get_pipeline_model_parallel_group())

    def _parts(self) -> list[Any]:
        """The optimizers that the model's parameters are shared out among."""
        return list(getattr(self.inner, "chained_optimizers", [self.inner]))

    def _clip(self, norm: float) -> None:
        for optimizer in self._parts():
            parameters = [] if getattr(optimizer, "is_stub_optimizer", False) else optimizer.get_parameters()
            if parameters:
                clip_grad_by_total_norm_fp32(
                    parameters,
                    max_norm=optimizer.config.clip_grad,
                    total_norm=norm,
                    use_decoupled_grad=optimizer.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8,
                )
