"""Takes a Hugging Face causal language model's head out of it, and puts it back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

import lossd.transformers._weights as _weights
from lossd.transformers._forward import patched_class
from lossd.transformers._lm_head import RemoteLmHead
from lossd.transformers._own_loss import require_same_loss
from lossd.transformers._ranks import LastBackward, SharedGradient
from lossd.transformers._state import ATTRIBUTE, Patch, require_patched
from lossd.transformers._tied import TiedWeight

if TYPE_CHECKING:
    import lossd
    from lossd.torch import RemoteHead


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
    logit_scale: float | None = None,
    softcap: float | None = None,
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
        exist_ok= and reset= for a name that is in use, master_weights=True, .... A weight that needs no gradient makes
        a frozen head.
      upload: False: the head has its weights already; the local ones are dropped unread.
      grad_scale: the upstream gradient that losses will have (`linear_cross_entropy`'s). Declared, a training step
        sends its hidden states once, not twice; 1.0 is right for `loss.backward()` and for Trainer. In
        evaluation mode it does not hold: such a loss adds nothing until it is given to backward.
      flush_tied: "backward" as above; "manual": call `flush_tied(model)` before each step of the optimizer
        (and before clipping), as trainers that accumulate by themselves will want.
      logit_scale, softcap: what the model does to the product of hidden states and weights: times logit_scale, then
        softcap * tanh(logits / softcap), 0 for no cap. None: read from the model's configuration, where most models
        have it.

    Returns:
      The remote head. An optimizer that is made of model.parameters() afterwards, as Trainers make theirs, steps it
      (RemoteHead); a tied one's embedding is stepped here. It is also `patched_head(model)`.

    Raises:
      TypeError or ValueError: not such a model, patched already, a head of other sizes, or a forward whose loss is not
        transformers' ForCausalLMLoss (a forward that does not call `self.loss_function` is tried with a few tokens);
        the model is as before.
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
    require_same_loss(model, linear)
    scale, cap = _weights.scale_and_softcap(model.config, logit_scale, softcap)
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
    last = LastBackward()
    follower = TiedWeight(remote, linear, last, automatic=flush_tied == "backward") if tied else None
    lm_head = RemoteLmHead(remote, linear if tied else None, logit_scale=scale, softcap=cap)
    lm_head.train(model.training)
    if not tied:
        _weights.free(linear)
    model.set_output_embeddings(lm_head)
    shared = SharedGradient(None if tied else remote, last)
    model_class: Any = type(model)
    setattr(model, ATTRIBUTE, Patch(lm_head, linear, model_class, follower, grad_scale, shared, last))
    model.__class__ = patched_class(model_class)
    return remote


def unpatch(model: nn.Module, *, read_back: bool = True) -> None:
    """Undoes patch(): the model has its own head again, with the server's weights (fp32 where they have a master).

    The head stays in the server, with what it has gathered since its last step or flush. With `read_back=False` the
    local weights [V, H] are left uninitialised, to be loaded from elsewhere. What others have put round the model's
    forward since (accelerate, TRL) stays, and meets the local head.

    Raises:
      ValueError: the model is not patched.
      LossdError: the weights could not be read; the model is still patched.
    """
    model, state = require_patched(model)
    if state.tied is None:
        device = model.get_input_embeddings().weight.device
        _weights.restore(state.original, state.remote, device=device, read_back=read_back)
    else:
        state.tied.close()
    state.shared.close()
    delattr(model, ATTRIBUTE)
    model.set_output_embeddings(state.original)
    if type(model) is patched_class(state.model_class):  # otherwise a later one, which does as its base does
        model.__class__ = state.model_class


def patched_head(model: nn.Module) -> RemoteHead:
    """The remote head of a patched model, or of the one in a PeftModel or DistributedDataParallel. Raises ValueError if
    there is none."""
    return require_patched(model)[1].remote


def flush_tied(model: nn.Module) -> None:
    """Adds the head's gradient to the `.grad` of the embedding that it is tied to, and empties the window.

    Needed before clipping and stepping where patch() was given flush_tied="manual", or where a pass did not go through
    the embedding (`inputs_embeds`). Raises ValueError if the model is not patched or its weights are not tied.
    """
    state = require_patched(model)[1]
    if state.tied is None:
        raise ValueError("flush_tied: this model's head is not tied to its embedding")
    state.tied.flush()
