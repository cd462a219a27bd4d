"""A trainer of a head over replicas as the protocol alone has it, without lossd's own client: what each call may answer when a
replica is lost is said here, and nowhere hidden."""
from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import numpy as np
from lossd.v1 import (gradient_pb2, gradient_pb2_grpc, head_pb2, head_pb2_grpc, loss_pb2, loss_pb2_grpc, status_pb2,
                      status_pb2_grpc, types_pb2)

from streaming import F32, OPTIONS, chunk_request, start_request

Code = grpc.StatusCode
# Ends of a call that say nothing of what it did: the connection or the server is gone, or not all replicas are there.
TRANSIENT = (Code.UNAVAILABLE, Code.CANCELLED, Code.UNKNOWN)
# Ends of a step that names a session which is not that of the window any more.
OTHER_MARKS = (Code.FAILED_PRECONDITION, Code.ABORTED, Code.NOT_FOUND)
PATIENCE_SECONDS = 120  # a guard: who is lost is back long before

Batch = tuple[np.ndarray, np.ndarray]  # hidden states [N, H] fp32, labels [N]


class SessionLost(Exception):
    """Its place is another session's."""


class WentBack(Exception):
    """All replicas went back to a checkpoint."""


def again(call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Repeats it for as long as its end says nothing."""
    end = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return call(*arguments, **options)
        except grpc.RpcError as error:
            if error.code() not in TRANSIENT or time.monotonic() > end:
                raise
        time.sleep(0.02)


class Calls:
    """Those of one service of a server. Answers that come as a stream are returned as a list."""

    def __init__(self, server: Server, stub: Callable[[grpc.Channel], Any]) -> None:
        self._server, self._stub = server, stub

    def __getattr__(self, method: str) -> Callable[..., Any]:
        def call(request: Any) -> Any:
            try:
                answer = getattr(self._stub(self._server.channel), method)(request)
                return list(answer) if hasattr(answer, "__next__") else answer
            except grpc.RpcError as error:
                if error.code() in TRANSIENT:
                    self._server.connect()
                raise

        return call


class Server:
    """One server of a set, or alone."""

    def __init__(self, target: str) -> None:
        self.target, self.channel = target, None
        self.connect()
        self.heads, self.losses = Calls(self, head_pb2_grpc.HeadServiceStub), Calls(self, loss_pb2_grpc.LossServiceStub)
        self.gradients = Calls(self, gradient_pb2_grpc.GradientServiceStub)
        self.statuses = Calls(self, status_pb2_grpc.StatusServiceStub)

    def connect(self) -> None:
        """Anew: a channel that has failed would wait for seconds until it tries again."""
        self.close()
        self.channel = grpc.insecure_channel(self.target, options=[*OPTIONS, ("grpc.use_local_subchannel_pool", 1)])

    def close(self) -> None:
        if self.channel is not None:
            self.channel.close()

    def incarnation(self) -> str:
        return str(self.statuses.GetStatus(status_pb2.GetStatusRequest()).incarnation)

    def create(self, name: str, vocab: int, hidden: int, **config: Any) -> Any:
        made = head_pb2.HeadConfig(name=name, vocab_size=vocab, hidden_size=hidden, weight_dtype=F32, **config)
        return self.heads.CreateHead(head_pb2.CreateHeadRequest(config=made))

    def get(self, name: str) -> Any:
        return self.heads.GetHead(head_pb2.GetHeadRequest(name=name))

    def list(self) -> Any:
        return self.heads.ListHeads(head_pb2.ListHeadsRequest()).heads

    def names(self) -> list[str]:
        return sorted(head.config.name for head in self.list())

    def delete(self, name: str, discard: bool = False) -> None:
        self.heads.DeleteHead(head_pb2.DeleteHeadRequest(name=name, discard_gradient=discard))

    def begin_write(self, name: str, key: str) -> str:
        return str(self.heads.BeginWrite(head_pb2.BeginWriteRequest(head=name, write_key=key, replace=True)).write_id)

    def write_rows(self, name: str, write_id: str, first: int, rows: np.ndarray) -> None:
        piece = head_pb2.WriteWeightsRequest(head=name, write_id=write_id, first_row=first, rows=len(rows), dtype=F32,
                                             weights=rows.tobytes())
        self.heads.WriteWeights(iter([piece]))

    def commit_write(self, name: str, write_id: str) -> int:
        request = head_pb2.CommitWriteRequest(head=name, write_id=write_id)
        return int(self.heads.CommitWrite(request).weight_version)

    def write(self, name: str, weights: np.ndarray, key: str = "w") -> int:
        write_id = self.begin_write(name, key)
        self.write_rows(name, write_id, 0, weights)
        return self.commit_write(name, write_id)

    def read(self, name: str, hidden: int) -> np.ndarray:
        pieces = self.heads.ReadWeights(head_pb2.ReadWeightsRequest(head=name, dtype=F32))
        return np.frombuffer(b"".join(piece.weights for piece in pieces), np.float32).reshape(-1, hidden)

    def logits(self, name: str, hidden: np.ndarray) -> np.ndarray:
        request = loss_pb2.LogitsRequest(head=name, rows=len(hidden), hidden_dtype=F32, hidden_states=hidden.tobytes())
        return np.frombuffer(self.losses.Logits(request).logits, np.float32).reshape(len(hidden), -1)

    def open_session(self, head: str, key: str, **options: Any) -> Any:
        return self.losses.OpenSession(loss_pb2.OpenSessionRequest(head=head, client_key=key, **options))


class Session:
    """A client's session, of one lane, with the batches that it has in the window. Opened through any of `servers`."""

    def __init__(self, servers: Sequence[Server], head: str, key: str) -> None:
        self._servers, self.head, self.key = servers, head, key
        self.went_back = 0  # how often the head was put back to a checkpoint
        self._lane: Server | None = None
        self._take(again(self._ask))

    def _ask(self) -> Any:
        """Whoever answers; the first that says no counts."""
        error: grpc.RpcError | None = None
        for server in self._servers:
            try:
                return server.open_session(self.head, self.key)
            except grpc.RpcError as failed:
                if failed.code() not in TRANSIENT:
                    raise
                error = failed
        assert error is not None
        raise error

    def _take(self, opened: Any) -> None:
        self.opened = opened
        self.accepted = int(opened.lanes[0].accepted)
        self.replica = opened.replica if opened.HasField("replica") else None
        self.close()
        # Where there are replicas, an address says which of them has the session; "" is whoever was asked.
        address = opened.lane_addresses[0] if opened.lane_addresses else ""
        self._lane = Server(address) if address else self._servers[0]

    def close(self) -> None:
        if self._lane is not None and self._lane not in self._servers:
            self._lane.close()

    def marks(self) -> Any:
        return types_pb2.SessionMarks(session_id=self.opened.session_id, lanes=[types_pb2.LaneMarks(accepted=self.accepted)])

    def compute(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """Losses and dX. The batch is in the window then, once."""
        answer = again(self._send, batch)
        hidden = batch[0].shape[1]
        return np.frombuffer(answer.losses, np.float32), np.frombuffer(answer.dx, np.float32).reshape(-1, hidden)

    def _send(self, batch: Batch) -> Any:
        """A chunk whose answer was lost is sent again under its number."""
        sequence = self.accepted + 1
        try:
            return self._exchange(batch, sequence)
        except grpc.RpcError as error:
            if error.code() in TRANSIENT:
                with contextlib.suppress(grpc.RpcError):  # the session may be gone, and its server too
                    self._look_again()
            elif error.code() in OTHER_MARKS:
                self._look_again()
            raise

    def _exchange(self, batch: Batch, sequence: int) -> Any:
        assert self._lane is not None
        chunk = chunk_request(self.opened, sequence, batch[1], batch[0])
        answers = self._lane.losses.Compute(iter([start_request(self.opened), chunk]))
        (result,) = [answer.result for answer in answers if answer.HasField("result")]
        if result.error.code != 0:
            raise AssertionError(f"a chunk was rejected: {result.error.message}")
        self.accepted = sequence
        return result

    def _look_again(self) -> None:
        """SessionLost if there is another in its place; WentBack if it is one of a checkpoint."""
        opened = self._ask()
        if opened.restores != self.opened.restores:
            raise WentBack
        if opened.session_id != self.opened.session_id:
            raise SessionLost
        self.opened.generation = opened.generation

    def begin_again(self) -> None:
        """After WentBack: as the checkpoint has it."""
        before = self.opened
        self._take(again(self._ask))
        self.went_back += self.opened.restores != before.restores

    def begin_window(self, generation: int) -> None:
        self.opened.generation = generation


class Trainer:
    """Ends windows that several sessions add to, through any of the servers."""

    def __init__(self, servers: Sequence[Server], head: str, sessions: Sequence[Session]) -> None:
        self._servers, self.head, self.sessions = servers, head, sessions

    def step(self, server: Server, rate: float) -> Any:
        """One step, exactly once; WentBack if all replicas went back to a checkpoint, which has it or not."""
        generation = self.sessions[0].opened.generation
        request = gradient_pb2.ApplyStepRequest(head=self.head, generation=generation, learning_rate=rate,
                                                marks=[session.marks() for session in self.sessions])
        try:
            stepped = again(server.gradients.ApplyStep, request)
        except grpc.RpcError as error:
            if error.code() not in OTHER_MARKS:
                raise
            restores = again(self._servers[0].open_session, self.head, self.sessions[0].key).restores
            if restores == self.sessions[0].opened.restores:
                raise AssertionError(f"a step was refused though nothing went back: {error.code()}: {error.details()}") from error
            raise WentBack from error
        if stepped.generation != generation + 1:
            raise AssertionError(f"a step of window {generation} has begun window {stepped.generation}")
        for session in self.sessions:
            session.begin_window(stepped.generation)
        return stepped

    def begin_again(self) -> int:
        """After WentBack: how many steps the weights have."""
        for session in self.sessions:
            session.begin_again()
        return int(again(self._servers[0].get, self.head).optimizer_steps)
