"""A step whose answer is lost on its way, and what the trainer does before it asks again."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import numpy as np
import pytest

import lossd

V, H = 32, 16
HIDDEN = np.random.default_rng(0).standard_normal((4, H), np.float32)
LABELS = np.arange(4)
LOST = (lossd.UnavailableError, lossd.DeadlineExceededError)


class Muffler:
    """Hands connections on to a server; while it is muffled, what the server answers is lost."""

    def __init__(self, target: str) -> None:
        self._path = target.removeprefix("unix:")
        self._muffled = threading.Event()
        self._open: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.target = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.socket(socket.AF_UNIX)
                server.connect(self._path)
                self._open += [client, server]
                threading.Thread(target=self._hand_on, args=(client, server, False), daemon=True).start()
                threading.Thread(target=self._hand_on, args=(server, client, True), daemon=True).start()

    def _hand_on(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if not (answers and self._muffled.is_set()):
                    sink.sendall(data)
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def muffle(self) -> None:
        self._muffled.set()

    def go_on(self) -> None:
        """Later connections are heard; those that have lost something are cut."""
        lost, self._open = self._open, []
        for one in lost:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        self._muffled.clear()

    def close(self) -> None:
        self._listener.close()
        self.go_on()


class Unanswered:
    """A head that has taken a step of which its trainer does not know."""

    def __init__(self, server: lossd.Server, muffler: Muffler) -> None:
        self.direct = server.client()
        self.client = lossd.connect(muffler.target, call_timeout=1.0, reconnect_timeout=1.0)
        options = lossd.AdamW(weight_decay=0.5)
        self.head = self.client.create_head("unanswered", V, H, "float32", optimizer=options)
        self.head.write_weights(np.random.default_rng(1).standard_normal((V, H), np.float32))
        self.session = self.head.open_session()
        self.session.compute(HIDDEN, LABELS)
        self.generation = self.head.info().generation
        muffler.muffle()
        with pytest.raises(LOST):
            self.head.step(0.1, generation=self.generation)
        muffler.go_on()
        assert self.info().optimizer_steps == 1
        self.weights = self.direct.head("unanswered").read_weights()

    def info(self) -> lossd.HeadInfo:
        return self.direct.head("unanswered").info()

    def close(self) -> None:
        self.direct.delete_head("unanswered", discard_gradient=True)
        self.client.close()
        self.direct.close()


@pytest.fixture
def unanswered(server: lossd.Server) -> Iterator[Unanswered]:
    muffler = Muffler(server.target)
    unanswered = Unanswered(server, muffler)
    yield unanswered
    unanswered.close()
    muffler.close()


@pytest.mark.parametrize("names_generation", [True, False])
def test_losses_in_between_do_not_make_it_another_step(unanswered: Unanswered, names_generation: bool) -> None:
    head = unanswered.head
    unanswered.session.compute(HIDDEN, LABELS, mode="loss")
    with head.open_session() as evaluation:
        evaluation.compute(HIDDEN, LABELS, mode="loss")
    result = head.step(0.1, generation=unanswered.generation if names_generation else None)
    assert (result.step, result.skipped, result.window_tokens) == (1, False, 4)
    assert unanswered.info().optimizer_steps == 1
    assert np.array_equal(head.read_weights(), unanswered.weights)
    assert head.marks() == [] and head.step(0.1).skipped  # which is another call, of a window without a token
    unanswered.session.compute(HIDDEN, LABELS)
    assert head.step(0.1).step == 2


def test_a_gradient_in_between_is_not_taken_for_part_of_it(unanswered: Unanswered) -> None:
    head = unanswered.head
    unanswered.session.compute(HIDDEN, LABELS)
    with pytest.raises(lossd.FailedPreconditionError, match="was applied with marks"):
        head.step(0.1)
    assert unanswered.info().optimizer_steps == 1
    result = head.step(0.1)
    assert (result.step, result.window_tokens) == (2, 4)
