"""Takes a Hugging Face causal language model's head out of it, and puts it back."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from lossd.transformers import _weights
from lossd.transformers._lm_head import RemoteLmHead
from lossd.transformers._tied import TiedWeight

if TYPE_CHECKING:
    import lossd
    from lossd.torch import RemoteHead

_STATE = "_lossd"


@dataclasses.dataclass
class _Patch:
    """What a patched model carries as an attribute."""

    lm_head: RemoteLmHead
    original: nn.Module
    tied: TiedWeight | None
    grad_scale: float | None
    forward: Any

    @property
    def remote(self) -> RemoteHead:
        return self.lm_head.remote


def patch(
    model: nn.Module,
    head: RemoteHead | lossd.Head | None = None,
    *,
    client: lossd.Client | None = None,
    name: str = "lm_head",
    dtype: str | torch.dtype | None = None,
    optimizer: lossd.SGD | lossd.Adam | lossd.AdamW | None = None,
    upload: bool = True,
    grad_scale: float | None = None,
    flush_tied: Literal["backward", "manual"] = "backward",
    **head_options: Any,
) -> RemoteHead:
    """Moves the `lm_head` of `model` into a lossd server, in place.

    With `labels` the model's forward answers the loss and `logits=None`, in training and in evaluation:
    no logits are computed in one piece anywhere. `num_items_in_batch` and `ignore_index` mean what they mean to
    transformers. Without labels, as `generate()` calls it, logits of the positions asked for (`logits_to_keep`) come
    from the server, without gradient.

    The local weight is given up: its storage is freed, and the model has no parameter of it until unpatch. If it is
    tied to the embedding, the embedding stays, with its parameter and the local optimizer that trains it: the end of
    each backward pass adds the head's gradient to the embedding's `.grad` (where accelerate or Trainer accumulates: of
    the last one), and changed weights are written to the server before the next forward.

    Args:
      model: a causal model of transformers (`get_output_embeddings()` is a linear layer [V, H]), on any device.
      head: where the weights go: a head of vocab_size V and hidden_size H. None: `client` makes one.
      client: makes the head `name` with `dtype` (None: the weight's), `optimizer` (not for tied weights, which the
        local optimizer trains) and `head_options`, which are RemoteHead.create's: group= and average= of several ranks,
        exist_ok= and reset= for a name that is in use, master_weights=True, ...; logit_scale and softcap are read from
        the model's configuration. A weight that needs no gradient makes a frozen head.
      upload: False: the head has its weights already; the local ones are dropped unread.
      grad_scale: the upstream gradient that losses will have (`linear_cross_entropy`'s). Declared, a training step
        sends its hidden states once, not twice; 1.0 is right for `loss.backward()` and for Trainer. In
        evaluation mode it does not hold: such a loss adds nothing until it is given to backward.
      flush_tied: "backward" as above; "manual": call `flush_tied(model)` before each step of the optimizer
        (and before clipping), as trainers that accumulate by themselves will want.

    Returns:
      The remote head. An optimizer that is made of model.parameters() afterwards, as Trainers make theirs, steps it
      (RemoteHead); a tied one's embedding is stepped here. It is also `patched_head(model)`.

    Raises:
      TypeError or ValueError: not such a model, patched already, or a head of other sizes; the model is as before.
      LossdError: the server refused; the model is as before.
    """
    linear = _weights.linear_of(model)
    tied = _weights.is_tied(model, linear)
    if (head is None) == (client is None):
        raise ValueError("patch() needs either head=... or client=... to create one with")
    if flush_tied not in ("backward", "manual"):
        raise ValueError(f'flush_tied: got {flush_tied!r}, want "backward" or "manual"')
    if tied and optimizer is not None:
        raise ValueError(
            "optimizer: the weight is tied to the embedding, which the local optimizer trains; leave it out, or untie "
            "the model first (config.tie_word_embeddings=False)"
        )
    scale, softcap = _weights.scale_and_softcap(model.config)
    if head is not None:
        given = {"dtype": dtype, "optimizer": optimizer, **head_options}
        remote = _weights.checked(linear, head, [word for word, value in given.items() if value is not None])
        if upload:
            _weights.upload(remote, linear)
    else:
        assert client is not None
        remote = _weights.created(
            linear, client, name=name, dtype=dtype, optimizer=optimizer, upload=upload, options=head_options
        )
        if tied and upload:
            _weights.upload(remote, linear)  # the trainer's weights are what counts, whatever the head had
    follower = TiedWeight(remote, linear, automatic=flush_tied == "backward") if tied else None
    lm_head = RemoteLmHead(remote, linear if tied else None, logit_scale=scale, softcap=softcap)
    lm_head.train(model.training)
    if not tied:
        _weights.free(linear)
    model.set_output_embeddings(lm_head)
    kind: Any = type(model)
    forward = types.MethodType(_forward_of(kind), model)
    setattr(model, _STATE, _Patch(lm_head, linear, follower, grad_scale, forward))
    model.forward = forward
    return remote


def unpatch(model: nn.Module, *, read_back: bool = True) -> None:
    """Undoes patch(): the model has its own head again, with the server's weights (fp32 where they have a master).

    The head stays in the server, with what it has gathered since its last step or flush. With `read_back=False` the
    local weights [V, H] are left uninitialised, to be loaded from elsewhere.

    Raises:
      ValueError: the model is not patched, or something else has replaced its forward since: undo that first
        (`accelerator.unwrap_model(model, keep_fp32_wrapper=False)`).
      LossdError: the weights could not be read; the model is still patched.
    """
    state = _state_of(model)
    current = model.__dict__.get("forward")
    if getattr(current, "__func__", None) is not state.forward.__func__:
        raise ValueError(
            "unpatch: something else has replaced the model's forward since patch(); undo that first (of accelerate: "
            "unwrap_model(model, keep_fp32_wrapper=False))"
        )
    if state.tied is None:
        device = model.get_input_embeddings().weight.device
        _weights.restore(state.original, state.remote, device=device, read_back=read_back)
    else:
        state.tied.close()
    model.set_output_embeddings(state.original)
    del model.forward
    delattr(model, _STATE)


def patched_head(model: nn.Module) -> RemoteHead:
    """The remote head of a patched model. Raises ValueError if it is not patched."""
    return _state_of(model).remote


def flush_tied(model: nn.Module) -> None:
    """Adds the head's gradient to the `.grad` of the embedding that it is tied to, and empties the window.

    Needed before clipping and stepping where patch() was given flush_tied="manual", or where a pass did not go through
    the embedding (`inputs_embeds`). Raises ValueError if the model is not patched or its weights are not tied.
    """
    state = _state_of(model)
    if state.tied is None:
        raise ValueError("flush_tied: this model's head is not tied to its embedding")
    state.tied.flush()


def is_tied(model: nn.Module) -> bool:
    """Whether a patched model's head follows its embedding."""
    return _state_of(model).tied is not None


@functools.cache
def _forward_of(model_class: type[nn.Module]) -> Any:
    """What replaces the forward of models of this class; Trainer and generate() read its signature."""
    original = model_class.forward
    signature = inspect.signature(original)

    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        state: _Patch = getattr(self, _STATE)
        if state.tied is not None:
            state.tied.refresh()
        kwargs = _by_name(signature, self, args, kwargs)
        labels = kwargs.pop("labels", None)
        if labels is None:
            return original(self, **kwargs)
        return_dict = kwargs.pop("return_dict", None)
        state.lm_head.begin_capture()
        try:
            outputs = original(self, return_dict=True, **kwargs)
            hidden = state.lm_head.end_capture(outputs.logits)
        finally:
            state.lm_head.cancel_capture()
        # In evaluation nobody said that there would be a backward pass.
        grad_scale = state.grad_scale if self.training else None
        loss = _loss(state, hidden, labels, kwargs, grad_scale)
        if getattr(outputs, "aux_loss", None) is not None:
            loss = loss + self.router_aux_loss_coef * outputs.aux_loss.to(loss.device)
        outputs = dataclasses.replace(outputs, loss=loss, logits=None)
        wants_dict = self.config.return_dict if return_dict is None else return_dict
        return outputs if wants_dict else outputs.to_tuple()

    return forward


def _by_name(
    signature: inspect.Signature, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    if not args:
        return kwargs
    positional = signature.bind_partial(model, *args).arguments
    return {**dict(list(positional.items())[1:]), **kwargs}


def _loss(
    state: _Patch, hidden: torch.Tensor, labels: torch.Tensor, kwargs: dict[str, Any], grad_scale: float | None
) -> torch.Tensor:
    """transformers' ForCausalLMLoss of what would be the logits: the mean, or the sum by `num_items_in_batch`."""
    from lossd.torch import linear_cross_entropy

    targets = kwargs.get("shift_labels")
    items = kwargs.get("num_items_in_batch")
    return linear_cross_entropy(
        hidden,
        (labels if targets is None else targets).to(hidden.device),
        state.remote,
        ignore_index=kwargs.get("ignore_index", -100),
        shift=targets is None,
        normalizer=None if items is None else float(items),
        grad_scale=grad_scale,
        logit_scale=state.lm_head.logit_scale,
        softcap=state.lm_head.softcap,
    )


def _state_of(model: nn.Module) -> _Patch:
    state: _Patch | None = getattr(model, _STATE, None)
    if state is None:
        raise ValueError(f"{type(model).__name__} is not patched: call lossd.transformers.patch(model, ...) first")
    return state
