"""A batch and its outputs as structs of the library."""

from __future__ import annotations

import ctypes as c
import inspect
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypedDict, TypeVar

import lossd._structs as s
import lossd._tensors as t
from lossd._arguments import choice, integer, number, optional_number
from lossd._library import encoded, library
from lossd.results import BatchResult

_Method = TypeVar("_Method", bound=Callable[..., Any])

MODES = {"gradients": s.LOSSD_LOSS_AND_GRADIENTS, "loss": s.LOSSD_LOSS_ONLY}
REDUCTIONS = {"sum": s.LOSSD_SUM, "mean": s.LOSSD_MEAN, "late_mean": s.LOSSD_LATE_MEAN}
PARTS = {"head": s.LOSSD_OF_HEAD, "ignore": s.LOSSD_IGNORE, "use": s.LOSSD_USE}
DIVERGENCES = {
    "forward_kl": s.LOSSD_FORWARD_KL,
    "reverse_kl": s.LOSSD_REVERSE_KL,
    "jensen_shannon": s.LOSSD_JENSEN_SHANNON,
}
# The dtypes of the values that a batch can return for each token besides its loss.
RETURNS = {
    "log_sum_exp": "float32",
    "z_losses": "float32",
    "log_probabilities": "float32",
    "entropies": "float32",
    "divergences": "float32",
    "predictions": "int32",
    "target_ranks": "int32",
}
TOP = {"top_tokens": "int32", "top_log_probabilities": "float32"}
# What a batch may be given for each token, fp32.
TOKEN_INPUTS = ("token_weights", "lse_gradients", "entropy_gradients")


@dataclass(frozen=True)
class Distillation:
    """Soft targets of another head of the same server, the teacher, fed with hidden states of its own.

    hidden: [..., the teacher's H]; divergence: "forward_kl", "reverse_kl" or "jensen_shannon" (with beta);
    temperature divides both heads' logits in it. A token's loss is label_weight times the cross-entropy plus weight
    times the divergence (docs/losses.md).
    """

    teacher: str
    hidden: Any
    divergence: str = "forward_kl"
    beta: float = 0.5
    temperature: float = 1.0
    weight: float = 1.0
    label_weight: float = 0.0
    hidden_dtype: Any = None


@dataclass(frozen=True)
class TargetLists:
    """Soft targets that come with the batch: how probable each token of a list should be, as the largest probabilities
    of a teacher. What they leave of 1 is that of all other tokens together, which count as one; probabilities that add
    up to 1 leave nothing to them.

    offsets: [N + 1] integers from 0 on; ids: [offsets[N]] integers in [0, V); probabilities: [offsets[N]] numbers, sent
    as fp32. The i-th of the N tokens has ids[offsets[i]:offsets[i + 1]], its label among them or not, in any order and
    none twice; only an ignored token's list may be empty. None is below 0, and a list's add up to 1 at most,
    but for rounding (1.0156).
    A token's loss is label_weight times the cross-entropy plus weight times the divergence KL(targets, head), the
    z-loss aside (docs/losses.md).
    """

    offsets: Any
    ids: Any
    probabilities: Any
    weight: float = 1.0
    label_weight: float = 0.0


class LossKeywords(TypedDict, total=False):
    """The keywords that say what the loss is beyond plain cross-entropy, for type checkers: LossNumbers."""

    label_smoothing: float
    lse_square_scale: float
    logit_scale: float | None
    softcap: float | None


@dataclass(frozen=True)
class LossNumbers:
    """Numbers of the loss beyond plain cross-entropy. None: the head's own value. Formulas: docs/numerics.md."""

    label_smoothing: float = 0.0  # in [0, 1]
    lse_square_scale: float = 0.0  # lambda of the z-loss lambda * lse**2; at least 0
    logit_scale: float | None = None  # above 0
    softcap: float | None = None  # above 0, or 0 for none

    def check(self) -> None:
        """Raises ValueError for what the server would reject."""
        if not 0 <= self.label_smoothing <= 1:
            raise ValueError(f"label_smoothing is {self.label_smoothing}; want a number in [0, 1]")
        if not (math.isfinite(self.lse_square_scale) and self.lse_square_scale >= 0):
            raise ValueError(f"lse_square_scale is {self.lse_square_scale}; want a finite number of at least 0")
        if self.softcap is not None and not (math.isfinite(self.softcap) and self.softcap >= 0):
            raise ValueError(f"softcap is {self.softcap}; want a finite number above 0, or 0 for none")
        if self.logit_scale is not None and not (math.isfinite(self.logit_scale) and self.logit_scale > 0):
            raise ValueError(f"logit_scale is {self.logit_scale}; want a finite number above 0")

    def numbers(self) -> dict[str, Any]:
        """Those above by name, as keywords of Session.compute."""
        return {one.name: getattr(self, one.name) for one in fields(LossNumbers)}

    def write_to(self, batch: s.Batch) -> None:
        for name, value in self.numbers().items():
            optional = getattr(LossNumbers, name) is None
            setattr(batch, name, optional_number(value, name) if optional else number(value, name))


def known_numbers(numbers: LossKeywords, function: str) -> LossKeywords:
    """`numbers`, if they are. TypeError names what else `function` was given, as Python would."""
    for name in numbers:
        if name not in LossKeywords.__annotations__:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
    return numbers


def takes_loss_numbers(method: _Method) -> _Method:
    """For a method with **numbers: Unpack[LossKeywords], which its signature then shows one by one."""
    signature = inspect.signature(method)
    own = [one for one in signature.parameters.values() if one.kind is not one.VAR_KEYWORD]
    numbers = [
        inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=one.default, annotation=one.type)
        for one in fields(LossNumbers)
    ]
    method.__signature__ = signature.replace(parameters=[*own, *numbers])  # type: ignore[attr-defined]
    return method


@dataclass(frozen=True)
class BatchOptions(LossNumbers):
    """The keywords of Session.compute."""

    mode: str = "gradients"
    dx: Any = True
    dx_dtype: Any = None
    hidden_dtype: Any = None
    losses: bool = True
    reduction: str = "sum"
    normalizer: Any = None
    z_normalizer: Any = None
    ignore_index: int = -100
    gradient_scale: Any = 1.0
    z_gradient_scale: Any = None
    class_weights: str = "head"
    bias: str = "head"
    token_weights: Any = None
    lse_gradients: Any = None
    entropy_gradients: Any = None
    kept_tokens: tuple[Any, Any] | None = None
    target_lists: TargetLists | None = None
    weight_version: int = 0
    hold: int = 0
    first_token: int = 0
    window_token: int | None = None
    torch_compat: bool = False
    distillation: Distillation | None = None
    returns: Collection[str] = ()
    top_k: int = 0
    out: Mapping[str, Any] = field(default_factory=dict)

    def wanted(self, name: str, asked: object) -> bool:
        return name in self.out or (asked is not None and asked is not False)

    @property
    def wants_dx(self) -> bool:
        return self.mode == "gradients" and self.wanted("dx", self.dx)

    @property
    def dx_array(self) -> Any:
        """Where the caller wants dX, or None."""
        return self.out.get("dx", None if isinstance(self.dx, bool) else self.dx)


@dataclass
class Prepared:
    """Structs, and everything that they point to."""

    batch: s.Batch
    outputs: s.Outputs
    arrays: dict[str, Any]
    keep: list[Any]


def _batch_numbers(batch: s.Batch, options: BatchOptions) -> None:
    batch.mode = choice(options.mode, "mode", MODES)
    batch.reduction = choice(options.reduction, "reduction", REDUCTIONS)
    batch.class_weights = choice(options.class_weights, "class_weights", PARTS)
    batch.bias = choice(options.bias, "bias", PARTS)
    batch.torch_compat = bool(options.torch_compat)
    batch.ignore_index = integer(options.ignore_index, "ignore_index", least=-(1 << 63))
    batch.first_token = integer(options.first_token, "first_token")
    batch.weight_version = integer(options.weight_version, "weight_version", most=(1 << 64) - 1)
    batch.hold = integer(options.hold, "hold", most=(1 << 64) - 1)
    batch.window_token = -1 if options.window_token is None else integer(options.window_token, "window_token")
    options.write_to(batch)
    batch.gradient_scale = number(options.gradient_scale, "gradient_scale")
    for name in ("z_gradient_scale", "normalizer", "z_normalizer"):
        setattr(batch, name, optional_number(getattr(options, name), name))


def _distillation(wanted: Distillation, leading: tuple[int, ...], keep: list[Any]) -> Any:
    if not isinstance(wanted, Distillation):
        raise TypeError(f"distillation is a {type(wanted).__name__}; want lossd.Distillation")
    hidden = t.float_view(wanted.hidden, "distillation.hidden", wanted.hidden_dtype)
    if hidden.shape[:-1] != leading or not hidden.shape:
        raise ValueError(
            f"distillation.hidden has shape {hidden.shape}; want {(*leading, 'the hidden size of the teacher')}"
        )
    struct = library().make(s.Distillation)
    struct.teacher = encoded(wanted.teacher, "distillation.teacher")
    struct.hidden_size, struct.hidden_dtype, struct.hidden_states = hidden.shape[-1], hidden.number, hidden.pointer
    struct.divergence = choice(wanted.divergence, "distillation.divergence", DIVERGENCES)
    for name in ("beta", "temperature", "weight", "label_weight"):
        setattr(struct, name, number(getattr(wanted, name), f"distillation.{name}"))
    keep += [hidden, struct]
    return c.pointer(struct)


def _kept_tokens(batch: s.Batch, lists: Any, tokens: int, keep: list[Any]) -> None:
    if not isinstance(lists, (tuple, list)) or len(lists) != 2:
        raise TypeError("kept_tokens is not a pair; want (offsets, ids)")
    offsets, ids = t.label_view(lists[0], "kept_tokens[0]"), t.token_view(lists[1], "kept_tokens[1]")
    t.require_shape(offsets, "kept_tokens[0]", (tokens + 1,))
    t.require_shape(ids, "kept_tokens[1]", (t.token_count(ids.shape),))
    batch.kept_offsets, batch.kept_tokens, batch.kept_token_count = offsets.pointer, ids.pointer, ids.shape[0]
    keep += [offsets, ids]


def _target_lists(wanted: TargetLists, tokens: int, keep: list[Any]) -> Any:
    if not isinstance(wanted, TargetLists):
        raise TypeError(f"target_lists is a {type(wanted).__name__}; want lossd.TargetLists")
    offsets = t.label_view(wanted.offsets, "target_lists.offsets")
    ids = t.token_view(wanted.ids, "target_lists.ids")
    t.require_shape(offsets, "target_lists.offsets", (tokens + 1,))
    t.require_shape(ids, "target_lists.ids", (t.token_count(ids.shape),))
    probabilities = t.float32_view(wanted.probabilities, "target_lists.probabilities", ids.shape)
    struct = library().make(s.TargetLists)
    struct.offsets, struct.tokens, struct.token_count = offsets.pointer, ids.pointer, ids.shape[0]
    struct.probabilities = probabilities.pointer
    for name in ("weight", "label_weight"):
        setattr(struct, name, number(getattr(wanted, name), f"target_lists.{name}"))
    keep += [offsets, ids, probabilities, struct]
    return c.pointer(struct)


def _outputs(
    prepared: Prepared, leading: tuple[int, ...], kind: t.Kind, dx: t.View | None, options: BatchOptions
) -> None:
    outputs = prepared.outputs
    returns = {options.returns} if isinstance(options.returns, str) else set(options.returns)
    top_k = integer(options.top_k, "top_k", most=64)
    unknown = (returns | set(options.out)) - set(RETURNS) - set(TOP) - {"top_k", "losses", "dx"}
    if unknown:
        known = ", ".join([*RETURNS, "top_k"])
        raise ValueError(f"returns and out name {', '.join(sorted(map(repr, unknown)))}; there are {known}")
    if ("top_k" in returns or returns & set(TOP)) and not top_k:
        raise ValueError('returns names "top_k"; say how many with top_k=1 to 64')

    def place(name: str, shape: tuple[int, ...], dtype: str) -> None:
        array = options.out[name] if name in options.out else kind.empty(shape, dtype)
        view = t.output_view(array, f"out[{name!r}]", shape, dtype)
        setattr(outputs, name, view.pointer)
        prepared.arrays[name] = array
        prepared.keep.append(view)

    if options.wanted("losses", options.losses):
        place("losses", leading, "float32")
    for name, dtype in RETURNS.items():
        if name in returns or name in options.out:
            place(name, leading, dtype)
    if top_k:
        outputs.top_k = top_k
        for name, dtype in TOP.items():
            place(name, (*leading, top_k), dtype)
    if dx is not None:
        outputs.dx, outputs.dx_dtype = dx.pointer, dx.number
        prepared.keep.append(dx)


def prepare(hidden: t.View, labels: Any, kind: t.Kind, dx: t.View | None, options: BatchOptions) -> Prepared:
    """`hidden` [..., H] and `dx`, which may lie in a region, are dense; the rest is made dense, or made as `kind`."""
    leading = hidden.shape[:-1]
    label_view = t.label_view(labels)
    t.require_shape(label_view, "labels", leading)
    batch = library().make(s.Batch)
    prepared = Prepared(batch, library().make(s.Outputs), {}, [hidden, label_view])
    _batch_numbers(batch, options)
    batch.tokens = t.token_count(leading)
    batch.labels, batch.hidden_states, batch.hidden_dtype = label_view.pointer, hidden.pointer, hidden.number
    for name in TOKEN_INPUTS:
        value = getattr(options, name)
        if value is not None:
            view = t.float32_view(value, name, leading)
            setattr(batch, name, view.pointer)
            prepared.keep.append(view)
    if options.kept_tokens is not None:
        _kept_tokens(batch, options.kept_tokens, batch.tokens, prepared.keep)
    if options.target_lists is not None:
        batch.target_lists = _target_lists(options.target_lists, batch.tokens, prepared.keep)
    if options.distillation is not None:
        batch.distillation = _distillation(options.distillation, leading, prepared.keep)
    _outputs(prepared, leading, kind, dx, options)
    return prepared


def result_of(result: s.Result, arrays: dict[str, Any]) -> BatchResult:
    return BatchResult(
        loss=result.loss,
        loss_sum=result.loss_sum,
        z_loss_sum=result.z_loss_sum,
        class_weight_sum=result.class_weight_sum,
        divergence_sum=result.divergence_sum,
        valid_tokens=result.valid_tokens,
        correct_tokens=result.correct_tokens,
        weight_version=result.weight_version,
        teacher_weight_version=result.teacher_weight_version,
        chunks=result.chunks,
        repeated_chunks=result.repeated_chunks,
        first_sequences=tuple(result.first_sequences[: result.lanes]),
        **arrays,
    )
