"""Work for a server that touches every kind of metric: steps, flushes, logits, checkpoints, and mistakes."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from types import TracebackType

import grpc
import numpy as np
from lossd.v1 import gradient_pb2, gradient_pb2_grpc, head_pb2, head_pb2_grpc, loss_pb2, loss_pb2_grpc, types_pb2
from programs import join
from streaming import F32, chunk_request, create_head, open_session, start_request
from waiting import wait_until

VOCAB, HIDDEN, TOKENS = 500, 32, 64
PAUSE = 0.02  # between chunks: the tests beside this one want the processor as well


class Trainer:
    """A session of one head with its stream."""

    def __init__(self, channel: grpc.Channel, head: str, **config: object) -> None:
        self.head = head
        self.losses = loss_pb2_grpc.LossServiceStub(channel)
        self.gradients = gradient_pb2_grpc.GradientServiceStub(channel)
        self.heads = head_pb2_grpc.HeadServiceStub(channel)
        create_head(channel, head, VOCAB, HIDDEN, **config)
        self.save("start")
        self.heads.RestoreCheckpoint(head_pb2.RestoreCheckpointRequest(head=head, tag="start"))
        self.session = open_session(channel, head, f"trainer of {head}")
        self.sequence = 0
        self._rng = np.random.default_rng(1)
        self._requests: queue.Queue[loss_pb2.ComputeRequest | None] = queue.Queue()
        self._requests.put(start_request(self.session))
        self._answers = self.losses.Compute(iter(self._requests.get, None))

    def chunk(
        self,
        labels: np.ndarray | None = None,
        hidden: np.ndarray | None = None,
        mode: loss_pb2.ComputeMode = loss_pb2.COMPUTE_MODE_UNSPECIFIED,
    ) -> loss_pb2.ChunkResult:
        self.sequence += 1
        if labels is None:
            labels = self._rng.integers(0, VOCAB, TOKENS)
            labels[0] = -100
        if hidden is None:
            hidden = self._rng.standard_normal((len(labels), HIDDEN), np.float32)
        request = chunk_request(self.session, self.sequence, labels, hidden)
        request.chunk.mode = mode
        self._requests.put(request)
        return next(answer.result for answer in self._answers if answer.HasField("result"))

    def mistakes(self) -> None:
        """A label that the head does not have, a hidden state that is no number, and a head that is not there."""
        self.chunk(labels=np.array([VOCAB + 7]))
        self.chunk(hidden=np.full((1, HIDDEN), np.nan, np.float32), labels=np.array([1]))
        try:
            self.heads.GetHead(head_pb2.GetHeadRequest(name="nobody"))
        except grpc.RpcError as error:
            assert error.code() == grpc.StatusCode.NOT_FOUND, error

    def marks(self) -> list[types_pb2.SessionMarks]:
        lanes = [types_pb2.LaneMarks(accepted=self.sequence)]
        return [types_pb2.SessionMarks(session_id=self.session.session_id, lanes=lanes)]

    def step(self) -> None:
        of = {"head": self.head, "generation": self.session.generation, "marks": self.marks()}
        self.gradients.GradientStats(gradient_pb2.GradientStatsRequest(**of))
        done = self.gradients.ApplyStep(gradient_pb2.ApplyStepRequest(learning_rate=1e-3, **of))
        self.session.generation = done.generation

    def flush(self, commit: bool) -> None:
        request = gradient_pb2.BeginFlushRequest(head=self.head, generation=self.session.generation, marks=self.marks())
        flush = {"head": self.head, "flush_id": self.gradients.BeginFlush(request).flush_id}
        if not commit:
            self.gradients.AbortFlush(gradient_pb2.AbortFlushRequest(**flush))
            return
        for _ in self.gradients.ReadGradient(gradient_pb2.ReadGradientRequest(**flush)):
            pass
        self.session.generation = self.gradients.CommitFlush(gradient_pb2.CommitFlushRequest(**flush)).generation

    def logits(self) -> None:
        hidden = self._rng.standard_normal((2, HIDDEN), np.float32).tobytes()
        self.losses.Logits(loss_pb2.LogitsRequest(head=self.head, rows=2, hidden_dtype=F32, hidden_states=hidden))

    def save(self, tag: str) -> None:
        self.heads.SaveCheckpoint(head_pb2.SaveCheckpointRequest(head=self.head, tag=tag))

    def close(self) -> None:
        self._requests.put(None)
        for _ in self._answers:
            pass


class Training:
    """Trains two heads in a thread of its own, from __enter__ to __exit__; raises there what went wrong."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._failure: Exception | None = None
        self.rounds = 0

    def _rounds(self) -> Iterator[int]:
        while not self._stop.is_set():
            self.rounds += 1
            yield self.rounds

    def _run(self) -> None:
        try:
            self._train()
        except Exception as error:  # shown by __exit__, in the test's own thread
            self._failure = error

    def _train(self) -> None:
        adamw = head_pb2.Optimizer(kind=head_pb2.OPTIMIZER_KIND_ADAMW)
        stepped, flushed = Trainer(self._channel, "lm_head", optimizer=adamw), Trainer(self._channel, "draft")
        for number in self._rounds():
            for trainer in (stepped, stepped, stepped, flushed):
                trainer.chunk()
                time.sleep(PAUSE)
            for trainer in (stepped, flushed):
                trainer.chunk(mode=loss_pb2.COMPUTE_MODE_LOSS_ONLY)
            stepped.logits()
            if number % 20 == 1:
                stepped.mistakes()
            if number % 4 == 0:
                stepped.step()
                flushed.flush(commit=number % 8 == 0)
            if number % 16 == 0:
                stepped.save(f"step-{number}")
        stepped.close()
        flushed.close()

    def wait(self, rounds: int) -> None:
        """Until so many rounds are done."""
        wait_until(lambda: self.rounds > rounds or not self._thread.is_alive(), f"{rounds} rounds of training")
        if self._failure:
            raise self._failure

    def __enter__(self) -> Training:
        self._thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        join([self._thread])
        if self._failure and not error:
            raise self._failure
