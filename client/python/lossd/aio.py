"""lossd for asyncio: the same methods as coroutines.

    async with lossd.aio.connect("unix:/run/lossd.sock") as client:
        head = await client.head("lm_head")
        async with await head.open_session() as session:
            result = await session.compute(hidden, labels)

Calls run in threads of the client's own (32, and one more for each session, which keeps the order of its batches),
because the library's calls wait. A task that is cancelled before its call's turn has come leaves no trace. After that
cancelling stops the waiting, not the call: the batch is counted in the window, or refused, as if nobody had
cancelled, and its tensors have to be left alone until then. The next call of the same session waits for it.

Tensors on a GPU are taken, and outputs given, in the order of the stream that was current where the coroutine began.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import os
from collections.abc import Callable, Coroutine, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

import lossd._device as _device
import lossd.client as _client
from lossd._trace import TraceParent
from lossd.averages import MovingAverage
from lossd.client import Client, Tls
from lossd.head import Head
from lossd.session import Session
from lossd.weights import WeightWrite

MOST_THREADS = 32

_P = ParamSpec("_P")
_R = TypeVar("_R")
_T = TypeVar("_T")


class _Wrapper(Generic[_T]):
    """Something of the package with an executor to run its methods in."""

    def __init__(self, wrapped: _T, executor: ThreadPoolExecutor) -> None:
        self._wrapped = wrapped
        self._executor = executor

    @property
    def sync(self) -> _T:
        """The object itself, whose methods block."""
        return self._wrapped

    async def _run(self, call: Callable[[], _R]) -> _R:
        # In the context of the coroutine: its span of OpenTelemetry is what the call belongs to.
        context = contextvars.copy_context()
        return await asyncio.get_running_loop().run_in_executor(self._executor, context.run, call)

    def __repr__(self) -> str:
        return f"<asyncio {self._wrapped!r}>"


def _in_order_of(streams: list[tuple[_device.Layer, Any]], call: Callable[[], _R]) -> _R:
    """The call as the thread makes it whose current streams these are."""
    with contextlib.ExitStack() as within:
        for layer, stream in streams:
            within.enter_context(layer.within(stream))
        return call()


def _lifted(
    method: Callable[Concatenate[_T, _P], _R],
) -> Callable[Concatenate[_Wrapper[_T], _P], Coroutine[Any, Any, _R]]:
    """The method as a coroutine of the wrapper."""

    async def call(self: _Wrapper[_T], /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        bound = functools.partial(method, self._wrapped, *args, **kwargs)
        out = kwargs.get("out")
        given = (*args, *kwargs.values(), *(out.values() if isinstance(out, Mapping) else ()))
        streams = _device.streams_of(given)
        return await self._run(functools.partial(_in_order_of, streams, bound) if streams else bound)

    functools.update_wrapper(call, method)
    return call


class AsyncSession(_Wrapper[Session]):
    """Session; its batches are computed one after another, in the order in which compute was called."""

    def __init__(self, session: Session) -> None:
        super().__init__(session, ThreadPoolExecutor(1, thread_name_prefix="lossd-session"))

    compute = _lifted(Session.compute)
    marks = _lifted(Session.marks)
    resume_at = _lifted(Session.resume_at)

    @property
    def client_key(self) -> str:
        return self._wrapped.client_key

    @property
    def reconnects(self) -> int:
        return self._wrapped.reconnects

    async def close(self) -> None:
        """Waits for what was begun and ends the session at the server."""
        await self._run(self._wrapped.close)
        self._executor.shutdown(wait=False)

    async def __aenter__(self) -> AsyncSession:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()


class AsyncWeightWrite(_Wrapper[WeightWrite]):
    """WeightWrite."""

    write_rows = _lifted(WeightWrite.write_rows)
    commit = _lifted(WeightWrite.commit)
    close = _lifted(WeightWrite.close)


class AsyncMovingAverage(_Wrapper[MovingAverage]):
    """MovingAverage."""

    update = _lifted(MovingAverage.update)

    @property
    def head(self) -> AsyncHead:
        return AsyncHead(self._wrapped.head, self._executor)


class AsyncHead(_Wrapper[Head]):
    """Head. Callbacks (sinks, progress) are called in a thread of the executor."""

    info = _lifted(Head.info)
    write_weights = _lifted(Head.write_weights)
    read_weights = _lifted(Head.read_weights)
    read_rows = _lifted(Head.read_rows)
    load_weights = _lifted(Head.load_weights)
    logits = _lifted(Head.logits)
    save_checkpoint = _lifted(Head.save_checkpoint)
    marks = _lifted(Head.marks)
    flush = _lifted(Head.flush)
    commit_flush = _lifted(Head.commit_flush)
    abort_flush = _lifted(Head.abort_flush)
    discard = _lifted(Head.discard)
    gradient_stats = _lifted(Head.gradient_stats)
    step = _lifted(Head.step)
    park = _lifted(Head.park)

    @property
    def name(self) -> str:
        return self._wrapped.name

    async def snapshot(self, name: str = "", *, source_version: int = 0) -> AsyncHead:
        copy = functools.partial(self._wrapped.snapshot, name, source_version=source_version)
        return AsyncHead(await self._run(copy), self._executor)

    async def ema(self, decay: float, name: str = "") -> AsyncMovingAverage:
        begin = functools.partial(self._wrapped.ema, decay, name)
        return AsyncMovingAverage(await self._run(begin), self._executor)

    async def blend(self, source: AsyncHead | Head | str, decay: float, **options: Any) -> int:
        named = source.name if isinstance(source, AsyncHead) else source
        return await self._run(functools.partial(self._wrapped.blend, named, decay, **options))

    async def open_session(self, **options: Any) -> AsyncSession:
        return AsyncSession(await self._run(functools.partial(self._wrapped.open_session, **options)))

    async def begin_write(self, write_key: str, *, replace: bool = True) -> AsyncWeightWrite:
        begin = functools.partial(self._wrapped.begin_write, write_key, replace=replace)
        return AsyncWeightWrite(await self._run(begin), self._executor)


class AsyncClient(_Wrapper[Client]):
    """Client."""

    heads = _lifted(Client.heads)
    delete_head = _lifted(Client.delete_head)
    status = _lifted(Client.status)
    memory = _lifted(Client.memory)
    traffic = _lifted(Client.traffic)
    drain = _lifted(Client.drain)
    restore_checkpoint = _lifted(Client.restore_checkpoint)
    checkpoints = _lifted(Client.checkpoints)
    delete_checkpoint = _lifted(Client.delete_checkpoint)
    park_head = _lifted(Client.park_head)
    create_region = _lifted(Client.create_region)

    async def create_head(self, name: str, vocab_size: int, hidden_size: int, *args: Any, **options: Any) -> AsyncHead:
        create = functools.partial(self._wrapped.create_head, name, vocab_size, hidden_size, *args, **options)
        return AsyncHead(await self._run(create), self._executor)

    async def copy_head(self, source: str, name: str, **options: Any) -> AsyncHead:
        copy = functools.partial(self._wrapped.copy_head, source, name, **options)
        return AsyncHead(await self._run(copy), self._executor)

    async def head(self, name: str) -> AsyncHead:
        return AsyncHead(await self._run(functools.partial(self._wrapped.head, name)), self._executor)

    async def close(self) -> None:
        self._wrapped.close()
        self._executor.shutdown(wait=False)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()


class _Connecting:
    """What connect() returns: `await` it, or `async with` it."""

    def __init__(self, connect: Callable[[], Client]) -> None:
        self._connect = connect
        self._client: AsyncClient | None = None

    def __await__(self) -> Generator[Any, None, AsyncClient]:
        return self._made().__await__()

    async def _made(self) -> AsyncClient:
        executor = ThreadPoolExecutor(MOST_THREADS, thread_name_prefix="lossd")
        context = contextvars.copy_context()  # a trace_parent is asked once, to see whether it is of use
        client = await asyncio.get_running_loop().run_in_executor(executor, context.run, self._connect)
        self._client = AsyncClient(client, executor)
        return self._client

    async def __aenter__(self) -> AsyncClient:
        return await self._made()

    async def __aexit__(self, *_error: object) -> None:
        if self._client is not None:
            await self._client.close()


def connect(
    target: str,
    *,
    tls: Tls | None = None,
    token_file: str | os.PathLike[str] | None = None,
    token_over_plain_text: bool = False,
    call_timeout: float = 30.0,
    reconnect_timeout: float = 60.0,
    transfer_bytes: int = 4 << 20,
    check_version: bool | None = None,
    trace_parent: TraceParent = None,
) -> _Connecting:
    """As lossd.connect; `await` it or `async with` it."""
    return _Connecting(
        functools.partial(
            _client.connect,
            target,
            tls=tls,
            token_file=token_file,
            token_over_plain_text=token_over_plain_text,
            call_timeout=call_timeout,
            reconnect_timeout=reconnect_timeout,
            transfer_bytes=transfer_bytes,
            check_version=check_version,
            trace_parent=trace_parent,
        )
    )
