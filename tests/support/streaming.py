"""What the script tests of the server share: a head with weights, and a Compute stream that keeps its credit."""
import numpy as np
from lossd.v1 import head_pb2, head_pb2_grpc, loss_pb2, loss_pb2_grpc, types_pb2
from lossd_server import read_metrics

F32 = types_pb2.DATA_TYPE_FLOAT32
OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


def create_head(channel, name, vocab, hidden, seed=1, **config):
    """An fp32 head with seeded weights."""
    heads = head_pb2_grpc.HeadServiceStub(channel)
    config = head_pb2.HeadConfig(name=name, vocab_size=vocab, hidden_size=hidden, weight_dtype=F32, **config)
    heads.CreateHead(head_pb2.CreateHeadRequest(config=config))
    write_weights(channel, name, vocab, hidden, seed)


def write_weights(channel, name, vocab, hidden, seed=1):
    heads = head_pb2_grpc.HeadServiceStub(channel)
    write_id = heads.BeginWrite(head_pb2.BeginWriteRequest(head=name, write_key=f"w{seed}")).write_id
    rng = np.random.default_rng(seed)
    rows = max(1, (1 << 20) // hidden)

    def pieces():
        for first in range(0, vocab, rows):
            count = min(rows, vocab - first)
            data = rng.standard_normal((count, hidden), dtype=np.float32) * np.float32(hidden ** -0.5)
            yield head_pb2.WriteWeightsRequest(head=name, write_id=write_id, first_row=first, rows=count, dtype=F32,
                                               weights=data.tobytes())

    heads.WriteWeights(pieces())
    heads.CommitWrite(head_pb2.CommitWriteRequest(head=name, write_id=write_id))


def in_flight(metrics_url, method):
    """How many calls of a method the server is at, by its own metrics; a call counts before anything is done for it."""
    calls = read_metrics(metrics_url).items()
    (count,) = [value for series, value in calls if series.startswith("lossd_rpcs_in_flight{") and f'"{method}"' in series]
    return count


def open_session(channel, head, client_key):
    request = loss_pb2.OpenSessionRequest(head=head, client_key=client_key)
    return loss_pb2_grpc.LossServiceStub(channel).OpenSession(request)


def start_request(session):
    return loss_pb2.ComputeRequest(
        start=loss_pb2.ComputeStart(session_id=session.session_id, incarnation=session.incarnation))


def chunk_request(session, sequence, labels, hidden_states):
    chunk = loss_pb2.Chunk(sequence=sequence, generation=session.generation, tokens=len(labels), hidden_dtype=F32,
                           labels=labels.tobytes(), hidden_states=hidden_states.tobytes())
    return loss_pb2.ComputeRequest(chunk=chunk)
