#!/usr/bin/python3
"""A client of the previous release, which is to say its stubs and nothing else, goes the whole common way with today's server
and gets the right numbers.

usage: previous_client_test.py LOSSD   with the previous release's generated stubs in PYTHONPATH
"""
import sys
import unittest

import grpc
import numpy as np
from lossd.v1 import (gradient_pb2, gradient_pb2_grpc, head_pb2, head_pb2_grpc, loss_pb2, loss_pb2_grpc, status_pb2,
                      status_pb2_grpc, types_pb2)
from lossd_server import LossdServer

BINARY = sys.argv.pop(1)
F32 = types_pb2.DATA_TYPE_FLOAT32
VOCAB, HIDDEN, CHUNKS, TOKENS = 131, 24, 3, 20
SMOOTHING, IGNORE = 0.125, -100


def reference(weights, hidden, labels, scale):
    """Losses, dX and dW in float64 with label smoothing."""
    w, x = weights.astype(np.float64), hidden.astype(np.float64)
    logits = x @ w.T
    log_sum_exp = np.log(np.exp(logits).sum(axis=1))
    rows, valid = np.arange(len(labels)), labels != IGNORE
    target = np.where(valid, labels, 0)
    losses = (1 - SMOOTHING) * (log_sum_exp - logits[rows, target]) + SMOOTHING * (log_sum_exp - logits.mean(axis=1))
    gradient = np.exp(logits - log_sum_exp[:, None]) - SMOOTHING / w.shape[0]
    gradient[rows, target] -= 1 - SMOOTHING
    gradient *= np.where(valid, scale, 0.0)[:, None]
    return np.where(valid, losses, 0.0), gradient @ w, gradient.T @ x


class PreviousClient(unittest.TestCase):
    def setUp(self):
        self.assertNotIn("features", status_pb2.GetStatusResponse.DESCRIPTOR.fields_by_name, "these stubs are today's")
        server = LossdServer(BINARY, "--device=cpu")
        server.__enter__()
        self.addCleanup(server.__exit__)
        channel = grpc.insecure_channel(server.target)
        self.addCleanup(channel.close)
        self.heads = head_pb2_grpc.HeadServiceStub(channel)
        self.losses = loss_pb2_grpc.LossServiceStub(channel)
        self.gradients = gradient_pb2_grpc.GradientServiceStub(channel)
        self.status = status_pb2_grpc.StatusServiceStub(channel)
        rng = np.random.default_rng(5)
        self.weights = rng.normal(0, 0.3, (VOCAB, HIDDEN)).astype(np.float32)
        self.hidden = rng.normal(0, 1, (CHUNKS * TOKENS, HIDDEN)).astype(np.float32)
        self.labels = rng.integers(0, VOCAB, CHUNKS * TOKENS)
        self.labels[[3, 41]] = IGNORE

    def create_head(self, **config):
        config = head_pb2.HeadConfig(name="h", vocab_size=VOCAB, hidden_size=HIDDEN, weight_dtype=F32, **config)
        generation = self.heads.CreateHead(head_pb2.CreateHeadRequest(config=config)).generation
        write_id = self.heads.BeginWrite(head_pb2.BeginWriteRequest(head="h", write_key="w")).write_id
        half = VOCAB // 2
        self.heads.WriteWeights(iter([
            head_pb2.WriteWeightsRequest(head="h", write_id=write_id, first_row=first, rows=len(rows), dtype=F32,
                                         weights=rows.tobytes())
            for first, rows in ((0, self.weights[:half]), (half, self.weights[half:]))]))
        self.heads.CommitWrite(head_pb2.CommitWriteRequest(head="h", write_id=write_id))
        return generation

    def compute(self, generation, scale):
        """Losses, dX and the marks of a session that has sent every chunk."""
        session = self.losses.OpenSession(loss_pb2.OpenSessionRequest(head="h", client_key="previous"))
        requests = [loss_pb2.ComputeRequest(
            start=loss_pb2.ComputeStart(session_id=session.session_id, incarnation=session.incarnation))]
        for i in range(CHUNKS):
            tokens = slice(i * TOKENS, (i + 1) * TOKENS)
            requests.append(loss_pb2.ComputeRequest(chunk=loss_pb2.Chunk(
                sequence=i + 1, generation=generation, first_token=i * TOKENS, tokens=TOKENS, hidden_dtype=F32,
                gradient_scale=scale, options=loss_pb2.LossOptions(label_smoothing=SMOOTHING),
                labels=self.labels[tokens].tobytes(), hidden_states=self.hidden[tokens].tobytes())))
        results = [answer.result for answer in self.losses.Compute(iter(requests)) if answer.HasField("result")]
        self.assertEqual([r.disposition for r in results], [loss_pb2.DISPOSITION_ACCUMULATED] * CHUNKS)
        marks = types_pb2.SessionMarks(session_id=session.session_id, lanes=[types_pb2.LaneMarks(accepted=CHUNKS)])
        return (np.frombuffer(b"".join(r.losses for r in results), np.float32),
                np.frombuffer(b"".join(r.dx for r in results), np.float32).reshape(-1, HIDDEN), marks)

    def close_to(self, got, wanted):
        self.assertLess(np.linalg.norm(got.astype(np.float64) - wanted) / np.linalg.norm(wanted), 2e-6)

    def test_the_common_way(self):
        scale = 1 / 32
        generation = self.create_head()
        losses, dx, marks = self.compute(generation, scale)
        flush = self.gradients.BeginFlush(
            gradient_pb2.BeginFlushRequest(head="h", generation=generation, marks=[marks]))
        parts = self.gradients.ReadGradient(gradient_pb2.ReadGradientRequest(head="h", flush_id=flush.flush_id))
        dw = np.frombuffer(b"".join(part.gradient for part in parts), np.float32).reshape(VOCAB, HIDDEN)
        committed = self.gradients.CommitFlush(gradient_pb2.CommitFlushRequest(head="h", flush_id=flush.flush_id))
        self.assertEqual(committed.generation, generation + 1)
        wanted = reference(self.weights, self.hidden, self.labels, scale)
        for got, expected in zip((losses, dx, dw), wanted):
            self.close_to(got, expected)
        self.losses.CloseSession(loss_pb2.CloseSessionRequest(session_id=marks.session_id))
        status = self.status.GetStatus(status_pb2.GetStatusRequest())
        self.assertEqual([head.config.name for head in status.heads], ["h"])
        self.heads.DeleteHead(head_pb2.DeleteHeadRequest(name="h"))

    def test_the_way_of_the_servers_own_optimizer(self):
        optimizer = head_pb2.Optimizer(kind=head_pb2.OPTIMIZER_KIND_SGD)
        generation = self.create_head(optimizer=optimizer)
        _, _, marks = self.compute(generation, 1 / 32)
        step = self.gradients.ApplyStep(
            gradient_pb2.ApplyStepRequest(head="h", generation=generation, marks=[marks], learning_rate=0.5))
        self.assertEqual((step.generation, step.step), (generation + 1, 1))
        pieces = self.heads.ReadWeights(head_pb2.ReadWeightsRequest(head="h", weight_version=step.weight_version))
        weights = np.frombuffer(b"".join(piece.weights for piece in pieces), np.float32).reshape(VOCAB, HIDDEN)
        gradient = reference(self.weights, self.hidden, self.labels, 1 / 32)[2]
        self.close_to(weights, self.weights - 0.5 * gradient)

    def test_a_field_that_there_is_no_more_is_refused_by_its_name(self):
        config = head_pb2.HeadConfig(name="h", vocab_size=VOCAB, hidden_size=HIDDEN, weight_dtype=F32)
        config.deferred_bytes = 1 << 20
        with self.assertRaises(grpc.RpcError) as refused:
            self.heads.CreateHead(head_pb2.CreateHeadRequest(config=config))
        self.assertEqual(refused.exception.code(), grpc.StatusCode.INVALID_ARGUMENT)
        for words in ("config.deferred_bytes", "field 9 of lossd.v1.HeadConfig", "no longer supported", "Leave it out"):
            self.assertIn(words, refused.exception.details())
        self.assertFalse(self.heads.ListHeads(head_pb2.ListHeadsRequest()).heads)
        config.deferred_bytes = 0
        created = self.heads.CreateHead(head_pb2.CreateHeadRequest(config=config))
        self.assertEqual(created.config.deferred_bytes, 0)


if __name__ == "__main__":
    unittest.main()
