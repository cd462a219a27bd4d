"""The trace that calls belong to: the one the caller names, or the current span of OpenTelemetry."""

from __future__ import annotations

import _thread
import ctypes as c
import importlib.util
import itertools
import sys
from collections.abc import Callable
from typing import Any

import lossd._structs as s

# A traceparent, with a tracestate if there is one; None or "": none.
Trace = str | tuple[str, str] | None
TraceParent = str | Callable[[], Trace] | None

_sources: dict[int, Callable[[], Trace]] = {}
_numbers = itertools.count(1)


def _parts(trace: Trace) -> tuple[bytes, bytes]:
    pair = trace if isinstance(trace, tuple) else (trace or "", "")
    if len(pair) != 2 or not all(isinstance(part, str) for part in pair):
        raise TypeError(f"trace_parent gave {trace!r}; want a str, a (traceparent, tracestate), or None")
    return pair[0].encode(), pair[1].encode()


def _fill(number: int | None, context: Any) -> None:
    try:
        source = _sources.get(number or 0)
        if source is None:
            return
        parent, state = _parts(source())
        room = s.TraceContext.traceparent.size, s.TraceContext.tracestate.size
        if len(parent) < room[0]:  # longer ones are of versions to come
            context.contents.traceparent = parent
            context.contents.tracestate = state if len(state) < room[1] else b""
    except Exception:  # noqa: BLE001 - a call must not fail for its trace; connect() has tried the source
        pass
    except KeyboardInterrupt:  # C would swallow it
        _thread.interrupt_main()


_callback = s.Trace(_fill)
# Handles may be freed after this module is.
c.pythonapi.Py_IncRef(c.py_object(_callback))


def _current_span() -> Trace:
    """OpenTelemetry's current span, if the program has imported OpenTelemetry."""
    if "opentelemetry.trace" not in sys.modules:
        return None
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    headers: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(headers)
    return headers.get("traceparent", ""), headers.get("tracestate", "")


def _has_opentelemetry() -> bool:
    try:
        return importlib.util.find_spec("opentelemetry.trace") is not None
    except ImportError:
        return False


def register(trace_parent: TraceParent) -> int:
    """A number for `trace_user`; 0: there is nothing to ask. Raises what a source raises that is of no use."""
    source: Callable[[], Trace]
    if trace_parent is None:
        if not _has_opentelemetry():
            return 0
        source = _current_span
    elif isinstance(trace_parent, str):
        if not trace_parent:
            return 0
        fixed = trace_parent
        source = lambda: fixed  # noqa: E731
    elif callable(trace_parent):
        source = trace_parent
    else:
        raise TypeError(f"trace_parent must be a str or a callable, not {type(trace_parent).__name__}")
    _parts(source())
    number = next(_numbers)
    _sources[number] = source
    return number


def unregister(number: int) -> None:
    """Calls belong to no trace from now on."""
    _sources.pop(number, None)


def install(options: Any, number: int) -> None:
    """Into a s.ClientOptions."""
    if number:
        options.trace, options.trace_user = _callback, number
