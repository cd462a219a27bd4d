#!/usr/bin/python3
"""lossd's own client at a group of ranks: where it opens its lanes, and what it does when it cannot.

usage: library_test.py LOSSD
"""
import contextlib
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import unittest

import lossd
import numpy as np
from lossd_server import LossdServer, free_ports

BINARY = sys.argv.pop(1)
FLAGS = ("--workspace_bytes=16M", "--rank_timeout=10m", "--lanes_at_ranks=true")
VOCAB, HIDDEN, TOKENS = 64, 32, 600


def group(*flags, devices="cpu,cpu,cpu"):
    return LossdServer(BINARY, f"--devices={devices}", *FLAGS, *flags)


def batch(seed):
    """Whole numbers, of which every sum is exact."""
    rng = np.random.default_rng(seed)
    return rng.integers(-2, 3, (TOKENS, HIDDEN)).astype(np.float32), rng.integers(0, VOCAB, TOKENS)


class Forwarder:
    """Another address of loopback that has the server's first port, and none of the others."""

    def __init__(self, port):
        self._to, self._open = port, []
        self._listener = socket.create_server(("127.0.0.9", port))
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._to))
                self._open += [client, server]
                for source, sink in ((client, server), (server, client)):
                    threading.Thread(target=self._pass, args=(source, sink), daemon=True).start()

    @staticmethod
    def _pass(source, sink):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def close(self):
        for each in [self._listener, *self._open]:
            each.close()


class Library(unittest.TestCase):
    def head(self, client):
        head = client.create_head("h", VOCAB, HIDDEN, "float32")
        head.write_weights(np.random.default_rng(1).integers(-1, 2, (VOCAB, HIDDEN)).astype(np.float32))
        return head

    @staticmethod
    def open(head, **options):
        return head.open_session(lanes=4, chunk_bytes=16 * HIDDEN * 4, **options)

    @staticmethod
    def targets(session):
        return [place["target"] for place in session.lane_places()]

    def results(self, head, session):
        hidden, labels = batch(3)
        result = session.compute(hidden, labels)
        gradient = np.empty((VOCAB, HIDDEN), np.float32)
        tokens = head.flush(gradient).window_tokens
        return result.losses, result.dx, gradient, tokens

    def test_lanes_go_to_every_rank_and_give_the_same(self):
        with group() as server, lossd.connect(server.target) as client:
            head = self.head(client)
            spread, together = self.open(head, client_key="spread"), self.open(head, client_key="together", spread_lanes=False)
            ours, expected = self.results(head, spread), self.results(head, together)
            targets = self.targets(spread)
            self.assertEqual((targets[0], targets[3]), (server.target, server.target))
            self.assertEqual(len(set(targets)), 3, targets)
            self.assertEqual({place["why_not_elsewhere"] for place in spread.lane_places()}, {""})
            self.assertEqual(set(self.targets(together)), {server.target})
            np.testing.assert_array_equal(ours[0], expected[0])
            np.testing.assert_array_equal(ours[1], expected[1])
            np.testing.assert_allclose(ours[2], expected[2], rtol=1e-4, atol=1e-5)  # lanes are added as they come
            self.assertEqual(ours[3], expected[3])
            self.assertEqual(spread.reconnects, 0)
            self.assertEqual(server.stop(), 0, server.log())

    def test_ranks_that_cannot_be_reached_leave_their_lanes_to_the_leader(self):
        port = free_ports(3)
        forwarder = Forwarder(port)
        self.addCleanup(forwarder.close)
        with group(f"--listen=127.0.0.1:{port}") as server, lossd.connect(f"127.0.0.9:{port}") as client:
            head = self.head(client)
            session = self.open(head)
            self.results(head, session)
            self.assertEqual(set(self.targets(session)), {f"127.0.0.9:{port}"})
            reasons = [place["why_not_elsewhere"] for place in session.lane_places()]
            self.assertEqual((reasons[0], reasons[3]), ("", ""))
            self.assertIn(f"127.0.0.9:{port + 1}", reasons[1])
            self.assertIn(f"127.0.0.9:{port + 2}", reasons[2])
            self.assertEqual(session.reconnects, 0)

    def test_deterministic_sessions_and_those_with_regions_are_at_the_leader(self):
        with group("--same_host_regions") as server, lossd.connect(server.target) as client:
            head = self.head(client)
            deterministic = self.open(head, deterministic=True)
            self.results(head, deterministic)
            self.assertEqual(set(self.targets(deterministic)), {server.target})
            session = self.open(head)
            expected = self.results(head, session)
            self.assertEqual(len(set(self.targets(session))), 3)
            region = client.create_region("system", TOKENS * HIDDEN * 4)
            shared = region.array((TOKENS, HIDDEN))
            hidden, labels = batch(3)
            shared[:] = hidden
            result = session.compute(shared, labels)
            self.assertEqual(set(self.targets(session)), {server.target})
            np.testing.assert_array_equal(result.losses, expected[0])
            np.testing.assert_array_equal(result.dx, expected[1])
            self.assertEqual(session.reconnects, 0)
            region.close()

    def test_a_session_comes_back_to_every_rank_after_a_drain_and_after_a_loss(self):
        """A drained group has the same window; in one that lost a rank, what was not saved is sent again."""
        port, folder = free_ports(3), self.enterContext(tempfile.TemporaryDirectory())
        flags = (f"--listen=127.0.0.1:{port}", f"--checkpoint_dir={folder}", "--restore")
        with contextlib.ExitStack() as opened:
            server = opened.enter_context(group(*flags))
            client = opened.enter_context(lossd.connect(f"127.0.0.1:{port}"))
            head = self.head(client)
            session = self.open(head)
            hidden, labels = batch(3)
            session.compute(hidden, labels)
            self.assertEqual(server.stop(), 0, server.log())
            server = opened.enter_context(group(*flags))
            session.compute(hidden, labels)
            self.assertEqual(len(set(self.targets(session))), 3)
            self.assertGreater(session.reconnects, 0)
            head.save_checkpoint("a")
            with open(f"/proc/{server.pid}/task/{server.pid}/children", encoding="ascii") as children:
                os.kill(int(children.read().split()[2]), signal.SIGKILL)
            while server.log().count(" serving version=") < 2:
                time.sleep(0.02)
            session = self.open(client.head("h"))
            session.compute(hidden, labels)
            self.assertEqual(len(set(self.targets(session))), 3)
            gradient = np.empty((VOCAB, HIDDEN), np.float32)
            self.assertEqual(client.head("h").flush(gradient).window_tokens, 3 * TOKENS)
            self.assertEqual(server.stop(), 0, server.log())


if __name__ == "__main__":
    unittest.main(verbosity=2)
