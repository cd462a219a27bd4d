"""The server is killed, stopped, drained: the error, and that a trainer can go on after it."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from restartable import Restartable
from stopping import stand_still

import lossd

V, H, N = 32, 16, 4
HIDDEN = np.random.default_rng(0).standard_normal((N, H)).astype(np.float32)
LABELS = np.arange(N)
WEIGHTS = np.random.default_rng(1).standard_normal((V, H)).astype(np.float32)


@pytest.fixture
def restartable(tmp_path: Path) -> Iterator[Restartable]:
    server = Restartable(tmp_path)
    yield server
    server.kill()


def open_head(client: lossd.Client) -> tuple[lossd.Head, lossd.Session]:
    head = client.create_head("a", V, H, "float32", optimizer=lossd.SGD())
    head.write_weights(WEIGHTS)
    return head, head.open_session()


CALLS: dict[str, Callable[[lossd.Head, lossd.Session], Any]] = {
    "compute": lambda head, session: session.compute(HIDDEN, LABELS),
    "flush": lambda head, session: head.flush(),
    "step": lambda head, session: head.step(0.1),
    "gradient_stats": lambda head, session: head.gradient_stats(),
}


@pytest.mark.parametrize("name", list(CALLS))
def test_killed_and_started_again(restartable: Restartable, name: str) -> None:
    with lossd.connect(restartable.target, reconnect_timeout=20) as client:
        head, session = open_head(client)
        wanted = session.compute(HIDDEN, LABELS)
        restartable.kill()
        restartable.start()
        with pytest.raises(lossd.LossdError) as raised:
            CALLS[name](head, session)
        # A new server has no heads: it is either that, or that the window is lost, which the caller is told.
        assert isinstance(raised.value, (lossd.WindowLostError, lossd.NotFoundError))
        head, session = open_head(client)
        again = session.compute(HIDDEN, LABELS)
        assert np.array_equal(again.dx, wanted.dx)
        assert head.step(0.1).window_tokens == N


@pytest.mark.parametrize("name", list(CALLS))
def test_killed_and_restored(tmp_path: Path, name: str) -> None:
    server = Restartable(tmp_path, f"--checkpoint_dir={tmp_path / 'saved'}", "--restore")
    try:
        with lossd.connect(server.target, reconnect_timeout=20) as client:
            head, session = open_head(client)
            head.save_checkpoint("begin")
            wanted = session.compute(HIDDEN, LABELS)
            server.kill()
            server.start()
            with pytest.raises(lossd.WindowLostError, match="a"):
                CALLS[name](head, session)
            with head.open_session() as replay:
                got = replay.compute(HIDDEN, LABELS)
                assert np.array_equal(got.dx, wanted.dx)
                result = head.step(0.1)  # nothing of the old session is named any more
            assert result.window_tokens == N and result.step == 1
    finally:
        server.kill()


@pytest.mark.parametrize("name", list(CALLS))
def test_gone_for_good(restartable: Restartable, name: str) -> None:
    with lossd.connect(restartable.target, reconnect_timeout=0.5, call_timeout=0.5) as client:
        head, session = open_head(client)
        session.compute(HIDDEN, LABELS)
        restartable.kill()
        with pytest.raises((lossd.UnavailableError, lossd.DeadlineExceededError)):
            CALLS[name](head, session)
        with pytest.raises(lossd.LossdError):
            session.close()


def test_stopped_for_a_while(restartable: Restartable) -> None:
    """Nobody notices a server that does not answer for less than the timeouts."""
    with lossd.connect(restartable.target) as client:
        head, session = open_head(client)
        stand_still(restartable.process.pid)
        future = session.compute_async(HIDDEN, LABELS)
        time.sleep(0.3)
        assert not future.done()
        restartable.process.send_signal(signal.SIGCONT)
        assert future.result().valid_tokens == N
        assert head.flush().window_tokens == N


def test_drained_and_restored(tmp_path: Path) -> None:
    server = Restartable(tmp_path, f"--checkpoint_dir={tmp_path / 'saved'}", "--restore")
    try:
        with lossd.connect(server.target, reconnect_timeout=20) as client:
            head, session = open_head(client)
            session.compute(HIDDEN, LABELS)
            client.drain()
            assert server.process.wait(30) == 0
            server.start()
            session.compute(HIDDEN, LABELS)
            assert head.flush().window_tokens == 2 * N  # nothing is lost
    finally:
        server.kill()


STOPPED: dict[str, Callable[[lossd.Client, lossd.Head, lossd.Session], Any]] = {
    "status": lambda client, head, session: client.status(),
    "compute": lambda client, head, session: session.compute(HIDDEN, LABELS),
    "flush": lambda client, head, session: head.flush(),
    "step": lambda client, head, session: head.step(0.1),
    "write_weights": lambda client, head, session: head.write_weights(WEIGHTS),
    "read_weights": lambda client, head, session: head.read_weights(),
    "logits": lambda client, head, session: head.logits(HIDDEN),
    "load_weights": lambda client, head, session: head.load_weights("weights.safetensors"),
    "save_checkpoint": lambda client, head, session: head.save_checkpoint("tag"),
}


@pytest.mark.parametrize("name", list(STOPPED))
def test_stopped_for_longer(restartable: Restartable, name: str) -> None:
    """Its connections stay open, and nothing comes over them."""
    with lossd.connect(restartable.target, call_timeout=2) as client:
        head, session = open_head(client)
        session.compute(HIDDEN, LABELS)
        stand_still(restartable.process.pid)
        begin = time.monotonic()
        with pytest.raises(lossd.DeadlineExceededError, match=r"no answer within call_timeout \(2 s\).*call_timeout"):
            STOPPED[name](client, head, session)
        assert time.monotonic() - begin < 15
        restartable.process.send_signal(signal.SIGCONT)
        assert head.info().generation == 1  # the client goes on


def test_stopped_with_much_under_way(tmp_path: Path) -> None:
    """The server does not even take what is sent."""
    server = Restartable(tmp_path, tcp=True)
    try:
        with lossd.connect(server.target, call_timeout=2) as client:
            head = client.create_head("a", V, 1024, "float32")
            weights = np.zeros((V, 1024), np.float32)
            head.write_weights(weights)
            session = head.open_session(lanes=2, chunk_bytes=1 << 20)
            hidden = np.zeros((1 << 14, 1024), np.float32)
            session.compute(hidden[:2], np.zeros(2, np.int64))
            stand_still(server.process.pid)
            with pytest.raises(lossd.DeadlineExceededError, match="no answer within call_timeout"):
                session.compute(hidden, np.zeros(1 << 14, np.int64))
            with pytest.raises(lossd.DeadlineExceededError, match="no answer within call_timeout"):
                head.logits(hidden[: 1 << 12], top_k=1)
            server.process.send_signal(signal.SIGCONT)
            assert head.read_weights().shape == weights.shape
    finally:
        server.kill()


def test_a_server_of_this_process_ends(tmp_path: Path) -> None:
    """Nobody waits for it for reconnect_timeout."""
    server = lossd.launch("cpu")
    client = server.client()
    by_target = lossd.connect(server.target)
    head, session = open_head(client)
    session.compute(HIDDEN, LABELS)
    stand_still(server.process.pid)
    waiting = session.compute_async(HIDDEN, LABELS)
    time.sleep(0.3)
    begin = time.monotonic()
    server.process.kill()
    with pytest.raises(lossd.UnavailableError, match="(?s)lossd.launch was ended by SIGKILL.*log.*serving"):
        waiting.result()
    calls: list[Callable[[], Any]] = [client.status, by_target.status, head.flush, head.open_session, server.client]
    for call in calls:
        with pytest.raises(lossd.UnavailableError, match="SIGKILL"):
            call()
    assert time.monotonic() - begin < 15
    server.stop()


def test_a_server_of_this_process_is_stopped() -> None:
    with lossd.launch("cpu") as server:
        client = server.client()
    with pytest.raises(lossd.UnavailableError, match="lossd.launch has ended with status 0"):
        client.status()


def test_what_is_lost_is_told_where_the_session_is_opened_again(tmp_path: Path) -> None:
    server = Restartable(tmp_path, f"--checkpoint_dir={tmp_path / 'checkpoints'}", "--restore")
    try:
        with lossd.connect(server.target, reconnect_timeout=20) as client:
            head = client.create_head("a", V, H, "float32", optimizer=lossd.SGD())
            head.write_weights(WEIGHTS)
            head.save_checkpoint("begin")
            session = head.open_session(client_key="trainer")
            session.compute(HIDDEN, LABELS)
            server.kill()
            server.start()
            with pytest.raises(lossd.WindowLostError, match="client_key 'trainer' had added is gone"):
                head.open_session(client_key="trainer")
            again = head.open_session(client_key="trainer")
            again.compute(HIDDEN, LABELS)
            assert head.step(0.1).window_tokens == N
    finally:
        server.kill()


def test_a_session_that_is_opened_again_takes_the_place_of_its_earlier_handle(restartable: Restartable) -> None:
    with lossd.connect(restartable.target) as client:
        head, _ = open_head(client)
        for _ in range(2):  # in the second window from the marks of the first on
            first = head.open_session(client_key="trainer")
            first.compute(HIDDEN, LABELS)
            second = head.open_session(client_key="trainer")
            assert second.session_id == first.session_id and head.marks() == [second.marks()]
            second.compute(HIDDEN, LABELS)
            assert head.step(0.1).window_tokens == 2 * N
            assert head.open_session(client_key="trainer").marks() and head.marks() == []
