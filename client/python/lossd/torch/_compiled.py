"""The loss in graphs of torch.compile: an operator and its backward, which Dynamo does not look into.

A graph holds tensors and numbers, so what backward has to know of a forward pass travels between the two operators in
tensors, and the head as a number. Both have effects, at the server, and are registered as such, so that no pass of a
compiler drops, repeats, merges or reorders them."""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from lossd._batch import Distillation
from lossd.torch._autograd import Left, dx_dtype
from lossd.torch._call import LossCall, make_call
from lossd.torch._options import LossOptions
from lossd.torch._passes import Values
from lossd.torch._window import window_of

if TYPE_CHECKING:
    from torch._library.custom_ops import CustomOpDef

# What of Values is a number, in the tensor that goes from forward to backward.
_VALUES = ("loss_sum", "z_loss_sum", "valid_tokens", "count", "z_count", "weight_version", "hold")
_DECLARED = len(_VALUES)  # behind them: the upstream gradient that dW and dX are of; NaN if there are none
_WINDOWS = _DECLARED + 1  # and how many windows of the head had gone before

_heads: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_keys = itertools.count(1)


@dataclass(frozen=True)
class TracedHead:
    """All that is asked of a head while Dynamo traces, which makes a graph for these very values."""

    key: int
    name: str
    vocab_size: int
    hidden_size: int
    frozen: bool
    has_class_weights: bool


def traced(head: Any) -> TracedHead:
    """What is asked of a RemoteHead, which graphs find by the key as long as it lives."""
    key = next(_keys)
    _heads[key] = head
    config = head.head.config
    return TracedHead(
        key, head.head.name, head.vocab_size, head.hidden_size, bool(config.frozen), bool(config.has_class_weights)
    )


def _head_of(key: int) -> Any:
    head = _heads.get(key)
    if head is None:
        raise RuntimeError("the RemoteHead that this graph was compiled with is gone; compile the model again")
    return head


class Description(NamedTuple):
    """What the operators are told of a loss beside its tokens. None of it but `reduction`, `grad_scale` and `returns`
    decides what a graph looks like; tensors are numbers that may be others in each step."""

    head: int
    class_weights: Tensor | None
    normalizer: Tensor | None
    z_normalizer: Tensor | None
    grad_scale: Tensor | None
    reduction: str
    returns: str  # of "lse", "z_loss" and "entropy"
    ignore_index: int
    label_smoothing: float
    lse_square_scale: float
    softcap: float | None
    logit_scale: float | None
    uses_class_weights: str
    uses_bias: str
    torch_compat: bool
    autocast: torch.dtype | None  # what autocast casts to, where it is on
    teacher: str
    soft_hidden: Tensor | None
    divergence: str
    soft_numbers: list[float]  # beta, temperature, weight, label_weight

    @property
    def may_know_dx(self) -> bool:
        """Whether a forward pass may bring dX."""
        return self.grad_scale is not None and self.reduction != "none"

    def call(self, hidden: Tensor, labels: Tensor) -> LossCall:
        options = LossOptions(
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            reduction=self.reduction,
            softcap=self.softcap,
            lse_square_scale=self.lse_square_scale,
            logit_scale=self.logit_scale,
            class_weights=self.uses_class_weights,
            bias=self.uses_bias,
            normalizer=None if self.normalizer is None else float(self.normalizer),
            z_normalizer=None if self.z_normalizer is None else float(self.z_normalizer),
            torch_compat=self.torch_compat,
        )
        soft = None
        if self.soft_hidden is not None:
            soft = Distillation(self.teacher, self.soft_hidden, self.divergence, *self.soft_numbers)
        return make_call(
            _head_of(self.head),
            options,
            labels,
            hidden_dtype=hidden.dtype,
            autocast=self.autocast,
            class_weights=self.class_weights,
            grad_scale=self.grad_scale,
            return_lse="lse" in self.returns,
            return_z_loss="z_loss" in self.returns,
            return_entropy="entropy" in self.returns,
            distillation=soft,
        )


_SCHEMA_TYPES = {
    "int": "SymInt",
    "float": "float",
    "str": "str",
    "bool": "bool",
    "float | None": "float?",
    "torch.dtype | None": "ScalarType?",
    "Tensor | None": "Tensor?",
    "list[float]": "float[]",
}
_DESCRIBED = ", ".join(
    f"{_SCHEMA_TYPES[str(getattr(kind, '__forward_arg__', kind))]} {name}"
    for name, kind in Description.__annotations__.items()
)


def _operator(name: str, arguments: str, results: int) -> Callable[[Callable[..., Any]], CustomOpDef]:
    schema = f"({arguments}, {_DESCRIBED}) -> ({', '.join(['Tensor'] * results)})"
    unsafe = getattr(torch.Tag, "cudagraph_unsafe", None)  # a graph of CUDA's would be replayed without the server
    tags = {} if unsafe is None else {"tags": (unsafe,)}
    operator: Callable[[Callable[..., Any]], CustomOpDef] = torch.library.custom_op(
        f"lossd::{name}", mutates_args=(), schema=schema, **tags
    )
    return operator


@_operator(
    "linear_cross_entropy", "Tensor hidden, Tensor? proxy, Tensor labels, Tensor? token_weights, bool wants_dx", 6
)
def _forward(
    hidden: Tensor, proxy: Tensor | None, labels: Tensor, token_weights: Tensor | None, wants_dx: bool, *rest: Any
) -> tuple[Tensor, ...]:
    """The loss, the log-sum-exps, the z-loss, the entropies, dX, and numbers for backward. What there is not is an
    empty tensor.
    proxy: the head's parameter, if the head is trained."""
    description = Description(*rest)
    call = description.call(hidden, labels)
    declared = call.declared if (wants_dx or proxy is not None) and _may_declare() else None
    windows = window_of(call.head).windows_gone
    again = wants_dx or proxy is not None
    values = call.forward(hidden, labels, token_weights, declared, dx_dtype(hidden) if wants_dx else None, again)
    loss, _, z_loss, *_ = call.outputs(values, hidden.device)
    assert loss is not None
    numbers = [float(getattr(values, name)) for name in _VALUES]
    numbers += [math.nan if declared is None else declared, windows]
    dx = values.dx
    if dx is None:  # of the shape that the graph expects; nobody reads it
        dx = hidden.new_empty(hidden.shape if wants_dx and description.may_know_dx else (0,))
    return (
        loss,
        _nothing(hidden) if values.log_sum_exp is None else values.log_sum_exp,
        _nothing(hidden) if z_loss is None else z_loss,
        _nothing(hidden) if values.entropies is None else values.entropies,
        dx.to(hidden.dtype),
        torch.tensor(numbers, dtype=torch.float64, device="cpu"),
    )


@_forward.register_fake
def _(
    hidden: Tensor, proxy: Tensor | None, labels: Tensor, token_weights: Tensor | None, wants_dx: bool, *rest: Any
) -> tuple[Tensor, ...]:
    description = Description(*rest)
    by_token = description.reduction == "none"
    with_z = "z_loss" in description.returns
    tokens = lambda: hidden.new_empty(labels.shape, dtype=torch.float32)  # noqa: E731
    reduced = lambda: tokens() if by_token else hidden.new_empty((), dtype=torch.float32)  # noqa: E731
    return (
        reduced(),
        tokens() if "lse" in description.returns or (with_z and by_token) else _nothing(hidden),
        reduced() if with_z else _nothing(hidden),
        tokens() if "entropy" in description.returns else _nothing(hidden),
        hidden.new_empty(hidden.shape if wants_dx and description.may_know_dx else (0,)),
        torch.empty(_WINDOWS + 1, dtype=torch.float64, device="cpu"),
    )


@_operator(
    "linear_cross_entropy_backward",
    "Tensor? d_loss, Tensor? d_lse, Tensor? d_z_loss, Tensor? d_entropy, Tensor hidden, Tensor? proxy, Tensor labels, "
    "Tensor? token_weights, Tensor lse, Tensor dx, Tensor numbers, bool wants_dx",
    2,
)
def _backward(
    d_loss: Tensor | None,
    d_lse: Tensor | None,
    d_z_loss: Tensor | None,
    d_entropy: Tensor | None,
    hidden: Tensor,
    proxy: Tensor | None,
    labels: Tensor,
    token_weights: Tensor | None,
    lse: Tensor,
    dx: Tensor,
    numbers: Tensor,
    wants_dx: bool,
    *rest: Any,
) -> tuple[Tensor, Tensor]:
    """dX, and the gradient of the head's parameter."""
    call = Description(*rest).call(hidden, labels)
    found = dict(zip(_VALUES, numbers.tolist(), strict=False))
    found |= {name: int(found[name]) for name in ("valid_tokens", "weight_version", "hold")}
    declared = float(numbers[_DECLARED])
    # Used up: the next backward of this graph, if it was retained, is another gradient. Autograd need not know.
    numbers.numpy()[_DECLARED] = math.nan
    left = Left(
        call=call,
        values=Values(**found),
        declared=None if math.isnan(declared) else declared,
        dx=dx if wants_dx else None,
        hidden_dtype=hidden.dtype,
        wants_dx=wants_dx,
        windows=int(numbers[_WINDOWS]),
    )
    saved = (hidden, labels, token_weights, lse if lse.numel() else None)
    # A graph gives zeros for outputs that nothing came back to.
    d_lse, d_entropy = (one if one is not None and bool(one.any()) else None for one in (d_lse, d_entropy))
    result, finite = left.gradient(lambda: saved, d_loss, d_lse, d_z_loss, d_entropy)
    return (
        hidden.new_empty((0,)) if result is None else result.clone() if result is dx else result,
        _nothing(hidden) if proxy is None else left.marker(finite).as_subclass(Tensor),
    )


@_backward.register_fake
def _(
    d_loss: Tensor | None,
    d_lse: Tensor | None,
    d_z_loss: Tensor | None,
    d_entropy: Tensor | None,
    hidden: Tensor,
    proxy: Tensor | None,
    labels: Tensor,
    token_weights: Tensor | None,
    lse: Tensor,
    dx: Tensor,
    numbers: Tensor,
    wants_dx: bool,
    *rest: Any,
) -> tuple[Tensor, Tensor]:
    return (
        hidden.new_empty(hidden.shape if wants_dx else (0,)),
        _nothing(hidden) if proxy is None else torch.empty(1, 1, dtype=torch.float32, device=proxy.device),
    )


def _set_up(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, proxy, labels, token_weights, wants_dx, *rest = inputs
    description = Description(*rest)
    _, lse, _, _, dx, numbers = output
    given = description._replace(class_weights=None, normalizer=None, z_normalizer=None, grad_scale=None)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(
        hidden,
        proxy,
        labels,
        token_weights,
        lse,
        dx,
        numbers,
        description.class_weights,
        description.normalizer,
        description.z_normalizer,
        description.grad_scale,
        description.soft_hidden,
    )
    ctx.wants_dx, ctx.description = wants_dx, given._replace(soft_hidden=None)


def _differentiate(ctx: Any, d_loss: Any, d_lse: Any, d_z_loss: Any, d_entropy: Any, *unused: Any) -> tuple[Any, ...]:
    *tokens, class_weights, normalizer, z_normalizer, grad_scale, soft_hidden = ctx.saved_tensors
    description = ctx.description._replace(
        class_weights=class_weights,
        normalizer=normalizer,
        z_normalizer=z_normalizer,
        grad_scale=grad_scale,
        soft_hidden=soft_hidden,
    )
    dx, marker = _backward(d_loss, d_lse, d_z_loss, d_entropy, *tokens, ctx.wants_dx, *description)
    nothing = [None] * (3 + len(description))
    return dx if ctx.wants_dx else None, marker if ctx.needs_input_grad[1] else None, *nothing


_forward.register_autograd(_differentiate, setup_context=_set_up)


def _nothing(like: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.float32, device=like.device)


def _register_effects() -> bool:
    if torch.torch_version.TorchVersion(torch.__version__) < "2.15":
        return False
    from torch._library.effects import EffectType

    _forward.register_effect(EffectType.ORDERED)
    _backward.register_effect(EffectType.ORDERED)
    return True


SUPPORTED = _register_effects()
"""Whether this PyTorch is known to keep operators with effects from being merged, and from being computed twice by a
checkpoint inside of a graph. If not, a graph ends before the loss."""


def _may_declare() -> bool:
    """Not where a checkpoint around the graph may compute it again: it forgets what the first pass has added."""
    recomputed = torch._C._current_graph_task_id() >= 0
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)  # noqa: SLF001  (there is no public way)
    return not recomputed and hooks is None


def linear_cross_entropy(
    hidden: Tensor, proxy: Tensor | None, labels: Tensor, token_weights: Tensor | None, description: Description
) -> tuple[Tensor | None, ...]:
    """The outputs: the loss, the log-sum-exps or None, the z-loss or None, the entropies or None. proxy: the head's
    parameter if its dW is wanted. Differentiable where gradients are on."""
    wants_dx = torch.is_grad_enabled() and hidden.requires_grad
    loss, lse, z_loss, entropies, _, _ = _forward(hidden, proxy, labels, token_weights, wants_dx, *description)
    return (
        loss,
        lse if "lse" in description.returns else None,
        z_loss if "z_loss" in description.returns else None,
        entropies if "entropy" in description.returns else None,
    )
