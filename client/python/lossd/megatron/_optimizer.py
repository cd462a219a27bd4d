"""Steps a head together with Megatron's optimizer."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer import ChainedOptimizer, FP32Optimizer, MixedPrecisionOptimizer

from lossd.megatron._layer import RemoteOutputLayer

try:
    from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer as _LayerWise
except ModuleNotFoundError:  # of a Megatron-Core before it
    _LayerWise = None

_KNOWN = [one for one in (ChainedOptimizer, FP32Optimizer, MixedPrecisionOptimizer, _LayerWise) if one is not None]
"""Whose step() is what OptimizerWithHead does in its place."""


class OptimizerWithHead:
    """Megatron's optimizer, whose step() steps the head of a RemoteOutputLayer as well; all else is the optimizer's.

        optimizer = OptimizerWithHead(get_megatron_optimizer(config, model_chunks), layer)
        scheduler = OptimizerParamScheduler(optimizer, ...)

    layer: of the last pipeline stage; None on the others, which have to make one as well, as norms are of the whole
    model. The head's gradient is part of the norm that is clipped and returned, of the loss scale, and of what makes a
    step be skipped; its learning rate (decoupled_lr, if the config has it) and weight decay are those of a group of its
    own, last in param_groups, which schedulers treat as the others. zero_grad() drops what waits at the server. Saved states have nothing of it."""

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
        self.inner.zero_grad(set_to_none)
        if self.layer is not None:
            self.layer.drop_gradient()

    @torch.no_grad()
    def step(self) -> tuple[bool, float | None, int | None]:
        """(whether it was taken, the gradient's norm over model and head, zeros in the model's gradient or None).
        Collective over all ranks. An error of the server is raised before anything is stepped."""
        outcome = self._step()
        if _LayerWise is not None and isinstance(self.inner, _LayerWise):  # each rank has stepped parameters of its own
            self.inner.allgather_params()
        return outcome

    def _step(self) -> tuple[bool, float | None, int | None]:
        config = self.inner.config
        scale = 1.0 / float(self.inner.get_loss_scale())  # of this step's losses; what follows may change it
        head_norm = self._head_norm() * scale
        # Grad scalers are updated once a step: by prepare_grads(), or here where the model's gradient no longer matters.
        finite = math.isfinite(head_norm)
        if not finite:
            for optimizer in self._parts():
                scaler = getattr(optimizer, "grad_scaler", None)
                if scaler is not None:
                    scaler.update(True)
        if not finite or bool(self.inner.prepare_grads()):
            if self.layer is not None:
                self.layer.drop_gradient()
            return False, None, None
        norm = math.hypot(float(self.inner.get_grad_norm() or 0.0), head_norm)
        factor = 1.0
        if config.clip_grad > 0.0:
            factor = min(1.0, config.clip_grad / (norm + 1e-6))
            self._clip(norm)
        zeros = self.inner.count_zeros() if config.log_num_zeros_in_grad else None
        if self.layer is not None:
            self.layer.head.step(
                self.head_group["lr"],
                gradient_scale=self.layer.gradient_scale * scale * factor,
                weight_decay=self.head_group["weight_decay"],
            )
        return bool(self.inner.step_with_ready_grads()), norm, zeros

    def _head_norm(self) -> float:
        """The norm of the gradient as it was reduced, before the loss scale is taken out; NaN if it is not finite. On
        all pipeline stages."""
        norm = 0.0
        if self.layer is not None:
            norm = float(self.layer.head.refresh_gradient()) * self.layer.gradient_scale
        if parallel_state.get_pipeline_model_parallel_world_size() == 1:
            return norm
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
        # Other stages have 0 in both: a NaN, which a maximum may drop, travels as a number.
        finite = math.isfinite(norm)
        told = torch.tensor([norm if finite else 0.0, float(not finite)], dtype=torch.float64, device=device)
        dist.all_reduce(told, op=dist.ReduceOp.MAX, group=parallel_state.get_pipeline_model_parallel_group())
        return math.nan if told[1] else float(told[0])

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
