"""The call behind Head.flush."""

from __future__ import annotations

import ctypes as c
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lossd import _structs as s
from lossd import _tensors as t
from lossd._arguments import ProgressCallback, Raised, number
from lossd._library import library, marks_array
from lossd.errors import LossdError
from lossd.results import FlushResult

if TYPE_CHECKING:
    from lossd.head import Head

Sink = Callable[[int, Any, Any], None]


@dataclass(frozen=True)
class Request:
    out: Any
    dtype: Any
    gradient_scale: float
    bias_out: Any
    sink: Sink | None
    on_frozen: Callable[[], None] | None
    progress: ProgressCallback | None
    commit: bool


def _block(pointer: int, shape: tuple[int, ...], dtype: str) -> Any:
    """Rows of the library's, valid during the call of a sink."""
    array = t.array_at(pointer, shape, dtype)
    array.flags.writeable = False
    return array


def _row_sink(sink: Sink, columns: int, dtype: str, raised: Raised) -> Any:
    def called(_user: object, first: int, rows: int, gradient: int, bias: int | None) -> int:
        block = _block(gradient, (rows, columns), dtype)
        bias_block = _block(bias, (rows,), "float32") if bias else None
        return 0 if raised.run(sink, first, block, bias_block) else 1

    return s.RowSink(called)


def device_sink(out: Any, dtype: str) -> Sink:
    """Copies rows into a tensor on a device as they arrive."""
    torch = t.torch_of(out)

    def copy(first: int, rows: Any, _bias: Any) -> None:
        block = torch.from_numpy(rows.copy())
        out[first : first + len(rows)].copy_(block.view(torch.bfloat16) if dtype == "bfloat16" else block)

    return copy


def _destination(head: Head, request: Request) -> tuple[Any, str, Sink | None]:
    """Where dW goes, its dtype, and the sink that takes it, if one does."""
    shape = (head.vocab_size, head.hidden_size)
    if request.sink is not None:
        if request.out is not None or request.bias_out is not None:
            raise ValueError("flush takes a sink, or out and bias_out, and not both")
        return None, t.dtype_name(request.dtype, "dtype"), request.sink
    if request.out is None:
        dtype = t.dtype_name(request.dtype, "dtype")
        return t.Kind().empty(shape, dtype), dtype, None
    dtype = t.output_dtype(request.out, "out")
    if t.is_on_device(request.out):
        if tuple(request.out.shape) != shape:
            raise ValueError(f"out has shape {tuple(request.out.shape)}; want {shape}")
        return request.out, dtype, device_sink(request.out.detach(), dtype)
    t.output_view(request.out, "out", shape, dtype)
    return request.out, dtype, None


def run(head: Head, request: Request, marks: list[str]) -> FlushResult:
    gradient, dtype, sink = _destination(head, request)
    raised = Raised()
    options = library().make(s.FlushOptions)
    options.dtype = t.DTYPES[dtype]
    options.leave_frozen = not request.commit
    options.gradient_scale = number(request.gradient_scale, "gradient_scale")
    options.progress = raised.progress(request.progress)
    if request.on_frozen is not None:
        on_frozen = request.on_frozen
        options.on_frozen = s.OnFrozen(lambda _user: raised.run(on_frozen) and None)
    bias = None
    if sink is None:
        options.gradient = t.output_view(gradient, "out", (head.vocab_size, head.hidden_size), dtype).pointer
        bias = _bias(head, request)
        if bias is not None:
            options.bias_gradient = t.output_view(bias, "bias_out", (head.vocab_size,), "float32").pointer
    else:
        bias = _bias(head, request) if request.sink is None else None
        options.sink = _row_sink(_with_bias(sink, bias), head.hidden_size, dtype, raised)
    result = library().make(s.FlushResultStruct)
    try:
        with head._handle as pointer:
            library().call("lossd_head_flush", pointer, c.byref(options), *marks_array(marks), c.byref(result))
    except Exception as error:
        raised.again()
        _name_flush(error, result)
        raise
    raised.again()
    return _result_of(result, gradient, bias)


def discard(head: Head, marks: list[str]) -> FlushResult:
    result = library().make(s.FlushResultStruct)
    try:
        with head._handle as pointer:
            library().call("lossd_head_discard", pointer, *marks_array(marks), c.byref(result))
    except LossdError as error:
        _name_flush(error, result)
        raise
    return _result_of(result, None, None)


def _name_flush(error: Exception, result: Any) -> None:
    """The library tells of a flush that is whole, and whose commit it does not know the end of."""
    if isinstance(error, LossdError):
        error.flush_id = result.flush_id.decode()


def _result_of(result: Any, gradient: Any, bias: Any) -> FlushResult:
    return FlushResult(
        result.flush_id.decode(),
        result.generation,
        result.rows,
        result.columns,
        result.norm,
        result.bias_norm,
        result.window_tokens,
        result.non_finite,
        gradient,
        bias,
    )


def _bias(head: Head, request: Request) -> Any:
    if request.bias_out is not None:
        return request.bias_out
    return t.Kind().empty((head.vocab_size,), "float32") if head.config.bias else None


def _with_bias(sink: Sink, bias: Any) -> Sink:
    """The bias's gradient arrives with the rows; it belongs into `bias` if that is given."""
    if bias is None:
        return sink
    torch = t.torch_of(bias)

    def both(first: int, rows: Any, bias_rows: Any) -> None:
        sink(first, rows, bias_rows)
        bias[first : first + len(rows)] = bias_rows if torch is None else torch.from_numpy(bias_rows.copy())

    return both
