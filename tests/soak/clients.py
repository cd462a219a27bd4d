"""Clients of the mixed load. Each checks everything that it is told, and fails at the first thing that is wrong."""
from __future__ import annotations

import random
import socket
import struct
import threading
import traceback
from collections.abc import Callable
from dataclasses import replace

import grpc
import lossd
import numpy as np

from oracle import Batch, Oracle, check_close, check_equal, random_batch, random_weights, valid_tokens

VOCAB, HIDDEN, TOKENS = 512, 32, 48
Connect = Callable[[], lossd.Client]


class Client(threading.Thread):
    """Does rounds until it is told to stop. A round that failed is in `failure`."""

    kind = ""

    def __init__(self, connect: Connect, number: int) -> None:
        super().__init__(name=f"{self.kind}-{number}", daemon=True)
        self.connect, self.rng = connect, np.random.default_rng(number + 1)
        self.stopping = threading.Event()
        self.rounds, self.tokens, self.failure = 0, 0, ""

    def run(self) -> None:
        try:
            self.work()
        except BaseException:  # noqa: BLE001: whatever it is, the soak has failed
            self.failure = f"{self.name}, round {self.rounds}: {traceback.format_exc()}"

    def work(self) -> None:
        with self.connect() as client:
            self.prepare(client)
            while not self.stopping.is_set():
                self.round()
                self.rounds += 1
            self.leave(client)

    def prepare(self, client: lossd.Client) -> None: ...
    def round(self) -> None: ...
    def leave(self, client: lossd.Client) -> None: ...


class Trainer(Client):
    """Batches from several sessions of one head, then a flush whose every element is compared."""

    kind = "trainer"
    sessions_wanted = 1

    def prepare(self, client: lossd.Client) -> None:
        self.client = client
        self.head = client.create_head(self.name, VOCAB, HIDDEN, "float32", **self.head_options())
        self.oracle = Oracle(weights := random_weights(self.rng, VOCAB, HIDDEN))
        self.head.write_weights(weights)
        self.sessions = [self.head.open_session() for _ in range(self.sessions_wanted)]

    def head_options(self) -> dict[str, object]:
        return {}

    def round(self) -> None:
        batches = []
        for session in self.sessions:
            for _ in range(int(self.rng.integers(1, 4))):
                batches.append(self.compute(session))
        self.consume(batches)

    def compute(self, session: lossd.Session) -> Batch:
        batch = random_batch(self.rng, int(self.rng.integers(1, TOKENS)), VOCAB, HIDDEN)
        result = self.send(session, batch)
        losses, dx = self.oracle.losses_and_dx(batch)
        check_close("a loss", result.losses, losses)
        check_close("dX", result.dx, dx)
        self.tokens += len(batch.labels)
        return batch

    def send(self, session: lossd.Session, batch: Batch) -> lossd.BatchResult:
        return session.compute(batch.hidden, batch.labels)

    def consume(self, batches: list[Batch]) -> None:
        gradient = np.empty((VOCAB, HIDDEN), np.float32)
        tokens = flush(self.head, gradient)
        if tokens is not None:
            check_equal("window_tokens", tokens, valid_tokens(batches))
        check_close("dW", gradient, self.oracle.weight_gradient(batches))

    def leave(self, client: lossd.Client) -> None:
        for session in self.sessions:
            session.close()
        client.delete_head(self.name)


def flush(head: lossd.Head, gradient: np.ndarray) -> int | None:
    """Through restarts of the server; the tokens, unless the answer to the commit was lost."""
    while True:
        try:
            return head.flush(gradient).window_tokens
        except (lossd.UnavailableError, lossd.DeadlineExceededError) as error:
            if error.flush_id:  # all of dW was read
                head.commit_flush(error.flush_id)
                return None


class PairTrainer(Trainer):
    kind = "pair"
    sessions_wanted = 2


class RegionTrainer(Trainer):
    """Its tensors lie in memory that it shares with the server; a server that is started anew knows none of it."""

    kind = "region"

    def prepare(self, client: lossd.Client) -> None:
        super().prepare(client)
        self.make_region()

    def make_region(self) -> None:
        self.region = self.client.create_region("system", 2 * TOKENS * HIDDEN * 4)

    def send(self, session: lossd.Session, batch: Batch) -> lossd.BatchResult:
        """The batch is one chunk: one that was rejected is not in the window."""
        while True:
            hidden = self.region.array(batch.hidden.shape)
            hidden[:] = batch.hidden
            dx = self.region.array(batch.hidden.shape, offset=TOKENS * HIDDEN * 4)
            try:
                result = session.compute(hidden, batch.labels, dx=dx)
                return replace(result, dx=dx.copy())
            except (lossd.NotFoundError, lossd.FailedPreconditionError):  # as the server, or as the library finds out
                self.region.close()
                self.make_region()

    def leave(self, client: lossd.Client) -> None:
        self.region.close()
        super().leave(client)


class Stepper(Trainer):
    """The server's optimizer takes the steps; its weights are read and compared."""

    kind = "stepper"
    rate = 0.05

    def head_options(self) -> dict[str, object]:
        return {"optimizer": lossd.SGD()}

    def consume(self, batches: list[Batch]) -> None:
        while True:
            try:
                stepped = self.head.step(self.rate)
                break
            except (lossd.UnavailableError, lossd.DeadlineExceededError):
                continue  # the same call is about the same step
        check_equal("window_tokens", stepped.window_tokens, valid_tokens(batches))
        self.oracle.weights -= self.rate * self.oracle.weight_gradient(batches)
        weights = self.head.read_weights()
        check_close("a weight", weights, self.oracle.weights)
        self.oracle = Oracle(weights)  # rounding does not add up


class Reader(Client):
    """Asks for logits, publishes weights and reads them back."""

    kind = "reader"

    def prepare(self, client: lossd.Client) -> None:
        self.head = client.create_head(self.name, VOCAB, HIDDEN, "float32")

    def round(self) -> None:
        weights = random_weights(self.rng, VOCAB, HIDDEN)
        self.head.write_weights(weights)
        check_equal("the weights", bool((self.head.read_weights() == weights).all()), True)
        hidden = self.rng.standard_normal((5, HIDDEN), dtype=np.float32)
        check_close("a logit", self.head.logits(hidden), Oracle(weights).logits(hidden))

    def leave(self, client: lossd.Client) -> None:
        client.delete_head(self.name)


class Visitor(Client):
    """Comes with a connection, a head and a session of its own, and leaves again: or vanishes, with all open."""

    kind = "visitor"

    def work(self) -> None:
        while not self.stopping.is_set():
            with self.connect() as client:
                head = client.create_head("visited", VOCAB, HIDDEN, "float32", frozen=True)
                session = head.open_session(client_key=f"{self.name} {self.rounds % 4}")
                if head.info().weight_version > 0:
                    batch = random_batch(self.rng, 8, VOCAB, HIDDEN)
                    session.compute(batch.hidden, batch.labels, mode="loss")
                else:
                    head.write_weights(np.zeros((VOCAB, HIDDEN), np.float32))
                if self.rng.random() < 0.5:
                    session.close()
                client.status()
            self.rounds += 1


class Intruder(Client):
    """Sends what no client sends. What becomes of it does not matter, as long as the others do not notice."""

    kind = "intruder"
    methods = ("LossService/Compute", "LossService/OpenSession", "LossService/Logits", "HeadService/CreateHead",
               "HeadService/WriteWeights", "HeadService/GetHead", "GradientService/BeginFlush",
               "GradientService/ReadGradient", "GradientService/ApplyStep", "RegionService/CreateRegion", "Nothing/AtAll")

    def __init__(self, connect: Connect, number: int, port: int, socket_target: str) -> None:
        super().__init__(connect, number)
        self.port, self.socket_target = port, socket_target
        self.random = random.Random(number)

    def work(self) -> None:
        while not self.stopping.is_set():
            self.random.choice((self.send_nonsense, self.send_nonsense, self.break_off, self.connect_and_linger))()
            self.rounds += 1
            self.stopping.wait(0.02)

    def nonsense(self) -> bytes:
        kind = self.random.randrange(4)
        if kind == 0:
            return self.random.randbytes(self.random.randrange(200))
        if kind == 1:  # a field whose length is not there
            return bytes([self.random.choice((0x0A, 0x12, 0x1A, 0x22))]) + b"\xff\xff\xff\xff\x07"
        if kind == 2:  # numbers at the edges
            return b"".join(bytes([8 * field]) + b"\xff" * 9 + b"\x01" for field in range(1, 12))
        return b"\x0a\x07trainer" + self.random.randbytes(50)

    def send_nonsense(self) -> None:
        with grpc.insecure_channel(self.socket_target) as channel:
            method = f"/lossd.v1.{self.random.choice(self.methods)}"
            call = channel.stream_stream(method)(
                iter([self.nonsense() for _ in range(self.random.randrange(4))]), timeout=5,
                metadata=(("traceparent", "".join(self.random.choices("0123456789abcdef-", k=55))),))
            try:
                for _ in call:
                    if self.random.random() < 0.5:
                        call.cancel()
            except grpc.RpcError:
                pass

    def break_off(self) -> None:
        """In the middle of what looks like HTTP/2, or like TLS."""
        begin = self.random.choice((b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0",
                                    b"\x16\x03\x01\x02\x00\x01", b"GET / HTTP/1.1\r\n\r\n", b""))
        self.raw(begin + self.random.randbytes(self.random.randrange(300)), self.random.random() < 0.5)

    def connect_and_linger(self) -> None:
        self.raw(b"", False, wait=self.random.random())

    def raw(self, data: bytes, reset: bool, wait: float = 0) -> None:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=5) as connection:
                connection.sendall(data)
                self.stopping.wait(wait)
                if reset:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        except OSError:
            pass  # a server that is being started anew
