"""The call behind Head.flush."""

from __future__ import annotations

import ctypes as c
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lossd._structs as s
import lossd._tensors as t
from lossd._arguments import ProgressCallback, Raised, number
from lossd._core import HeadCore
from lossd._library import library, marks_array
from lossd.errors import CancelledError, LossdError
from lossd.results import FlushResult

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


class _Callbacks:
    """What a flush calls, and how far it got. A signal's error that is raised at the very first instruction of a
    callback is ctypes' to report, and C gets a 0: what counts is what was noted here."""

    def __init__(self, frozen: bool) -> None:
        self.raised = Raised()
        self.rows: int | None = None  # that a sink has taken
        self.frozen = frozen  # on_frozen has been called, or there is none

    def row_sink(self, sink: Sink, columns: int, dtype: str) -> Any:
        self.rows = 0

        def take(first: int, rows: int, gradient: int, bias: int | None) -> None:
            block = _block(gradient, (rows, columns), dtype)
            sink(first, block, _block(bias, (rows,), "float32") if bias else None)
            self.rows = first + rows

        def called(_user: object, first: int, rows: int, gradient: int, bias: int | None) -> int:
            return 0 if first == self.rows and self.raised.run(take, first, rows, gradient, bias) else 1

        return s.RowSink(called)

    def on_frozen(self, callback: Callable[[], None]) -> Any:
        def run() -> None:
            callback()
            self.frozen = True

        return s.OnFrozen(lambda _user: self.raised.run(run) and None)

    def confirm(self, rows: int) -> Any:
        """Lets the library commit only a flush whose callbacks have all come to their end. One that is cut itself
        answers 0, which is no."""
        return s.Confirm(lambda _user: int(self.raised.run(self.check, rows)))

    def check(self, rows: int) -> None:
        """CancelledError if something was cut short without a trace."""
        if self.rows not in (None, rows):
            raise CancelledError(
                f"a signal ended the sink at row {self.rows} of {rows}: the window is whole, flush it again"
            )
        if not self.frozen:
            raise CancelledError("a signal ended on_frozen: the window is whole, flush it again")


def device_sink(out: Any, dtype: str) -> Sink:
    """Copies rows into a tensor on a device as they arrive."""
    torch = t.torch_of(out)

    def copy(first: int, rows: Any, _bias: Any) -> None:
        block = torch.from_numpy(rows.copy())
        out[first : first + len(rows)].copy_(block.view(torch.bfloat16) if dtype == "bfloat16" else block)

    return copy


def _destination(core: HeadCore, request: Request) -> tuple[Any, str, Sink | None]:
    """Where dW goes, its dtype, and the sink that takes it, if one does."""
    shape = core.shape
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


def run(core: HeadCore, request: Request, marks: list[str]) -> FlushResult:
    gradient, dtype, sink = _destination(core, request)
    callbacks = _Callbacks(frozen=request.on_frozen is None)
    options = library().make(s.FlushOptions)
    options.dtype = t.DTYPES[dtype]
    options.gradient_scale = number(request.gradient_scale, "gradient_scale")
    options.progress = callbacks.raised.progress(request.progress)
    if request.on_frozen is not None:
        options.on_frozen = callbacks.on_frozen(request.on_frozen)
    bias = None
    if sink is None:
        options.gradient = t.output_view(gradient, "out", core.shape, dtype).pointer
        bias = _bias(core, request)
        if bias is not None:
            options.bias_gradient = t.output_view(bias, "bias_out", (core.vocab_size,), "float32").pointer
    else:
        bias = _bias(core, request) if request.sink is None else None
        options.sink = callbacks.row_sink(_with_bias(sink, bias), core.hidden_size, dtype)
    options.leave_frozen = not request.commit
    if sink is not None or request.progress is not None or request.on_frozen is not None:
        options.confirm = callbacks.confirm(core.vocab_size)
    result = library().make(s.FlushResult)
    try:
        with core.handle as pointer:
            library().call("lossd_head_flush", pointer, c.byref(options), *marks_array(marks), c.byref(result))
    except BaseException as error:
        # A signal that came when the library had left the window frozen: nobody gets to know the flush_id.
        if not isinstance(error, LossdError):
            if request.commit:
                core.window.note_interrupted(result.flush_id.decode())
            else:
                _abort(core, result.flush_id)
        callbacks.raised.again()
        raise
    return _result_of(result, gradient, bias)


def _abort(core: HeadCore, flush_id: bytes) -> None:
    """Reopens the window, unless it is that of an earlier flush, which is whole and waits for its commit."""
    if not flush_id or core.window.is_open_flush(flush_id.decode()):
        return
    try:
        with core.handle as pointer:
            library().call("lossd_head_abort_flush", pointer, flush_id)
    except LossdError:  # the caller gets the error that came first
        pass


def discard(core: HeadCore, marks: list[str]) -> FlushResult:
    result = library().make(s.FlushResult)
    try:
        with core.handle as pointer:
            library().call("lossd_head_discard", pointer, *marks_array(marks), c.byref(result))
    except BaseException as error:
        if not isinstance(error, LossdError):
            core.window.note_interrupted(result.flush_id.decode())
        raise
    return _result_of(result, None, None)


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


def _bias(core: HeadCore, request: Request) -> Any:
    if request.bias_out is not None:
        return request.bias_out
    return t.Kind().empty((core.vocab_size,), "float32") if core.config.bias else None


def _with_bias(sink: Sink, bias: Any) -> Sink:
    """The bias's gradient arrives with the rows; it belongs into `bias` if that is given."""
    if bias is None:
        return sink
    torch = t.torch_of(bias)

    def both(first: int, rows: Any, bias_rows: Any) -> None:
        sink(first, rows, bias_rows)
        bias[first : first + len(rows)] = bias_rows if torch is None else torch.from_numpy(bias_rows.copy())

    return both
