#!/usr/bin/python3
"""Servers that hold replicas of the same heads: what is said at one is true at all, and they train as one server does.

usage: replicas_test.py LOSSD [--devices=NAMES]

Nothing here is late: what has to happen is waited for as long as CTest allows.
"""
from __future__ import annotations

import threading
import unittest
from collections.abc import Iterator

import numpy as np
from lossd.v1 import head_pb2, head_pb2_grpc, loss_pb2

from replica_client import Code, Server
from replica_servers import until
from replica_test_case import ADAMW, HIDDEN, TOKENS, VOCAB, TestCase, apply_step, batch_of, code_of, parse, weights
from streaming import F32, in_flight, start_request


class Calls(TestCase):
    def test_heads_are_created_listed_and_deleted_at_any_for_all(self) -> None:
        servers = self.reach(self.start(2))
        servers[1].create("made-at-1", VOCAB, HIDDEN)
        servers[0].create("made-at-0", VOCAB, HIDDEN, bias=True)
        for server in servers:
            self.assertEqual(server.names(), ["made-at-0", "made-at-1"])
            self.assertTrue(server.get("made-at-0").config.bias)
            server.create("made-at-1", VOCAB, HIDDEN)  # the same again
            self.assertEqual(code_of(server.create, "made-at-1", VOCAB, 2 * HIDDEN)[0], Code.ALREADY_EXISTS)
        servers[0].delete("made-at-1")
        servers[1].delete("made-at-0")
        for server in servers:
            self.assertEqual(server.names(), [])
            self.assertEqual(code_of(server.get, "made-at-0")[0], Code.NOT_FOUND)

    def test_weights_are_written_and_read_at_any_for_all(self) -> None:
        servers = self.reach(self.start(2))
        servers[0].create("h", VOCAB, HIDDEN)
        for version, server in enumerate(servers, 1):
            self.assertEqual(server.write("h", weights(version), f"w{version}"), version)
            for reader in servers:
                np.testing.assert_array_equal(reader.read("h", HIDDEN), weights(version))
                self.assertEqual(reader.get("h").weight_version, version)

    def test_a_write_may_be_begun_at_one_filled_at_both_and_committed_at_the_other(self) -> None:
        servers = self.reach(self.start(2))
        servers[0].create("h", VOCAB, HIDDEN)
        write_id = servers[0].begin_write("h", "shared")
        self.assertEqual(servers[1].begin_write("h", "shared"), write_id)
        half = VOCAB // 2
        servers[0].write_rows("h", write_id, 0, weights()[:half])
        self.assertEqual(code_of(servers[1].commit_write, "h", write_id)[0], Code.FAILED_PRECONDITION)
        servers[1].write_rows("h", write_id, half, weights()[half:])
        self.assertEqual([server.commit_write("h", write_id) for server in reversed(servers)], [1, 1])
        np.testing.assert_array_equal(servers[1].read("h", HIDDEN), weights())

    def test_logits_of_any_are_those_of_the_weights_that_all_have(self) -> None:
        servers = self.reach(self.start(2))
        servers[1].create("h", VOCAB, HIDDEN)
        servers[1].write("h", weights())
        hidden = np.random.default_rng(3).standard_normal((4, HIDDEN), dtype=np.float32)
        for server in servers:
            np.testing.assert_allclose(server.logits("h", hidden), hidden @ weights().T, rtol=1e-4, atol=1e-5)

    def test_heads_are_copied_and_blended_at_all_by_whichever_is_asked(self) -> None:
        servers = self.reach(self.start(2))
        servers[0].create("h", VOCAB, HIDDEN)
        servers[0].write("h", weights())
        servers[1].heads.CopyHead(head_pb2.CopyHeadRequest(source="h", name="copy", copy_id="1", frozen=True))
        servers[0].write("h", 3 * weights())
        blend = head_pb2.BlendHeadRequest(head="copy", source="h", decay=0.5, blend_id="2")
        self.assertEqual([server.heads.BlendHead(blend).weight_version for server in servers], [2, 2])
        hidden = np.random.default_rng(3).standard_normal((4, HIDDEN), dtype=np.float32)
        for server in servers:
            self.assertEqual(server.names(), ["copy", "h"])
            np.testing.assert_allclose(server.logits("copy", hidden), hidden @ (2 * weights()).T, rtol=1e-4, atol=1e-5)

    def test_many_calls_that_do_not_go_on_keep_no_other_from_its_answer(self) -> None:
        started = self.start(2)
        servers = self.reach(started)
        servers[0].create("h", VOCAB, HIDDEN)
        write_id = servers[1].begin_write("h", "w")
        piece = head_pb2.WriteWeightsRequest(head="h", write_id=write_id, rows=1, dtype=F32, weights=weights()[:1].tobytes())
        given_up = threading.Event()
        self.addCleanup(given_up.set)

        def slow() -> Iterator[head_pb2.WriteWeightsRequest]:
            yield piece
            given_up.wait()

        others = [Server(servers[1].target) for _ in range(2)]
        stubs = [head_pb2_grpc.HeadServiceStub(other.channel) for other in others]
        writes = [stub.WriteWeights.future(slow()) for stub in stubs for _ in range(150)]
        metrics = f"http://{started[1].metrics_target}/metrics"
        until(lambda: in_flight(metrics, "HeadService/WriteWeights") == len(writes))
        self.assertEqual(servers[1].names(), ["h"])
        self.assertEqual(servers[1].open_session("h", "a").replica, 0)
        for write in writes:
            write.cancel()
        for other in others:
            other.close()


class Sessions(TestCase):
    def test_they_are_spread_and_a_client_comes_back_to_its_own(self) -> None:
        servers = self.reach(self.start(2))
        servers[0].create("h", VOCAB, HIDDEN)
        opened = {key: servers[0].open_session("h", key) for key in "abcd"}
        self.assertEqual(sorted(found.replica for found in opened.values()), [0, 0, 1, 1])
        for key, found in opened.items():
            self.assertTrue(found.is_new)
            for server in servers:
                again_found = server.open_session("h", key)
                self.assertEqual((again_found.session_id, again_found.replica, again_found.is_new, again_found.history),
                                 (found.session_id, found.replica, False, found.history))
        self.assertEqual(servers[1].get("h").open_sessions, servers[0].get("h").open_sessions)
        for key, found in opened.items():  # through the one that does not have it
            servers[1 - found.replica].losses.CloseSession(loss_pb2.CloseSessionRequest(session_id=found.session_id))
            self.assertTrue(servers[0].open_session("h", key).is_new)

    def test_lanes_that_come_to_another_replica_are_told_where_the_session_is(self) -> None:
        servers = self.reach(self.start(2))
        servers[0].create("h", VOCAB, HIDDEN)
        for session in self.open(servers):
            start = start_request(session.opened)
            code, details = code_of(servers[1 - session.replica].losses.Compute, iter([start]))
            self.assertEqual(code, Code.ABORTED)
            self.assertIn(f"is at replica {session.replica}; open its lanes", details)

    def test_who_must_be_at_the_server_that_it_called_is(self) -> None:
        servers = self.reach(self.start(2))
        servers[0].create("h", VOCAB, HIDDEN)
        for turn, number in enumerate((1, 0, 1, 1)):
            opened = servers[number].open_session("h", f"client {turn}", at_this_replica=True)
            self.assertEqual(opened.replica, number)


class Windows(TestCase):
    def test_a_window_is_ended_at_any_and_only_with_the_marks_of_all(self) -> None:
        servers = self.reach(self.start(2))
        servers[0].create("h", VOCAB, HIDDEN, optimizer=ADAMW)
        servers[0].write("h", weights())
        sessions = self.open(servers)
        self.assertEqual({session.replica for session in sessions}, {0, 1})
        for generation, asked in enumerate([1, 0, 1], 1):
            for client, session in enumerate(sessions):
                session.compute(batch_of(generation, client))
            marks = {session.opened.session_id: generation for session in sessions}
            for number in (0, 1):
                (head,) = servers[number].list()
                self.assertEqual(head, servers[number].get("h"))
                self.assertEqual((head.generation, head.window_tokens, head.open_sessions), (generation, 2 * TOKENS, 2))
                self.assertEqual({named.session_id: named.lanes[0].accepted for named in head.sessions}, marks)
                for alone in sessions:
                    code, details = code_of(apply_step, servers[number], generation, [alone])
                    self.assertEqual(code, Code.FAILED_PRECONDITION, details)
                    other = sessions[1 - sessions.index(alone)]
                    self.assertIn(other.opened.session_id, details)
            answers = [apply_step(servers[number], generation, sessions) for number in (asked, 1 - asked, asked)]
            self.assertEqual(answers[0], answers[1], "the same step, asked of another")
            self.assertEqual(answers[0], answers[2])
            self.assertEqual((answers[0].generation, answers[0].window_tokens), (generation + 1, 2 * TOKENS))
            for session in sessions:
                session.begin_window(generation + 1)
        np.testing.assert_array_equal(servers[0].read("h", HIDDEN), servers[1].read("h", HIDDEN))
        self.assertFalse((servers[0].read("h", HIDDEN) == weights()).all())

    def test_a_head_with_gradients_at_the_other_replica_is_not_deleted_by_mistake(self) -> None:
        servers = self.reach(self.start(2))
        servers[0].create("h", VOCAB, HIDDEN, optimizer=ADAMW)
        servers[0].write("h", weights())
        for session in self.open(servers):
            if session.replica == 1:
                session.compute(batch_of(1, 1))
        for server in servers:
            self.assertEqual(code_of(server.delete, "h")[0], Code.FAILED_PRECONDITION)
        servers[1].delete("h", discard=True)
        self.assertEqual(servers[0].names(), [])


class Training(TestCase):
    def test_it_is_that_of_one_server_and_each_time_the_same(self) -> None:
        steps = 100
        losses, final = self.trained_by_one(steps)
        tokens = 2 * TOKENS
        self.assertLess(losses[-tokens:].mean(), 0.8 * losses[:tokens].mean(), "nothing was learnt")
        runs = []
        for _ in range(2):
            servers = self.start(2)
            trained_losses, trained_weights, sessions = self.trained(self.reach(servers), steps)
            self.assertEqual({session.replica for session in sessions}, {0, 1})
            self.assert_close(trained_losses, losses, "losses")
            self.assert_close(trained_weights, final, "weights")
            runs.append((trained_losses, trained_weights))
            servers.kill()
        np.testing.assert_array_equal(runs[1][0], runs[0][0])
        np.testing.assert_array_equal(runs[1][1], runs[0][1])

    def test_three_replicas_train_as_one_server_does(self) -> None:
        losses, final = self.trained_by_one(20, "abcd")
        servers = self.start(3)
        trained_losses, trained_weights, sessions = self.trained(self.reach(servers), 20, "abcd")
        self.assertEqual({session.replica for session in sessions}, {0, 1, 2})
        self.assert_close(trained_losses, losses, "losses")
        self.assert_close(trained_weights, final, "weights")


if __name__ == "__main__":
    TestCase.options = parse()
    unittest.main()
