"""Puts a head in the place of a GPTModel's output layer and loss."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler, MTPLossLoggingHelper, roll_tensor
from torch import Tensor

from lossd.megatron._layer import RemoteOutputLayer
from lossd.torch import RemoteHead

if TYPE_CHECKING:
    import lossd

_IGNORED = -100


def replace_output_layer(
    model: GPTModel,
    client: lossd.Client,
    name: str,
    *,
    optimizer: Any = None,
    own_weight: bool = False,
    delay_wgrad: bool = False,
    skip_masked: bool = False,
    group: dist.ProcessGroup | None = None,
    loss_options: Mapping[str, Any] | None = None,
    session_options: Mapping[str, Any] | None = None,
    **config: Any,
) -> RemoteOutputLayer:
    """Moves `model`'s output layer and loss to the head `name` of the server, and returns the layer that is
    model.output_layer now. Every rank with the last pipeline stage calls it, in model_provider: before the model is
    wrapped (Float16Module, DistributedDataParallel) and before its optimizer is made. Collective.

    model(..., labels=...) returns losses [b, s] as before, and its gradients are the same. Without labels it returns
    logits, where no gradient is needed.

    optimizer: the server's rule (lossd.AdamW, ...). The trainer has neither the weight nor its gradient nor moments.
    own_weight: the weight stays a parameter of Megatron's [V / tp, H], its gradient comes to main_grad in each backward
        pass, Megatron's optimizer steps it, and the next forward pass writes it to the server. The only way for tied
        embeddings.
    delay_wgrad: of an own weight: its gradient comes once a step, by layer.finalizing(). Not with overlap_grad_reduce.
    skip_masked: tokens whose loss_mask is 0 (the model's argument) are not sent, and their losses are 0.
    group: all ranks that call this; by default those of the last stage (tensor-, data- and context-parallel).
    loss_options: of linear_cross_entropy, such as {"lse_square_scale": 1e-4}.
    session_options: of Head.open_session. config: further arguments of RemoteHead.create, such as softcap, or
        frozen=True, of which there is no gradient: neither an optimizer nor OptimizerWithHead then.

    The model's weight is written to the head, unless the head has weights already. TypeError or ValueError for what
    does not fit, with what to do."""
    _check(model, optimizer, own_weight, delay_wgrad, bool(config.get("frozen")))
    layer: Any = model.output_layer
    if group is None:
        group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    tp_group = model.pg_collection.tp
    tied = model.share_embeddings_and_output_weights
    weight = _weight_of(model)
    ranks = dist.get_world_size(tp_group)
    head = RemoteHead.create(
        client,
        name,
        weight.shape[0] * ranks,
        weight.shape[1],
        dtype=weight.dtype,
        optimizer=optimizer,
        group=group,
        device=weight.device,
        session_options=session_options,
        **config,
    )
    remote = RemoteOutputLayer(
        head,
        tp_group=tp_group,
        sequence_parallel=model.config.sequence_parallel,
        gather_output=layer.gather_output,
        weight=layer.weight if own_weight else None,
        shared_weight=weight if own_weight and tied else None,
        delay_wgrad=delay_wgrad,
        gradient_scale=None if model.config.calculate_per_token_loss else ranks / dist.get_world_size(group),
        skip_masked=skip_masked,
        device=weight.device,
        options=loss_options,
    )
    if own_weight or head.head.info().weight_version == 0:
        remote.write_rows(weight)
    model.output_layer = remote
    model.__class__ = _with_remote_loss(type(model))  # type: ignore[arg-type]
    return remote


def _check(model: Any, optimizer: Any, own_weight: bool, delay_wgrad: bool, frozen: bool) -> None:
    if not isinstance(model, GPTModel):
        raise TypeError(
            f"model is a {type(model).__name__}; want the GPTModel itself, before Float16Module and "
            "DistributedDataParallel have it: call this in model_provider"
        )
    if not model.post_process:
        raise ValueError("model has no output layer: call this for the last pipeline stage only (post_process)")
    if isinstance(model.output_layer, RemoteOutputLayer):
        raise ValueError(f"model's output layer is head '{model.output_layer.head.name}' already")
    if model.share_embeddings_and_output_weights and not own_weight:
        raise ValueError(
            "model shares its embeddings with its output layer (share_embeddings_and_output_weights), so the server "
            "alone cannot step the weight: give own_weight=True, by which Megatron's optimizer does, or build the "
            "model untied (--untie-embeddings-and-output-weights)"
        )
    if own_weight and optimizer is not None:
        raise ValueError("optimizer is the server's, and own_weight=True leaves the step to Megatron: give one of them")
    if not own_weight and optimizer is None and not frozen:
        raise ValueError("give the server's optimizer, such as lossd.AdamW(), or own_weight=True")
    if own_weight and frozen:
        raise ValueError("frozen=True is of a head that nobody trains, and own_weight=True trains it: give one of them")
    if own_weight and not _weight_of(model).requires_grad:
        raise ValueError(
            "the model's output weight is frozen (requires_grad is False), and own_weight=True is for one that "
            "Megatron steps: give frozen=True in its place, by which the server makes no gradient of it (of tied "
            "embeddings: build the model untied), or freeze the weight after this"
        )
    if delay_wgrad and not own_weight:
        raise ValueError("delay_wgrad is of an own weight: without one no gradient comes here")
    if getattr(model.config, "defer_embedding_wgrad_compute", False):
        raise ValueError("defer_embedding_wgrad_compute is Megatron's own output layer's: turn it off")


def _weight_of(model: Any) -> Any:
    """The parameter that the model's logits are computed with."""
    if model.share_embeddings_and_output_weights:
        return model.shared_embedding_or_output_weight()
    return model.output_layer.weight


@functools.cache
def _with_remote_loss(model_class: Any) -> Any:
    """`model_class` with RemoteLoss in front of it, under its own name."""
    return type(model_class.__name__, (_RemoteLoss, model_class), {"__module__": model_class.__module__})


class _RemoteLoss:
    """What GPTModel does behind its decoder, with losses from the server."""

    config: Any
    output_layer: RemoteOutputLayer
    post_process: bool
    cp_group: Any
    training: bool

    def _postprocess(self, *arguments: Any, labels: Tensor | None = None, **given: Any) -> Tensor:
        if labels is None or not self.post_process:
            answer: Tensor = super()._postprocess(*arguments, labels=labels, **given)  # type: ignore[misc]
            return answer
        # A stage without output layer answers what the decoder, and the layers for more tokens, make.
        self.post_process = False
        try:
            hidden: Tensor = super()._postprocess(*arguments, labels=labels, **given)  # type: ignore[misc]
        finally:
            self.post_process = True
        return self._remote_losses(hidden, labels, given.get("loss_mask"), given.get("packed_seq_params"))

    def _remote_losses(self, hidden: Tensor, labels: Tensor, loss_mask: Tensor | None, packed: Any) -> Tensor:
        layer = self.output_layer
        main = labels
        if layer.skip_masked and loss_mask is not None:
            main = labels.masked_fill(loss_mask == 0, _IGNORED)
        depths = self.config.mtp_num_layers or 0
        if depths == 0:
            return layer.losses(hidden, main)
        targets, masks, counts = [main], [], []
        mask = torch.ones_like(labels) if loss_mask is None else loss_mask
        for _ in range(depths):
            labels, _ = roll_tensor(labels, shifts=-1, dims=-1, cp_group=self.cp_group, packed_seq_params=packed)
            mask, count = roll_tensor(mask, shifts=-1, dims=-1, cp_group=self.cp_group, packed_seq_params=packed)
            targets.append(labels.masked_fill(mask == 0, _IGNORED))
            masks.append(mask)
            counts.append(count)
        stacked = hidden.reshape(1 + depths, hidden.shape[0] // (1 + depths), *hidden.shape[1:])
        loss, *others = layer.losses_of_depths(stacked, targets)
        scale = self.config.mtp_loss_scaling_factor / depths
        for depth, (own, mask, count) in enumerate(zip(others, masks, counts, strict=True)):
            masked = mask * own
            divisor = count.clamp(min=1)
            if self.training:
                MTPLossLoggingHelper.save_loss_to_tracker(
                    masked.detach().sum() / divisor,
                    depth,
                    depths,
                    avg_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
                )
            # Backward gives it the gradient that the main loss's mean gets, whatever the trainer makes of `loss`.
            share = scale * masked if self.config.calculate_per_token_loss else scale * masked / divisor
            loss = MTPLossAutoScaler.apply(loss, share)
        return loss
