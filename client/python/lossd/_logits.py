"""Logits of a few tokens."""

from __future__ import annotations

import ctypes as c
import dataclasses
from dataclasses import dataclass
from typing import Any

import lossd._structs as s
import lossd._tensors as t
from lossd._arguments import choice, integer, optional_number
from lossd._batch import PARTS
from lossd._core import HeadCore
from lossd._library import library
from lossd.results import TopLogits


@dataclass(frozen=True)
class Request:
    """The keywords of Head.logits."""

    hidden_dtype: Any
    dtype: Any
    top_k: int | None
    logit_scale: float | None
    softcap: float | None
    bias: str
    weight_version: int


def run(core: HeadCore, given: Any, request: Request) -> Any:
    kind = t.kind_of(given)
    # A tensor on a GPU is copied in its stream's turn.
    on_host = given.detach().to("cpu") if t.is_on_device(given) else given
    hidden = t.float_view(on_host, "hidden", request.hidden_dtype)
    if not hidden.shape or hidden.shape[-1] != core.hidden_size:
        raise ValueError(f"hidden has shape {hidden.shape}; want [..., {core.hidden_size}] for {core.name!r}")
    leading = hidden.shape[:-1]
    struct = library().make(s.Logits)
    struct.rows = t.token_count(leading)
    struct.hidden_states, struct.hidden_dtype = hidden.pointer, hidden.number
    struct.bias = choice(request.bias, "bias", PARTS)
    struct.logit_scale = optional_number(request.logit_scale, "logit_scale")
    struct.softcap = optional_number(request.softcap, "softcap")
    struct.weight_version = integer(request.weight_version, "weight_version", most=(1 << 64) - 1)
    made = dataclasses.replace(kind, device=None)  # on the CPU first
    if request.top_k is None:
        dtype = t.dtype_name(request.dtype, "dtype")
        logits = made.empty((*leading, core.vocab_size), dtype)
        struct.dtype = t.DTYPES[dtype]
        struct.logits = t.output_view(logits, "logits", tuple(logits.shape), dtype).pointer
        _call(core, struct)
        return _as(kind, logits)
    struct.top_k = integer(request.top_k, "top_k", least=1, most=64)
    if t.dtype_name(request.dtype, "dtype") != "float32":
        raise ValueError(f"dtype is {request.dtype!r}; with top_k logits are float32")
    tokens = made.empty((*leading, struct.top_k), "int32")
    logits = made.empty((*leading, struct.top_k), "float32")
    log_sum_exp = made.empty(leading, "float32")
    struct.top_tokens = t.output_view(tokens, "tokens", tuple(tokens.shape), "int32").pointer
    struct.top_logits = t.output_view(logits, "logits", tuple(logits.shape), "float32").pointer
    struct.log_sum_exp = t.output_view(log_sum_exp, "log_sum_exp", leading, "float32").pointer
    version = _call(core, struct)
    return TopLogits(_as(kind, tokens), _as(kind, logits), _as(kind, log_sum_exp), version)


def _call(core: HeadCore, struct: s.Logits) -> int:
    version = c.c_uint64()
    with core.handle as pointer:
        library().call("lossd_head_logits", pointer, c.byref(struct), c.byref(version))
    return version.value


def _as(kind: t.Kind, array: Any) -> Any:
    """Where the caller's hidden states are."""
    return array if kind.torch is None or kind.device is None else array.to(kind.device)
