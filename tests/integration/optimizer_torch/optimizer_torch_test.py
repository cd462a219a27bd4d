#!/usr/bin/python3
"""A hundred steps of a server's optimizer end where torch.optim's end that is given the same gradients.

The gradients are those of real chunks: each step streams one, reads dW by a flush that it then aborts, and applies the
step; torch gets what was read. Needs torch, NumPy and grpcio, and no GPU but for --device=cuda:N, which is the server's:
torch works on the CPU.

usage: optimizer_torch_test.py LOSSD REPOSITORY [--device=cpu|cuda:N] [unittest options]   with the stubs in PYTHONPATH
"""
import os
import sys
import unittest

import grpc
import numpy as np
import torch

REPOSITORY = sys.argv[2]
sys.path.insert(0, os.path.join(REPOSITORY, "tests/support"))
from lossd.v1 import (gradient_pb2, gradient_pb2_grpc, head_pb2, head_pb2_grpc, loss_pb2, loss_pb2_grpc,  # noqa: E402
                      types_pb2)
from lossd_server import LossdServer  # noqa: E402

LOSSD = sys.argv[1]
del sys.argv[1:3]
DEVICE = next((a.split("=", 1)[1] for a in sys.argv if a.startswith("--device=")), "cpu")
sys.argv = [a for a in sys.argv if not a.startswith("--device=")]

F32 = types_pb2.DATA_TYPE_FLOAT32
VOCAB, WIDTH, TOKENS, STEPS = 257, 72, 96, 100
MOST = 1e-6  # relative, in the Frobenius norm

SGD, ADAM, ADAMW = (head_pb2.OPTIMIZER_KIND_SGD, head_pb2.OPTIMIZER_KIND_ADAM, head_pb2.OPTIMIZER_KIND_ADAMW)
# name: kind, learning rate, torch's arguments, factor of the gradient
CASES = {
    "sgd": (SGD, 0.5, {}, 1.0),
    "sgd, decay": (SGD, 0.5, {"weight_decay": 0.01}, 0.25),
    "sgd, momentum": (SGD, 0.1, {"momentum": 0.9}, 1.0),
    "sgd, momentum, dampening, decay": (SGD, 0.1, {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01}, 1.0),
    "sgd, nesterov, decay": (SGD, 0.1, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}, 1.0),
    "sgd, nesterov, maximize": (SGD, 0.01, {"momentum": 0.9, "nesterov": True, "maximize": True}, 1.0),
    "adam": (ADAM, 1e-2, {}, 1.0),
    "adam, decay": (ADAM, 1e-2, {"weight_decay": 0.1, "betas": (0.8, 0.95), "eps": 1e-6}, 1 / 3),
    "adam, beta1 below a half": (ADAM, 1e-3, {"betas": (0.3, 0.99)}, 1.0),
    "adamw": (ADAMW, 1e-2, {}, 1.0),
    "adamw, decay": (ADAMW, 1e-2, {"weight_decay": 0.1, "betas": (0.9, 0.95)}, 0.125),
    "adamw, maximize": (ADAMW, 1e-3, {"maximize": True}, 1.0),
}


def optimizer_message(kind, arguments):
    message = head_pb2.Optimizer(kind=kind)
    for name, value in arguments.items():
        if name == "betas":
            message.beta1, message.beta2 = value
        else:
            setattr(message, name, value)
    return message


class Head:
    """A head of one server with one session, driven by plain gRPC."""

    def __init__(self, channel, optimizer, weights, bias):
        self._name = "torch"
        self._heads = head_pb2_grpc.HeadServiceStub(channel)
        self._losses = loss_pb2_grpc.LossServiceStub(channel)
        self._gradients = gradient_pb2_grpc.GradientServiceStub(channel)
        config = head_pb2.HeadConfig(name=self._name, vocab_size=VOCAB, hidden_size=WIDTH, weight_dtype=F32, bias=True,
                                     optimizer=optimizer)
        self._generation = self._heads.CreateHead(head_pb2.CreateHeadRequest(config=config)).generation
        write_id = self._heads.BeginWrite(head_pb2.BeginWriteRequest(head=self._name, write_key="one")).write_id
        rows = head_pb2.WriteWeightsRequest(head=self._name, write_id=write_id, rows=VOCAB, dtype=F32,
                                            weights=weights.tobytes(), bias=bias.tobytes())
        self._heads.WriteWeights(iter([rows]))
        self._heads.CommitWrite(head_pb2.CommitWriteRequest(head=self._name, write_id=write_id))
        self._session = self._losses.OpenSession(
            loss_pb2.OpenSessionRequest(head=self._name, client_key="optimizer_torch_test.py"))
        self._sequence = self._session.lanes[0].accepted

    def add(self, hidden, labels):
        """One chunk into the window; returns its marks."""
        self._sequence += 1
        start = loss_pb2.ComputeStart(session_id=self._session.session_id, incarnation=self._session.incarnation)
        chunk = loss_pb2.Chunk(sequence=self._sequence, generation=self._generation, tokens=len(labels),
                               hidden_dtype=F32, gradient_scale=1 / len(labels), labels=labels.tobytes(),
                               hidden_states=hidden.tobytes(),
                               options=loss_pb2.LossOptions(label_smoothing=0.1))
        requests = [loss_pb2.ComputeRequest(start=start), loss_pb2.ComputeRequest(chunk=chunk)]
        results = [r.result for r in self._losses.Compute(iter(requests)) if r.HasField("result")]
        if results[0].HasField("error"):
            raise RuntimeError(results[0].error.message)
        return [types_pb2.SessionMarks(session_id=self._session.session_id,
                                       lanes=[types_pb2.LaneMarks(accepted=self._sequence)])]

    def gradient(self, marks):
        """dW and db, which stay in the window."""
        flush = self._gradients.BeginFlush(
            gradient_pb2.BeginFlushRequest(head=self._name, generation=self._generation, marks=marks))
        request = gradient_pb2.ReadGradientRequest(head=self._name, flush_id=flush.flush_id)
        parts = list(self._gradients.ReadGradient(request))
        self._gradients.AbortFlush(gradient_pb2.AbortFlushRequest(head=self._name, flush_id=flush.flush_id))
        dw = np.frombuffer(b"".join(part.gradient for part in parts), np.float32).reshape(VOCAB, WIDTH)
        return dw, np.frombuffer(b"".join(part.bias_gradient for part in parts), np.float32)

    def step(self, marks, learning_rate, scale):
        answer = self._gradients.ApplyStep(
            gradient_pb2.ApplyStepRequest(head=self._name, generation=self._generation, marks=marks,
                                          learning_rate=learning_rate, gradient_scale=scale))
        self._generation = answer.generation
        return answer

    def weights(self):
        parts = list(self._heads.ReadWeights(head_pb2.ReadWeightsRequest(head=self._name, dtype=F32)))
        weights = np.frombuffer(b"".join(part.weights for part in parts), np.float32).reshape(VOCAB, WIDTH)
        return weights, np.frombuffer(b"".join(part.bias for part in parts), np.float32)


def torch_optimizer(kind, parameters, learning_rate, arguments):
    classes = {SGD: torch.optim.SGD, ADAM: torch.optim.Adam, ADAMW: torch.optim.AdamW}
    return classes[kind](parameters, lr=learning_rate, foreach=False, **arguments)


def relative_difference(got, wanted):
    return np.linalg.norm(got.astype(np.float64) - wanted.astype(np.float64)) / np.linalg.norm(wanted)


class Trajectories(unittest.TestCase):
    def run_case(self, kind, learning_rate, arguments, scale):
        rng = np.random.default_rng(5)
        weights = rng.normal(0, 0.1, (VOCAB, WIDTH)).astype(np.float32)
        bias = rng.normal(0, 0.1, VOCAB).astype(np.float32)
        parameters = [torch.nn.Parameter(torch.from_numpy(values.copy())) for values in (weights, bias)]
        optimizer = torch_optimizer(kind, parameters, learning_rate, arguments)
        with LossdServer(LOSSD, f"--device={DEVICE}") as server, grpc.insecure_channel(server.target) as channel:
            head = Head(channel, optimizer_message(kind, arguments), weights, bias)
            worst = 0.0
            for step in range(1, STEPS + 1):
                rate = learning_rate * (1 - step / (2 * STEPS))  # a schedule
                marks = head.add(rng.normal(0, 1, (TOKENS, WIDTH)).astype(np.float32), rng.integers(0, VOCAB, TOKENS))
                gradient = head.gradient(marks)
                answer = head.step(marks, rate, scale)
                self.assertEqual(answer.step, step)
                self.assertFalse(answer.skipped)
                self.assertLess(abs(answer.norm / (abs(scale) * np.linalg.norm(gradient[0].astype(np.float64))) - 1), 1e-6)
                for group in optimizer.param_groups:
                    group["lr"] = rate
                for parameter, values in zip(parameters, gradient):
                    parameter.grad = torch.from_numpy(values * np.float32(scale))
                optimizer.step()
                for got, wanted in zip(head.weights(), parameters):
                    worst = max(worst, relative_difference(got, wanted.detach().numpy()))
            moved = relative_difference(parameters[0].detach().numpy(), weights)
            self.assertGreater(moved, 0.01, "the steps have to be of some size")
            self.assertEqual(server.stop(), 0, server.log())
        return worst, moved

    def test_a_hundred_steps_end_where_torchs_end(self):
        for name, case in CASES.items():
            with self.subTest(name):
                worst, moved = self.run_case(*case)
                print(f"{name}: at most {worst:.1e} apart in {STEPS} steps, which moved the weights by {moved:.2f} "
                      f"(torch {torch.__version__}, {DEVICE})", flush=True)
                self.assertLessEqual(worst, MOST)


if __name__ == "__main__":
    unittest.main()
