"""Forwards that libraries give to a patched model: TRL's trainers get log-probabilities from the server.

TRL (1.16 and newer) gives a model another forward, which answers `model(..., labels=labels, fused_lm_head=True)` with
log-probabilities of the labels, computed from `lm_head.weight`. A patched model that is given such a forward has the
server compute them: with gradients of trunk and head, and without logits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import types
from typing import TYPE_CHECKING, Any

import torch

from lossd.transformers._lm_head import require_fp32
from lossd.transformers._state import ATTRIBUTE, Patch, aux_loss_coefficient

if TYPE_CHECKING:
    from torch import nn

KEYWORD = "lossd_fused_lm_head"
"""The argument of a patched model's forward that asks for what TRL wants; a FusedCall."""


@dataclasses.dataclass(frozen=True)
class FusedCall:
    """What TRL asks of a model: by the trainer, once, and by each call."""

    temperature: float
    outputs: tuple[str, ...]
    """Fields of TRL's FusedCausalLMOutput."""
    in_fp32: bool
    """Whether autocast is to leave hidden states as they are."""
    labels: torch.Tensor | None = None
    shift_labels: torch.Tensor | None = None
    num_items_in_batch: torch.Tensor | int | None = None
    label_smoothing: float = 0.0


def with_remote_head(model: nn.Module, state: Patch, forward: Any) -> Any:
    """`forward`, which is to be the model's; of TRL's fused head one that leaves log-probabilities to the server.
    RuntimeError or ValueError of those that would train without the head."""
    function = getattr(forward, "__func__", None)
    if str(getattr(function, "__module__", None)).startswith("liger_kernel."):
        raise ValueError(
            "Liger's forward computes a loss from lm_head.weight, which is at a lossd server: give TrainingArguments "
            'liger_kernel_config={"fused_linear_cross_entropy": False}, the head needs none of it'
        )
    if function is None or "fused_lm_head" not in inspect.signature(function, follow_wrapped=False).parameters:
        return forward
    told = inspect.getclosurevars(function).nonlocals
    if not {"temperature", "outputs", "cast_lm_head_to_fp32", "original_forward"} <= told.keys():
        raise RuntimeError(
            "this version of TRL has a fused LM head that lossd does not know, and that would train without the head "
            "at the server: use trl 1.16, or lossd.transformers.unpatch(model) first"
        )
    _check_trainer(state)
    if told["cast_lm_head_to_fp32"]:
        require_fp32(state.remote)
    ours: Any = told["original_forward"].__func__
    asked = FusedCall(told["temperature"], tuple(told["outputs"]), bool(told["cast_lm_head_to_fp32"]))
    fields = {field.name for field in dataclasses.fields(FusedCall)}

    @functools.wraps(function)
    def with_log_probabilities(self: nn.Module, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        if not fused_lm_head:
            # TRL would call the forward of the model that it was given, which is not that of a copy.
            return ours(self, *args, **kwargs)
        if ATTRIBUTE not in self.__dict__:
            return function(self, *args, fused_lm_head=True, **kwargs)
        told_now = {name: kwargs.pop(name) for name in fields & kwargs.keys()}
        kwargs["use_cache"] = False
        return ours(self, *args, **kwargs, **{KEYWORD: dataclasses.replace(asked, **told_now)})

    return types.MethodType(with_log_probabilities, model)


def _check_trainer(state: Patch) -> None:
    """Raises ValueError if the trainer that is being made moves weights by itself, and would miss those of the head."""
    arguments = _arguments_of_trainer()
    if getattr(arguments, "use_vllm", False) and state.tied is None and state.remote.proxy.requires_grad:
        raise ValueError(
            f"use_vllm: TRL gives vLLM the model's parameters, and the weights of head {state.remote.name!r} are at a "
            "lossd server, so that it would generate with those of the beginning; use_vllm=False generates with the "
            "patched model"
        )
    if getattr(arguments, "sync_ref_model", False):
        raise ValueError(
            f"sync_ref_model: TRL would bring the reference's trunk up to date, and not its head, which is at a lossd "
            f"server as {state.remote.name!r} is; use sync_ref_model=False, or lossd.transformers.unpatch(model) first"
        )


def _arguments_of_trainer() -> Any:
    """Those of the Trainer whose __init__ this was called from, or None: it tells a model none of its options."""
    frame = inspect.currentframe()
    while frame is not None:
        arguments = getattr(frame.f_locals.get("self"), "args", None)
        if frame.f_code.co_name == "__init__" and hasattr(arguments, "per_device_train_batch_size"):
            return arguments
        frame = frame.f_back
    return None


def outputs_of(model: Any, state: Patch, call: FusedCall, hidden: torch.Tensor, outputs: Any) -> Any:
    """A FusedCausalLMOutput of hidden states [B, T, H]; `outputs`: what else the model answered."""
    from trl.trainer.utils import FusedCausalLMOutput

    # linear_cross_entropy() asks for autocast when it is called, which the values' methods do, too.
    with torch.autocast(hidden.device.type, enabled=False) if call.in_fp32 else contextlib.nullcontext():
        values = _Values(state, call, hidden)
        wanted = {name: getattr(values, name)() for name in call.outputs if name != "log_probs"}
    count = values.mask.sum().clamp(min=1) if call.num_items_in_batch is None else call.num_items_in_batch
    loss = -values.log_probs.sum() / count
    aux_loss = getattr(outputs, "aux_loss", None)
    if aux_loss is not None:
        loss = loss + aux_loss_coefficient(model) * aux_loss.to(loss.device)
    return FusedCausalLMOutput(
        loss=loss, log_probs=values.log_probs, label_mask=values.mask, aux_loss=aux_loss, **wanted
    )


class _Values:
    """What there is to know of each label, and of the distribution that should have given it; 0 where it is ignored.
    Tensors [B, T - 1], or of labels that were shifted before [B, T]."""

    def __init__(self, state: Patch, call: FusedCall, hidden: torch.Tensor) -> None:
        from lossd.torch import linear_cross_entropy, shift_labels

        labels, self._visible = call.shift_labels, slice(None)
        if labels is None:
            assert call.labels is not None
            labels, self._visible = shift_labels(call.labels, 1, -100), slice(None, -1)
        self._labels = labels.to(hidden.device)
        self._hidden = hidden
        self._state = state
        self._temperature = call.temperature
        self._loss = functools.partial(
            linear_cross_entropy, head=state.head_of_loss(hidden), reduction="none", weight=False
        )
        losses, self._lse, *more = self._loss(
            hidden,
            self._labels,
            label_smoothing=call.label_smoothing,
            return_lse=True,
            return_entropy="entropy" in call.outputs,
            return_values=["predictions"] if "is_top1" in call.outputs else [],
            **self._logits(),
        )
        self._more = more
        self.mask = self._shown(self._labels != -100)
        self.log_probs = -self._shown(losses)

    def entropy(self) -> torch.Tensor:
        return self._masked(self._more[0])

    def is_top1(self) -> torch.Tensor:
        return self._shown(self._more[-1]["predictions"] == self._labels) & self.mask

    def mean_logits(self) -> torch.Tensor:
        """A loss that is all label smoothing is the log-sum-exp less that."""
        with torch.no_grad():
            losses = self._loss(self._hidden, self._labels, label_smoothing=1.0, **self._logits())
            return self._masked(self._lse - losses)

    def log_sum_sq_probs(self) -> torch.Tensor:
        """The log-sum-exp of the doubled logits less twice that of the logits."""
        with torch.no_grad():
            _, doubled = self._loss(self._hidden, self._labels, return_lse=True, **self._logits(2.0))
            return self._masked(doubled - 2 * self._lse)

    def _logits(self, times: float = 1.0) -> dict[str, Any]:
        """The options of a loss of `times` the logits over the temperature."""
        factor = times / self._temperature
        # (c / t) tanh((s / t) x / (c / t)) is the capped logit c tanh(s x / c) over t.
        return {
            "logit_scale": self._state.lm_head.logit_scale * factor,
            "softcap": self._state.lm_head.softcap * factor,
        }

    def _masked(self, values: torch.Tensor) -> torch.Tensor:
        return self._shown(values).masked_fill(~self.mask, 0.0)

    def _shown(self, values: torch.Tensor) -> torch.Tensor:
        return values[:, self._visible]
