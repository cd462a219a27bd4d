#!/usr/bin/python3
"""Where the server listens: plain text beyond loopback, the port of health, and the limits of connections."""
import os
import queue
import sys
import tempfile
import unittest

import grpc
from lossd.v1 import loss_pb2_grpc, status_pb2, status_pb2_grpc
from lossd_server import LossdServer
from programs import run
from standard_services import NOT_SERVING, SERVING, health

from access_support import REFLECTION, TOKENS, Certificates, call, methods, write_tokens
from streaming import create_head, open_session, start_request

BINARY = sys.argv.pop(1)


def refusal(*flags):
    done = run(BINARY, "--metrics_listen=", *flags)
    return done.returncode, done.stderr


def status(channel):
    return status_pb2_grpc.StatusServiceStub(channel).GetStatus(status_pb2.GetStatusRequest())


def own_channel(server):
    """On a connection that no other channel has."""
    return grpc.insecure_channel(server.target, [("grpc.use_local_subchannel_pool", 1)])


class PlainText(unittest.TestCase):
    def test_beyond_loopback_it_is_refused_with_the_ways_out(self):
        for listen in ("0.0.0.0:0", "[::]:0", "127.0.0.1:0,0.0.0.0:0", "127.example.com:0"):
            code, error = refusal(f"--listen={listen}")
            self.assertEqual(code, 2, listen)
            for word in (listen.split(",")[-1], "--tls_certificate", "127.0.0.1", "unix:PATH", "--insecure"):
                self.assertIn(word, error)

    def test_it_can_be_said_aloud(self):
        with LossdServer(BINARY, "--device=cpu", "--listen=0.0.0.0:0", "--insecure") as server:
            with grpc.insecure_channel(server.target) as channel:
                self.assertTrue(status(channel).version)
            self.assertEqual(server.stop(), 0)
            self.assertIn("listening beyond loopback without encryption or authentication", server.log())

    def test_the_configuration_file_can_say_it_too(self):
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            file.write('{"listen": "0.0.0.0:0", "insecure": true, "device": "cpu"}')
            file.flush()
            with LossdServer(BINARY, f"--config={file.name}") as server:  # whose --listen is on loopback
                with grpc.insecure_channel(server.target) as channel:
                    self.assertTrue(status(channel).version)

    def test_tokens_never_go_beyond_loopback_in_it(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "tokens")
            write_tokens(path, TOKENS.items())
            code, error = refusal("--listen=0.0.0.0:0", "--insecure", f"--tokens={path}")
            self.assertEqual(code, 2)
            for word in ("--tokens", "could read the tokens", "--tls_certificate", "--insecure does not"):
                self.assertIn(word, error)

    def test_tokens_in_it_need_an_address_that_grpc_takes_for_local(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "tokens")
            write_tokens(path, TOKENS.items())
            for flags in ([], ["--insecure"]):
                code, error = refusal("--listen=127.0.0.1:0,127.0.0.2:0", f"--tokens={path}", *flags)
                self.assertEqual(code, 2)
                for word in ("127.0.0.2:0", "--tokens", "[::1]", "unix:PATH", "--tls_certificate"):
                    self.assertIn(word, error)

    def test_metrics_and_health_may_go_beyond_loopback(self):
        with LossdServer(BINARY, "--device=cpu", "--metrics_listen=0.0.0.0:0", "--health_listen=0.0.0.0:0") as server:
            with grpc.insecure_channel(server.target) as channel:
                self.assertTrue(status(channel).version)


class Health(unittest.TestCase):
    def test_a_probe_needs_neither_certificate_nor_token_and_reaches_nothing_else(self):
        with tempfile.TemporaryDirectory() as folder:
            certificates = Certificates(folder)
            tokens = os.path.join(folder, "tokens")
            write_tokens(tokens, TOKENS.items())
            with LossdServer(BINARY, "--device=cpu", *certificates.server_flags(), f"--tokens={tokens}",
                             f"--tls_client_ca={certificates.path('ca.pem')}",
                             "--health_listen=127.0.0.1:0") as server:
                with grpc.insecure_channel(server.health_target) as probe:
                    self.assertEqual(health(probe), SERVING)
                    self.assertEqual(health(probe, "liveness"), SERVING)
                    for path in (*methods(), REFLECTION):
                        self.assertEqual(call(probe, path)[0], grpc.StatusCode.UNIMPLEMENTED, path)
                self.assertEqual(server.stop(), 0)

    def test_a_server_that_drains_is_alive_and_not_ready(self):
        with LossdServer(BINARY, "--device=cpu", "--health_listen=127.0.0.1:0", "--drain_timeout=1h") as server:
            with grpc.insecure_channel(server.target) as channel, grpc.insecure_channel(server.health_target) as probe:
                create_head(channel, "h", 64, 8)
                # A call that the server waits for: weights that their sender does not end.
                unended = queue.Queue()
                stream = channel.stream_unary("/lossd.v1.HeadService/WriteWeights")
                future = stream.future(iter(unended.get, None))
                self.assertEqual(health(probe), SERVING)
                server.signal(15)
                server.wait_until(lambda: health(probe) == NOT_SERVING, "the probe is told that the server drains")
                self.assertEqual(health(probe, "liveness"), SERVING)
                unended.put(None)
                future.exception()
            self.assertEqual(server.wait(), 0)

    def test_an_address_that_cannot_be_one_is_refused(self):
        code, error = refusal("--listen=127.0.0.1:0", "--health_listen=localhost")
        self.assertEqual(code, 2)
        self.assertIn("--health_listen is 'localhost'", error)
        with LossdServer(BINARY, "--device=cpu", "--health_listen=127.0.0.1:0") as server:
            code, error = refusal("--listen=127.0.0.1:0", f"--health_listen={server.health_target}")
            self.assertEqual(code, 1)
            self.assertIn("--health_listen", error)


class Limits(unittest.TestCase):
    def test_headers_above_the_limit_are_refused_and_others_are_served(self):
        for flags, fits, too_much in (([], 7000, 9000), (["--max_metadata_bytes=32768"], 31000, 34000)):
            with LossdServer(BINARY, "--device=cpu", *flags) as server, own_channel(server) as other:
                path = "/lossd.v1.StatusService/GetStatus"
                with own_channel(server) as channel:
                    self.assertEqual(call(channel, path, [("x", "y" * fits)])[0], grpc.StatusCode.OK)
                    refused = call(channel, path, [("x", "y" * too_much)])
                    # gRPC closes the connection behind its answer: a sender still writing may see that, as a broken
                    # pipe, a reset or an end, before it reads why.
                    if refused[0] != grpc.StatusCode.UNAVAILABLE:
                        self.assertEqual(refused[0], grpc.StatusCode.RESOURCE_EXHAUSTED, refused)
                        self.assertIn("metadata", refused[1])
                self.assertEqual(call(other, path)[0], grpc.StatusCode.OK)

    def test_limits_that_cannot_be_ones_are_refused(self):
        for flag, words in (("--max_metadata_bytes=10", ("--max_metadata_bytes", "10", "1024")),
                            ("--max_connection_age=1ms", ("--max_connection_age", "1ms", "1s")),
                            ("--max_connection_age_grace=0", ("--max_connection_age_grace", "0", "1s"))):
            code, error = refusal("--listen=127.0.0.1:0", flag)
            self.assertEqual(code, 2)
            for word in words:
                self.assertIn(word, error)

    def test_a_stream_on_a_connection_that_is_too_old_is_cut_off_and_calls_go_on_over_another(self):
        with LossdServer(BINARY, "--device=cpu", "--max_connection_age=1s", "--max_connection_age_grace=1s") as server:
            with grpc.insecure_channel(server.target) as channel:
                create_head(channel, "h", 64, 8)
                requests = queue.Queue()
                requests.put(start_request(open_session(channel, "h", "k")))
                stream = loss_pb2_grpc.LossServiceStub(channel).Compute(iter(requests.get, None))
                with self.assertRaises(grpc.RpcError) as ended:
                    for _ in stream:
                        pass
                self.assertEqual(ended.exception.code(), grpc.StatusCode.UNAVAILABLE)
                requests.put(None)
                self.assertEqual(status(channel).heads[0].open_sessions, 1, "the session lives on")

    def test_a_connection_has_256_calls_at_a_time_and_further_ones_wait(self):
        with LossdServer(BINARY, "--device=cpu") as server, grpc.insecure_channel(server.target) as channel:
            losses = loss_pb2_grpc.LossServiceStub(channel)
            create_head(channel, "h", 64, 8)
            start = start_request(open_session(channel, "h", "k"))
            requests = [queue.Queue() for _ in range(257)]
            streams = [losses.Compute(iter(queued.get, None)) for queued in requests]
            with own_channel(server) as other:
                server.wait_until(lambda: server.metric("lossd_live_streams") >= 256, "256 streams")
                self.assertTrue(status(other).version, "another connection is not held up")
            self.assertEqual(server.metric("lossd_live_streams"), 256)
            requests[0].put(None)
            list(streams[0])
            requests[256].put(start)
            self.assertTrue(next(streams[256]).HasField("ready"))
            for queued in requests:
                queued.put(None)


if __name__ == "__main__":
    unittest.main()
