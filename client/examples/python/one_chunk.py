#!/usr/bin/python3
"""One chunk through lossd from plain gRPC: a head is made, written, used and flushed. Needs grpcio, protobuf and NumPy.

Generate the stubs once, then run it against a server:
  mkdir -p build/stubs && protoc -I proto --python_out=build/stubs --grpc_out=build/stubs \\
      --plugin=protoc-gen-grpc="$(command -v grpc_python_plugin)" proto/lossd/v1/*.proto
  PYTHONPATH=build/stubs client/examples/python/one_chunk.py localhost:50051
"""
import sys

import grpc
import numpy as np
from lossd.v1 import gradient_pb2, gradient_pb2_grpc, head_pb2, head_pb2_grpc, loss_pb2, loss_pb2_grpc, types_pb2

F32 = types_pb2.DATA_TYPE_FLOAT32


def one_chunk(channel, weights, hidden, labels, scale, **more):
    """Losses [N], dX [N, H] and dW [V, H] of fp32 weights [V, H], hidden states [N, H] and int64 labels [N].

    `more`: further fields of the Chunk, as options=loss_pb2.LossOptions(label_smoothing=0.1).
    """
    heads = head_pb2_grpc.HeadServiceStub(channel)
    losses = loss_pb2_grpc.LossServiceStub(channel)
    gradients = gradient_pb2_grpc.GradientServiceStub(channel)
    (vocab, width), name = weights.shape, "one_chunk"

    config = head_pb2.HeadConfig(name=name, vocab_size=vocab, hidden_size=width, weight_dtype=F32)
    generation = heads.CreateHead(head_pb2.CreateHeadRequest(config=config)).generation
    write_id = heads.BeginWrite(head_pb2.BeginWriteRequest(head=name, write_key="one", replace=True)).write_id
    rows = head_pb2.WriteWeightsRequest(head=name, write_id=write_id, rows=vocab, dtype=F32, weights=weights.tobytes())
    heads.WriteWeights(iter([rows]))
    heads.CommitWrite(head_pb2.CommitWriteRequest(head=name, write_id=write_id))

    session = losses.OpenSession(loss_pb2.OpenSessionRequest(head=name, client_key="one_chunk.py"))
    start = loss_pb2.ComputeStart(session_id=session.session_id, incarnation=session.incarnation)
    sequence = session.lanes[0].accepted + 1
    chunk = loss_pb2.Chunk(sequence=sequence, generation=generation, tokens=len(labels), hidden_dtype=F32,
                           gradient_scale=scale, labels=labels.tobytes(), hidden_states=hidden.tobytes(), **more)
    requests = [loss_pb2.ComputeRequest(start=start), loss_pb2.ComputeRequest(chunk=chunk)]
    result = next(r.result for r in list(losses.Compute(iter(requests))) if r.HasField("result"))
    if result.HasField("error"):
        raise RuntimeError(result.error.message)

    marks = types_pb2.SessionMarks(session_id=session.session_id, lanes=[types_pb2.LaneMarks(accepted=sequence)])
    flush = gradients.BeginFlush(gradient_pb2.BeginFlushRequest(head=name, generation=generation, marks=[marks]))
    parts = gradients.ReadGradient(gradient_pb2.ReadGradientRequest(head=name, flush_id=flush.flush_id))
    dw = np.frombuffer(b"".join(part.gradient for part in parts), np.float32).reshape(vocab, width)
    gradients.CommitFlush(gradient_pb2.CommitFlushRequest(head=name, flush_id=flush.flush_id))
    losses.CloseSession(loss_pb2.CloseSessionRequest(session_id=session.session_id))
    heads.DeleteHead(head_pb2.DeleteHeadRequest(name=name))
    return np.frombuffer(result.losses, np.float32), np.frombuffer(result.dx, np.float32).reshape(-1, width), dw


if __name__ == "__main__":
    rng = np.random.default_rng(1)
    with grpc.insecure_channel(sys.argv[1] if len(sys.argv) > 1 else "localhost:50051") as lossd:
        loss, dx, dw = one_chunk(lossd, rng.normal(0, 0.1, (1000, 64)).astype(np.float32),
                                 rng.normal(0, 1, (32, 64)).astype(np.float32), rng.integers(0, 1000, 32), 1 / 32)
    print(f"mean loss {loss.mean():.4f}  |dX| {np.linalg.norm(dx):.4f}  |dW| {np.linalg.norm(dw):.4f}")
