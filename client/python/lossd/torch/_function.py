"""linear_cross_entropy: the loss of a head that lives at a server."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import lossd.torch._compiled as _compiled
from lossd._batch import TOP, Distillation, TargetLists
from lossd.torch._autograd import RemoteLoss, evaluate
from lossd.torch._call import make_call
from lossd.torch._options import LossOptions
from lossd.torch._proxy import GradientProxy
from lossd.torch._sharded import is_dtensor, sharded_loss
from lossd.torch._tokens import shift_labels

if TYPE_CHECKING:
    from lossd.torch.head import RemoteHead

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
VALUES = ("entropies", "log_probabilities", "losses", "predictions", "target_ranks")
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def linear_cross_entropy(
    input: Tensor,
    target: Tensor,
    head: Any,
    *,
    weight: Tensor | bool | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    softcap: float | None = None,
    logit_scale: float | None = None,
    bias: bool | None = None,
    shift: bool | int = False,
    return_lse: bool = False,
    return_z_loss: bool = False,
    return_entropy: bool = False,
    return_values: Collection[str] = (),
    top_k: int = 0,
    token_weights: Tensor | None = None,
    normalizer: float | Tensor | None = None,
    z_normalizer: float | Tensor | None = None,
    grad_scale: float | Tensor | None = None,
    train_head: bool | None = None,
    distillation: Distillation | None = None,
    kept_tokens: tuple[Tensor, Tensor] | None = None,
    target_lists: TargetLists | None = None,
    torch_compat: bool = True,
) -> Any:
    """F.cross_entropy(F.linear(input, W, b), target) with W and b at the server; no logits exist here.

    input: hidden states [..., H], fp32, bf16, fp16 (fp64 is sent as fp32), any strides, on a CPU or a CUDA device.
    target: labels [...], any integers in [0, V) or `ignore_index`, on the same device.
    head: a RemoteHead. Its dW grows at the server, by what autograd would add to W.grad, when backward runs.

    weight: class weights, which belong to the head: None, those of the head, if it has any; False, none; True, those of
        the head, and an error if it has none; a tensor [V], the head's own values, which spares a declared mean (see
        grad_scale) a pass.
    reduction: "mean", over the tokens that count (with class weights over their weights' sum), "sum" or "none".
    softcap, logit_scale: in place of the head's; softcap=0 is none. bias: None, the head's, if it has one; False, none;
        True, the head's.
    lse_square_scale: lambda of the z-loss lambda * lse**2.
    shift: True or k: the label of a hidden state is that of the next, or k-th next, token of its sequence, the last
        dimension of target. Shapes stay as they are; the last k tokens of each sequence are ignored.
    return_lse: also the log-sum-exps [...] of the logits. return_z_loss: also the z-loss, reduced like the loss, which
        contains it. return_entropy: also the entropies [...] of the distributions, in nats, 0 where tokens are ignored.
        All of them are differentiable.
    return_values: also a dict of values of each token [...], which have no gradient: of "entropies" (fp32),
        "predictions" (int32, the most likely token), "log_probabilities" (of the labels, fp32), "losses" (fp32) and
        "target_ranks" (int32), by these names. What ignored tokens have there is nothing to be used.
    top_k: 1 to 64: the dict also has the likeliest tokens, "top_tokens" [..., top_k] (int32), best first, and their
        "top_log_probabilities" (fp32).
    token_weights: [...], multiply each token's loss. They get no gradient.
    normalizer: what a mean is divided by, for a mean over more than this batch (gradient accumulation, ranks):
        global_token_count, or with class weights the sum of the labels' weights. 0, of a step without any, is right
        for a batch without any, whose mean is empty. z_normalizer: of the z-loss, if it has another count.
    grad_scale: the gradient that will come back to a reduced loss, if it is known: 1 for loss.backward(), 1 / k for
        (loss / k).backward(), scaler.get_scale() for scaler.scale(loss).backward(). The tokens are sent once, then: dX
        and dW are made while the loss is. Another gradient is corrected in backward by a further pass, to a relative
        error in dW of |grad_scale / gradient| * 2**-24. Such a loss must be given to backward: dW is there already.
        None: forward computes the loss, and backward sends the tokens again.
    train_head: whether dW is wanted; None: unless the head is frozen. False, of a head that is not frozen: only for
        input that needs no gradient.
    distillation: soft targets of another head of the same server, fed with hidden states of its own, which get no
        gradient: lossd.Distillation. A mean divides the divergence as it does the cross-entropy.
    kept_tokens: (offsets [N + 1], ids [offsets[N]]), integers: the distribution of the i-th of the N hidden states is
        over ids[offsets[i]:offsets[i + 1]] alone, as if every other logit were -inf: what a sampler with top-p or top-k
        kept. A list has the (shifted) label of its hidden state and nothing twice; where the label is ignored it may be
        empty. Both tensors are left as they are until backward is done. Not with label_smoothing, distillation or
        top_k.
    target_lists: soft targets on a list of tokens for each of the N hidden states, in their order:
        lossd.TargetLists(offsets [N + 1], ids, probabilities), integers, integers and floats. They get no gradient, and
        are left as they are until backward is done. The labels say which tokens count, and count themselves by
        label_weight. A mean divides the divergence as it does the cross-entropy. Not with label_smoothing, distillation
        or kept_tokens.
    torch_compat: an empty mean, of a batch without tokens that count, is NaN, as PyTorch's, and not 0. Gradients are
        0. With a normalizer above 0 it is 0 in any case.

    Returns the loss in fp32, [] or, of "none", [...]; or a tuple of it and what else is asked for, in the order lse,
    z_loss, entropy, the dict of values. Where gradients are off (torch.no_grad, torch.inference_mode) and where nothing
    needs any it is a number without a graph, and the server adds nothing.

    Raises TypeError or ValueError for tensors that do not fit, lossd.InvalidArgumentError for labels out of range, and
    what Session.compute raises, in forward and in backward. FailedPreconditionError in backward: the head's weights are
    not those of the forward pass any more. RuntimeError for create_graph=True. May be called from any thread; calls of
    one head wait for each other.
    """
    if is_dtensor(input) and isinstance(target, Tensor) and _is_head(head):
        if return_values or top_k:
            raise ValueError("return_values and top_k are not for a DTensor: give input.to_local(), and its own labels")
        if kept_tokens is not None:
            raise ValueError("kept_tokens is not for a DTensor: give input.to_local(), its own labels and their lists")
        if target_lists is not None:
            raise ValueError("target_lists is not for a DTensor: give input.to_local(), its own labels and their lists")
        return sharded_loss(
            linear_cross_entropy,
            input,
            target,
            head,
            weight=weight,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
            lse_square_scale=lse_square_scale,
            softcap=softcap,
            logit_scale=logit_scale,
            bias=bias,
            shift=shift,
            return_lse=return_lse,
            return_z_loss=return_z_loss,
            return_entropy=return_entropy,
            token_weights=token_weights,
            normalizer=normalizer,
            z_normalizer=z_normalizer,
            grad_scale=grad_scale,
            train_head=train_head,
            distillation=distillation,
            torch_compat=torch_compat,
        )
    _check_tensors(input, target, token_weights, head)
    if isinstance(weight, Tensor) and weight.shape != (head.traced.vocab_size,):
        raise ValueError(
            f"weight has shape {list(weight.shape)}; want [{head.traced.vocab_size}], a weight for each class"
        )
    labels = shift_labels(target.detach(), int(shift), ignore_index)
    weights = None if token_weights is None else token_weights.detach().float().contiguous()
    names = _known(return_values, top_k)
    compute: Callable[..., Any] = _eager
    if torch.compiler.is_compiling():
        in_graph = _compiled.SUPPORTED and not names and kept_tokens is None and target_lists is None
        compute = _in_graph if in_graph else torch.compiler.disable(_eager)
    outputs = compute(
        input,
        head,
        head.proxy if _trains(train_head, input, head) else None,
        labels,
        weights,
        class_weights="head" if weight is None else "ignore" if weight is False else "use",
        class_weight_values=weight.detach() if isinstance(weight, Tensor) else None,
        bias="head" if bias is None else "use" if bias else "ignore",
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
        lse_square_scale=lse_square_scale,
        softcap=softcap,
        logit_scale=logit_scale,
        normalizer=normalizer,
        z_normalizer=z_normalizer,
        grad_scale=grad_scale,
        torch_compat=torch_compat,
        return_lse=return_lse,
        return_z_loss=return_z_loss,
        return_entropy=return_entropy,
        distillation=_soft_targets(distillation),
        autocast=torch.get_autocast_dtype(input.device.type) if torch.is_autocast_enabled(input.device.type) else None,
        **({"return_values": names, "top_k": top_k} if names else {}),
        **({} if kept_tokens is None else {"kept_tokens": _lists(kept_tokens)}),
        **({} if target_lists is None else {"target_lists": _targets(target_lists)}),
    )
    wanted = (True, return_lse, return_z_loss, return_entropy)
    chosen: tuple[Any, ...] = tuple(output for output, want in zip(outputs[:4], wanted, strict=True) if want)
    if names:
        chosen = (*chosen, dict(zip(names, outputs[4:], strict=True)))
    return chosen if len(chosen) > 1 else chosen[0]


def token_log_probs(
    input: Tensor,
    target: Tensor,
    head: Any,
    *,
    entropy: bool = False,
    return_values: Collection[str] = (),
    top_k: int = 0,
    kept_tokens: tuple[Tensor, Tensor] | None = None,
    **options: Any,
) -> Any:
    """Log-probabilities of the labels, [...] in fp32, as policy gradients and preference losses are made of; 0 where
    tokens are ignored. Two passes, as of a loss of reduction "none": the gradients are exact whatever is made of them.

    entropy: also the entropies [...] of the distributions, in nats, for a bonus: (log_probs, entropy), both with a
        gradient.
    return_values, top_k: also a dict of values without a gradient, behind the others, as linear_cross_entropy returns
        it; beside the names there, "accuracy" [] is the share of the labels that are predictions (NaN of none).
    kept_tokens: lists of the tokens that the distributions are over, as linear_cross_entropy takes them: the
        log-probabilities are those of a sampler that kept these.
    options: ignore_index, softcap, logit_scale, bias, shift and train_head of linear_cross_entropy. Class weights do
        not count. logit_scale=scale / T and softcap=cap / T make a temperature T of a head's scale and cap.

    A token to whose outputs nothing comes back, because it was clipped or its group has no advantage, costs backward as
    little as an ignored one. Raises what linear_cross_entropy raises.
    """
    unknown = options.keys() - {"ignore_index", "softcap", "logit_scale", "bias", "shift", "train_head"}
    if unknown:
        raise TypeError(f"token_log_probs() got an unexpected keyword argument {min(unknown)!r}")
    if isinstance(return_values, str):
        raise TypeError(f"return_values is {return_values!r}; want a collection of names")
    names = set(return_values)
    asked = names - {"accuracy"} | ({"predictions"} if "accuracy" in names else set())
    found = linear_cross_entropy(
        input,
        target,
        head,
        weight=False,
        reduction="none",
        return_entropy=entropy,
        return_values=asked,
        top_k=top_k,
        kept_tokens=kept_tokens,
        **options,
    )
    losses, *more = found if isinstance(found, tuple) else (found,)
    if "accuracy" in names:
        values = more[-1]
        ignore_index = options.get("ignore_index", -100)
        labels = shift_labels(target.detach(), int(options.get("shift", False)), ignore_index)
        valid = labels != ignore_index
        hits = (values["predictions"] == labels) & valid
        values["accuracy"] = hits.sum(dtype=torch.float32) / valid.sum()
        more[-1] = {name: value for name, value in values.items() if name in names or name in TOP}
    return (-losses, *more) if more else -losses


def _lists(kept_tokens: Any) -> tuple[Tensor, Tensor]:
    if not isinstance(kept_tokens, (tuple, list)) or len(kept_tokens) != 2:
        raise TypeError("kept_tokens is not a pair; want (offsets, ids)")
    offsets, ids = kept_tokens
    return _integers("kept_tokens", "offsets", offsets), _integers("kept_tokens", "ids", ids)


def _integers(argument: str, name: str, value: Any) -> Tensor:
    if not isinstance(value, Tensor) or value.dtype not in INTEGERS:
        found = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"{argument} has {name} of {found}; want a tensor of integers")
    return value.detach()


def _targets(target_lists: Any) -> TargetLists:
    if not isinstance(target_lists, TargetLists):
        raise TypeError(f"target_lists is a {type(target_lists).__name__}; want lossd.TargetLists")
    probabilities = target_lists.probabilities
    if not isinstance(probabilities, Tensor) or not probabilities.is_floating_point():
        found = probabilities.dtype if isinstance(probabilities, Tensor) else type(probabilities).__name__
        raise TypeError(f"target_lists has probabilities of {found}; want a tensor of floats, such as torch.float32")
    return replace(
        target_lists,
        offsets=_integers("target_lists", "offsets", target_lists.offsets),
        ids=_integers("target_lists", "ids", target_lists.ids),
        probabilities=probabilities.detach(),
    )


def _eager(
    input: Tensor,
    head: RemoteHead,
    proxy: Tensor | None,
    labels: Tensor,
    weights: Tensor | None,
    *,
    class_weight_values: Tensor | None,
    normalizer: float | Tensor | None,
    z_normalizer: float | Tensor | None,
    grad_scale: float | Tensor | None,
    return_lse: bool,
    return_z_loss: bool,
    return_entropy: bool,
    distillation: Distillation | None,
    autocast: torch.dtype | None,
    return_values: tuple[str, ...] = (),
    top_k: int = 0,
    kept_tokens: tuple[Tensor, Tensor] | None = None,
    target_lists: TargetLists | None = None,
    **options: Any,
) -> tuple[Tensor | None, ...]:
    call = make_call(
        head,
        LossOptions(
            normalizer=None if normalizer is None else float(normalizer),
            z_normalizer=None if z_normalizer is None else float(z_normalizer),
            **options,
        ),
        labels,
        hidden_dtype=input.dtype,
        autocast=autocast,
        class_weights=class_weight_values,
        grad_scale=grad_scale,
        return_lse=return_lse,
        return_z_loss=return_z_loss,
        return_entropy=return_entropy,
        distillation=distillation,
        return_values=return_values,
        top_k=top_k,
        kept_tokens=kept_tokens,
        target_lists=target_lists,
    )
    if not (torch.is_grad_enabled() and (proxy is not None or input.requires_grad)):
        return evaluate(call, input, labels, weights)
    # Tensors that were made in inference_mode cannot be kept for backward.
    hidden, labels, weights = (
        one.clone() if one is not None and one.is_inference() else one for one in (input, labels, weights)
    )
    outputs: tuple[Tensor | None, ...] = RemoteLoss.apply(hidden, proxy, labels, weights, call)
    return outputs


def _in_graph(
    input: Tensor,
    head: RemoteHead,
    proxy: Tensor | None,
    labels: Tensor,
    weights: Tensor | None,
    *,
    class_weights: str,
    class_weight_values: Tensor | None,
    bias: str,
    normalizer: float | Tensor | None,
    z_normalizer: float | Tensor | None,
    grad_scale: float | Tensor | None,
    return_lse: bool,
    return_z_loss: bool,
    return_entropy: bool,
    distillation: Distillation | None,
    softcap: float | None,
    logit_scale: float | None,
    label_smoothing: float,
    lse_square_scale: float,
    **options: Any,
) -> tuple[Tensor | None, ...]:
    soft = distillation
    if soft is not None and not isinstance(soft.hidden, Tensor):
        raise TypeError(f"distillation.hidden is a {type(soft.hidden).__name__}; want a torch.Tensor in a graph")
    returned = {"lse": return_lse, "z_loss": return_z_loss, "entropy": return_entropy}
    description = _compiled.Description(
        head=head.traced.key,
        class_weights=class_weight_values,
        normalizer=_number(normalizer),
        z_normalizer=_number(z_normalizer),
        grad_scale=_number(grad_scale),
        returns=" ".join(name for name, want in returned.items() if want),
        uses_class_weights=class_weights,
        uses_bias=bias,
        softcap=None if softcap is None else float(softcap),
        logit_scale=None if logit_scale is None else float(logit_scale),
        label_smoothing=float(label_smoothing),
        lse_square_scale=float(lse_square_scale),
        teacher="" if soft is None else soft.teacher,
        soft_hidden=None if soft is None else soft.hidden,
        divergence="" if soft is None else soft.divergence,
        soft_numbers=[] if soft is None else [soft.beta, soft.temperature, soft.weight, soft.label_weight],
        **options,
    )
    differentiates = torch.is_grad_enabled()
    return _compiled.linear_cross_entropy(input, proxy if differentiates else None, labels, weights, description)


def _number(value: float | Tensor | None) -> Tensor | None:
    """In a graph numbers that change from step to step are tensors."""
    if value is None or isinstance(value, Tensor):
        return None if value is None else value.detach()
    # A product, and not torch.tensor(value): of that Dynamo makes a graph for each value.
    return torch.ones((), dtype=torch.float64, device="cpu") * value


def _is_head(head: Any) -> bool:
    return isinstance(getattr(head, "proxy", None), GradientProxy) and hasattr(head, "traced")


def _check_tensors(input: Tensor, target: Tensor, token_weights: Tensor | None, head: Any) -> None:
    if not _is_head(head):
        if hasattr(head, "traced"):
            raise TypeError(
                f"the parameter of head {head.traced.name!r} was replaced, as by torch.func.functional_call: leave it "
                "out of the parameters given, since it stands for weights at a server"
            )
        raise TypeError(f"head is a {type(head).__name__}; want a lossd.torch.RemoteHead: RemoteHead(head) makes one")
    for name, value in (("input", input), ("target", target)):
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} is a {type(value).__name__}; want a torch.Tensor")
    if input.dtype not in FLOATS:
        raise TypeError(f"input is {input.dtype}; want one of {', '.join(map(str, FLOATS))}")
    if target.dtype not in INTEGERS:
        raise TypeError(f"target is {target.dtype}; want integers, one of {', '.join(map(str, INTEGERS))}")
    _check_dense("input", input)
    if input.dim() < 1 or input.shape[-1] != head.traced.hidden_size:
        raise ValueError(f"input has shape {list(input.shape)}; want [..., {head.traced.hidden_size}], as the head is")
    _check_dense("target", target)
    _check_tokens("target", target, input)
    if token_weights is None:
        return
    if not isinstance(token_weights, Tensor):
        raise TypeError(f"token_weights is a {type(token_weights).__name__}; want a torch.Tensor")
    if token_weights.dtype not in FLOATS:
        raise TypeError(f"token_weights is {token_weights.dtype}; want one of {', '.join(map(str, FLOATS))}")
    _check_tokens("token_weights", token_weights, input)
    if token_weights.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "token_weights needs a gradient, and gets none here; multiply the losses of reduction='none' instead, "
            "or detach it"
        )


def _check_dense(name: str, value: Tensor) -> None:
    if value.layout is not torch.strided or value.is_nested or value.device.type not in ("cpu", "cuda"):
        layout = "nested" if value.is_nested else value.layout
        raise ValueError(f"{name} is a {layout} tensor on {value.device}; want a dense one on a CPU or CUDA device")
    if torch.compiler.is_compiling():  # whose tensors are no others
        return
    if is_dtensor(value):
        raise ValueError(f"{name} is a DTensor, and input is not: give its to_local() or full_tensor()")
    # A wrapper, whose memory holds something else than its elements in their order.
    if type(value).__torch_dispatch__ is not Tensor.__torch_dispatch__ and not hasattr(value, "trigger_wait"):
        raise ValueError(f"{name} is a {type(value).__name__}; want a plain tensor, such as its to_local()")


def _check_tokens(name: str, value: Tensor, input: Tensor) -> None:
    if value.shape != input.shape[:-1]:
        raise ValueError(
            f"{name} has shape {list(value.shape)}; want {list(input.shape[:-1])}, one for each row of input"
        )
    if value.device != input.device:
        raise ValueError(f"{name} is on {value.device} and input on {input.device}; want both on one device")


def _known(names: Collection[str], top_k: int) -> tuple[str, ...]:
    if isinstance(names, str):
        raise TypeError(f"return_values is {names!r}; want a collection of names")
    unknown = set(names) - set(VALUES)
    if unknown:
        raise ValueError(f"return_values names {', '.join(sorted(map(repr, unknown)))}; there are {', '.join(VALUES)}")
    if not isinstance(top_k, int) or not 0 <= top_k <= 64:
        raise ValueError(f"top_k is {top_k!r}; want an integer from 1 to 64, or 0 for none")
    return tuple(sorted({*names, *(TOP if top_k else ())}))


def _soft_targets(distillation: Distillation | None) -> Distillation | None:
    if distillation is None or not isinstance(distillation.hidden, Tensor):
        return distillation
    return replace(distillation, hidden=distillation.hidden.detach())


def _trains(train_head: bool | None, input: Tensor, head: RemoteHead) -> bool:
    frozen = head.traced.frozen
    if train_head is None:
        train_head = bool(head.proxy.requires_grad) and not frozen
    if train_head and frozen:
        raise ValueError(f"train_head is True, but head {head.traced.name!r} is frozen: it has no dW")
    if not train_head and not frozen and input.requires_grad and torch.is_grad_enabled():
        why = "train_head is False" if head.proxy.requires_grad else "the head's parameter was frozen"
        raise ValueError(
            f"{why} and input needs a gradient, but head {head.traced.name!r} is not frozen: dX and "
            "dW are made together; create the head with frozen=True if it is not to be trained"
        )
    return train_head
