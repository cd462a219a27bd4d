"""The weight of a model's head: found, checked, moved to the server and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lossd.torch._dtypes import NAMES, dtype_of

if TYPE_CHECKING:
    import lossd
    from lossd.torch import RemoteHead

_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")


def linear_of(model: nn.Module) -> nn.Linear:
    """The model's head. Raises TypeError or ValueError, naming what is missing, if lossd cannot take its place."""
    model_class = type(model).__name__
    if hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
        raise TypeError(f"model: got {model_class}, want the model in it: patch(model.get_base_model(), ...)")
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "get_output_embeddings"):
        raise TypeError(f"model: got {model_class}, want a causal language model of transformers (a PreTrainedModel)")
    if hasattr(model, "_lossd"):
        raise ValueError(f"model: this {model_class} is patched already; lossd.transformers.unpatch(model) first")
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"model: {model_class} is an encoder-decoder model; only causal models are supported")
    if "forward" in model.__dict__:
        raise ValueError(
            f"model: something has replaced the forward of this {model_class} already; patch it before accelerate or "
            "others wrap it. If that was a trainer of TRL that has done its work: `del model.forward` gives the model "
            "its own again"
        )
    linear = model.get_output_embeddings()
    if not isinstance(linear, nn.Linear):
        raise TypeError(
            f"model: the output embeddings of {model_class} are {type(linear).__name__}, want an nn.Linear [V, H]"
        )
    _check_weight(linear.weight)
    require_loss(model, getattr(model, "loss_function", None))
    return linear


def require_loss(model: nn.Module, function: Any) -> None:
    """Raises ValueError unless `function`, which is or will be the model's loss_function, is the one that lossd
    computes. None is that, too."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    if function is not None and function is not ForCausalLMLoss:
        name = getattr(function, "__name__", repr(function))
        raise ValueError(
            f"model: its loss_function is {name}; only transformers' ForCausalLMLoss is computed by lossd. Take the "
            "logits, which have no gradient, or leave this model unpatched"
        )


def loss_of_type(loss_type: str | None) -> Any:
    """The function that a PreTrainedModel of this `loss_type` has."""
    from transformers.loss.loss_utils import LOSS_MAPPING

    return LOSS_MAPPING.get(loss_type or "", LOSS_MAPPING["ForCausalLM"])


def is_tied(model: nn.Module, linear: nn.Linear) -> bool:
    """Whether the head's weight is the input embedding's."""
    return getattr(model.get_input_embeddings(), "weight", None) is linear.weight


def scale_and_softcap(config: Any, logit_scale: float | None, softcap: float | None) -> tuple[float, float]:
    """What the model does to its logits, as patch() was told, or else its configuration tells: (logit_scale, softcap),
    (1, 0) for nothing.

    Cohere multiplies by `logit_scale`, Falcon-H1 by `lm_head_multiplier`, Granite divides by `logits_scaling`; Gemma
    caps at `final_logit_softcapping`, RecurrentGemma and xLSTM under other names. The first forward with labels checks
    that this is all; what others mean by these names (MiniCPM3, HyperCLOVA X) patch() has to be told.
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    scale = 1.0
    for factor in ("logit_scale", "lm_head_multiplier"):
        value = getattr(text, factor, None)
        scale *= 1.0 if value is None else float(value)
    if getattr(text, "logits_scaling", None) is not None:
        scale /= float(text.logits_scaling)
    caps = (getattr(text, name, None) for name in _CAPS)
    cap = float(next((value for value in caps if value), 0.0))
    return scale if logit_scale is None else logit_scale, cap if softcap is None else softcap


def checked(linear: nn.Linear, head: RemoteHead | lossd.Head, options: list[str]) -> RemoteHead:
    """The head that patch() was given, if it is of the weight's sizes; `options`: what else it was given."""
    from lossd.torch import RemoteHead

    if options:
        raise ValueError(
            f"{', '.join(options)}: only for heads that patch() makes with client=...; this one has its own"
        )
    if (head.vocab_size, head.hidden_size) != tuple(linear.weight.shape):
        raise ValueError(
            f"head: {head.vocab_size} x {head.hidden_size}, but the model's lm_head is "
            f"{linear.weight.shape[0]} x {linear.weight.shape[1]}"
        )
    return head if isinstance(head, RemoteHead) else RemoteHead(head, device=linear.weight.device)


def created(
    linear: nn.Linear,
    client: lossd.Client,
    *,
    name: str,
    dtype: str | torch.dtype | None,
    optimizer: Any,
    upload: bool,
    options: dict[str, Any],
) -> RemoteHead:
    """A new head of the client's with the weight (and bias), or without if `upload` is false: it has its own then."""
    from lossd.torch import RemoteHead

    wanted: Any = linear.weight.dtype if dtype is None else dtype
    return RemoteHead.create(
        client,
        name,
        *linear.weight.shape,
        dtype=dtype_of(wanted) if isinstance(wanted, str) else wanted,
        optimizer=optimizer,
        weights=linear.weight if upload else None,
        device=linear.weight.device,
        **{
            "bias": linear.bias is not None if not upload else bias_of(linear),
            "frozen": not linear.weight.requires_grad,
            "exist_ok": not upload,
            **options,
        },
    )


def upload(remote: RemoteHead, linear: nn.Linear) -> None:
    """Writes the weight (and bias) to the server; with a group, the first rank's."""
    remote.write_weights(linear.weight, bias_of(linear))


def bias_of(linear: nn.Linear) -> torch.Tensor | None:
    """[V] fp32, or None."""
    return None if linear.bias is None else linear.bias.detach().float()


def free(linear: nn.Linear) -> None:
    """Frees the storage of weight and bias, also where an optimizer holds the Parameters."""
    for parameter in (linear.weight, linear.bias):
        if parameter is not None:
            parameter.grad = None
            parameter.data = parameter.data.new_empty(0)


def restore(linear: nn.Linear, remote: RemoteHead, *, device: torch.device, read_back: bool) -> None:
    """Undoes `free` with the server's weights, in the dtype that they had."""
    weight = linear.weight.data.new_empty((remote.vocab_size, remote.hidden_size), device=device)
    bias = None if linear.bias is None else linear.bias.data.new_empty(remote.vocab_size, device=device)
    if read_back:
        rows = torch.empty_like(weight, device="cpu")
        bias_rows = None if bias is None else torch.empty(remote.vocab_size, dtype=torch.float32, device="cpu")
        remote.head.read_weights(out=rows, dtype=NAMES[rows.dtype], bias_out=bias_rows)
        weight.copy_(rows)
        if bias is not None:
            bias.copy_(bias_rows)
    linear.weight.data = weight
    if bias is not None:
        linear.bias.data = bias


def _check_weight(weight: torch.Tensor) -> None:
    if type(weight.data).__name__ == "DTensor":
        raise TypeError(
            "model: its lm_head.weight is sharded (DTensor); patch the model before it is sharded, or write the shards "
            "with lossd.torch.write_shard and unshard the rest"
        )
    if weight.device.type == "meta":
        raise ValueError(
            "model: its lm_head.weight is on the meta device; load it first, or load it in the server "
            "(Head.load_weights) and give patch() that head with upload=False and a model with weights"
        )
    if weight.dtype not in NAMES:
        raise TypeError(f"model: its lm_head.weight is {weight.dtype}, want one of {', '.join(NAMES.values())}")
