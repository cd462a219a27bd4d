"""Ctrl-C, and other signals with handlers, while a call waits for a server that is stopped or busy."""

from __future__ import annotations

import ctypes as c
import itertools
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from servers import Restartable
from trainer import HIDDEN, LABELS, MUCH_LATER, WEIGHTS, H, N, Trainer, V, interrupt, signalled
from waiting import wait_until

import lossd
from lossd import _interrupts


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Restartable]:
    server = Restartable(tmp_path_factory.mktemp("server"), "--same_host_regions")
    yield server
    server.kill()


@pytest.fixture(autouse=True)
def goes_on(server: Restartable) -> Iterator[None]:
    yield
    server.ready()


@pytest.fixture(scope="module")
def tcp_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Restartable]:
    server = Restartable(tmp_path_factory.mktemp("tcp"), tcp=True)
    yield server
    server.kill()


@pytest.mark.parametrize("lanes", [1, 4])
@pytest.mark.parametrize("kind", ["tcp", "unix", "region"])
def test_a_batch_for_which_the_server_gives_no_credit(request: pytest.FixtureRequest, kind: str, lanes: int) -> None:
    """More chunks than may be under way."""
    server = request.getfixturevalue("tcp_server" if kind == "tcp" else "server")
    with lossd.connect(server.target, **MUCH_LATER) as client:
        head = client.create_head(f"{kind}-{lanes}", V, 1024, "float32")
        head.write_weights(np.zeros((V, 1024), np.float32))
        session = head.open_session(lanes=lanes, chunk_bytes=1 << 16)
        tokens = 1 << 13
        hidden: Any = np.zeros((tokens, 1024), np.float32)
        if kind == "region":
            region = client.create_region("system", hidden.nbytes)
            hidden = region.array(hidden.shape)
        session.compute(hidden[:64], np.zeros(64, np.int64))
        server.stop()
        interrupt(lambda: session.compute(hidden, np.zeros(tokens, np.int64)))
        with pytest.raises(lossd.CancelledError, match="ended with an earlier error.*client_key"):
            session.compute(hidden[:64], np.zeros(64, np.int64))
        server.go_on()


def test_a_call_that_waits_for_the_one_of_another_thread(server: Restartable) -> None:
    with lossd.connect(server.target, **MUCH_LATER) as client:
        trainer = Trainer(client)
        server.stop()
        future = trainer.session.compute_async(HIDDEN, LABELS)
        interrupt(future.result)
        interrupt(trainer.head.flush)  # which has to know what the batch has added
        server.go_on()
        assert future.result().valid_tokens == N
        assert trainer.head.flush().window_tokens == 2 * N


def test_many_messages_without_a_wait(server: Restartable) -> None:
    """Nothing takes long, and yet the whole does."""
    with lossd.connect(server.target, transfer_bytes=1 << 10) as client:
        head = client.create_head("many-messages", 1 << 18, 64, "float32")
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
            server.stop()
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
            server.go_on()

        before = signal.signal(signal.SIGUSR1, handle)
        try:
            server.stop()
            result = signalled(lambda: trainer.session.compute(HIDDEN, LABELS), signal.SIGUSR1)
        finally:
            signal.signal(signal.SIGUSR1, before)
        assert result.valid_tokens == N and len(versions) == 1
        assert trainer.head.flush().window_tokens == 2 * N


@pytest.mark.parametrize("resumes", [False, True])
def test_an_interrupted_batch_counts_once(server: Restartable, resumes: bool) -> None:
    with lossd.connect(server.target, **MUCH_LATER) as client:
        trainer = Trainer(client)
        head = trainer.head
        server.stop()
        interrupt(lambda: trainer.session.compute(HIDDEN, LABELS))
        server.go_on()
        with pytest.raises(lossd.CancelledError, match=trainer.session.client_key):
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
    with lossd.connect(server.target, **MUCH_LATER) as client:
        trainer = Trainer(client)
        server.stop()
        interrupt(trainer.head.flush)
        server.go_on()
        flushed = trainer.head.flush()
        assert flushed.window_tokens == N and flushed.gradient.any()


def test_an_interrupted_commit_is_told_of(server: Restartable) -> None:
    with lossd.connect(server.target, **MUCH_LATER) as client:
        trainer = Trainer(client)
        wanted = trainer.head.flush().gradient
        trainer.session.compute(HIDDEN, LABELS)
        out = np.zeros((V, H), np.float32)
        interrupt(lambda: trainer.head.flush(out, progress=lambda done, of: server.stop() if done == of else None))
        assert np.array_equal(out, wanted)
        server.go_on()
        with pytest.raises(lossd.AlreadyExistsError) as raised:
            trainer.head.flush()
        assert raised.value.flush_id
        trainer.session.compute(HIDDEN, LABELS)
        assert trainer.head.flush().window_tokens == N


def test_an_interrupted_step_is_taken_once(server: Restartable) -> None:
    with lossd.connect(server.target, **MUCH_LATER) as client:
        trainer = Trainer(client)
        server.stop()
        # What comes before the step goes to the server too: only the last call of it may have changed anything.
        interrupt(lambda: trainer.head.step(0.1, generation=1, marks=trainer.head.marks()))
        server.go_on()
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
    with lossd.connect(server.target, **MUCH_LATER) as client:
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
    with lossd.connect(server.target, **MUCH_LATER) as client:
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
    with lossd.connect(server.target, **MUCH_LATER) as client:
        trainer = Trainer(client)
        server.stop()
        thread = threading.Thread(target=lambda: trainer.session.compute(HIDDEN, LABELS))
        thread.start()
        wait_until(trainer.session._turn._lock.locked, "the batch is under way")
        interrupt(trainer.session.close)
        server.go_on()
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
            tokens = 5_000
            batch = np.zeros((tokens, 512), np.float32), np.zeros(tokens, np.int64)
            thread = threading.Thread(target=lambda: session.compute(*batch))
            thread.start()
            yield thread
            thread.join()
        client.delete_head("wide", discard_gradient=True)


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
