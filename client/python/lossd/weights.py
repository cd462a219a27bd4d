"""Weights in and out, whole and by rows."""

from __future__ import annotations

import ctypes as c
import uuid
from typing import Any

import lossd._tensors as t
from lossd._arguments import ProgressCallback, Raised, integer
from lossd._core import HeadCore
from lossd._handles import Handle
from lossd._library import encoded, library

PIECE_BYTES = 64 << 20  # of weights on a device, on their way through host memory


class WeightWrite:
    """A new version of a head's weights on its way in, or this process's part of it. Nobody sees any of it before it
    is committed. Thread-safe."""

    def __init__(self, core: HeadCore, pointer: int | None, owner: object = None) -> None:
        """`owner` is kept alive: a client that is collected takes the trace_parent of its calls with it."""
        self._core = core
        self._owner = owner
        self._handle = Handle(pointer, "lossd_weight_write_free", "this weight write")

    def write_rows(
        self,
        first_row: int,
        weights: Any,
        bias: Any = None,
        *,
        dtype: Any = None,
        progress: ProgressCallback | None = None,
    ) -> None:
        """Sends rows from first_row on: weights [rows, H], and of a head with a bias bias [rows]. Rows that were sent
        before are overwritten. NotFoundError if the write was committed, or replaced by one of another key."""
        first = integer(first_row, "first_row")
        if t.is_on_device(weights):
            self._write_from_device(first, weights, bias, progress)
            return
        view = t.float_view(weights, "weights", dtype)
        _require_rows(self._core, view.shape, "weights")
        self._send(first, view, _bias_view(bias, view.shape[0]), progress)

    def _send(self, first: int, view: t.View, bias: t.View | None, progress: ProgressCallback | None) -> None:
        raised = Raised()
        with self._handle as write:
            library().call(
                "lossd_weight_write_rows",
                write,
                first,
                view.shape[0],
                view.number,
                view.pointer,
                bias.pointer if bias else None,
                raised.progress(progress),
                None,
            )
        raised.again()

    def _write_from_device(self, first: int, weights: Any, bias: Any, progress: ProgressCallback | None) -> None:
        _require_rows(self._core, tuple(weights.shape), "weights")
        rows = weights.shape[0]
        bias_view = _bias_view(bias, rows)
        for begin, end in pieces(rows, self._core.hidden_size * weights.element_size()):
            view = t.float_view(weights[begin:end].detach().to("cpu"), "weights")
            part = None if bias_view is None else t.float_view(bias_view.array[begin:end], "bias")
            self._send(first + begin, view, part, None)
            if progress is not None:
                progress(end * self._core.hidden_size, rows * self._core.hidden_size)

    def commit(self) -> int:
        """Publishes the version and returns it. FailedPreconditionError, naming the first row that is missing, unless
        all have arrived. Every writer may call it; all get the same answer."""
        version = c.c_uint64()
        with self._handle as write:
            library().call("lossd_weight_write_commit", write, c.byref(version))
        return version.value

    def close(self) -> None:
        """Lets go of the handle; the server keeps the rows."""
        self._handle.close()


def pieces(rows: int, row_bytes: int) -> list[tuple[int, int]]:
    """Ranges of rows of at most PIECE_BYTES."""
    each = max(1, PIECE_BYTES // max(1, row_bytes))
    return [(begin, min(begin + each, rows)) for begin in range(0, rows, each)]


def begin_write(core: HeadCore, write_key: str, *, replace: bool, owner: object = None) -> WeightWrite:
    pointer = c.c_void_p()
    with core.handle as head:
        library().call("lossd_head_begin_write", head, encoded(write_key, "write_key"), bool(replace), c.byref(pointer))
    return WeightWrite(core, pointer.value, owner)


def write_weights(core: HeadCore, weights: Any, bias: Any, dtype: Any, progress: ProgressCallback | None) -> int:
    if t.is_on_device(weights):
        _require_shape(core, tuple(weights.shape), "weights")
        write = begin_write(core, uuid.uuid4().hex, replace=True)
        try:
            write.write_rows(0, weights, bias, progress=progress)
            return write.commit()
        finally:
            write.close()
    view = t.float_view(weights, "weights", dtype)
    _require_shape(core, view.shape, "weights")
    bias_view = _bias_view(bias, core.vocab_size)
    version = c.c_uint64()
    raised = Raised()
    with core.handle as pointer:
        library().call(
            "lossd_head_write_weights",
            pointer,
            view.number,
            view.pointer,
            bias_view.pointer if bias_view else None,
            raised.progress(progress),
            None,
            c.byref(version),
        )
    raised.again()
    return version.value


def read_rows(
    core: HeadCore,
    first_row: int,
    rows: int,
    out: Any,
    dtype: Any,
    weight_version: int,
    bias_out: Any,
    progress: ProgressCallback | None,
) -> Any:
    first, count = integer(first_row, "first_row"), integer(rows, "rows")
    version = integer(weight_version, "weight_version", most=(1 << 64) - 1)
    shape = (count, core.hidden_size)
    if out is None:
        out = t.Kind().empty(shape, t.dtype_name(dtype, "dtype"))
    name = t.output_dtype(out, "out")
    if bias_out is None and core.config.bias:
        bias_out = t.Kind().empty((count,), "float32")
    if count == 0:
        return out
    if t.is_on_device(out):
        if tuple(out.shape) != shape:
            raise ValueError(f"out has shape {tuple(out.shape)}; want {shape}")
        _read_to_device(core, first, out, name, version, bias_out)
        return out
    view = t.output_view(out, "out", shape, name)
    bias = None if bias_out is None else t.output_view(bias_out, "bias_out", (count,), "float32")
    read_view(core, first, view, bias, version, progress)
    return out


def read_view(
    core: HeadCore,
    first: int,
    view: t.View,
    bias: t.View | None,
    version: int,
    progress: ProgressCallback | None = None,
) -> int:
    """Reads rows into `view`; returns the version that they are of."""
    number = c.c_uint64(version)
    raised = Raised()
    with core.handle as pointer:
        library().call(
            "lossd_head_read_weights",
            pointer,
            first,
            view.shape[0],
            view.number,
            view.pointer,
            bias.pointer if bias else None,
            raised.progress(progress),
            None,
            c.byref(number),
        )
    raised.again()
    return number.value


def _read_to_device(core: HeadCore, first: int, out: Any, dtype: str, version: int, bias_out: Any) -> None:
    kind = t.Kind(torch=t.torch_of(out))
    target = out.detach()
    bias = None if bias_out is None else t.output_view(bias_out, "bias_out", (out.shape[0],), "float32")
    for begin, end in pieces(out.shape[0], out.shape[1] * out.element_size()):
        block = kind.empty((end - begin, out.shape[1]), dtype)
        part = None if bias is None else t.output_view(bias_out[begin:end], "bias_out", (end - begin,), "float32")
        version = read_view(core, first + begin, t.output_view(block, "out", tuple(block.shape), dtype), part, version)
        target[begin:end].copy_(block)


def _bias_view(bias: Any, rows: int) -> t.View | None:
    return None if bias is None else t.float32_view(bias, "bias", (rows,))


def _require_shape(core: HeadCore, shape: tuple[int, ...], field: str) -> None:
    if shape != core.shape:
        raise ValueError(f"{field} has shape {shape}; want {core.shape} for {core.name!r}")


def _require_rows(core: HeadCore, shape: tuple[int, ...], field: str) -> None:
    if len(shape) != 2 or shape[1] != core.hidden_size:
        raise ValueError(f"{field} has shape {shape}; want [rows, {core.hidden_size}] for {core.name!r}")
