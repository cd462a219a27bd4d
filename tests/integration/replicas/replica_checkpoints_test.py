#!/usr/bin/python3
"""Checkpoints of heads that several servers have: what a client asks for is what is saved.

usage: replica_checkpoints_test.py LOSSD [--devices=NAMES]

Nothing here is late: what has to happen is waited for as long as CTest allows.
"""
from __future__ import annotations

import unittest
from typing import Any

from lossd.v1 import head_pb2

from replica_client import Code, Server, Session, Trainer, again
from replica_servers import ReplicaServers
from replica_test_case import ADAMW, HIDDEN, RATE, TOKENS, VOCAB, TestCase, batch_of, code_of, parse, weights


def save(server: Server, tag: str, **expected: Any) -> Any:
    return server.heads.SaveCheckpoint(head_pb2.SaveCheckpointRequest(head="h", tag=tag, **expected)).checkpoint


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
        again(save, reached[0], "a", history=history)  # which one that is lost does not change
        again(restore, reached[0], "a")
        self.assertEqual(code_of(save, reached[0], "b", history=history)[0], Code.ABORTED)
        now = again(reached[0].open_session, "h", "a").history
        self.assertNotEqual(now, history)
        save(reached[0], "c", history=now)
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
            self.assertNotIn(f"part-{lost}", self.tags(reached[0]))
            Trainer(reached, "h", sessions).step(reached[0], RATE)  # what was lost is replayed
        again(restore, reached[0], "whole-0")
        self.assertEqual(again(reached[1].get, "h").window_tokens, 2 * TOKENS)


if __name__ == "__main__":
    TestCase.options = parse()
    unittest.main()
