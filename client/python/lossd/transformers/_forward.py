"""The class of patched models, whose forward leaves logits and loss to the server."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Any

import torch
from torch import nn

import lossd.transformers._trl as _trl
import lossd.transformers._weights as _weights
from lossd.transformers._own_loss import parameters_of
from lossd.transformers._ranks import require_group
from lossd.transformers._state import Patch, aux_loss_coefficient, patch_of


@functools.cache
def patched_class(model_class: Any) -> Any:
    """A subclass for the patched models of a class, under its name, by which transformers and others know it."""
    body = {
        "__doc__": model_class.__doc__,
        "__module__": model_class.__module__,
        "__qualname__": model_class.__qualname__,
        "__setattr__": _setattr_of(model_class),
        "forward": _forward_of(model_class),
        "resize_token_embeddings": _resize_of(model_class),
        "zero_grad": _zero_grad_of(model_class),
    }
    return type(model_class.__name__, (model_class,), body)


def _forward_of(model_class: type[nn.Module]) -> Any:
    # Others may hold the forward when unpatch() has given the model its class back: then it is the model's own.
    original: Any = model_class.forward
    signature = inspect.signature(original)

    @functools.wraps(original)  # Trainer and generate() read its signature
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        state = patch_of(self)
        if state is None:
            return original(self, *args, **kwargs)
        require_group(state.remote, tied=state.tied is not None)
        state.last_backward.note_forward()
        if state.tied is not None:
            state.tied.require_tied(state.lm_head.weight)
            state.tied.refresh()
        kwargs = _by_name(signature, self, args, kwargs)
        fused = kwargs.pop(_trl.KEYWORD, None)
        if fused is not None:
            hidden, outputs = _hidden_states(self, state, original, kwargs)
            return _trl.outputs_of(self, state, fused, hidden, outputs)
        labels = kwargs.pop("labels", None)
        if labels is None:
            return original(self, **kwargs)
        return _with_loss(self, state, original, labels, kwargs)

    return forward


def _setattr_of(model_class: Any) -> Any:
    def __setattr__(self: nn.Module, name: str, value: Any) -> None:
        state = patch_of(self)
        if state is not None and name == "forward":
            value = _trl.with_remote_head(self, state, value)
        elif state is not None and name in ("loss_function", "loss_type"):
            _weights.require_loss(self, value if name == "loss_function" else _weights.loss_of_type(value))
        elif state is not None and self.__dict__["_modules"].get(name) is state.lm_head is not value:
            raise TypeError(
                f"{name} of this {type(self).__name__} is head {state.remote.name!r} of a lossd server, and cannot be "
                f"replaced by a {type(value).__name__}: {state.lm_head.advice_to_adapters()}, or take the head back "
                "with lossd.transformers.unpatch(model) before"
            )
        model_class.__setattr__(self, name, value)

    return __setattr__


def _zero_grad_of(model_class: Any) -> Any:
    @functools.wraps(model_class.zero_grad)
    def zero_grad(self: Any, *args: Any, **kwargs: Any) -> None:
        state = patch_of(self)
        if state is not None and state.tied is None:
            state.remote.zero_grad()  # of all ranks, also those that have added nothing
        model_class.zero_grad(self, *args, **kwargs)

    return zero_grad


def _resize_of(model_class: type[nn.Module]) -> Any:
    original: Any = getattr(model_class, "resize_token_embeddings", None)

    @functools.wraps(original)
    def resize_token_embeddings(self: Any, new_num_tokens: int | None = None, *args: Any, **kwargs: Any) -> Any:
        state = patch_of(self)
        if state is None:
            return original(self, new_num_tokens, *args, **kwargs)
        if new_num_tokens is None and not args and not kwargs.get("pad_to_multiple_of"):
            return self.get_input_embeddings()
        raise ValueError(
            f"resize_token_embeddings: the {state.remote.vocab_size} rows of lm_head are at a lossd server, as head "
            f"{state.remote.name!r}, whose size is fixed. Call lossd.transformers.unpatch(model), resize, and patch() "
            "it again as a head of another name"
        )

    return resize_token_embeddings


def _by_name(
    signature: inspect.Signature, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    if not args:
        return kwargs
    positional = signature.bind_partial(model, *args).arguments
    return {**dict(list(positional.items())[1:]), **kwargs}


def _hidden_states(model: nn.Module, state: Patch, original: Any, kwargs: dict[str, Any]) -> tuple[torch.Tensor, Any]:
    """What the model gives its lm_head [..., H], and its outputs, whose logits are none."""
    state.lm_head.begin_capture()
    try:
        named = {"return_dict": True} if parameters_of(original)("return_dict") else {}
        outputs = original(model, **{**kwargs, **named})
        return state.lm_head.end_capture(outputs.logits), outputs
    finally:
        state.lm_head.cancel_capture()


def _with_loss(model: Any, state: Patch, original: Any, labels: torch.Tensor, kwargs: dict[str, Any]) -> Any:
    return_dict = kwargs.pop("return_dict", None)
    smoothing = kwargs.pop("label_smoothing", None)
    hidden, outputs = _hidden_states(model, state, original, kwargs)
    evaluates = not model.training and not torch.is_grad_enabled()
    loss, predictions = _loss(state, hidden, labels, kwargs, smoothing or 0.0, model.training, evaluates)
    if state.tied is not None:
        state.tied.watch(loss)
    # LabelSmoother, whose loss this is then, knows of none.
    if getattr(outputs, "aux_loss", None) is not None and smoothing is None:
        loss = loss + aux_loss_coefficient(model) * outputs.aux_loss.to(loss.device)
    outputs = dataclasses.replace(outputs, loss=loss, logits=None)
    wants_dict = model.config.return_dict if return_dict is None else return_dict
    if not wants_dict:
        return outputs.to_tuple()
    if predictions is not None:
        _put_for_logits(outputs, predictions)
    return outputs


def _put_for_logits(outputs: Any, predictions: torch.Tensor) -> None:
    """Where compute_metrics, which gets the values without their names, looks for logits: before what comes behind."""
    names = [field.name for field in dataclasses.fields(outputs)]
    outputs["predictions"] = predictions
    for name in names[names.index("logits") :]:
        if name in outputs:
            outputs.move_to_end(name)


def _loss(
    state: Patch,
    hidden: torch.Tensor,
    labels: torch.Tensor,
    kwargs: dict[str, Any],
    label_smoothing: float,
    training: bool,
    predict: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """transformers' ForCausalLMLoss of what would be the logits: the mean, or the sum by `num_items_in_batch`. And
    the most likely token of each position [B, T], -100 where the next one has no label, or None."""
    from lossd.torch import linear_cross_entropy, shift_labels

    targets = kwargs.get("shift_labels")
    items = kwargs.get("num_items_in_batch")
    ignore_index = kwargs.get("ignore_index", -100)
    labels = (labels if targets is None else targets).to(hidden.device)
    results = linear_cross_entropy(
        hidden,
        labels,
        state.head_of_loss(hidden),
        ignore_index=ignore_index,
        shift=targets is None,
        normalizer=None if items is None else float(items),
        # In evaluation nobody said that there would be a backward pass.
        grad_scale=(state.remote.grad_scale if state.grad_scale is None else state.grad_scale) if training else None,
        logit_scale=state.lm_head.logit_scale,
        softcap=state.lm_head.softcap,
        label_smoothing=label_smoothing,
        return_values=("predictions",) if predict else (),
    )
    if not predict:
        return results, None
    loss, values = results
    counted = shift_labels(labels, int(targets is None), ignore_index) != ignore_index
    return loss, values["predictions"].long().where(counted, -100)
