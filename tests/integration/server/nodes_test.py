#!/usr/bin/python3
"""--group: a group of several lossd, here all on loopback. What becomes of all when one ends, dies or is another than it
should be, what each tells of its health, and how launchers start them.

usage: nodes_test.py LOSSD

Nothing here is late: the limits of waits guard against hangs alone.
"""
import contextlib
import json
import os
import re
import secrets
import signal
import socket
import sys
import tempfile
import time
import unittest
from pathlib import Path

import grpc
import numpy as np
from certificates import Authority
from lossd.v1 import (gradient_pb2, gradient_pb2_grpc, head_pb2, head_pb2_grpc, loss_pb2_grpc, status_pb2,
                      status_pb2_grpc, types_pb2)
from lossd_server import LossdServer, await_ports, free_port, free_ports
from programs import Program, run
from standard_services import NOT_SERVING, SERVING, health
from waiting import wait_until

from group_support import epochs, list_heads, read_weights, runs
from stopped_thread import stopped_thread
from streaming import F32, chunk_request, create_head, in_flight, open_session, start_request

BINARY = sys.argv.pop(1)
FLAGS = ("--workspace_bytes=16M", "--memory_limit_bytes=256M", "--drain_timeout=10m", "--rank_timeout=3s")
VOCAB, HIDDEN = 800, 16


class Node(LossdServer):
    """One lossd. `nodes`: those whose logs may say why this one fails."""

    def __init__(self, number, flags, nodes, **options):
        self.number, self.nodes, self.health_target = number, nodes, f"127.0.0.1:{free_port()}"
        super().__init__(BINARY, f"--health_listen={self.health_target}", *flags, **options)

    def port_file(self):
        return self.folder / (f"ports.json.{self.number}" if self.number > 0 else "ports.json")

    def pids(self):
        """Those of its ranks, in the epoch that is the last."""
        return epochs(self.log())[-1]

    def last_words(self):
        return "\n".join(f"node {node.number}:\n{node.log()[-4000:]}" for node in self.nodes)

    def health(self):
        """What its health says, or None if nobody answers."""
        with grpc.insecure_channel(self.health_target) as channel:
            try:
                return health(channel)
            except grpc.RpcError:
                return None


class TestCase(unittest.TestCase):
    def setUp(self):
        self.folder = self.enterContext(tempfile.TemporaryDirectory())
        self.control = free_port()
        self.token = os.path.join(self.folder, "token")
        self.secret = secrets.token_hex(32)
        with open(self.token, "w", encoding="utf-8") as file:
            file.write(self.secret + "\n")
        os.chmod(self.token, 0o600)
        self.nodes = []

    def flags(self, number, *flags, nodes=2, devices="cpu,cpu"):
        return ["--group=flags", f"--group_nodes={nodes}", f"--group_node={number}", f"--devices={devices}",
                f"--group_leader=127.0.0.1:{self.control}", f"--group_token_file={self.token}",
                "--collective_network=trusted", "--collective_interface=lo", *FLAGS, *flags]

    def start(self, number, *flags, **options):
        return self.begin(Node(number, self.flags(number, *flags, **options), self.nodes))

    def begin(self, node):
        self.addCleanup(node.close)
        node.begin()
        self.nodes.append(node)
        return node

    def start_all(self, *flags, nodes=2, devices="cpu,cpu"):
        """Nodes of a group that serves."""
        started = [self.start(number, *flags, nodes=nodes, devices=devices) for number in range(nodes)]
        for node in started:
            node.await_serving()
        return started

    def assert_all_end(self, status, *nodes):
        for node in nodes:
            self.assertEqual(node.wait(), status, node.log())
            self.assertNotIn(self.secret, node.log())
        left = [pid for node in nodes for pids in epochs(node.log()) for pid in pids if runs(pid)]
        self.assertEqual(left, [])

    def run_alone(self, *flags):
        return run(BINARY, "--listen=127.0.0.1:0", "--metrics_listen=", *flags)


def compute(target):
    """Losses, dX and the gradient of one chunk."""
    with grpc.insecure_channel(target) as channel:
        create_head(channel, "h", VOCAB, HIDDEN, fixed_segments=True)
        session = open_session(channel, "h", "c")
        rng = np.random.default_rng(3)
        labels = rng.integers(0, VOCAB, 64)
        chunk = chunk_request(session, 1, labels, rng.standard_normal((64, HIDDEN), np.float32))
        stream = loss_pb2_grpc.LossServiceStub(channel).Compute(iter([start_request(session), chunk]))
        (result,) = [answer.result for answer in stream if answer.HasField("result")]
        gradients = gradient_pb2_grpc.GradientServiceStub(channel)
        marks = [types_pb2.SessionMarks(session_id=session.session_id, lanes=[types_pb2.LaneMarks(accepted=1)])]
        flush = gradients.BeginFlush(
            gradient_pb2.BeginFlushRequest(head="h", generation=session.generation, marks=marks))
        request = gradient_pb2.ReadGradientRequest(head="h", flush_id=flush.flush_id)
        return result.losses, result.dx, b"".join(part.gradient for part in gradients.ReadGradient(request))


def lane_addresses(target):
    """What a session is told."""
    with grpc.insecure_channel(target) as channel:
        create_head(channel, "h", VOCAB, HIDDEN)
        return list(open_session(channel, "h", "c").lane_addresses)


class Together(TestCase):
    def test_nodes_are_one_server_that_computes_as_one_device_and_tells_nobody_its_token(self):
        leader, other = self.start_all()
        computed = compute(leader.target)
        with LossdServer(BINARY, "--device=cpu", *FLAGS) as alone:
            self.assertEqual(computed, compute(alone.target))
        with grpc.insecure_channel(leader.target) as channel:
            status = status_pb2_grpc.StatusServiceStub(channel).GetStatus(status_pb2.GetStatusRequest())
        self.assertEqual([rank.rank for rank in status.ranks], [0, 1, 2, 3])
        self.assertGreater(status.group_epoch, 0)
        self.assert_no_process_shows_the_token(leader, other)
        ports = other.await_serving()
        self.assertEqual((ports["grpc"], ports["metrics"]), (0, 0))
        self.assertEqual(f"127.0.0.1:{ports['health']}", other.health_target)
        leader.signal(signal.SIGTERM)
        self.assert_all_end(0, leader, other)

    def test_one_node_is_a_group_of_one_host(self):
        (node,) = self.start_all(nodes=1)
        self.assertEqual(list(list_heads(node.target)), [])
        node.signal(signal.SIGTERM)
        self.assert_all_end(0, node)

    def test_health_of_every_node_is_that_of_the_group(self):
        other = self.start(1, "--group_start_timeout=10m", "--rank_timeout=2s")
        wait_until(lambda: other.health() == NOT_SERVING)
        leader = self.start(0, "--rank_timeout=2s")
        other.await_serving()
        wait_until(lambda: (leader.health(), other.health()) == (SERVING, SERVING))
        # A rank that has stopped is lost, and the group with it.
        os.kill(leader.pids()[1], signal.SIGSTOP)
        wait_until(lambda: other.health() != SERVING)
        other.await_log("started the ranks of a group", 2)
        wait_until(lambda: (leader.health(), other.health()) == (SERVING, SERVING))
        leader.signal(signal.SIGTERM)
        self.assert_all_end(0, leader, other)
        self.assertEqual(other.health(), None)

    def test_health_of_every_node_says_that_a_rank_is_stuck(self):
        leader, other = self.start_all("--rank_timeout=1s")
        with grpc.insecure_channel(leader.target) as channel:
            create_head(channel, "h", VOCAB, HIDDEN)
        wait_until(lambda: (leader.health(), other.health()) == (SERVING, SERVING))
        with stopped_thread(other.pids()[1]):  # it has nothing to do but to look after its device now and then
            wait_until(lambda: (leader.health(), other.health()) == (NOT_SERVING, NOT_SERVING), every=0.2)
        wait_until(lambda: (leader.health(), other.health()) == (SERVING, SERVING), every=0.2)
        self.assertEqual([len(epochs(node.log())) for node in self.nodes], [1, 1])
        leader.signal(signal.SIGTERM)
        self.assert_all_end(0, leader, other)

    def assert_no_process_shows_the_token(self, *nodes):
        for pid in [pid for node in nodes for pid in (node.pid, *node.pids())]:
            for name in ("cmdline", "environ"):
                self.assertNotIn(self.secret, Path(f"/proc/{pid}/{name}").read_text(encoding="utf-8"))

    def test_certificates_do_in_the_place_of_a_token(self):
        authority = Authority(self.folder)
        authority.issue("node")
        certificates = ["--group_token_file=none", f"--group_tls_certificate={authority.certificate('node')}",
                        f"--group_tls_key={authority.key('node')}", f"--group_tls_ca={authority.certificate('ca')}"]
        leader, other = self.start_all(*certificates, devices="cpu")
        self.assertEqual(list(list_heads(leader.target)), [])
        other.signal(signal.SIGTERM)
        self.assert_all_end(0, leader, other)

    def test_certificates_that_are_gone_when_a_rank_starts_again_are_no_mistake_of_the_command_line(self):
        authority = Authority(self.folder)
        authority.issue("node")
        certificates = [f"--group_tls_certificate={authority.certificate('node')}",
                        f"--group_tls_key={authority.key('node')}", f"--group_tls_ca={authority.certificate('ca')}"]
        nodes = self.start_all(*certificates, devices="cpu")
        os.remove(authority.certificate("node"))
        os.kill(nodes[1].pids()[0], signal.SIGKILL)
        self.assert_all_end(1, *nodes)  # 2 is for good where systemd starts lossd again
        for node in nodes:
            self.assertIn("--group_tls_certificate: cannot read", node.log())


class Ends(TestCase):
    @staticmethod
    def read_from_a_stopped_rank(channel, leader):
        """A call that a drain waits for, and the process of the leading node's rank 1, which stands still."""
        create_head(channel, "h", VOCAB, HIDDEN)
        stopped = leader.pids()[1]
        os.kill(stopped, signal.SIGSTOP)
        weights = head_pb2_grpc.HeadServiceStub(channel).ReadWeights(head_pb2.ReadWeightsRequest(head="h", dtype=F32))
        wait_until(lambda: in_flight(leader.metrics_url, "HeadService/ReadWeights") == 1)
        return weights, stopped

    def test_any_node_that_is_told_to_end_drains_all(self):
        leader, other, third = self.start_all(nodes=3, devices="cpu")
        other.signal(signal.SIGTERM)
        self.assert_all_end(0, leader, other, third)
        self.assertIn("told to end by a rank of another node", leader.log())
        self.assertIn("stopped chunks=0 rank=0", leader.log())
        self.assertEqual([len(epochs(node.log())) for node in self.nodes], [1, 1, 1])

    def test_a_node_that_waits_for_others_ends_when_it_is_told_to(self):
        alone = [self.start(0), self.start(1, "--group_leader=no-such-host.invalid")]
        for node, words in zip(alone, ("still waits for the ranks of the group .*ranks (1, )?2, 3 of 4 did not join",
                                       "still looks for the leader of the group .*not know the name no-such-host.invalid")):
            wait_until(lambda: re.search(words, node.log()), words)  # noqa: B023: called here
            node.signal(signal.SIGTERM)
        self.assert_all_end(0, *alone)

    def test_a_second_signal_ends_a_node_at_once(self):
        leader, other = self.start_all("--rank_timeout=10m")
        os.kill(leader.pids()[0], signal.SIGSTOP)  # a drain that does not end

        def ended():  # signals that come together are one
            other.signal(signal.SIGTERM)
            return not other.running()

        wait_until(ended, "the end of the node", every=0.1)
        self.assert_all_end(-signal.SIGTERM, other)

    def test_a_rank_that_is_lost_while_the_group_drains_is_the_end_of_all_nodes(self):
        leader, other = self.start_all("--rank_timeout=10m")
        with grpc.insecure_channel(leader.target) as channel:
            weights, _ = self.read_from_a_stopped_rank(channel, leader)
            leader.signal(signal.SIGTERM)
            other.await_log("the leader drains the group")
            os.kill(other.pids()[1], signal.SIGKILL)
            self.assert_all_end(1, leader, other)
            weights.cancel()
        self.assertEqual([len(epochs(node.log())) for node in self.nodes], [1, 1])

    def test_a_nodes_first_signal_while_the_group_drains_is_no_second_one(self):
        leader, other = self.start_all("--rank_timeout=10m")
        with grpc.insecure_channel(leader.target) as channel:
            weights, stopped = self.read_from_a_stopped_rank(channel, leader)
            other.signal(signal.SIGTERM)
            leader.await_log(" draining")
            time.sleep(1.5)  # signals that come sooner after each other are one
            leader.signal(signal.SIGTERM)
            leader.await_log(" told to end signal=")
            os.kill(stopped, signal.SIGCONT)
            self.assert_all_end(0, leader, other)
            weights.cancel()


class Loss(TestCase):
    def test_after_the_death_of_any_rank_all_nodes_start_again_and_restore(self):
        leader, other = self.start_all("--restore", "--group_short_life=0s",
                                       "--checkpoint_dir=" + os.path.join(self.folder, "checkpoints"))
        with grpc.insecure_channel(leader.target) as channel:
            create_head(channel, "h", VOCAB, HIDDEN)
            head_pb2_grpc.HeadServiceStub(channel).SaveCheckpoint(head_pb2.SaveCheckpointRequest(head="h", tag="a-1"))
            weights = read_weights(channel, "h")
        for epoch, (node, rank) in enumerate([(other, 1), (other, 0), (leader, 1), (leader, 0)], start=2):
            os.kill(node.pids()[rank], signal.SIGKILL)
            leader.await_log(" serving version=", epoch)
            with grpc.insecure_channel(leader.target) as channel:
                self.assertEqual(read_weights(channel, "h"), weights)
            wait_until(lambda: other.health() == SERVING)
            node.await_log(f"of_rank={node.number * 2 + rank} device=\"cpu\" signal=9")
            dead = [pid for node in self.nodes for pids in epochs(node.log())[:-1] for pid in pids if runs(pid)]
            self.assertEqual(dead, [])
        other.signal(signal.SIGTERM)
        self.assert_all_end(0, leader, other)
        self.assertEqual([len(epochs(node.log())) for node in self.nodes], [5, 5])

    def test_a_node_that_dies_and_comes_back_is_waited_for(self):
        for number in (1, 0):
            with self.subTest(node=number):
                nodes = self.start_all("--group_start_timeout=10m")
                lost, left = nodes[number], nodes[1 - number]
                lost.kill()
                left.await_log("started the ranks of a group", 2)
                nodes[number] = back = self.start(number)
                back.await_serving()
                self.assertEqual(list(list_heads(nodes[0].target)), [])
                nodes[1].signal(signal.SIGTERM)
                self.assert_all_end(0, back, left)

    def test_a_leader_that_waits_for_a_node_keeps_its_ports(self):
        leader, other = self.start_all("--group_start_timeout=10m")
        ports = leader.await_serving()
        other.kill()
        leader.await_log("started the ranks of a group", 2)
        for name in ("grpc", "metrics", "health"):
            with self.subTest(port=name), socket.socket() as stranger:
                self.assertRaises(OSError, stranger.bind, ("127.0.0.1", ports[name]))
        other = self.start(1)
        other.await_serving()
        self.assertEqual(list(list_heads(leader.target)), [])
        leader.signal(signal.SIGTERM)
        self.assert_all_end(0, leader, other)

    def test_a_leader_that_dies_before_others_know_that_it_serves_is_waited_for(self):
        config = os.path.join(self.folder, "config.json")  # keeps a leader, whose ranks are ready, from serving for a while
        heads = [{"name": f"h{i}", "vocab_size": VOCAB, "hidden_size": HIDDEN, "weight_dtype": "float32"} for i in range(50)]
        with open(config, "w", encoding="utf-8") as file:
            json.dump({"heads": heads}, file)
        other = self.start(1, "--group_start_timeout=10m", devices="cpu")
        for times in range(1, 51):
            leader = self.start(0, f"--config={config}", devices="cpu")
            other.await_log(" ready device=", times)
            os.kill(leader.pids()[0], signal.SIGKILL)
            other.await_log("a rank ended because it lost another one", times)
            leader.await_log("a rank died")
            died_early = " serving version=" not in leader.log()
            leader.signal(signal.SIGKILL)
            leader.wait()  # it ends by itself where it did not serve
            if died_early:
                break
        else:
            self.fail("no leader died early enough")
        leader = self.start(0, devices="cpu")
        other.await_serving()
        leader.await_serving()

    def test_a_node_that_does_not_come_back_ends_the_group(self):
        leader, other = self.start_all("--group_start_timeout=3s")
        other.kill()
        self.assert_all_end(1, leader)
        self.assertRegex(leader.log(), r"ranks 2, 3 of 4 did not join within 3s .*node 0 the first.* 127\.0\.0\.1:" + str(self.control))

    def test_a_rank_that_stops_is_lost_at_all_nodes(self):
        leader, other = self.start_all("--rank_timeout=2s")
        os.kill(other.pids()[1], signal.SIGSTOP)
        leader.await_log(" serving version=", 2)
        leader.await_log("rank 3 was lost: it was silent for 2s")
        leader.signal(signal.SIGTERM)
        self.assert_all_end(0, leader, other)


    def test_a_rank_that_stands_still_alone_on_its_node_is_killed_by_its_parent(self):
        nodes = self.start_all("--group_start_timeout=10m", "--rank_timeout=1s", devices="cpu")
        for times, still in ((2, nodes[1]), (3, nodes[0])):  # a member, and the leader
            os.kill(still.pids()[0], signal.SIGSTOP)
            nodes[0].await_log(" serving version=", times)
            still.await_log("a rank stands still: killed")
            self.assertEqual([len(epochs(node.log())) for node in nodes], [times, times])
            wait_until(lambda: nodes[1].health() == SERVING)
        nodes[0].signal(signal.SIGTERM)
        self.assert_all_end(0, *nodes)

    def test_a_rank_that_stood_still_for_a_moment_goes_on(self):
        nodes = self.start_all("--rank_timeout=10m", devices="cpu")
        for node in nodes:
            os.kill(node.pids()[0], signal.SIGSTOP)
            os.kill(node.pids()[0], signal.SIGCONT)
        self.assertEqual(list(list_heads(nodes[0].target)), [])
        nodes[0].signal(signal.SIGTERM)
        self.assert_all_end(0, *nodes)


class Starts(TestCase):
    def test_a_node_that_never_comes_is_named_by_those_that_wait(self):
        nowhere = f"127.0.0.1:{free_port()}"
        leader = self.start(0, "--group_start_timeout=2s", devices="cpu")
        other = self.start(1, "--group_start_timeout=2s", f"--group_leader={nowhere}", devices="cpu")
        self.assert_all_end(1, leader, other)
        self.assertIn("rank 1 of 2 did not join within 2s", leader.log())
        self.assertIn(nowhere, other.log())

    def test_a_leader_that_cannot_serve_ends_all_nodes_with_an_error(self):
        with LossdServer(BINARY, "--device=cpu", *FLAGS) as other:
            nodes = [self.start(0, f"--listen={other.target}", devices="cpu"), self.start(1, devices="cpu")]
            self.assert_all_end(1, *nodes)
        self.assertIn("cannot listen on", nodes[0].log())
        self.assertIn("the log of node 0 says why", nodes[1].log())

    def test_the_second_of_two_nodes_with_one_number_is_refused(self):
        leader, other = self.start_all(devices="cpu")
        for twin, words in [(self.start(1, devices="cpu"), "and so is one that has joined before"),
                            (self.start(0, devices="cpu"), f"127.0.0.1:{self.control}")]:
            self.assert_all_end(1, twin)
            self.assertIn(words, twin.log())
        self.assertEqual(list(list_heads(leader.target)), [])
        self.assertEqual([len(epochs(node.log())) for node in (leader, other)], [1, 1])
        leader.signal(signal.SIGTERM)
        self.assert_all_end(0, leader, other)

    def test_a_node_that_is_another_than_the_group_expects_is_told_what_differs(self):
        leader = self.start(0, "--group_start_timeout=10m", devices="cpu")
        stranger = os.path.join(self.folder, "stranger")
        with open(stranger, "w", encoding="utf-8") as file:
            file.write(secrets.token_hex(32))
        os.chmod(stranger, 0o600)
        for flags, options, words in [
                (["--rank_timeout=4s"], {}, ("rank_timeout", "3s", "4s")),
                (["--max_chunk_tokens=7"], {}, ("max_chunk_tokens", "65536", "7")),
                ([], {"devices": "cpu,cpu"}, ("ranks", "2", "4")),
                ([], {"nodes": 3}, ("ranks", "2", "3")),
                ([f"--group_token_file={stranger}"], {}, ("token",))]:
            other = self.start(1, *flags, **{"devices": "cpu", **options})
            self.assert_all_end(1, other)
            for word in words:
                self.assertIn(word, other.log())
        other = self.start(1, devices="cpu")
        other.await_serving()
        leader.signal(signal.SIGTERM)
        self.assert_all_end(0, leader, other)

    def test_flags_that_make_no_group_are_a_mistake_that_says_what_to_do(self):
        short, everybodys = os.path.join(self.folder, "short"), os.path.join(self.folder, "everybodys")
        for path, mode in ((short, 0o600), (everybodys, 0o604)):
            with open(path, "w", encoding="utf-8") as file:
                file.write("0123456789abcdef" if path == everybodys else "short")
            os.chmod(path, mode)
        nodes = ["--group=flags", "--group_nodes=2", "--group_node=0", "--group_leader=127.0.0.1"]
        network = ["--collective_network=trusted", "--collective_interface=lo"]
        token = [f"--group_token_file={self.token}"]
        cpu = ["--devices=cpu"]
        for flags, words in [
                ([*cpu, "--group=mpi"], ("'mpi'", "torchrun")),
                ([*cpu, "--group=torchrun"], ("RANK is not set", "torchrun --no-python")),
                ([*cpu, "--group_nodes=2"], ("--group_nodes", "without --group")),
                ([*cpu, *network], ("--collective_network, --collective_interface", "without --group")),
                ([*cpu, *nodes, "--group_node=2", *network, *token], ("node 2 of 2",)),
                ([*nodes, *network, *token], ("--devices",)),
                (["--devices=" + ",".join(["cpu"] * 5), *nodes, *network, *token], ("5 devices", "at most 8")),
                ([*cpu, *nodes, *token], ("--collective_network is ''", "plain text", "trusted")),
                ([*cpu, *nodes, *token, "--collective_network=yes"], ("--collective_network is 'yes'",)),
                ([*cpu, *nodes, *token, "--collective_network=trusted"], ("--collective_interface is ''", "lo (127.0.0.1")),
                ([*cpu, *nodes, *token, *network, "--collective_interface=none0"], ("'none0'", "lo (127.0.0.1")),
                ([*cpu, *nodes, *network], ("--group_token_file", "--group_tls_ca")),
                ([*cpu, *nodes, *network, "--group_token_file=/none"], ("/none", "openssl rand")),
                ([*cpu, *nodes, *network, f"--group_token_file={short}"], ("5 bytes", "16")),
                ([*cpu, *nodes, *network, f"--group_token_file={everybodys}"], ("chmod o-r",)),
                ([*cpu, *nodes, *network, "--group_tls_certificate=/none"], ("--group_tls_certificate", "/none")),
                ([*cpu, *nodes, *network, f"--group_tls_certificate={self.token}"], ("--group_tls_",))]:
            result = self.run_alone(*flags)
            self.assertEqual(result.returncode, 2, (flags, result.stderr))
            for word in words:
                self.assertIn(word, result.stderr, flags)
            self.assertEqual(epochs(result.stderr), [])


class Launchers(TestCase):
    """Each process that they start is a node. torchrun is there in client/python/tests/test_launch.py."""

    def assert_four_ranks(self, target):
        with grpc.insecure_channel(target) as channel:
            stub = status_pb2_grpc.StatusServiceStub(channel)
            self.assertEqual([rank.rank for rank in stub.GetStatus(status_pb2.GetStatusRequest()).ranks], [0, 1, 2, 3])

    @contextlib.contextmanager
    def launched(self, launcher, variables, *flags, devices="cpu,cpu"):
        """Two nodes with the variables that the launcher sets for each. `flags`: the last of their common command line."""
        without = [flag for flag in self.flags(0, devices=devices) if not flag.startswith(("--group=", "--group_node"))]
        self.nodes.clear()
        for number in (0, 1):
            environment = {**os.environ, **{name: values[number] for name, values in variables.items()}}
            node = Node(number, [*without, f"--group={launcher}", *flags], self.nodes, env=environment)
            self.begin(node)
        for node in self.nodes:
            node.await_serving()
        self.assert_four_ranks(self.nodes[0].target)
        yield self.nodes[0]
        self.nodes[1].signal(signal.SIGTERM)
        self.assert_all_end(0, *self.nodes)

    def test_processes_of_one_host_share_one_command_line_and_its_ports(self):
        torchrun = {"RANK": "01", "WORLD_SIZE": "22", "LOCAL_RANK": "01", "LOCAL_WORLD_SIZE": "22",
                    "MASTER_ADDR": ["127.0.0.1"] * 2}
        slurm = {"SLURM_NTASKS": "22", "SLURM_PROCID": "01", "SLURM_LOCALID": "01", "SLURM_NODEID": "00",
                 "SLURM_STEP_TASKS_PER_NODE": "22"}
        for launcher, variables in (("torchrun", torchrun), ("slurm", slurm)):
            port = free_ports(7)
            with self.subTest(launcher=launcher), self.launched(
                    launcher, variables, f"--listen=127.0.0.1:{port}", f"--metrics_listen=127.0.0.1:{port + 1}",
                    f"--health_listen=127.0.0.1:{port + 2}", f"--group_leader=127.0.0.1:{port + 4}",
                    "--lanes_at_ranks=true", devices="cpu,cpu,cpu,cpu") as leader:
                self.assertEqual(lane_addresses(leader.target), ["", f":{port + 3}", f":{port + 5}", f":{port + 6}"])
                self.assertEqual(leader.health_target, f"127.0.0.1:{port + 2}")
                self.assertEqual(leader.health(), SERVING)

    def test_nodes_that_were_started_one_by_one_on_one_host_may_have_one_address(self):
        port = free_ports(2)
        nodes = [self.start(number, f"--listen=127.0.0.1:{port}", devices="cpu") for number in (1, 0)]
        for node in nodes:
            node.await_serving()
        self.assertEqual(lane_addresses(nodes[1].target), ["", f":{port + 1}"])
        nodes[1].signal(signal.SIGTERM)
        self.assert_all_end(0, *nodes)

    def test_leader_worker_set(self):
        with self.launched("lws", {"LWS_GROUP_SIZE": "22", "LWS_WORKER_INDEX": "01",
                                   "LWS_LEADER_ADDRESS": ["lossd-0.lossd.default"] * 2}):
            pass

    def test_slurm(self):
        with self.launched("slurm", {"SLURM_NTASKS": "22", "SLURM_STEP_NUM_TASKS": "22", "SLURM_PROCID": "01",
                                     "SLURM_LOCALID": "00", "SLURM_NODEID": "01", "SLURM_STEP_TASKS_PER_NODE": ["1(x2)"] * 2,
                                     "SLURM_STEP_NODELIST": ["gpu[01-02]"] * 2}):
            pass

    def test_mpirun_whose_processes_share_out_the_devices_of_their_host(self):
        flags = [flag for flag in self.flags(0, devices="cpu,cpu,cpu,cpu")
                 if not flag.startswith(("--group=", "--group_node"))]
        ports = os.path.join(self.folder, "ports.json")
        with Program("mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", BINARY, *flags, "--listen=127.0.0.1:0",
                     "--metrics_listen=", "--group=ompi", f"--port_file={ports}", log=os.path.join(self.folder, "log")) as program:
            await_ports(program, f"{ports}.1", program.last_words)
            target = f"127.0.0.1:{await_ports(program, ports, program.last_words)['grpc']}"
            self.assert_four_ranks(target)
            self.assertEqual(program.log().count("takes cpu,cpu of 4 devices that this process sees"), 2)
            with grpc.insecure_channel(target) as channel:
                status_pb2_grpc.StatusServiceStub(channel).Drain(status_pb2.DrainRequest())
            self.assertEqual(program.wait(), 0, program.log())


if __name__ == "__main__":
    unittest.main()
