"""The server is killed, stopped, drained: the error, and that a trainer can go on after it."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stopping import stand_still

import lossd

V, H, N = 32, 16, 4
HIDDEN = np.random.default_rng(0).standard_normal((N, H)).astype(np.float32)
LABELS = np.arange(N)
WEIGHTS = np.random.default_rng(1).standard_normal((V, H)).astype(np.float32)


class Restartable:
    """A server that can be killed and started again at the same address."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.target = f"unix:{folder / 'socket'}"
        ports = folder / "ports.json"
        self._ports = ports
        self._command = [
            str(lossd.server.find_program()),
            "--device=cpu",
            "--metrics_listen=",
            f"--listen={self.target}",
            f"--port_file={ports}",
            *flags,
        ]
        self.start()

    def start(self) -> None:
        self._ports.unlink(missing_ok=True)
        self.process = subprocess.Popen(self._command, stderr=subprocess.DEVNULL)
        while not self._ports.exists():
            assert self.process.poll() is None
            time.sleep(0.01)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


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
