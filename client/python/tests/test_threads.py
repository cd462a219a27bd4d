"""Threads, futures, and what is left behind after many calls."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from servers import stand_still
from waiting import wait_until

import lossd

MakeHead = Callable[..., lossd.Head]
V, H = 32, 16


def batch(tokens: int = 4, seed: int = 0) -> tuple[Any, Any]:
    random = np.random.default_rng(seed)
    return random.standard_normal((tokens, H), np.float32), random.integers(0, V, tokens)


def test_other_threads_go_on_during_a_call(client: lossd.Client) -> None:
    """The flush waits in its callback, in Python, so this would hang if calls kept the lock of the interpreter."""
    counted: list[int] = []
    stop = threading.Event()

    def count() -> None:
        while not stop.is_set():
            counted.append(1)
            time.sleep(0.001)

    with lossd.launch("cpu") as server, server.client() as own:
        head = own.create_head("a", V, H, "float32")
        head.write_weights(np.zeros((V, H), np.float32))
        session = head.open_session()
        stand_still(server.process.pid)
        call = threading.Thread(target=session.compute, args=batch())
        call.start()
        thread = threading.Thread(target=count)
        thread.start()
        wait_until(lambda: len(counted) >= 20, "another thread goes on")
        assert call.is_alive()
        os.kill(server.process.pid, 18)  # SIGCONT
        call.join()
        stop.set()
        thread.join()


def test_sessions_of_many_threads(make_head: MakeHead) -> None:
    head = make_head()
    (hidden, labels), threads = batch(16), 6

    def work(rank: int) -> float:
        with head.open_session(rank=rank) as session:
            return sum(session.compute(hidden, labels).loss for _ in range(5))

    with ThreadPoolExecutor(threads) as pool:
        losses = list(pool.map(work, range(threads)))
    assert len(set(losses)) == 1
    assert head.flush().window_tokens == 16 * 5 * threads


def test_one_session_in_many_threads(make_head: MakeHead) -> None:
    head, (hidden, labels) = make_head(), batch(16)
    with head.open_session() as session, ThreadPoolExecutor(4) as pool:
        wanted = session.compute(hidden, labels).dx
        results = list(pool.map(lambda _: session.compute(hidden, labels).dx, range(12)))
    assert all(np.array_equal(one, wanted) for one in results)
    assert head.flush().window_tokens == 16 * 13


def test_futures_keep_their_order(make_head: MakeHead) -> None:
    head = make_head()
    with head.open_session() as session:
        batches = [batch(8, seed) for seed in range(6)]
        futures = [session.compute_async(*one, mode="loss") for one in batches]
        losses = [one.result().loss for one in futures]
        assert losses == [session.compute(*one, mode="loss").loss for one in batches]
        bad = session.compute_async(batches[0][0], [0.5] * 8)
        with pytest.raises(TypeError, match="labels"):
            bad.result()
        last = session.compute_async(*batches[0])
    assert last.done()  # closing waits
    assert head.flush().window_tokens == 8  # what only looks does not count


def test_handles_are_freed_in_any_order(server: lossd.Server) -> None:
    for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2]):
        client = server.client()
        head = client.create_head("any-order", V, H, "float32")
        head.write_weights(np.zeros((V, H), np.float32))
        handles: list[Any] = [client, head, head.open_session()]
        del client, head
        for index in order:
            handles[index].close()
        for use, values in ((handles[0].status, ()), (handles[1].info, ()), (handles[2].compute, batch(8))):
            with pytest.raises(ValueError, match="closed"):
                use(*values)
    with server.client() as client:
        client.delete_head("any-order", discard_gradient=True)


def test_closing_during_a_call(make_head: MakeHead) -> None:
    head, (hidden, labels) = make_head(), batch(64)
    session = head.open_session()
    future = session.compute_async(hidden, labels)
    session.close()
    assert future.result().valid_tokens == 64


def test_a_session_is_collected_after_its_handle(make_head: MakeHead) -> None:
    """The garbage collector ends the objects of a circle in any order."""
    session = make_head().open_session()
    session._handle.__del__()
    session.__del__()  # type: ignore[no-untyped-call,unused-ignore]
    assert "closed" in repr(session)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_many_calls_leave_nothing_behind(client: lossd.Client, make_head: MakeHead) -> None:
    head, (hidden, labels) = make_head(64, 256, "float32"), batch(64)
    hidden = np.random.default_rng(0).standard_normal((64, 256), np.float32)

    def round_of_calls() -> None:
        with head.open_session() as session:
            for _ in range(10):
                session.compute(hidden, labels, returns=["entropies"], top_k=4)
        head.flush(sink=lambda *_: None)
        head.read_weights()
        client.heads()
        with pytest.raises(lossd.NotFoundError):
            client.head("nobody")

    for _ in range(10):
        round_of_calls()
    gc.collect()
    files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    growths: list[int] = []
    # Each round computes 1.3 MiB of outputs: a leak of one array in ten would be 2.6 MiB, and it grows each time. What
    # an allocator takes once, for a thread that is new to it, is there only once.
    while len(growths) < 6 and not any(growth < 2 << 20 for growth in growths):
        memory = resident()
        for _ in range(20):
            round_of_calls()
        gc.collect()
        growths.append(resident() - memory)
    assert min(growths) < 2 << 20, growths
    assert len(os.listdir("/proc/self/fd")) <= files + 2
    assert threading.active_count() <= threads
    assert head.info().open_sessions == 0
