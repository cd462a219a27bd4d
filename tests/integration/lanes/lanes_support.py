"""A group of ranks, and single lanes of a session at any of them, as stock gRPC sees them."""
import contextlib

import grpc
import numpy as np
from lossd.v1 import gradient_pb2, gradient_pb2_grpc, head_pb2, head_pb2_grpc, loss_pb2, loss_pb2_grpc

from streaming import F32, OPTIONS

FLAGS = ("--workspace_bytes=16M", "--rank_timeout=10m", "--lanes_at_ranks=true")
VOCAB, HIDDEN, TOKENS = 64, 16, 12


class Places:
    """Channels to every rank that a session can have lanes at; [0] is the leader's."""

    def __init__(self, target, addresses, connect=None):
        self.targets = [target if not address else resolve(target, address) for address in addresses]
        self._connect = connect or (lambda place: grpc.insecure_channel(place, options=OPTIONS))
        self._open = contextlib.ExitStack()

    def __enter__(self):
        self.channels = [self._open.enter_context(self._connect(place)) for place in self.targets]
        return self

    def __exit__(self, *_):
        self._open.close()

    def __getitem__(self, rank):
        return self.channels[rank]


def resolve(target, address):
    if address.startswith(":"):
        return target.rpartition(":")[0] + address
    return target + address if address.startswith(".") else address


def open_session(channel, head="h", key="trainer", lanes=4, **more):
    request = loss_pb2.OpenSessionRequest(head=head, client_key=key, lanes=lanes, **more)
    return loss_pb2_grpc.LossServiceStub(channel).OpenSession(request)


def batch(seed, tokens=TOKENS, hidden=HIDDEN, vocab=VOCAB, **more):
    """A chunk without its number."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, vocab, tokens)
    labels[1::5] = -100
    states = rng.standard_normal((tokens, hidden), dtype=np.float32)
    return loss_pb2.Chunk(tokens=tokens, hidden_dtype=F32, labels=labels.astype(np.int64).tobytes(),
                          hidden_states=states.tobytes(), **more)


class Lane:
    """One Compute stream. What it is answered is read in the calling thread."""

    def __init__(self, channel, session, lane=0, metadata=None):
        self.session, self.sequence, self._requests = session, 0, _Queue()
        start = loss_pb2.ComputeStart(session_id=session.session_id, incarnation=session.incarnation, lane=lane)
        self._requests.put(loss_pb2.ComputeRequest(start=start))
        self.call = loss_pb2_grpc.LossServiceStub(channel).Compute(self._requests, metadata=metadata)
        self.applied = 0

    def ready(self):
        ready = next(self.call).ready
        self.sequence = ready.marks.accepted
        return ready

    def put(self, chunk, sequence=None, generation=None):
        """The chunk's sequence."""
        self.sequence = sequence or self.sequence + 1
        numbered = loss_pb2.Chunk(sequence=self.sequence, generation=generation or self.session.generation)
        numbered.MergeFrom(chunk)
        self._requests.put(loss_pb2.ComputeRequest(chunk=numbered))
        return self.sequence

    def put_request(self, request):
        self._requests.put(request)

    def result(self):
        for response in self.call:
            if response.HasField("result"):
                return response.result
            self.applied = max(self.applied, response.applied.applied)
        raise AssertionError("the stream ended without a result")

    def compute(self, chunk, **where):
        self.put(chunk, **where)
        return self.result()

    def await_applied(self):
        while self.applied < self.sequence:
            self.applied = max(self.applied, next(self.call).applied.applied)

    def close(self):
        """Half-closes it; (code, details) of its end."""
        self._requests.close()
        return self.end()

    def end(self):
        with contextlib.suppress(grpc.RpcError):
            for _ in self.call:
                pass
        return self.call.code(), self.call.details()

    def cancel(self):
        self.call.cancel()


class _Queue:
    """An iterator that waits for what is put in."""

    def __init__(self):
        import queue
        self._queue = queue.SimpleQueue()

    def put(self, item):
        self._queue.put(item)

    def close(self):
        self._queue.put(None)

    def __iter__(self):
        return self

    def __next__(self):
        item = self._queue.get()
        if item is None:
            raise StopIteration
        return item


def flush(channel, head="h"):
    """dW, and how many tokens are in it; the window is open again afterwards."""
    gradients = gradient_pb2_grpc.GradientServiceStub(channel)
    told = head_pb2_grpc.HeadServiceStub(channel).GetHead(head_pb2.GetHeadRequest(name=head))
    request = gradient_pb2.BeginFlushRequest(head=head, generation=told.generation, marks=told.sessions)
    begun = gradients.BeginFlush(request)
    pieces = gradients.ReadGradient(gradient_pb2.ReadGradientRequest(head=head, flush_id=begun.flush_id))
    gradient = b"".join(piece.gradient for piece in pieces)
    gradients.CommitFlush(gradient_pb2.CommitFlushRequest(head=head, flush_id=begun.flush_id))
    return gradient, begun.window_tokens
