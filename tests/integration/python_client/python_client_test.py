#!/usr/bin/python3
"""A client made of nothing but stock grpcio and generated stubs gets the right numbers, and finds the standard services.

usage: python_client_test.py LOSSD REPOSITORY   with the generated stubs and tests/support in PYTHONPATH
"""
import os
import re
import sys
import unittest
import urllib.request

import grpc
import numpy as np

from lossd_server import LossdServer
from programs import run
import standard_services

LOSSD, REPOSITORY = sys.argv.pop(1), sys.argv.pop(1)
sys.path.insert(0, os.path.join(REPOSITORY, "client/examples/python"))
from lossd.v1 import loss_pb2  # noqa: E402
from one_chunk import one_chunk  # noqa: E402  (the example is the client under test)

IGNORE = -100


def reference(weights, hidden, labels, scale):
    """Losses, dX and dW in float64, straight from the definition."""
    w, x = weights.astype(np.float64), hidden.astype(np.float64)
    z = x @ w.T
    top = z.max(axis=1, keepdims=True)
    log_sum_exp = top[:, 0] + np.log(np.exp(z - top).sum(axis=1))
    rows = np.arange(len(labels))
    valid = labels != IGNORE
    target = np.where(valid, labels, 0)
    losses = np.where(valid, log_sum_exp - z[rows, target], 0.0)
    g = np.exp(z - log_sum_exp[:, None])
    g[rows, target] -= 1.0
    g *= np.where(valid, scale, 0.0)[:, None]
    return losses, g @ w, g.T @ x


def reference_with_options(weights, hidden, labels, scale, smoothing, z_scale, softcap, token_weights):
    """The same with label smoothing, a z-loss, a softcap and a weight for each token."""
    w, x = weights.astype(np.float64), hidden.astype(np.float64)
    s = softcap * np.tanh(x @ w.T / softcap)
    log_sum_exp = np.log(np.exp(s).sum(axis=1))
    rows, vocab = np.arange(len(labels)), w.shape[0]
    valid = labels != IGNORE
    target = np.where(valid, labels, 0)
    a = np.where(valid, token_weights, 0.0)
    smooth = log_sum_exp - s.mean(axis=1)
    losses = a * ((1 - smoothing) * (log_sum_exp - s[rows, target]) + smoothing * smooth + z_scale * log_sum_exp**2)
    g = np.exp(s - log_sum_exp[:, None]) * (1 + 2 * z_scale * log_sum_exp)[:, None] - smoothing / vocab
    g[rows, target] -= 1.0 - smoothing
    g *= (a * scale)[:, None] * (1 - (s / softcap) ** 2)
    return losses, g @ w, g.T @ x


def relative_error(got, wanted):
    return np.linalg.norm(got.astype(np.float64) - wanted) / np.linalg.norm(wanted)


def samples(text):
    """{'name{labels}': value} of a Prometheus exposition."""
    found = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            found[name] = float(value)
    return found


def scrape(server):
    with urllib.request.urlopen(server.metrics_url) as answer:
        return answer.read().decode()


class OneChunk(unittest.TestCase):
    def test_loss_dx_and_dw_equal_float64_arithmetic(self):
        rng = np.random.default_rng(7)
        tokens, vocab, width, scale = 150, 1031, 72, np.float32(1 / 128)
        weights = rng.normal(0, 0.3, (vocab, width)).astype(np.float32)
        hidden = rng.normal(0, 1, (tokens, width)).astype(np.float32)
        labels = rng.integers(0, vocab, tokens)
        labels[[3, 77, tokens - 1]] = IGNORE
        with LossdServer(LOSSD, "--device=cpu") as server:
            with grpc.insecure_channel(server.target) as channel:
                for repeat in range(2):  # the second time on a server that has been used
                    losses, dx, dw = one_chunk(channel, weights, hidden, labels, scale)
                    wanted_losses, wanted_dx, wanted_dw = reference(weights, hidden, labels, np.float64(scale))
                    with self.subTest(repeat=repeat):
                        np.testing.assert_allclose(losses, wanted_losses, rtol=2e-6, atol=2e-6)
                        self.assertLess(relative_error(dx, wanted_dx), 2e-6)
                        self.assertLess(relative_error(dw, wanted_dw), 2e-6)
                        self.assertTrue((dx[labels == IGNORE] == 0).all())
                        self.assertTrue((losses[labels == IGNORE] == 0).all())
            self.assertEqual(server.stop(), 0, server.log())


class LossOptions(unittest.TestCase):
    def test_loss_dx_and_dw_with_options_equal_float64_arithmetic(self):
        rng = np.random.default_rng(11)
        tokens, vocab, width, scale = 40, 131, 24, 1 / 32
        weights = rng.normal(0, 0.3, (vocab, width)).astype(np.float32)
        hidden = rng.normal(0, 1, (tokens, width)).astype(np.float32)
        labels = rng.integers(0, vocab, tokens)
        labels[[3, 17]] = IGNORE
        token_weights = rng.uniform(0, 2, tokens).astype(np.float32)
        smoothing, z_scale, softcap = 0.125, 2.0**-10, 4.0
        options = loss_pb2.LossOptions(label_smoothing=smoothing, lse_square_scale=z_scale, softcap=softcap)
        inputs = loss_pb2.TokenInputs(weights=token_weights.tobytes())
        with LossdServer(LOSSD, "--device=cpu") as server, grpc.insecure_channel(server.target) as channel:
            losses, dx, dw = one_chunk(channel, weights, hidden, labels, scale, options=options, token_inputs=inputs)
        wanted = reference_with_options(weights, hidden, labels, scale, smoothing, z_scale, softcap, token_weights)
        np.testing.assert_allclose(losses, wanted[0], rtol=2e-6, atol=2e-6)
        self.assertLess(relative_error(dx, wanted[1]), 2e-6)
        self.assertLess(relative_error(dw, wanted[2]), 2e-6)
        self.assertTrue((dx[labels == IGNORE] == 0).all())


class StandardServices(unittest.TestCase):
    def test_health_and_reflection(self):
        with LossdServer(LOSSD, "--device=cpu") as server, grpc.insecure_channel(server.target) as channel:
            self.assertEqual(standard_services.health(channel), standard_services.SERVING)
            listed = standard_services.services(channel)
            for service in ("HeadService", "LossService", "GradientService", "StatusService"):
                self.assertIn(f"lossd.v1.{service}", listed)
            self.assertIn("grpc.health.v1.Health", listed)


def operations_table(pattern):
    """First cells of the rows of docs/operations.md that match."""
    with open(os.path.join(REPOSITORY, "docs/operations.md"), encoding="utf-8") as file:
        return set(re.findall(rf"^\| `({pattern})` \|", file.read(), re.MULTILINE))


class Documentation(unittest.TestCase):
    def test_the_flags_are_those_of_the_help(self):
        text = run(LOSSD, "--help").stdout
        flags = set(re.findall(r"^ +(--\w+) \((?!internal: )", text, re.MULTILINE))
        self.assertTrue(flags)
        self.assertEqual(operations_table(r"--\w+"), flags)


class Metrics(unittest.TestCase):
    def test_counters_are_zero_before_use_and_keep_their_labels_after(self):
        rng = np.random.default_rng(3)
        with LossdServer(LOSSD, "--device=cpu") as server:
            before = samples(scrape(server))
            counters = [n for n in before if n.startswith("lossd_") and ("_total" in n or "_count" in n or "_sum" in n)]
            self.assertGreater(len(counters), 10)
            self.assertEqual({n: before[n] for n in counters if before[n] != 0}, {})
            with grpc.insecure_channel(server.target) as channel:
                one_chunk(channel, rng.normal(0, 1, (50, 8)).astype(np.float32),
                          rng.normal(0, 1, (9, 8)).astype(np.float32), rng.integers(0, 50, 9), 1.0)
            after = samples(scrape(server))
        self.assertEqual({n for n in after if n.startswith("lossd_") and n not in before and "_bucket" not in n}, set())
        self.assertTrue([n for n in counters if "chunks" in n and after[n] == 1], after)
        self.assertTrue([n for n in counters if "tokens" in n and after[n] == 9], after)


if __name__ == "__main__":
    unittest.main()
