#!/usr/bin/python3
"""Checkpoints of heads that several servers have: what a client asks for is what is saved, and a drain of all loses nothing.

usage: replica_checkpoints_test.py LOSSD [--devices=NAMES]

Nothing here is late: what has to happen is waited for as long as CTest allows.
"""
from __future__ import annotations

import signal
import time
import unittest
from typing import Any

from lossd.v1 import head_pb2, status_pb2

from replica_client import Code, Server, Session, Trainer, WentBack, again
from replica_servers import ReplicaServers, until
from replica_test_case import ADAMW, HIDDEN, RATE, TOKENS, VOCAB, TestCase, batch_of, code_of, parse, weights


def save(server: Server, tag: str, **expected: Any) -> Any:
    return server.heads.SaveCheckpoint(head_pb2.SaveCheckpointRequest(head="h", tag=tag, **expected)).checkpoint


def status(server: Server) -> Any:
    return server.statuses.GetStatus(status_pb2.GetStatusRequest())


def restore(server: Server, tag: str) -> Any:
    return server.heads.RestoreCheckpoint(head_pb2.RestoreCheckpointRequest(head="h", tag=tag)).checkpoint


class Checkpoints(TestCase):
    def start_kept(self, replicas: int = 2, *flags: str) -> ReplicaServers:
        return self.start(replicas, f"--checkpoint_dir={self.folder}/checkpoints", "--replica_timeout=2s", *flags)

    def begin(self, servers: list[Server]) -> list[Session]:
        servers[0].create("h", VOCAB, HIDDEN, optimizer=ADAMW)
        servers[0].write("h", weights())
        sessions = self.open(servers)
        self.assertEqual({session.replica for session in sessions}, set(range(len(servers))))
        return sessions

    def tags(self, server: Server) -> list[str]:
        listed = server.heads.ListCheckpoints(head_pb2.ListCheckpointsRequest(head="h")).checkpoints
        return sorted(checkpoint.tag for checkpoint in listed)


class Pasts(Checkpoints):
    def test_a_checkpoint_is_of_the_history_that_is_named(self) -> None:
        servers = self.start_kept()
        reached = self.reach(servers)
        history = self.begin(reached)[0].opened.history
        self.assertNotEqual(history, 0)
        for server in reached:  # whichever is asked
            save(server, "a", history=history)
            code, details = code_of(save, server, "b", history=history + 1)
            self.assertEqual(code, Code.ABORTED, details)
        servers[1].kill()
        servers.start()
        self.assertEqual(code_of(again, save, reached[0], "b", history=history, restores=0)[0], Code.ABORTED, "all went back")
        opened = again(reached[0].open_session, "h", "a")
        again(save, reached[0], "a", history=opened.history, restores=opened.restores)
        again(restore, reached[0], "a")
        self.assertEqual(code_of(save, reached[0], "b", history=opened.history, restores=opened.restores)[0], Code.ABORTED)
        now = again(reached[0].open_session, "h", "a")
        self.assertEqual(now.history, opened.history)
        self.assertEqual(again(status, reached[0]).history, now.history, "what clients compare it with")
        save(reached[0], "c", history=now.history, restores=now.restores)
        self.assertEqual(self.tags(reached[0]), ["a", "c"])

    def test_what_a_lost_replica_had_is_not_missed_unseen(self) -> None:
        servers = self.start_kept()
        reached = self.reach(servers)
        sessions = self.begin(reached)
        for lost in (1, 0):
            for client, session in enumerate(sessions):
                session.compute(batch_of(lost, client))
            named = {"history": sessions[0].opened.history, "marks": [session.marks() for session in sessions]}
            for session, marks in zip(sessions, named["marks"], strict=True):
                marks.incarnation, marks.restores = session.opened.incarnation, session.opened.restores
            self.assertEqual(save(reached[1], f"whole-{lost}", **named).window_tokens, 2 * TOKENS)
            servers[lost].kill()
            servers.start()
            code, details = code_of(again, save, reached[1 - lost], f"part-{lost}", **named)
            self.assertEqual(code, Code.ABORTED, details)
            self.assertNotIn(f"part-{lost}", again(self.tags, reached[0]))
            trainer = Trainer(reached, "h", sessions)
            trainer.begin_again()
            trainer.step(reached[0], RATE)  # of what was saved
        again(restore, reached[0], "whole-0")
        self.assertEqual(again(reached[1].get, "h").window_tokens, 2 * TOKENS)


class Drains(Checkpoints):
    """SIGTERM to servers that train; the next ones are started with the same flags."""

    SAVED = " saved the heads for the next server heads=1"

    def half_a_window(self, reached: list[Server], sessions: list[Session], generation: int) -> None:
        for client, session in enumerate(sessions):
            session.compute(batch_of(generation, client))

    def expected(self) -> Any:
        """The weights after two steps of one server."""
        return self.trained_by_one(2)[1]

    def drain(self, servers: ReplicaServers, order: list[int], pause: float = 0) -> None:
        for number in order:
            servers[number].signal(signal.SIGTERM)
            time.sleep(pause)
        self.assertEqual([servers[number].wait() for number in order], [0] * len(order), servers.log())

    def test_one_of_all_is_gone_on_from_in_the_middle_of_a_window(self) -> None:
        for order, pause in (([0, 1], 0), ([1, 0], 1), ([0, 1], 1)):
            with self.subTest(order=order, pause=pause):
                servers = self.start(2, f"--checkpoint_dir={self.folder}/checkpoints-{self.sets}", "--restore")
                reached = self.reach(servers)
                sessions = self.begin(reached)
                self.half_a_window(reached, sessions, 0)
                trainer = Trainer(reached, "h", sessions)
                trainer.step(reached[0], RATE)
                self.half_a_window(reached, sessions, 1)
                ids = [session.opened.session_id for session in sessions]
                self.drain(servers, order, pause)
                self.assertIn(self.SAVED, servers[0].log())
                self.assertNotIn("was not flushed", servers.log())
                servers.start()
                head = again(reached[1].get, "h")
                self.assertEqual((head.generation, head.window_tokens), (2, 2 * TOKENS))
                trainer.begin_again()
                self.assertEqual([session.opened.session_id for session in sessions], ids)
                self.assertEqual(trainer.step(reached[1], RATE).window_tokens, 2 * TOKENS)
                for server in reached:
                    self.assert_close(again(server.read, "h", HIDDEN), self.expected(), "weights")
                servers.kill()

    def test_one_of_the_coordinator_alone_is_what_all_go_back_to(self) -> None:
        servers = self.start_kept(2, "--restore")
        reached = self.reach(servers)
        sessions = self.begin(reached)
        self.half_a_window(reached, sessions, 0)
        self.drain(servers, [0])
        self.assertIn(self.SAVED, servers[0].log())
        servers.start()
        self.assertIn("went back to its newest checkpoint", servers[0].log())
        trainer = Trainer(reached, "h", sessions)
        trainer.begin_again()
        trainer.step(reached[0], RATE)
        self.assertEqual([session.went_back for session in sessions], [1, 1])
        self.half_a_window(reached, sessions, 1)
        trainer.step(reached[0], RATE)
        self.assert_close(reached[1].read("h", HIDDEN), self.expected(), "weights")

    def test_one_of_another_replica_alone_saves_nothing_and_all_go_back(self) -> None:
        servers = self.start_kept()
        reached = self.reach(servers)
        sessions = self.begin(reached)
        save(reached[0], "begun")
        self.half_a_window(reached, sessions, 0)
        self.drain(servers, [1])
        self.assertIn("was not flushed", servers[1].log())
        servers.start()
        trainer = Trainer(reached, "h", sessions)
        with self.assertRaises(WentBack):
            trainer.step(reached[0], RATE)
        self.assertEqual(trainer.begin_again(), 0)
        self.half_a_window(reached, sessions, 0)
        trainer.step(reached[0], RATE)
        self.assertEqual(self.tags(reached[0]), ["begun"])

    def test_one_of_the_coordinator_without_another_says_that_nothing_is_saved(self) -> None:
        servers = self.start_kept(3)
        server = self.reach(servers)[0]
        server.create("h", VOCAB, HIDDEN, optimizer=ADAMW)
        server.write("h", weights())
        told = servers[0].log().count("not all replicas are there")
        servers[2].kill()
        until(lambda: servers[0].log().count("not all replicas are there") > told)
        servers[0].signal(signal.SIGTERM)
        self.assertEqual(servers[0].wait(), 1)
        self.assertIn("a head could not be saved", servers[0].log())
        self.assertNotIn(self.SAVED, servers[0].log())


if __name__ == "__main__":
    TestCase.options = parse()
    unittest.main()
