"""The trace that calls belong to, as the server's log has it."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import json
import sys
import types
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from typing import Any

import pytest
from waiting import wait_until

import lossd
import lossd.aio
from lossd import _trace

TRACES = [f"{number:032x}" for number in range(1, 10)]


def parent(trace: str) -> str:
    return f"00-{trace}-00f067aa0ba902b7-01"


@pytest.fixture(scope="module")
def logging_server() -> Iterator[lossd.Server]:
    with lossd.launch("cpu", args=["--log_format=json"]) as server:
        yield server


class Log:
    """What the server says of the failed calls that are made from now on."""

    def __init__(self, server: lossd.Server) -> None:
        self.server = server
        self.seen = len(self._lines())

    def _lines(self) -> list[dict[str, Any]]:
        complete = self.server.log().rpartition("\n")[0]  # the last line may be in the middle of being written
        lines = [json.loads(line) for line in complete.splitlines() if line.startswith("{")]
        return [line for line in lines if line["event"] in ("a call failed", "audit") and line["code"] != "OK"]

    def trace_of(self, call: Callable[[], None]) -> str | None:
        """That of a call which fails. Two lines need not be in the order of their calls: each is waited for."""
        call()
        (trace,) = self.next_traces(1)
        return trace

    def next_traces(self, count: int) -> list[str | None]:
        """The traces of that many calls, in any order."""
        wait_until(lambda: len(self._lines()) >= self.seen + count, f"the log has {count} more failed calls")
        lines = self._lines()[self.seen :]
        self.seen += count
        return [line.get("trace_id") for line in lines[:count]]


def fail(client: lossd.Client) -> None:
    with pytest.raises(lossd.NotFoundError):
        client.head("absent")


def test_a_trace_that_is_given_is_told_with_every_call(logging_server: lossd.Server) -> None:
    log = Log(logging_server)
    with logging_server.client(trace_parent=parent(TRACES[0])) as client:
        for _ in range(2):
            assert log.trace_of(lambda: fail(client)) == TRACES[0]


def test_a_source_is_asked_before_each_call(logging_server: lossd.Server) -> None:
    log = Log(logging_server)
    given: list[Any] = [parent(TRACES[1]), None, "", (parent(TRACES[2]), "vendor=value"), parent(TRACES[3])]
    now: list[Any] = [None]
    told = []
    with logging_server.client(trace_parent=lambda: now[0]) as client:
        for now[0] in given:
            told.append(log.trace_of(lambda: fail(client)))
    assert told == [TRACES[1], None, None, TRACES[2], TRACES[3]]


@pytest.mark.parametrize(
    "wrong",
    ["nonsense", parent(TRACES[1]).replace("a", "A"), parent(TRACES[1]) + "\n", "\0", "é" * 55, "x" * 10_000],
    ids=["nonsense", "upper", "line", "zero", "unicode", "long"],
)
def test_what_is_no_trace_is_not_sent_and_no_error(logging_server: lossd.Server, wrong: str) -> None:
    log = Log(logging_server)
    with logging_server.client(trace_parent=lambda: wrong) as client:
        assert log.trace_of(lambda: fail(client)) is None
    with logging_server.client(trace_parent=lambda: (parent(TRACES[4]), wrong)) as client:
        assert log.trace_of(lambda: fail(client)) == TRACES[4]


def test_a_source_that_is_of_no_use_is_found_at_once_and_one_that_breaks_later_disturbs_nobody(
    logging_server: lossd.Server,
) -> None:
    with pytest.raises(TypeError, match="trace_parent"):
        logging_server.client(trace_parent=7)
    with pytest.raises(TypeError, match="trace_parent"):
        logging_server.client(trace_parent=lambda: 7)
    log, broken = Log(logging_server), False

    def source() -> str:
        if broken:
            raise RuntimeError("no trace today")
        return parent(TRACES[5])

    with logging_server.client(trace_parent=source) as client:
        broken = True
        assert log.trace_of(lambda: fail(client)) is None


def test_sources_go_with_their_clients(logging_server: lossd.Server) -> None:
    before = set(_trace._sources)  # those of other tests' clients may go at any time
    client = logging_server.client(trace_parent=lambda: parent(TRACES[0]))
    added = set(_trace._sources) - before
    assert len(added) == 1
    client.close()
    del client
    gc.collect()  # an interpreter need not count references
    assert not added & set(_trace._sources)


@contextlib.contextmanager
def opentelemetry_stand_in(span: contextvars.ContextVar[str]) -> Iterator[None]:
    """The two modules that lossd looks at."""

    class Propagator:
        def inject(self, carrier: dict[str, str]) -> None:
            if span.get(""):
                carrier["traceparent"] = span.get("")

    modules = {name: types.ModuleType(name) for name in ("opentelemetry", "opentelemetry.trace")}
    modules["opentelemetry"].__path__ = []
    modules["opentelemetry.trace"].__spec__ = ModuleSpec("opentelemetry.trace", None)
    propagation = types.ModuleType("opentelemetry.trace.propagation")
    context = types.ModuleType("opentelemetry.trace.propagation.tracecontext")
    context.TraceContextTextMapPropagator = Propagator  # type: ignore[attr-defined]
    modules |= {propagation.__name__: propagation, context.__name__: context}
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def test_the_current_span_is_told_without_a_word(logging_server: lossd.Server) -> None:
    span: contextvars.ContextVar[str] = contextvars.ContextVar("span")
    log = Log(logging_server)
    with opentelemetry_stand_in(span), logging_server.client() as client:
        assert log.trace_of(lambda: fail(client)) is None
        span.set(parent(TRACES[6]))
        assert log.trace_of(lambda: fail(client)) == TRACES[6]
        with logging_server.client(trace_parent="") as untraced:
            assert log.trace_of(lambda: fail(untraced)) is None


def test_a_load_of_weights_belongs_to_the_span_of_its_caller(logging_server: lossd.Server) -> None:
    span: contextvars.ContextVar[str] = contextvars.ContextVar("span")
    log = Log(logging_server)
    with opentelemetry_stand_in(span), logging_server.client() as client:
        head = client.create_head("loaded", 16, 4)
        span.set(parent(TRACES[8]))

        def load() -> None:
            with pytest.raises(lossd.LossdError):
                head.load_weights("absent.safetensors")

        assert log.trace_of(load) == TRACES[8]


def test_coroutines_tell_the_span_that_they_run_in(logging_server: lossd.Server) -> None:
    span: contextvars.ContextVar[str] = contextvars.ContextVar("span")
    log = Log(logging_server)

    async def ask(client: Any, trace: str) -> None:
        span.set(parent(trace))
        with pytest.raises(lossd.NotFoundError):
            await client.head("absent")

    async def main() -> None:
        async with lossd.aio.connect(logging_server.target) as client:
            await asyncio.gather(*(ask(client, trace) for trace in TRACES))

    with opentelemetry_stand_in(span):
        asyncio.run(main())
    assert sorted(str(trace) for trace in log.next_traces(len(TRACES))) == TRACES


def test_a_source_of_the_coroutine_that_connects_is_asked_there(logging_server: lossd.Server) -> None:
    span: contextvars.ContextVar[str] = contextvars.ContextVar("span")
    log = Log(logging_server)

    async def main() -> None:
        span.set(parent(TRACES[0]))
        async with lossd.aio.connect(logging_server.target, trace_parent=lambda: span.get()) as client:
            with pytest.raises(lossd.NotFoundError):
                await client.head("absent")

    asyncio.run(main())
    assert log.next_traces(1) == [TRACES[0]]


def test_opentelemetry_itself(logging_server: lossd.Server) -> None:
    trace = pytest.importorskip("opentelemetry.trace")
    context = trace.SpanContext(int(TRACES[7], 16), 7, is_remote=False, trace_flags=trace.TraceFlags(1))
    log = Log(logging_server)
    with logging_server.client() as client:
        with trace.use_span(trace.NonRecordingSpan(context)):
            assert log.trace_of(lambda: fail(client)) == TRACES[7]
        assert log.trace_of(lambda: fail(client)) is None
