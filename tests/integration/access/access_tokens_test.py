#!/usr/bin/python3
"""The file of tokens: what the server does not start with, and what becomes of calls and streams when it changes."""
import os
import queue
import signal
import sys
import tempfile
import time
import unittest

import grpc
import numpy as np
from lossd.v1 import loss_pb2_grpc
from lossd_server import LossdServer
from programs import run
from waiting import wait_until

from access_support import TOKENS, Certificates, bearer, call, with_token, write_tokens
from streaming import chunk_request, create_head, open_session, start_request

BINARY = sys.argv.pop(1)
STATUS = "/lossd.v1.StatusService/GetStatus"
FAILING = 'lossd_reload_failing{files="%s"}'
SECOND = "second-token-0123456789abcdef"


class Start(unittest.TestCase):
    def refusal(self, text):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "tokens")
            if text is not None:
                with open(path, "w", encoding="utf-8") as file:
                    file.write(text)
            done = run(BINARY, "--listen=127.0.0.1:0", "--metrics_listen=", f"--tokens={path}")
            self.assertEqual(done.returncode, 2, text)
            self.assertIn("--tokens: ", done.stderr)
            self.assertIn(path, done.stderr)
            return done.stderr

    def test_a_file_that_is_no_good_is_refused_by_its_line_and_no_token_is_told(self):
        secret = "s3cr3t-s3cr3t-s3cr3t"
        for text, words in [(f"trainer {secret}\n{secret}\n", ("line 2", "1 words")),
                            (f"# comment\n\n{secret} trainer\n", ("line 3", "read-only, trainer, admin")),
                            (f"root {secret}\n", ("line 1", "role")),
                            (f"trainer {secret[:15]}\n", ("line 1", "15 characters", "openssl rand")),
                            (f"trainer {secret}{{}}\n", ("line 1", "letters")),
                            (f"trainer {secret} name more\n", ("line 1", "4 words")),
                            (f"trainer {secret}\nadmin {secret}\n", ("line 2", "line 1")),
                            ("# nothing\n", ("no token",)), ("", ("no token",)), (None, ("cannot read",))]:
            error = self.refusal(text)
            for word in words:
                self.assertIn(word, error)
            self.assertNotIn(secret[:15], error)

    def test_a_file_that_others_can_read_is_warned_of(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "tokens")
            write_tokens(path, TOKENS.items())
            for mode, warned in ((0o600, False), (0o640, True), (0o604, True)):
                os.chmod(path, mode)
                with LossdServer(BINARY, "--device=cpu", f"--tokens={path}") as server:
                    server.await_log("tokens are asked for")
                    server.stop()
                    self.assertEqual("chmod go-r" in server.log(), warned, oct(mode))


class Rotation(unittest.TestCase):
    def setUp(self):
        self.path = os.path.join(self.enterContext(tempfile.TemporaryDirectory()), "tokens")
        write_tokens(self.path, TOKENS.items())
        self.server = self.enterContext(LossdServer(BINARY, "--device=cpu", "--log_level=debug", f"--tokens={self.path}"))
        self.channel = self.enterContext(grpc.insecure_channel(self.server.target))

    def code(self, token):
        return call(self.channel, STATUS, bearer(token))[0]

    def reloaded(self, times=1):
        self.server.await_log("reloaded the tokens", times)

    def open_stream(self, token):
        """(requests, answers) of a Compute stream that has begun."""
        create_head(with_token(self.channel, TOKENS["trainer"]), "h", 16, 4)
        channel = with_token(self.channel, token)
        session = open_session(channel, "h", token)
        requests = queue.Queue()
        requests.put(start_request(session))
        stream = loss_pb2_grpc.LossServiceStub(channel).Compute(iter(requests.get, None))
        self.addCleanup(requests.put, None)
        self.assertTrue(next(stream).HasField("ready"))
        return session, requests, stream

    def end_of(self, stream):
        with self.assertRaises(grpc.RpcError) as ended:
            for _ in stream:
                pass
        return ended.exception.code()

    def test_a_new_token_is_let_in_and_a_removed_one_is_not(self):
        self.assertEqual(self.code(SECOND), grpc.StatusCode.UNAUTHENTICATED)
        write_tokens(self.path, [*TOKENS.items(), ("read-only", SECOND)])
        wait_until(lambda: self.code(SECOND) == grpc.StatusCode.OK)
        self.assertEqual(self.code(TOKENS["trainer"]), grpc.StatusCode.OK)
        write_tokens(self.path, [("read-only", SECOND)])
        wait_until(lambda: self.code(TOKENS["trainer"]) == grpc.StatusCode.UNAUTHENTICATED)
        self.assertEqual(self.code(SECOND), grpc.StatusCode.OK)

    def test_sighup_reads_the_file_again_and_says_what_has_changed(self):
        self.server.await_log("tokens are asked for")
        self.server.signal(signal.SIGHUP)
        self.server.await_log("told to read files again tls=false tokens=true")
        self.reloaded()
        self.assertIn("reloaded the tokens count=3 added=0 removed=0 other_role=0", self.server.log())
        write_tokens(self.path, [("admin", TOKENS["admin"]), ("admin", TOKENS["trainer"]), ("trainer", SECOND)])
        self.server.signal(signal.SIGHUP)  # whether or not the second's look came first
        self.server.await_log("reloaded the tokens count=3 added=1 removed=1 other_role=1")
        self.assertEqual(self.code(SECOND), grpc.StatusCode.OK)
        with open(self.path, "w", encoding="utf-8") as file:
            file.write("nonsense")
        for times in (1, 2):  # each time it is asked for
            self.server.signal(signal.SIGHUP)
            self.server.await_log("told to read files again", 2 + times)
            self.server.await_log("those from before go on", times)
        self.assertEqual(self.code(SECOND), grpc.StatusCode.OK)

    def test_streams_of_a_removed_token_end_and_others_go_on(self):
        write_tokens(self.path, [*TOKENS.items(), ("trainer", SECOND)])
        self.reloaded()
        _, _, removed = self.open_stream(TOKENS["trainer"])
        session, requests, stays = self.open_stream(SECOND)
        write_tokens(self.path, [("trainer", SECOND)])
        self.assertEqual(self.end_of(removed), grpc.StatusCode.UNAUTHENTICATED)
        requests.put(chunk_request(session, 1, np.array([1]), np.ones((1, 4), np.float32)))
        self.assertTrue(any(True for _ in stays), "the other stream answers")

    def test_refusals_and_reloads_are_counted(self):
        denied = 'lossd_access_denied_total{reason="%s"}'
        reloads = 'lossd_token_reloads_total{outcome="%s"}'
        call(self.channel, STATUS)
        self.code(SECOND)
        call(self.channel, "/lossd.v1.StatusService/Drain", bearer(TOKENS["trainer"]))
        call(self.channel, "/lossd.v1.StatusService/Drain", bearer(TOKENS["read-only"]))
        self.assertEqual([self.server.metric(denied % reason) for reason in ("no_token", "unknown_token", "role")],
                         [1, 1, 2])
        refused = 'lossd_rpcs_total{method="StatusService/Drain",code="PERMISSION_DENIED"}'
        self.assertEqual(self.server.metric(refused), 2)
        write_tokens(self.path, [("read-only", SECOND)])
        wait_until(lambda: self.server.metric(reloads % "ok") == 1)
        write_tokens(self.path, [])
        wait_until(lambda: self.server.metric(reloads % "failed") == 1)
        self.assertEqual(self.server.metric(reloads % "ok"), 1)
        wait_until(lambda: self.server.metric(FAILING % "tokens") == 1)
        self.assertEqual(self.server.metric(FAILING % "tls"), 0)
        write_tokens(self.path, [("read-only", SECOND)])
        wait_until(lambda: self.server.metric(FAILING % "tokens") == 0)

    def test_streams_of_a_token_that_became_less_end(self):
        _, _, stream = self.open_stream(TOKENS["trainer"])
        write_tokens(self.path, [("read-only", TOKENS["trainer"])])
        self.assertEqual(self.end_of(stream), grpc.StatusCode.PERMISSION_DENIED)

    def test_a_file_that_became_no_good_leaves_the_tokens_as_they_are(self):
        _, _, stream = self.open_stream(TOKENS["trainer"])
        with open(self.path, "w", encoding="utf-8") as file:
            file.write(f"{SECOND} admin\n")
        self.server.await_log("those from before go on")
        self.assertEqual(self.code(TOKENS["trainer"]), grpc.StatusCode.OK)
        os.remove(self.path)
        self.server.await_log("those from before go on", 2)
        self.assertEqual(self.code(TOKENS["trainer"]), grpc.StatusCode.OK)
        self.assertEqual(self.code(SECOND), grpc.StatusCode.UNAUTHENTICATED)
        self.assertTrue(stream.is_active())
        write_tokens(self.path, [("read-only", SECOND)])
        wait_until(lambda: self.code(SECOND) == grpc.StatusCode.OK)
        self.assertEqual(self.server.stop(), 0)
        for token in (SECOND, *TOKENS.values()):
            self.assertNotIn(token, self.server.log())


class Tls(unittest.TestCase):
    def test_the_certificates_end_and_its_changes_are_counted(self):
        expiry = "lossd_tls_certificate_expiry_timestamp_seconds"
        reloads = 'lossd_tls_reloads_total{outcome="%s"}'
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as other:
            certificates = Certificates(folder)
            with LossdServer(BINARY, "--device=cpu", *certificates.server_flags()) as server:
                wait_until(lambda: server.metric(expiry) > time.time())
                first = server.metric(expiry)
                self.assertLess(first, time.time() + 31 * 86400)
                renewed = Certificates(other, days=60)
                os.replace(renewed.path("server.pem"), certificates.path("server.pem"))
                wait_until(lambda: server.metric(reloads % "failed") == 1)  # it is of another key
                wait_until(lambda: server.metric(FAILING % "tls") == 1)
                os.replace(renewed.path("server.key"), certificates.path("server.key"))
                wait_until(lambda: server.metric(reloads % "ok") == 1)
                wait_until(lambda: server.metric(FAILING % "tls") == 0)
                self.assertGreater(server.metric(expiry), first)
                renewed.expire("server")
                os.replace(renewed.path("server.pem"), certificates.path("server.pem"))
                wait_until(lambda: server.metric(reloads % "failed") == 2)
                wait_until(lambda: server.metric(expiry) <= time.time())
        with LossdServer(BINARY, "--device=cpu") as server:
            self.assertEqual(server.metric(expiry), 0)


if __name__ == "__main__":
    unittest.main()
