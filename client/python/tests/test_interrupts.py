"""Ctrl-C, and other signals with handlers, while a call waits for a server that is stopped, busy or away."""

from __future__ import annotations

import ctypes as c
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from restartable import Restartable
from stopping import stand_still

import lossd
from lossd import _interrupts

V, H, N = 32, 16, 4
HIDDEN = np.random.default_rng(0).standard_normal((N, H)).astype(np.float32)
LABELS = np.arange(N)
WEIGHTS = np.random.default_rng(1).standard_normal((V, H)).astype(np.float32)
SOON = 5.0  # seconds, on a busy machine; nothing here would end by itself in less than 30


class Trainer:
    """A client with a head, and a session that has added a batch to its window."""

    def __init__(self, client: lossd.Client, name: str = "a") -> None:
        self.client = client
        self.head = client.create_head(name, V, H, "float32", optimizer=lossd.SGD())
        self.head.write_weights(WEIGHTS)
        self.session = self.head.open_session(client_key=f"trainer of {name}")
        self.first = self.session.compute(HIDDEN, LABELS)


def signalled(call: Callable[[], Any], number: int = signal.SIGINT, after: float = 0.5) -> Any:
    """What the call returns or raises if the signal comes so many seconds after its begin; it must not take long."""
    sent: list[float] = []

    def send() -> None:
        sent.append(time.monotonic())
        os.kill(os.getpid(), number)

    timer = threading.Timer(after, send)
    timer.start()
    try:
        return call()
    finally:
        ended = time.monotonic()
        timer.cancel()
        assert sent, "the call did not wait"
        assert ended - sent[0] < SOON


def interrupt(call: Callable[[], Any]) -> KeyboardInterrupt:
    with pytest.raises(KeyboardInterrupt) as raised:
        signalled(call)
    return raised.value


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Restartable]:
    server = Restartable(tmp_path, f"--checkpoint_dir={tmp_path / 'saved'}", "--same_host_regions")
    yield server
    server.kill()


def stop(server: Restartable) -> None:
    stand_still(server.process.pid)


def go_on(server: Restartable) -> None:
    server.process.send_signal(signal.SIGCONT)


CALLS: dict[str, Callable[[Trainer], Any]] = {
    "connect": lambda of: lossd.connect(of.client.target),
    "status": lambda of: of.client.status(),
    "create_head": lambda of: of.client.create_head("b", V, H),
    "drain": lambda of: of.client.drain(),
    "create_region": lambda of: of.client.create_region("system", 4096),
    "info": lambda of: of.head.info(),
    "write_weights": lambda of: of.head.write_weights(WEIGHTS),
    "write_rows": lambda of: of.head.begin_write("key").write_rows(0, WEIGHTS),
    "read_weights": lambda of: of.head.read_weights(),
    "read_weights with progress": lambda of: of.head.read_weights(progress=lambda *_: None),
    "logits": lambda of: of.head.logits(HIDDEN),
    "save_checkpoint": lambda of: of.head.save_checkpoint("tag"),
    "open_session": lambda of: of.head.open_session(),
    "compute": lambda of: of.session.compute(HIDDEN, LABELS),
    "flush": lambda of: of.head.flush(),
    "flush to a sink": lambda of: of.head.flush(sink=lambda *_: None),
    "discard": lambda of: of.head.discard(),
    "gradient_stats": lambda of: of.head.gradient_stats(),
    "step": lambda of: of.head.step(0.1),
    "close": lambda of: of.session.close(),
}


@pytest.mark.parametrize("name", list(CALLS))
def test_a_call_to_a_stopped_server(server: Restartable, name: str) -> None:
    with lossd.connect(server.target) as client:
        trainer = Trainer(client)
        stop(server)
        interrupt(lambda: CALLS[name](trainer))
        go_on(server)
        assert client.status().version  # the client goes on


@pytest.mark.parametrize("name", [name for name in CALLS if name != "drain"])
def test_a_call_to_a_server_that_is_away(server: Restartable, name: str) -> None:
    with lossd.connect(server.target) as client:
        trainer = Trainer(client)
        server.kill()
        interrupt(lambda: CALLS[name](trainer))


@pytest.mark.parametrize("lanes", [1, 4])
@pytest.mark.parametrize("kind", ["tcp", "unix", "region"])
def test_a_batch_for_which_the_server_gives_no_credit(tmp_path: Path, kind: str, lanes: int) -> None:
    """More chunks than may be under way."""
    server = Restartable(tmp_path, "--same_host_regions", tcp=kind == "tcp")
    try:
        with lossd.connect(server.target) as client:
            head = client.create_head("a", V, 1024, "float32")
            head.write_weights(np.zeros((V, 1024), np.float32))
            session = head.open_session(lanes=lanes, chunk_bytes=1 << 16)
            tokens = 1 << 13
            hidden: Any = np.zeros((tokens, 1024), np.float32)
            if kind == "region":
                region = client.create_region("system", hidden.nbytes)
                hidden = region.array(hidden.shape)
            session.compute(hidden[:64], np.zeros(64, np.int64))
            stop(server)
            interrupt(lambda: session.compute(hidden, np.zeros(tokens, np.int64)))
            with pytest.raises(lossd.CancelledError, match="ended with an earlier error.*client_key"):
                session.compute(hidden[:64], np.zeros(64, np.int64))
    finally:
        server.kill()


def test_a_call_that_waits_for_the_one_of_another_thread(server: Restartable) -> None:
    with lossd.connect(server.target) as client:
        trainer = Trainer(client)
        stop(server)
        future = trainer.session.compute_async(HIDDEN, LABELS)
        interrupt(future.result)
        interrupt(trainer.head.flush)  # which has to know what the batch has added
        go_on(server)
        assert future.result().valid_tokens == N
        assert trainer.head.flush().window_tokens == 2 * N


def test_many_messages_without_a_wait(server: Restartable) -> None:
    """Nothing takes long, and yet the whole does."""
    with lossd.connect(server.target, transfer_bytes=1 << 10) as client:
        head = client.create_head("a", 1 << 18, 64, "float32")
        weights = np.zeros((1 << 18, 64), np.float32)  # 64 MiB
        with pytest.raises(KeyboardInterrupt):
            signalled(lambda: [head.write_weights(weights) for _ in range(100)], after=1)
        assert head.info().weight_version < 100


class Mine(Exception):
    pass


def test_what_a_handler_raises_is_raised(server: Restartable) -> None:
    mine = Mine()

    def handle(_number: int, _frame: Any) -> None:
        raise mine

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with lossd.connect(server.target) as client:
            stop(server)
            with pytest.raises(Mine) as raised:
                signalled(client.status, signal.SIGUSR1)
            assert raised.value is mine
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_handler_that_raises_nothing_cuts_nothing(server: Restartable) -> None:
    """It runs while the call waits, and may make calls of its own."""
    with lossd.connect(server.target) as client, lossd.launch("cpu") as other, other.client() as others:
        trainer = Trainer(client)
        versions: list[str] = []

        def handle(_number: int, _frame: Any) -> None:
            with pytest.raises(RuntimeError, match="handler of a signal"):
                trainer.session.marks()
            versions.append(others.status().version)
            go_on(server)

        before = signal.signal(signal.SIGUSR1, handle)
        try:
            stop(server)
            result = signalled(lambda: trainer.session.compute(HIDDEN, LABELS), signal.SIGUSR1)
        finally:
            signal.signal(signal.SIGUSR1, before)
        assert result.valid_tokens == N and len(versions) == 1
        assert trainer.head.flush().window_tokens == 2 * N


@pytest.mark.parametrize("resumes", [False, True])
def test_an_interrupted_batch_counts_once(server: Restartable, resumes: bool) -> None:
    with lossd.connect(server.target) as client:
        trainer = Trainer(client)
        head = trainer.head
        stop(server)
        interrupt(lambda: trainer.session.compute(HIDDEN, LABELS))
        go_on(server)
        with pytest.raises(lossd.CancelledError, match="trainer of a"):
            trainer.session.compute(HIDDEN, LABELS)
        session = head.open_session(client_key=trainer.session.client_key)
        if resumes:
            session.resume_at([sequence + trainer.first.chunks for sequence in trainer.first.first_sequences])
        else:
            head.discard()
            session.compute(HIDDEN, LABELS)
        result = session.compute(HIDDEN, LABELS)
        assert np.array_equal(result.dx, trainer.first.dx)
        assert head.flush().window_tokens == 2 * N


def test_an_interrupted_flush_leaves_the_window_whole(server: Restartable) -> None:
    with lossd.connect(server.target) as client:
        trainer = Trainer(client)
        stop(server)
        interrupt(trainer.head.flush)
        go_on(server)
        flushed = trainer.head.flush()
        assert flushed.window_tokens == N and flushed.gradient.any()


def test_an_interrupted_commit_is_told_of(server: Restartable) -> None:
    with lossd.connect(server.target) as client:
        trainer = Trainer(client)
        wanted = trainer.head.flush().gradient
        trainer.session.compute(HIDDEN, LABELS)
        out = np.zeros((V, H), np.float32)
        interrupt(lambda: trainer.head.flush(out, progress=lambda done, of: stop(server) if done == of else None))
        assert np.array_equal(out, wanted)
        go_on(server)
        with pytest.raises(lossd.AlreadyExistsError) as raised:
            trainer.head.flush()
        assert raised.value.flush_id
        trainer.session.compute(HIDDEN, LABELS)
        assert trainer.head.flush().window_tokens == N


def test_an_interrupted_step_is_taken_once(server: Restartable) -> None:
    with lossd.connect(server.target) as client:
        trainer = Trainer(client)
        stop(server)
        # What comes before the step goes to the server too: only the last call of it may have changed anything.
        interrupt(lambda: trainer.head.step(0.1, generation=1, marks=trainer.head.marks()))
        go_on(server)
        result = trainer.head.step(0.1)
        assert result.window_tokens == N and trainer.head.info().optimizer_steps == 1


# Signals in the last moment of a call, and two at once


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """The next call of this function of the library has succeeded when the handler of a signal runs."""

    def arm(name: str) -> None:
        def call(function: Any, arguments: tuple[Any, ...]) -> tuple[Any, BaseException | None]:
            result, error = original(function, arguments)
            if function.__name__ != name:
                return result, error
            monkeypatch.setattr(_interrupts, "call", original)
            return result, KeyboardInterrupt()

        monkeypatch.setattr(_interrupts, "call", call)

    original = _interrupts.call
    return arm


def test_the_result_of_a_call_is_kept_though_a_signal_comes_in_its_last_moment() -> None:
    status, error = _interrupts.call(c.CDLL(None)["raise"], (int(signal.SIGINT),))
    assert status == 0 and isinstance(error, KeyboardInterrupt)


def test_a_batch_that_was_counted_without_its_caller_is_not_counted_again(
    server: Restartable, late: Callable[[str], None]
) -> None:
    with lossd.connect(server.target) as client:
        trainer = Trainer(client)
        late("lossd_session_compute")
        with pytest.raises(KeyboardInterrupt):
            trainer.session.compute(HIDDEN, LABELS)
        with pytest.raises(lossd.CancelledError, match="ended with an earlier error.*client_key"):
            trainer.session.compute(HIDDEN, LABELS)
        assert trainer.head.info().window_tokens == 2 * N
        again = trainer.head.open_session(client_key=trainer.session.client_key)
        trainer.head.discard()
        again.compute(HIDDEN, LABELS)
        assert trainer.head.flush().window_tokens == N


@pytest.mark.parametrize("more", [False, True])
def test_a_step_that_was_taken_without_its_caller_is_answered_by_the_next_call(
    server: Restartable, late: Callable[[str], None], more: bool
) -> None:
    with lossd.connect(server.target) as client:
        trainer = Trainer(client)
        late("lossd_head_apply_step")
        with pytest.raises(KeyboardInterrupt):
            trainer.head.step(0.1)
        if more:  # then it is another step
            trainer.session.compute(HIDDEN, LABELS)
        step = trainer.head.step(0.1)
        assert step.step == trainer.head.info().optimizer_steps == 1 + more
        assert step.window_tokens == N and not step.skipped
        assert trainer.head.step(0.1).skipped


def test_two_signals_in_one_moment() -> None:
    first, second = Mine(), Mine()
    handlers = {signal.SIGUSR1: first, signal.SIGUSR2: second}

    def handle(number: int, _frame: Any) -> None:
        raise handlers[signal.Signals(number)]

    before = {number: signal.signal(number, handle) for number in handlers}
    try:
        wait = _interrupts.Wait()
        both = itertools.starmap(c.CDLL(None)["raise"], [(int(number),) for number in handlers])
        asked = list(itertools.chain(both, map(next, [wait.asked])))  # nothing of Python in between
        assert asked == [0, 0, 1] and wait.error in handlers.values()
        assert next(wait.asked) == 1  # the next signal finds it, too
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_closing_a_session_whose_batch_is_under_way_in_another_thread(server: Restartable) -> None:
    with lossd.connect(server.target) as client:
        trainer = Trainer(client)
        stop(server)
        thread = threading.Thread(target=lambda: trainer.session.compute(HIDDEN, LABELS))
        thread.start()
        while not trainer.session._turn._lock.locked():  # noqa: SLF001  (until the batch is under way)
            time.sleep(0.01)
        interrupt(trainer.session.close)
        go_on(server)
        thread.join()
        trainer.session.close()
        assert trainer.head.flush().window_tokens == 2 * N


# A device that another head keeps busy

WIDE = 1 << 14  # of that head's vocabulary, so that a batch takes seconds


@pytest.fixture
def busy(server: Restartable) -> Iterator[threading.Thread]:
    """Computes for another client."""
    with lossd.connect(server.target) as client:
        head = client.create_head("wide", WIDE, 512, "float32")
        head.write_weights(np.zeros((WIDE, 512), np.float32))
        with head.open_session() as session:
            session.compute(np.zeros((1, 512), np.float32), [0])
            tokens = 12_000
            batch = np.zeros((tokens, 512), np.float32), np.zeros(tokens, np.int64)
            thread = threading.Thread(target=lambda: session.compute(*batch))
            thread.start()
            yield thread
            thread.join()


def test_a_busy_server_is_waited_for(server: Restartable, busy: threading.Thread) -> None:
    with lossd.connect(server.target, call_timeout=1.0) as client:
        trainer = Trainer(client)
        assert trainer.head.gradient_stats().window_tokens == N
        trainer.head.write_weights(WEIGHTS)
        assert trainer.head.step(0.1).step == 1


def test_an_interrupted_flush_leaves_no_window_frozen(server: Restartable, busy: threading.Thread) -> None:
    with lossd.connect(server.target, call_timeout=2.0) as client:
        trainer = Trainer(client)
        while busy.is_alive():
            try:
                signalled(lambda: trainer.head.flush(commit=False), after=0.1)
            except KeyboardInterrupt:
                break
            except AssertionError:  # it did not have to wait
                break
        busy.join()
        trainer.session.compute(HIDDEN, LABELS)
        assert trainer.head.flush().window_tokens == 2 * N
