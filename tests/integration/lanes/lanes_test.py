#!/usr/bin/python3
"""Lanes at any rank of a group: what clients are told, what they get, and what becomes of it when something breaks off.

usage: lanes_test.py LOSSD
"""
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import unittest
import urllib.request

import grpc
import numpy as np
from lossd.v1 import head_pb2, head_pb2_grpc, loss_pb2, status_pb2, status_pb2_grpc, types_pb2
from lossd_server import LossdServer, await_ports, free_ports
from standard_services import SERVING, health
from waiting import wait_until as until

from lanes_support import FLAGS, HIDDEN, TOKENS, VOCAB, Lane, Places, batch, flush, open_session
from streaming import F32, OPTIONS, create_head

BINARY = sys.argv.pop(1)
Code = grpc.StatusCode
LOSS_ONLY, WEIGHT_GRADIENT = loss_pb2.COMPUTE_MODE_LOSS_ONLY, loss_pb2.COMPUTE_MODE_LOSS_AND_WEIGHT_GRADIENT
ALL_RETURNS = loss_pb2.WantedReturns(log_sum_exp=True, z_losses=True, log_probabilities=True, entropies=True,
                                     predictions=True, target_ranks=True, top_k=3)


def group(*flags, devices="cpu,cpu,cpu"):
    return LossdServer(BINARY, f"--devices={devices}", *FLAGS, *flags)


def metric(server, series):
    with urllib.request.urlopen(server.metrics_url) as response:
        for line in response.read().decode().splitlines():
            if line.startswith(series + " "):
                return float(line.rsplit(" ", 1)[1])
    raise AssertionError(f"there is no {series}")


def kinds_of_chunks():
    """(name, chunk without its number), of every option that a loss has."""
    weights = np.linspace(0.5, 2, TOKENS, dtype=np.float32).tobytes()
    options = loss_pb2.LossOptions
    teacher = np.random.default_rng(7).standard_normal((TOKENS, HIDDEN), dtype=np.float32).tobytes()

    def distilled(**more):
        distillation = loss_pb2.Distillation(teacher="teacher", hidden_dtype=F32, weight=0.7, label_weight=0.3, **more)
        return batch(9, options=options(distillation=distillation, returns=loss_pb2.WantedReturns(divergences=True)),
                     teacher_hidden_states=teacher)

    return [
        ("plain", batch(1)),
        ("one token", batch(2, tokens=1)),
        ("loss only", batch(3, mode=LOSS_ONLY)),
        ("dW only", batch(4, mode=WEIGHT_GRADIENT)),
        ("dX in bf16", batch(5, dx_dtype=types_pb2.DATA_TYPE_BFLOAT16)),
        ("scales", batch(6, gradient_scale=0.25, options=options(label_smoothing=0.1, lse_square_scale=1e-3, logit_scale=0.5,
                                                                softcap=15.0, z_gradient_scale=2.0))),
        ("token inputs", batch(7, token_inputs=loss_pb2.TokenInputs(weights=weights, lse_gradients=weights,
                                                                   entropy_gradients=weights))),
        ("returns", batch(8, options=options(returns=ALL_RETURNS))),
        ("forward KL", distilled(divergence=loss_pb2.DIVERGENCE_FORWARD_KL)),
        ("reverse KL", distilled(divergence=loss_pb2.DIVERGENCE_REVERSE_KL, temperature=2.0)),
        ("Jensen-Shannon", distilled(divergence=loss_pb2.DIVERGENCE_JENSEN_SHANNON, beta=0.4)),
        ("returns of losses alone", batch(10, mode=LOSS_ONLY, options=options(returns=ALL_RETURNS))),
    ]


class Told(unittest.TestCase):
    def test_a_session_is_told_the_port_of_every_rank(self):
        with group() as server, grpc.insecure_channel(server.target) as channel:
            create_head(channel, "h", VOCAB, HIDDEN)
            addresses = open_session(channel).lane_addresses
            self.assertEqual([addresses[0], len(addresses), len(set(addresses))], ["", 3, 3])
            self.assertTrue(all(address[0] == ":" for address in addresses[1:]), addresses)
            self.assertIn("lanes_at_ranks", status_pb2_grpc.StatusServiceStub(channel).GetStatus(status_pb2.GetStatusRequest()).features)
            self.assertEqual(server.stop(), 0, server.log())

    def test_ranks_take_the_ports_behind_that_of_the_leader_but_for_those_of_others(self):
        port = free_ports(4)
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "lossd.sock")
            with LossdServer(BINARY, "--devices=cpu,cpu,cpu", *FLAGS, f"--listen=127.0.0.1:{port},unix:{path}",
                             f"--health_listen=127.0.0.1:{port + 2}") as server:
                with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
                    create_head(channel, "h", VOCAB, HIDDEN)
                    self.assertEqual(list(open_session(channel).lane_addresses), ["", f":{port + 1}", f":{port + 3}"])
                with grpc.insecure_channel(f"unix:{path}") as channel:
                    session = open_session(channel)
                    self.assertEqual(list(session.lane_addresses), ["", ".1", ".2"])
                    with Places(f"unix:{path}", session.lane_addresses) as places:
                        lane = Lane(places[2], session)
                        lane.ready()
                        self.assertEqual(lane.compute(batch(1)).disposition, loss_pb2.DISPOSITION_ACCUMULATED)
                        self.assertEqual(lane.close()[0], Code.OK)
                self.assertEqual(server.stop(), 0, server.log())

    def test_ranks_leave_the_port_by_which_replicas_meet(self):
        port = free_ports(3)
        with tempfile.TemporaryDirectory() as folder:
            token = os.path.join(folder, "token")
            with open(os.open(token, os.O_WRONLY | os.O_CREAT, 0o600), "w", encoding="ascii") as file:
                file.write("a-secret-of-all-replicas")
            server = LossdServer(BINARY, "--devices=cpu,cpu", *FLAGS, "--replica_set=s", "--replicas=2", "--replica=0",
                                 f"--replica_leader=127.0.0.1:{port + 1}", f"--group_token_file={token}",
                                 f"--listen=127.0.0.1:{port}")
            self.addCleanup(server.close)
            server.begin()
            server.await_log("1 of 2 did not join")
            self.assertIn(f"takes lanes listen=\"127.0.0.1:{port + 2}\"", server.log())

    def test_a_port_that_is_taken_costs_the_lanes_there_and_nothing_else(self):
        port = free_ports(4)
        with LossdServer(BINARY, f"--listen=127.0.0.1:{port + 1}"), \
                LossdServer(BINARY, "--devices=cpu,cpu", *FLAGS, f"--listen=127.0.0.1:{port}") as server:
            with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
                create_head(channel, "h", VOCAB, HIDDEN)
                self.assertEqual(list(open_session(channel).lane_addresses), [])
            self.assertIn("this rank takes no lanes", server.log())
            self.assertEqual(server.stop(), 0, server.log())

    def test_no_lanes_at_ranks_by_itself_on_one_host_nor_where_that_is_asked_for_or_there_is_one_device(self):
        for server in (LossdServer(BINARY, "--devices=cpu,cpu"), group("--lanes_at_ranks=false"), LossdServer(BINARY)):
            with server, grpc.insecure_channel(server.target) as channel:
                create_head(channel, "h", VOCAB, HIDDEN)
                self.assertEqual(list(open_session(channel).lane_addresses), [])
                self.assertEqual(server.stop(), 0, server.log())


class Hosts(unittest.TestCase):
    def test_ranks_of_another_host_are_told_by_its_name(self):
        """Two nodes of one rank each, which here are one host's."""
        port = free_ports(3)
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as nodes:
            token = os.path.join(folder, "token")
            with open(token, "w", encoding="ascii") as file:
                file.write("a-secret-of-all-nodes")
            os.chmod(token, 0o600)
            logs = [os.path.join(folder, f"log {node}") for node in range(2)]
            processes = []
            for node in range(2):
                with open(logs[node], "w", encoding="utf-8") as log:
                    processes.append(subprocess.Popen(
                        [BINARY, "--devices=cpu", "--workspace_bytes=16M", "--rank_timeout=10m", "--group=flags", "--group_nodes=2", f"--group_node={node}",
                         f"--group_leader=127.0.0.1:{port + 2}", f"--group_token_file={token}", "--collective_network=trusted",
                         "--collective_interface=lo", f"--listen=127.0.0.1:{port + node}", "--metrics_listen=",
                         "--advertise_host=localhost", f"--port_file={folder}/ports {node}"], stderr=log))
                nodes.callback(processes[-1].wait)
                nodes.callback(processes[-1].kill)
            await_ports(processes[0], f"{folder}/ports 0", logs[0])
            with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
                create_head(channel, "h", VOCAB, HIDDEN)
                session = open_session(channel)
                self.assertEqual(list(session.lane_addresses), ["", f"localhost:{port + 1}"])
                with Places(f"127.0.0.1:{port}", session.lane_addresses) as places:
                    answers = []
                    for rank in range(2):
                        lane = Lane(places[rank], session, rank)
                        lane.ready()
                        answers.append(lane.compute(batch(1)))
                        self.assertEqual(lane.close()[0], Code.OK)
                    self.assertEqual(answers[1], answers[0])
                    self.assertEqual(health(places[1]), SERVING)
            processes[0].send_signal(signal.SIGTERM)
            self.assertEqual([process.wait() for process in processes], [0, 0])


class Lanes(unittest.TestCase):
    """One group for all of them; each has a head of its own."""

    @classmethod
    def setUpClass(cls):
        cls.server = cls.enterClassContext(group("--same_host_regions", "--lane_credit_bytes=64K", "--log_level=debug"))
        cls.channel = cls.enterClassContext(grpc.insecure_channel(cls.server.target, options=OPTIONS))
        create_head(cls.channel, "teacher", VOCAB, HIDDEN, seed=5)
        create_head(cls.channel, "h", VOCAB, HIDDEN)
        cls.addresses = open_session(cls.channel).lane_addresses

    @classmethod
    def tearDownClass(cls):
        until(lambda: metric(cls.server, "lossd_live_streams") == 0)
        assert metric(cls.server, "lossd_credit_bytes") == 0
        assert cls.server.stop() == 0, cls.server.log()

    def setUp(self):
        self.places = self.enterContext(Places(self.server.target, self.addresses))
        self.head = self.id().rpartition(".")[2][5:]
        create_head(self.channel, self.head, VOCAB, HIDDEN)

    def session(self, **more):
        return open_session(self.channel, self.head, **more)

    def lane(self, rank, session, lane=0):
        opened = Lane(self.places[rank], session, lane)
        opened.ready()
        return opened

    def test_every_kind_of_chunk_gets_the_same_bits_at_any_rank(self):
        kinds, seen = kinds_of_chunks(), {}
        for rank in range(3):
            session = self.session(key=f"at {rank}")
            lane, answers = self.lane(rank, session, lane=rank), []
            for name, chunk in kinds:
                answer = lane.compute(chunk, generation=rank + 1)
                self.assertEqual(answer.disposition, loss_pb2.DISPOSITION_ACCUMULATED, (name, answer.error))
                self.assertEqual(len(answer.losses), 4 * chunk.tokens, name)
                wants_dx = chunk.mode not in (LOSS_ONLY, WEIGHT_GRADIENT)
                size = 2 if chunk.dx_dtype == types_pb2.DATA_TYPE_BFLOAT16 else 4
                self.assertEqual(len(answer.dx), size * chunk.tokens * HIDDEN if wants_dx else 0, name)
                answers.append(answer.SerializeToString(deterministic=True))
            lane.await_applied()
            seen[rank] = (answers, flush(self.channel, self.head))
            self.assertEqual(lane.close()[0], Code.OK)
        for rank in (1, 2):
            for (name, _), ours, leaders in zip(kinds, seen[rank][0], seen[0][0]):
                self.assertEqual(ours, leaders, f"{name} at rank {rank}")
            self.assertEqual(seen[rank][1], seen[0][1], f"dW of rank {rank}")

    def test_lanes_of_one_session_at_all_ranks_at_once_are_in_one_window(self):
        session = self.session()
        lanes = [self.lane(number % 3, session, number) for number in range(4)]
        for step in range(6):
            for number, lane in enumerate(lanes):
                lane.put(batch(100 + 10 * step + number))
        alone = self.lane(0, open_session(self.channel, "h", key="alone"))
        for number, lane in enumerate(lanes):
            for step in range(6):
                ours, expected = lane.result(), alone.compute(batch(100 + 10 * step + number, mode=LOSS_ONLY))
                self.assertEqual(ours.losses, expected.losses)
        for lane in [*lanes, alone]:
            lane.await_applied()
            self.assertEqual(lane.close()[0], Code.OK)
        _, tokens = flush(self.channel, self.head)
        valid = sum(label != -100 for step in range(6) for number in range(4)
                    for label in np.frombuffer(batch(100 + 10 * step + number).labels, np.int64))
        self.assertEqual(tokens, valid)

    def test_what_is_wrong_with_a_chunk_is_said_in_the_same_words(self):
        def spoilt(rows, value, **more):
            chunk = batch(1, **more)
            states = np.frombuffer(chunk.hidden_states, np.float32).reshape(TOKENS, HIDDEN).copy()
            states[rows] = value
            chunk.hidden_states = states.tobytes()
            return chunk

        bad_label = batch(1)
        bad_label.labels = np.full(TOKENS, VOCAB, np.int64).tobytes()
        short = batch(1)
        short.hidden_states = short.hidden_states[:-4]
        teacher = batch(1, options=loss_pb2.LossOptions(distillation=loss_pb2.Distillation(
            teacher="teacher", hidden_dtype=F32, divergence=loss_pb2.DIVERGENCE_FORWARD_KL, weight=1)),
            teacher_hidden_states=np.full((TOKENS, HIDDEN), np.inf, np.float32).tobytes())
        chunks = [spoilt([0, 2], np.nan), spoilt(5, np.inf), bad_label, short, batch(1, tokens=0), teacher,
                  batch(1, options=loss_pb2.LossOptions(label_smoothing=2)), batch(1, mode=77 & 3)]
        ignored_alone = spoilt([1, 6, 11], np.nan)  # of which nobody asks
        lanes = [self.lane(rank, self.session(), rank) for rank in range(3)]
        for chunk in chunks:
            errors = [lane.compute(chunk) for lane in lanes]
            for answer in errors:
                answer.sequence = 0
            self.assertEqual(errors[1], errors[0])
            self.assertEqual(errors[2], errors[0])
        self.assertEqual({lane.compute(ignored_alone).disposition for lane in lanes}, {loss_pb2.DISPOSITION_ACCUMULATED})

    def test_a_lane_that_is_opened_elsewhere_is_fenced_where_it_was(self):
        session = self.session()
        for before, after in ((0, 1), (1, 2), (2, 2), (2, 0)):
            old = self.lane(before, session)
            done = old.compute(batch(before)).sequence
            new = self.lane(after, session)
            self.assertEqual(new.sequence, done)
            self.assertEqual(old.end()[0], Code.ABORTED)
            self.assertEqual(new.compute(batch(1)).disposition, loss_pb2.DISPOSITION_ACCUMULATED)
            new.cancel()

    def test_errors_of_position_end_the_stream_with_where_it_stands(self):
        codes = {}
        for rank in range(3):
            lane = self.lane(rank, self.session(), rank)
            lane.put(batch(1), sequence=5)
            code, details = lane.end()
            position = dict(lane.call.trailing_metadata()).get("grpc-status-details-bin")
            codes[rank] = (code, details.replace(f"lane {rank}", "lane"), position is None)
        self.assertEqual(codes[0], (Code.FAILED_PRECONDITION, codes[0][1], False))
        self.assertEqual(codes[1], codes[0])
        self.assertEqual(codes[2], codes[0])

    def test_a_chunk_that_is_sent_again_after_a_cut_is_computed_again_and_not_added(self):
        session = self.session()
        lane = self.lane(1, session)
        first = lane.compute(batch(1))
        lane.put(batch(2))
        lane.put(batch(3))
        lane.cancel()
        lane = self.lane(2, session)  # elsewhere this time
        taken = lane.sequence
        for sequence in range(1, 4):
            answer = lane.compute(batch(sequence), sequence=sequence)
            repeated = sequence <= taken
            self.assertEqual(answer.disposition, loss_pb2.DISPOSITION_REPEATED if repeated else loss_pb2.DISPOSITION_ACCUMULATED)
            if sequence == 1:
                self.assertEqual((answer.losses, answer.dx), (first.losses, first.dx))
        lane.await_applied()
        self.assertEqual(lane.close()[0], Code.OK)
        other = self.lane(0, self.session(key="whole"))
        gradient, tokens = flush(self.channel, self.head)
        for sequence in range(1, 4):
            other.compute(batch(sequence), generation=2)
        other.await_applied()
        self.assertEqual((gradient, tokens), flush(self.channel, self.head))

    def test_clients_that_vanish_in_the_midst_leave_nothing(self):
        session = self.session()
        before = metric(self.server, "lossd_live_streams")
        for number in range(40):
            lane = Lane(self.places[1 + number % 2], session, number % 4)
            if number % 5:
                lane.ready()
                for seed in range(number % 7):
                    lane.put(batch(seed))
            lane.cancel()
        until(lambda: metric(self.server, "lossd_live_streams") == before)
        until(lambda: metric(self.server, "lossd_credit_bytes") == 0)
        lane = self.lane(1, session)
        lane.compute(batch(1))

    def test_a_client_that_does_not_read_is_not_read_from(self):
        """The lane's credit is 64 KiB, of payload and answers together; gRPC holds some more on the way."""
        session = self.session()
        tokens = 1024  # 64 KiB of hidden states, and as much of dX
        lane = self.lane(1, session)
        taken = metric(self.server, "lossd_payload_bytes_total{direction=\"in\"}")
        for seed in range(400):
            lane.put(batch(seed % 3, tokens=tokens))
        seen = []

        def stands_still():
            seen.append(metric(self.server, "lossd_payload_bytes_total{direction=\"in\"}"))
            return len(seen) > 100 and seen[-100] == seen[-1]

        until(stands_still)
        self.assertLess(seen[-1] - taken, 200 * tokens * HIDDEN * 4)
        self.assertGreater(seen[-1] - taken, 0)
        other = self.lane(1, session, 1)  # another lane at the same rank goes on
        other.compute(batch(1))
        for _ in range(400):
            lane.result()
        self.assertEqual(lane.close()[0], Code.OK)

    def test_payload_at_ranks_is_counted(self):
        session = self.session()
        def moved():
            return [metric(self.server, f"lossd_payload_bytes_total{{direction=\"{way}\"}}") for way in ("in", "out")]

        counts = []
        for rank in range(2):
            before = moved()
            lane = self.lane(rank, session, rank)
            self.assertEqual(metric(self.server, "lossd_live_streams"), 1)
            lane.compute(batch(1))
            lane.await_applied()
            self.assertEqual(lane.close()[0], Code.OK)
            until(lambda: metric(self.server, "lossd_live_streams") == 0)
            counts.append([after - old for after, old in zip(moved(), before)])
        self.assertEqual(counts[1], counts[0])

    def test_regions_and_deterministic_sessions_belong_to_the_leader(self):
        lane = self.lane(1, self.session())
        chunk = batch(1)
        chunk.hidden_states = b""
        chunk.hidden_states_region.handle = bytes(16)
        lane.put(chunk)
        code, details = lane.end()
        self.assertEqual(code, Code.FAILED_PRECONDITION)
        self.assertIn("the leader (rank 0", details)
        deterministic = self.session(key="deterministic", deterministic=True)
        lane = Lane(self.places[1], deterministic)
        code, details = lane.end()
        self.assertEqual(code, Code.FAILED_PRECONDITION)
        self.assertIn("the leader, rank 0", details)
        self.lane(0, deterministic).compute(batch(1, window_token=0))

    def test_nothing_else_can_be_called_at_a_rank(self):
        for rank in (1, 2):
            channel = self.places[rank]
            for call in (lambda: head_pb2_grpc.HeadServiceStub(channel).ListHeads(head_pb2.ListHeadsRequest()),
                         lambda: open_session(channel), lambda: status_pb2_grpc.StatusServiceStub(channel).Drain(status_pb2.DrainRequest())):
                with self.assertRaises(grpc.RpcError) as refused:
                    call()
                self.assertEqual(refused.exception.code(), Code.FAILED_PRECONDITION)
                self.assertIn("the leader (rank 0, --listen=127.0.0.1:", refused.exception.details())
            with self.assertRaises(grpc.RpcError) as refused:
                channel.unary_unary("/lossd.v1.LossService/Nothing")(b"")
            self.assertEqual(refused.exception.code(), Code.UNIMPLEMENTED)
            with self.assertRaises(grpc.RpcError) as refused:
                channel.unary_unary("/lossd.group.v1.RelayService/Settle")(b"")
            self.assertEqual(refused.exception.code(), Code.UNIMPLEMENTED)
            self.assertEqual(health(channel), SERVING)

    def test_what_is_no_message_ends_the_stream_as_at_the_leader(self):
        def say(rank, *messages):
            call = self.places[rank].stream_stream("/lossd.v1.LossService/Compute")(iter(messages))
            try:
                for _ in call:
                    pass
            except grpc.RpcError:
                pass
            return call.code(), call.details()

        session = self.session()
        start = loss_pb2.ComputeRequest(start=loss_pb2.ComputeStart(session_id=session.session_id, incarnation=session.incarnation))
        chunk = loss_pb2.ComputeRequest(chunk=batch(1, sequence=1, generation=1)).SerializeToString()
        start = start.SerializeToString()
        unknown = b"\xfa\x3f\x01x"
        for messages in ((), (b"\xff",), (b"",), (chunk,), (start, b"\xff" * 7), (start, start), (start, b""), (unknown,),
                         (start, chunk + unknown), (loss_pb2.ComputeRequest(start=loss_pb2.ComputeStart(session_id="no")).SerializeToString(),)):
            self.assertEqual(say(1, *messages), say(0, *messages), messages)


class Guarded(unittest.TestCase):
    def test_tokens_and_tls_are_asked_for_as_at_the_leader(self):
        from access_support import Certificates, TOKENS as SECRETS, bearer, write_tokens
        with tempfile.TemporaryDirectory() as folder:
            certificates, tokens = Certificates(folder), os.path.join(folder, "tokens")
            write_tokens(tokens, SECRETS.items())
            flags = (f"--tokens={tokens}", f"--tls_certificate={certificates.path('server.pem')}",
                     f"--tls_key={certificates.key('server')}")
            with group(*flags, devices="cpu,cpu") as server:
                target = server.target.replace("127.0.0.1", "localhost")
                def connect(place):
                    return grpc.secure_channel(place, certificates.client(), options=OPTIONS)

                with connect(target) as channel:
                    from access_support import with_token
                    admin = with_token(channel, SECRETS["admin"])
                    create_head(admin, "h", VOCAB, HIDDEN)
                    session = open_session(admin)
                with Places(target, session.lane_addresses, connect) as places:
                    self.assertEqual(Lane(places[1], session).end()[0], Code.UNAUTHENTICATED)
                    self.assertEqual(Lane(places[1], session, metadata=bearer("x" * 24)).end()[0], Code.UNAUTHENTICATED)
                    self.assertEqual(Lane(places[1], session, metadata=bearer(SECRETS["read-only"])).end()[0],
                                     Code.PERMISSION_DENIED)
                    lane = Lane(places[1], session, metadata=bearer(SECRETS["trainer"]))
                    lane.ready()
                    lane.compute(batch(1))
                    with grpc.insecure_channel(places.targets[1]) as plain:
                        self.assertEqual(Lane(plain, session).end()[0], Code.UNAVAILABLE)
                    write_tokens(tokens, [("admin", SECRETS["admin"])])
                    self.assertEqual(lane.end()[0], Code.UNAUTHENTICATED)  # of a token that is gone


class Ends(unittest.TestCase):
    def lanes(self, server, channel):
        create_head(channel, "h", VOCAB, HIDDEN)
        session = open_session(channel)
        places = self.enterContext(Places(server.target, session.lane_addresses))
        lanes = [Lane(places[number % len(places.channels)], session, number) for number in range(4)]
        for lane in lanes:
            lane.ready()
        return places, lanes

    def test_a_drain_answers_what_was_taken_at_every_rank(self):
        with group() as server, grpc.insecure_channel(server.target) as channel:
            places, lanes = self.lanes(server, channel)
            for lane in lanes:
                lane.compute(batch(1))
                for seed in range(20):
                    lane.put(batch(seed))
            server.signal(signal.SIGTERM)
            for lane in lanes:
                answered, applied = 1, 0
                try:
                    for response in lane.call:
                        answered = max(answered, response.result.sequence)
                        applied = max(applied, response.applied.applied)
                except grpc.RpcError:
                    pass
                self.assertEqual(lane.call.code(), Code.UNAVAILABLE)
                self.assertEqual(applied, answered, lane.call.details())
            self.assertEqual(server.wait(), 0, server.log())
            self.assertIn("stopped chunks=", server.log())

    def test_lanes_wait_for_nobody_when_a_rank_or_the_leader_is_killed(self):
        for victim in (0, 1, 2):
            with group() as server, grpc.insecure_channel(server.target) as channel:
                places, lanes = self.lanes(server, channel)
                for lane in lanes:
                    lane.put(batch(1))
                with open(f"/proc/{server.pid}/task/{server.pid}/children", encoding="ascii") as children:
                    pids = [int(pid) for pid in children.read().split()]
                os.kill(pids[victim], signal.SIGKILL)
                for lane in lanes:
                    self.assertIn(lane.end()[0], (Code.UNAVAILABLE, Code.UNKNOWN, Code.CANCELLED))
                until(lambda: server.log().count(" serving version=") == 2)
                with grpc.insecure_channel(server.target, options=[("grpc.use_local_subchannel_pool", 1)]) as again:
                    self.lanes(server, again)[1][1].compute(batch(1))  # at rank 1, wherever its port is now
                self.assertEqual(server.stop(), 0, server.log())

    def test_health_of_a_rank_ends_with_the_group(self):
        with group(devices="cpu,cpu") as server, grpc.insecure_channel(server.target) as channel:
            places, lanes = self.lanes(server, channel)
            self.assertEqual(health(places[1]), SERVING)
            self.assertEqual(server.stop(), 0)
            with self.assertRaises(grpc.RpcError) as refused:
                health(places[1])
            self.assertEqual(refused.exception.code(), Code.UNAVAILABLE)


if __name__ == "__main__":
    unittest.main(verbosity=2)
