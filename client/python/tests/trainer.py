"""A client with a head and a batch in its window, and signals that come while it waits for its server."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from waiting import wait_until

import lossd

V, H, N = 32, 16, 4
HIDDEN = np.random.default_rng(0).standard_normal((N, H)).astype(np.float32)
LABELS = np.arange(N)
WEIGHTS = np.random.default_rng(1).standard_normal((V, H)).astype(np.float32)
SOON = 30.0  # seconds, on a busy machine
MUCH_LATER = {"call_timeout": 120.0, "reconnect_timeout": 120.0}  # when a call would end by itself

_numbers = itertools.count()


class Trainer:
    """A head with a name of its own, and a session that has added a batch to its window."""

    def __init__(self, client: lossd.Client) -> None:
        self.client = client
        self.name = f"trained-{next(_numbers)}"
        self.create()

    def create(self) -> None:
        self.head = self.client.create_head(self.name, V, H, "float32", optimizer=lossd.SGD())
        self.head.write_weights(WEIGHTS)
        self.session = self.head.open_session(client_key=f"trainer of {self.name}")
        self.first = self.session.compute(HIDDEN, LABELS)


def _sleeps() -> bool:
    """Whether the main thread is in no state but that for a tenth of a second, as a call that waits is."""
    stat = Path(f"/proc/self/task/{threading.main_thread().native_id}/stat")
    for _ in range(10):
        if stat.read_text().rpartition(")")[2].split()[0] != "S":
            return False
        time.sleep(0.01)
    return True


def signalled(call: Callable[[], Any], number: int = signal.SIGINT, after: float | None = None) -> Any:
    """What the call returns or raises if the signal comes while it waits, or so many seconds after its begin; that is
    long before it would end."""
    sent: list[float] = []
    ended = threading.Event()

    def send() -> None:
        if after is None:
            wait_until(lambda: ended.is_set() or _sleeps(), "the call waits")
        if not ended.wait(after or 0.0):
            sent.append(time.monotonic())
            os.kill(os.getpid(), number)

    sender = threading.Thread(target=send)
    sender.start()
    try:
        return call()
    finally:
        now = time.monotonic()
        ended.set()
        sender.join()
        assert sent, "the call did not wait"
        assert now - sent[0] < SOON, "the call went on waiting"


def interrupt(call: Callable[[], Any]) -> KeyboardInterrupt:
    with pytest.raises(KeyboardInterrupt) as raised:
        signalled(call)
    return raised.value
