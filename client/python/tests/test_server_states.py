"""Calls to a server that stands still, is away, was killed and is back, is restored, or is gone for good: the error,
and that a trainer can go on after it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from servers import Restartable, stand_still
from trainer import HIDDEN, LABELS, MUCH_LATER, WEIGHTS, H, N, Trainer, V, interrupt

import lossd


@pytest.fixture(scope="module")
def restartable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Restartable]:
    folder = tmp_path_factory.mktemp("server")
    server = Restartable(folder, "--same_host_regions", "--max_heads=1000", saves=True)
    yield server
    server.kill()


@pytest.fixture
def server(restartable: Restartable) -> Restartable:
    restartable.ready()
    return restartable


CALLS: dict[str, Callable[[Trainer], Any]] = {
    "connect": lambda of: lossd.connect(of.client.target, **MUCH_LATER),
    "status": lambda of: of.client.status(),
    "create_head": lambda of: of.client.create_head(f"{of.name}-other", V, H),
    "drain": lambda of: of.client.drain(),
    "create_region": lambda of: of.client.create_region("system", 4096),
    "info": lambda of: of.head.info(),
    "write_weights": lambda of: of.head.write_weights(WEIGHTS),
    "write_rows": lambda of: of.head.begin_write("key").write_rows(0, WEIGHTS),
    "read_weights": lambda of: of.head.read_weights(),
    "read_weights with progress": lambda of: of.head.read_weights(progress=lambda *_: None),
    "load_weights": lambda of: of.head.load_weights("weights.safetensors"),
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
OF_THE_WINDOW = ["compute", "flush", "step", "gradient_stats"]


def stopped(server: Restartable, call: str) -> None:
    with lossd.connect(server.target, **MUCH_LATER) as client:
        trainer = Trainer(client)
        server.stop()
        interrupt(lambda: CALLS[call](trainer))
        server.go_on()
        if call != "drain":
            assert client.status().version  # the client goes on
    if call == "drain":  # which may have come to the server
        server.kill()


def away(server: Restartable, call: str) -> None:
    with lossd.connect(server.target, **MUCH_LATER) as client:
        trainer = Trainer(client)
        server.kill()
        interrupt(lambda: CALLS[call](trainer))


def killed(server: Restartable, call: str) -> None:
    with lossd.connect(server.target, reconnect_timeout=20) as client:
        trainer = Trainer(client)
        wanted = trainer.first
        server.kill()
        server.start()
        # A new server has no heads: it is either that, or that the window is lost, which the caller is told.
        with pytest.raises((lossd.WindowLostError, lossd.NotFoundError)):
            CALLS[call](trainer)
        trainer.create()
        assert np.array_equal(trainer.first.dx, wanted.dx)
        assert trainer.head.step(0.1).window_tokens == N


def restored(server: Restartable, call: str) -> None:
    with lossd.connect(server.target, reconnect_timeout=20) as client:
        trainer = Trainer(client)
        trainer.head.discard()
        trainer.head.save_checkpoint("begin")
        trainer.session.compute(HIDDEN, LABELS)
        server.kill()
        server.start()
        with pytest.raises(lossd.WindowLostError, match=trainer.name):
            CALLS[call](trainer)
        with trainer.head.open_session() as replay:
            assert np.array_equal(replay.compute(HIDDEN, LABELS).dx, trainer.first.dx)
            result = trainer.head.step(0.1)  # nothing of the old session is named any more
        assert result.window_tokens == N and result.step == 1


def gone(server: Restartable, call: str) -> None:
    with lossd.connect(server.target, reconnect_timeout=0.5, call_timeout=20) as client:
        trainer = Trainer(client)
        server.kill()
        with pytest.raises((lossd.UnavailableError, lossd.DeadlineExceededError)):
            CALLS[call](trainer)
        with pytest.raises(lossd.LossdError):
            trainer.session.close()


TABLE = {
    stopped: list(CALLS),
    # A server that is away has drained; and load_weights is not tried again.
    away: [call for call in CALLS if call not in ("drain", "load_weights")],
    killed: OF_THE_WINDOW,
    restored: OF_THE_WINDOW,
    gone: OF_THE_WINDOW,
}


@pytest.mark.parametrize(
    ("state", "call"),
    [pytest.param(state, call, id=f"{state.__name__}-{call}") for state, calls in TABLE.items() for call in calls],
)
def test_a_call_to_a_server_that_is(server: Restartable, state: Callable[[Restartable, str], None], call: str) -> None:
    state(server, call)


SLOW_TO_GIVE_UP = [
    *["status", "compute", "flush", "step", "write_weights", "read_weights", "logits", "load_weights"],
    "save_checkpoint",
]


def test_calls_give_up_a_stopped_server_after_call_timeout(server: Restartable) -> None:
    """Its connections stay open, and nothing comes over them."""
    clients = [lossd.connect(server.target, call_timeout=2) for _ in SLOW_TO_GIVE_UP]
    trainers = [Trainer(client) for client in clients]

    def give_up(call: str, trainer: Trainer) -> None:
        with pytest.raises(lossd.DeadlineExceededError, match=r"no answer within call_timeout \(2 s\).*call_timeout"):
            CALLS[call](trainer)

    server.stop()
    with ThreadPoolExecutor(len(clients)) as pool:
        waiting = [pool.submit(give_up, call, trainer) for call, trainer in zip(SLOW_TO_GIVE_UP, trainers, strict=True)]
    for future in waiting:
        future.result()
    server.go_on()
    for client, trainer in zip(clients, trainers, strict=True):
        assert trainer.head.info().generation == 1  # the client goes on
        client.close()


def test_stopped_for_a_while(server: Restartable) -> None:
    """Nobody notices a server that does not answer for less than the timeouts."""
    with lossd.connect(server.target) as client:
        trainer = Trainer(client)
        server.stop()
        future = trainer.session.compute_async(HIDDEN, LABELS)
        time.sleep(0.3)
        assert not future.done()
        server.go_on()
        assert future.result().valid_tokens == N
        assert trainer.head.flush().window_tokens == 2 * N


def test_drained_and_restored(server: Restartable) -> None:
    with lossd.connect(server.target, reconnect_timeout=20) as client:
        trainer = Trainer(client)
        client.drain()
        assert server.process.wait(30) == 0
        server.start()
        trainer.session.compute(HIDDEN, LABELS)
        assert trainer.head.flush().window_tokens == 2 * N  # nothing is lost


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
            server.stop()
            with pytest.raises(lossd.DeadlineExceededError, match="no answer within call_timeout"):
                session.compute(hidden, np.zeros(1 << 14, np.int64))
            with pytest.raises(lossd.DeadlineExceededError, match="no answer within call_timeout"):
                head.logits(hidden[: 1 << 12], top_k=1)
            server.go_on()
            assert head.read_weights().shape == weights.shape
    finally:
        server.kill()


def test_a_server_of_this_process_ends() -> None:
    """Nobody waits for it for reconnect_timeout."""
    server = lossd.launch("cpu")
    client = server.client(**MUCH_LATER)
    by_target = lossd.connect(server.target, **MUCH_LATER)
    trainer = Trainer(client)
    stand_still(server.process.pid)
    waiting = trainer.session.compute_async(HIDDEN, LABELS)
    time.sleep(0.3)
    server.process.kill()
    with pytest.raises(lossd.UnavailableError, match="(?s)lossd.launch was ended by SIGKILL.*log.*serving"):
        waiting.result()
    head = trainer.head
    calls: list[Callable[[], Any]] = [client.status, by_target.status, head.flush, head.open_session, server.client]
    for call in calls:
        with pytest.raises(lossd.UnavailableError, match="SIGKILL"):
            call()
    server.stop()


def test_a_server_of_this_process_is_stopped() -> None:
    with lossd.launch("cpu") as server:
        client = server.client()
    with pytest.raises(lossd.UnavailableError, match="lossd.launch has ended with status 0"):
        client.status()


def test_what_is_lost_is_told_where_the_session_is_opened_again(server: Restartable) -> None:
    with lossd.connect(server.target, reconnect_timeout=20) as client:
        trainer = Trainer(client)
        trainer.head.discard()
        trainer.head.save_checkpoint("begin")
        trainer.session.compute(HIDDEN, LABELS)
        server.kill()
        server.start()
        client_key = trainer.session.client_key
        with pytest.raises(lossd.WindowLostError, match=f"client_key '{client_key}' had added is gone"):
            trainer.head.open_session(client_key=client_key)
        again = trainer.head.open_session(client_key=client_key)
        again.compute(HIDDEN, LABELS)
        assert trainer.head.step(0.1).window_tokens == N


def test_a_session_that_is_opened_again_takes_the_place_of_its_earlier_handle(server: Restartable) -> None:
    with lossd.connect(server.target) as client:
        head = Trainer(client).head
        head.discard()
        for _ in range(2):  # in the second window from the marks of the first on
            first = head.open_session(client_key="trainer")
            first.compute(HIDDEN, LABELS)
            second = head.open_session(client_key="trainer")
            assert second.session_id == first.session_id and head.marks() == [second.marks()]
            second.compute(HIDDEN, LABELS)
            assert head.step(0.1).window_tokens == 2 * N
            assert head.open_session(client_key="trainer").marks() and head.marks() == []
