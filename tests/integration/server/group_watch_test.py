#!/usr/bin/python3
"""What is seen of a group of devices from outside: memory, waiting and commands of each rank, and whether it is ready.

usage: group_watch_test.py LOSSD
"""
import concurrent.futures
import contextlib
import json
import re
import sys
import unittest
import urllib.request

import grpc
import numpy as np
from lossd.v1 import head_pb2, head_pb2_grpc, loss_pb2_grpc, status_pb2, status_pb2_grpc
from lossd_server import LossdServer
from standard_services import NOT_SERVING, SERVING, health
from waiting import wait_until

from stopped_thread import stopped_thread
from streaming import F32, chunk_request, create_head, open_session, start_request

BINARY = sys.argv.pop(1)
FLAGS = ("--workspace_bytes=16M", "--memory_limit_bytes=256M", "--drain_timeout=10m", "--rank_timeout=3s")
VOCAB, HIDDEN = 800, 16
WAITED = 2  # seconds, of those that wait for a rank that stands still


class Watch(unittest.TestCase):
    def start(self, devices, *flags):
        self.server = self.enterContext(LossdServer(BINARY, f"--devices={devices}", *FLAGS, *flags))
        self.channel = self.enterContext(grpc.insecure_channel(self.server.target))
        self.status = status_pb2_grpc.StatusServiceStub(self.channel)

    def pids(self):
        (ranks,) = re.findall(r"started the ranks of a group epoch=1 ranks=(\[.*\])", self.server.log())
        return [rank["pid"] for rank in json.loads(ranks)]

    def ranks(self):
        return self.status.GetStatus(status_pb2.GetStatusRequest()).ranks

    def await_idle(self):
        """Until every rank has told, from now on, that it is done with everything."""
        told = [rank.uptime_seconds for rank in self.ranks()]
        wait_until(lambda: all(rank.uptime_seconds > told[rank.rank] and not rank.command for rank in self.ranks()))

    def memory(self):
        return self.status.GetMemory(status_pb2.GetMemoryRequest())

    def page(self, path):
        with urllib.request.urlopen(self.server.metrics_url.replace("/metrics", path)) as response:
            return response.read().decode()

    def metric(self, series):
        return self.server.metric(series)

    def health(self):
        """What both addresses say, once they say the same."""
        with grpc.insecure_channel(self.server.health_target) as probe:
            said = wait_until(lambda: (said := health(self.channel)) == health(probe) and said, "both addresses say the same")
            self.assertEqual(health(probe, "liveness"), SERVING)
        return said

    def compute(self, tokens=64):
        session = open_session(self.channel, "h", "c")
        labels = np.arange(tokens, dtype=np.int64) % VOCAB
        chunk = chunk_request(session, 1, labels, np.ones((tokens, HIDDEN), np.float32))
        stream = loss_pb2_grpc.LossServiceStub(self.channel).Compute(iter([start_request(session), chunk]))
        return [answer for answer in stream if answer.HasField("result")]

    def read_weights(self):
        request = head_pb2.ReadWeightsRequest(head="h", dtype=F32)
        stub = head_pb2_grpc.HeadServiceStub(self.channel)
        return b"".join(piece.weights for piece in stub.ReadWeights(request))


class Memory(Watch):
    def test_every_rank_tells_what_it_has(self):
        self.start("cpu,cpu,cpu")
        create_head(self.channel, "h", VOCAB, HIDDEN)
        wait_until(lambda: all(rank.heads for rank in self.memory().ranks))
        memory = self.memory()
        self.assertEqual([rank.rank for rank in memory.ranks], [0, 1, 2])
        for rank in memory.ranks:
            items = {item.purpose: item.bytes for item in rank.heads[0].items}
            held = sum(items.values()) + sum(item.bytes for item in rank.shared)
            self.assertEqual((rank.limit_bytes, rank.reserved_bytes), (256 << 20, held))
            self.assertEqual(items["gradient"], items["weights"])  # fp32, both
            self.assertGreater(rank.process_resident_bytes, 0)
            self.assertGreater(rank.device_total_bytes, rank.device_free_bytes)
        rows = [{item.purpose: item.bytes for item in rank.heads[0].items}["weights"] for rank in memory.ranks]
        self.assertEqual(sum(rows), VOCAB * HIDDEN * 4)
        # Clients that know of no ranks see the leader's, and so do metrics and status.
        self.assertEqual((memory.limit_bytes, memory.reserved_bytes), (256 << 20, memory.ranks[0].reserved_bytes))
        self.assertEqual(list(memory.heads[0].items), list(memory.ranks[0].heads[0].items))
        for rank, of_rank in zip(memory.ranks, self.ranks(), strict=True):
            self.assertEqual(of_rank.memory_reserved_bytes, rank.reserved_bytes)
            self.assertEqual(self.metric(f'lossd_memory_free_bytes{{rank="{rank.rank}"}}'),
                             rank.limit_bytes - rank.reserved_bytes)
        head_pb2_grpc.HeadServiceStub(self.channel).DeleteHead(head_pb2.DeleteHeadRequest(name="h", discard_gradient=True))
        wait_until(lambda: not any(rank.heads for rank in self.memory().ranks))
        self.assertEqual(self.server.stop(), 0)

    def test_one_device_tells_of_no_ranks(self):
        with LossdServer(BINARY, "--device=cpu", *FLAGS[:-1]) as server, grpc.insecure_channel(server.target) as channel:
            status = status_pb2_grpc.StatusServiceStub(channel)
            self.assertEqual(list(status.GetMemory(status_pb2.GetMemoryRequest()).ranks), [])
            answer = status.GetStatus(status_pb2.GetStatusRequest())
            self.assertEqual((list(answer.ranks), answer.group_epoch), ([], 0))
            with urllib.request.urlopen(server.metrics_url) as response:
                self.assertNotRegex(response.read().decode(), "rank|group|exchange")


class Stuck(Watch):
    """A rank's heartbeats come, and its executor does not come on."""

    def test_the_server_is_not_ready_and_says_which_rank_and_at_what(self):
        self.start("cpu,cpu", "--health_listen=127.0.0.1:0", "--rank_timeout=2s")
        create_head(self.channel, "h", VOCAB, HIDDEN)
        weights = self.read_weights()
        self.await_idle()
        self.assertEqual(self.health(), SERVING)
        pids = self.pids()
        with contextlib.ExitStack() as stack:
            pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor())
            with stopped_thread(pids[1]):
                reading = pool.submit(self.read_weights)
                wait_until(lambda: self.health() == NOT_SERVING, every=0.2)
                wait_until(lambda: all(rank.stuck for rank in self.ranks()))
                leader, other = self.ranks()
                self.assertEqual((other.command, other.waits_at), ("ReadRows", ""))
                self.assertEqual((leader.command, leader.waits_at), ("ReadRows", "rows"))
                self.assertGreater(self.metric('lossd_rank_command_age_seconds{rank="1"}'), 0)
                self.assertIn("not ready: a rank is stuck", self.page("/"))
                self.assertIn(">stuck</span> ReadRows", self.page("/"))
                wait_until(lambda: re.search(r'do not come on .*"command":"ReadRows".*"rank":1', self.server.log()))
                self.assertFalse(reading.done())
            self.assertEqual(reading.result(), weights)
        wait_until(lambda: self.health() == SERVING)
        wait_until(lambda: not any(rank.command or rank.stuck for rank in self.ranks()))
        self.server.await_log("all ranks come on")
        self.assertEqual(self.pids(), pids, "nobody was killed for it")
        self.assertEqual(self.server.stop(), 0)

    def test_who_waits_least_is_the_one_that_the_others_wait_for(self):
        self.start("cpu,cpu,cpu")
        create_head(self.channel, "h", VOCAB, HIDDEN)
        self.await_idle()  # a rank that is stopped in the middle of an exchange waits, too
        before = [rank.waited_seconds for rank in self.ranks()]
        with concurrent.futures.ThreadPoolExecutor() as pool:
            with stopped_thread(self.pids()[1]):
                computing = pool.submit(self.compute)
                wait_until(lambda: all(rank.waits_at and rank.command_seconds > WAITED for rank in self.ranks() if rank.rank != 1))
            self.assertEqual(len(computing.result()), 1)
        wait_until(lambda: all(rank.waited_seconds - before[rank.rank] > WAITED for rank in self.ranks() if rank.rank != 1))
        waited = [rank.waited_seconds - before[rank.rank] for rank in self.ranks()]
        self.assertEqual(min(waited), waited[1], waited)
        for exchange in ("hidden_states", "row_statistics", "input_gradients"):
            self.assertGreater(self.metric(f'lossd_exchange_wait_seconds_count{{exchange="{exchange}",rank="2"}}'), 0)
        self.assertEqual(self.server.stop(), 0)


if __name__ == "__main__":
    unittest.main()
