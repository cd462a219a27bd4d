#!/usr/bin/python3
"""Ends and signals of the server as a process: a drain waits for calls and for nobody else who is connected; SIGHUP
reads files again and ends nothing, whenever it comes.

usage: signals_test.py LOSSD

Drains may take ten minutes here: one that waited for a stranger would run into the limit of LossdServer.wait().
"""
import contextlib
import os
import queue
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import unittest

import grpc
from certificates import Authority
from lossd.v1 import head_pb2, head_pb2_grpc, loss_pb2_grpc
from lossd_server import LossdServer
from programs import Program
from standard_services import NOT_SERVING, SERVING, health, watch_health
from waiting import PATIENCE, wait_until

from streaming import F32, create_head, in_flight, open_session, start_request

BINARY = sys.argv.pop(1)
FLAGS = ("--device=cpu", "--workspace_bytes=16M", "--drain_timeout=10m")


def connection_to(server):
    host, port = server.target.split(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE)


class Strangers(unittest.TestCase):
    def test_a_connection_that_says_nothing_is_not_waited_for(self):
        with LossdServer(BINARY, *FLAGS) as server, connection_to(server) as stranger:
            with grpc.insecure_channel(server.target) as channel:
                self.assertEqual(health(channel), SERVING)  # the stranger, who came first, was taken
            self.assertEqual(server.stop(), 0)
            with contextlib.suppress(ConnectionError):
                while stranger.recv(4096):  # settings, farewell; then the server's end, not ours
                    pass

    def test_a_handshake_that_is_never_finished_is_not_waited_for(self):
        with tempfile.TemporaryDirectory() as folder:
            authority = Authority(folder, 30)
            authority.issue("server")
            with LossdServer(BINARY, *FLAGS, *authority.server_flags()) as server, connection_to(server) as silent, \
                    connection_to(server) as half:
                half.sendall(b"\x16\x03\x01\x02\x00\x01")
                context = ssl.create_default_context(cafile=authority.certificate("ca"))
                with context.wrap_socket(connection_to(server), server_hostname="localhost"):
                    self.assertEqual(server.stop(), 0)
                for stranger in (silent, half):
                    with contextlib.suppress(ConnectionError):
                        while stranger.recv(4096):
                            pass

    def test_a_channel_that_idles_is_not_waited_for(self):
        with LossdServer(BINARY, *FLAGS) as server, grpc.insecure_channel(server.target) as channel:
            self.assertEqual(health(channel), SERVING)
            self.assertEqual(server.stop(), 0)

    def test_who_watches_health_is_told_and_not_waited_for(self):
        with LossdServer(BINARY, *FLAGS) as server, contextlib.ExitStack() as stack:
            watches = []
            for _ in range(4):
                options = [("grpc.use_local_subchannel_pool", 1)]
                channel = stack.enter_context(grpc.insecure_channel(server.target, options=options))
                watches += [watch_health(channel) for _ in range(50)]
            for watch in watches:
                self.assertEqual(next(watch).status, SERVING)
            self.assertEqual(server.stop(), 0)
            for watch in watches:
                self.assertEqual(next(watch).status, NOT_SERVING)
                with self.assertRaises(grpc.RpcError) as ended:
                    next(watch)
                self.assertIn(ended.exception.code(), (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED))

    def test_a_call_that_was_accepted_is_waited_for(self):
        with LossdServer(BINARY, *FLAGS) as server, connection_to(server), \
                grpc.insecure_channel(server.target) as channel:
            create_head(channel, "h", 4, 2)
            heads = head_pb2_grpc.HeadServiceStub(channel)
            write = heads.BeginWrite(head_pb2.BeginWriteRequest(head="h", write_key="k")).write_id
            rows = queue.Queue()
            writing = heads.WriteWeights.future(iter(rows.get, None))
            first = head_pb2.WriteWeightsRequest(head="h", write_id=write, rows=2, dtype=F32, weights=bytes(16))
            second = head_pb2.WriteWeightsRequest(head="h", write_id=write, first_row=2, rows=2, dtype=F32, weights=bytes(16))
            rows.put(first)
            wait_until(lambda: in_flight(server.metrics_url, "HeadService/WriteWeights") == 1)
            watch = watch_health(channel)
            self.assertEqual(next(watch).status, SERVING)
            server.signal(signal.SIGTERM)
            self.assertEqual(next(watch).status, NOT_SERVING)
            rows.put(second)
            rows.put(None)
            self.assertEqual(writing.result(PATIENCE).rows_received, 4)
            self.assertEqual(server.wait(), 0)


class HangUp(unittest.TestCase):
    def test_it_ends_nothing_while_the_server_serves_or_drains(self):
        with LossdServer(BINARY, *FLAGS) as server, grpc.insecure_channel(server.target) as channel:
            create_head(channel, "h", 4, 2)
            session = open_session(channel, "h", "k")
            for times in (1, 2):
                server.signal(signal.SIGHUP)
                server.await_log("told to read files again tls=false tokens=false", times)
            heads = head_pb2_grpc.HeadServiceStub(channel)
            write = heads.BeginWrite(head_pb2.BeginWriteRequest(head="h", write_key="k")).write_id
            rows = queue.Queue()
            writing = heads.WriteWeights.future(iter(rows.get, None))
            rows.put(head_pb2.WriteWeightsRequest(head="h", write_id=write, rows=4, dtype=F32, weights=bytes(32)))
            requests = queue.Queue()
            requests.put(start_request(session))
            stream = loss_pb2_grpc.LossServiceStub(channel).Compute(iter(requests.get, None))
            next(stream)
            wait_until(lambda: in_flight(server.metrics_url, "HeadService/WriteWeights") == 1)
            server.signal(signal.SIGTERM)
            with self.assertRaises(grpc.RpcError):  # the drain has begun
                next(stream)
            for _ in range(10):
                server.signal(signal.SIGHUP)
            rows.put(None)
            requests.put(None)
            self.assertEqual(writing.result(PATIENCE).rows_received, 4)
            self.assertEqual(server.wait(), 0)

    def test_it_ends_nothing_before_the_server_serves(self):
        with tempfile.TemporaryDirectory() as folder:
            # A start that waits for its configuration: nothing has been set up yet.
            config = os.path.join(folder, "config.json")
            os.mkfifo(config)
            server = LossdServer(BINARY, *FLAGS, f"--config={config}", folder=folder)
            self.addCleanup(server.close)
            server.begin()
            with open(config, "w", encoding="utf-8") as file:  # which it has opened, too
                server.signal(signal.SIGHUP)
                file.write("{}")

            def serves():
                server.signal(signal.SIGHUP)
                return server.port_file().exists()

            server.wait_until(serves, "a server that is told to read files again, and serves", every=0)
            self.assertEqual(server.stop(), 0)

    def test_many_of_it_do_not_hide_the_signal_to_end(self):
        with LossdServer(BINARY, *FLAGS) as server:
            server.signal(signal.SIGTERM)

            def ended():
                server.signal(signal.SIGHUP)
                return not server.running()

            wait_until(ended, "the end of the server", every=0)
            self.assertEqual(server.wait(), 0)

    def test_nohup_does_not_keep_it_from_being_heard(self):
        with tempfile.NamedTemporaryFile() as log, \
                Program("nohup", BINARY, *FLAGS, "--listen=127.0.0.1:0", "--metrics_listen=", log=log.name,
                        stdin=subprocess.DEVNULL) as server:
            server.await_log("serving")
            server.signal(signal.SIGHUP)
            server.await_log("told to read files again")
            self.assertEqual(server.stop(), 0)


if __name__ == "__main__":
    unittest.main()
