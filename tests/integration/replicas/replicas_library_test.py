#!/usr/bin/python3
"""lossd's own clients at replicas of a head: where their sessions are, and what they lose with a replica.

usage: replicas_library_test.py LOSSD LOSSCTL
"""
import contextlib
import json
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import lossd
import numpy as np
from lossd_server import LossdServer
from replica_servers import ReplicaServers

LOSSCTL = sys.argv.pop(2)
BINARY = sys.argv.pop(1)
FLAGS = ("--memory_limit_bytes=384M", "--workspace_bytes=16M")
VOCAB, HIDDEN, TOKENS = 32, 16, 24
LR = 0.5


def batch(seed):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((TOKENS, HIDDEN), np.float32), rng.integers(0, VOCAB, TOKENS)


def create(client):
    head = client.create_head("h", VOCAB, HIDDEN, "float32", optimizer=lossd.Adam())
    head.write_weights(np.random.default_rng(1).standard_normal((VOCAB, HIDDEN)).astype(np.float32))
    return head


def targets(session):
    return {place["target"] for place in session.lane_places()}


class ReplicasTest(unittest.TestCase):
    def setUp(self):
        open_ = contextlib.ExitStack()
        self.addCleanup(open_.close)
        folder = Path(open_.enter_context(tempfile.TemporaryDirectory()))
        self.replicas = open_.enter_context(ReplicaServers(BINARY, folder, 2, f"--checkpoint_dir={folder}/checkpoints",
                                                          "--restore", *FLAGS))
        self.target = ",".join(self.replicas.targets)
        self.alone = open_.enter_context(LossdServer(BINARY, *FLAGS))
        self.expected = create(open_.enter_context(lossd.connect(self.alone.target)))
        self._clients = open_
        self.client = self.connect()
        self.head = create(self.client)
        self.head.save_checkpoint("created")

    def connect(self, target=""):
        return self._clients.enter_context(lossd.connect(target or self.target))

    def sessions(self):
        """One at each replica, and the number of the replica."""
        opened = [self.head.open_session(client_key=f"trainer-{i}", lanes=2) for i in range(2)]
        places = []
        for session in opened:
            where, = targets(session)
            places.append(self.replicas.targets.index(where))
        self.assertEqual(sorted(places), [0, 1])
        return dict(zip(places, opened, strict=True))

    def open_again(self, sessions):
        """After all went back to a checkpoint."""
        for session in sessions.values():
            with contextlib.suppress(lossd.LossdError):
                session.close()
        return self.sessions()

    def step_alone(self, *seeds):
        """What a step of these batches comes to at one server."""
        with self.expected.open_session() as session:
            for seed in seeds:
                session.compute(*batch(seed))
            self.expected.step(LR)

    def assert_weights(self):
        expected = self.expected.read_weights()
        for target in self.replicas.targets:
            with lossd.connect(target) as client:
                np.testing.assert_allclose(client.head("h").read_weights(), expected, rtol=1e-4, atol=1e-5)

    def test_a_step_is_of_the_sessions_of_all(self):
        for step in range(2):
            sessions = self.sessions()
            for replica, session in sessions.items():
                session.compute(*batch(2 * step + replica))
            self.head.step(LR)
            self.step_alone(2 * step, 2 * step + 1)
            self.assert_weights()
            for session in sessions.values():
                session.close()

    def test_any_replica_may_be_called(self):
        clients = [self.connect(target) for target in self.replicas.targets]
        heads = [client.head("h") for client in clients]
        sessions = [head.open_session(client_key=f"t{i}") for i, head in enumerate(heads)]
        for i, session in enumerate(sessions):
            session.compute(*batch(i))
        marks = [mark for head in heads for mark in head.marks()]
        self.assertEqual(heads[1].step(LR, marks=marks).step, 1)
        self.step_alone(0, 1)
        self.assert_weights()
        for session in sessions:
            session.close()

    def test_a_client_goes_to_another_when_the_one_that_it_calls_is_killed(self):
        client = self.connect(",".join(reversed(self.replicas.targets)))
        head, sessions = client.head("h"), self.sessions()
        sessions[0].compute(*batch(0))
        self.replicas[1].kill()
        self.assertEqual(client.status().incarnation, self.client.status().incarnation)
        sessions[0].compute(*batch(1))
        self.replicas.start()
        with self.assertRaises(lossd.WindowLostError):
            head.step(LR, marks=self.head.marks())

    def test_after_a_kill_all_sessions_are_told_and_computed_again(self):
        for victim in (1, 0):
            with self.subTest(victim=victim):
                sessions = self.sessions()
                for replica, session in sessions.items():
                    session.compute(*batch(10 * victim + replica))
                self.replicas[victim].kill()
                self.replicas.start()
                with self.assertRaises(lossd.WindowLostError):
                    self.head.step(LR)
                for session in sessions.values():
                    with self.assertRaises(lossd.WindowLostError):
                        session.compute(*batch(2))
                sessions = self.open_again(sessions)
                for replica, session in sessions.items():
                    session.compute(*batch(10 * victim + replica))
                self.head.step(LR)
                self.head.save_checkpoint(f"without-{victim}")
                self.step_alone(10 * victim, 10 * victim + 1)
                self.assert_weights()
                for session in sessions.values():
                    session.close()

    def test_a_checkpoint_does_not_miss_unseen_what_a_killed_replica_had(self):
        sessions = self.sessions()
        for replica, session in sessions.items():
            session.compute(*batch(replica))
        marks = self.head.marks()
        self.assertEqual(self.head.save_checkpoint("whole", marks=marks).info.window_tokens, 2 * TOKENS)
        with self.assertRaises(lossd.FailedPreconditionError):
            self.head.save_checkpoint("one", marks=[sessions[0].marks()])
        self.replicas[1].kill()
        self.replicas.start()
        with self.assertRaises(lossd.WindowLostError):
            self.head.save_checkpoint("part", marks=marks)
        self.assertEqual([checkpoint.tag for checkpoint in self.client.checkpoints("h")], ["whole", "created"])

    def test_a_replica_that_is_killed_behind_a_checkpoint_of_the_step_costs_nothing(self):
        for victim in (1, 0):
            with self.subTest(victim=victim):
                sessions = self.sessions()
                for round_ in range(2):
                    for replica, session in sessions.items():
                        session.compute(*batch(10 * victim + 2 * round_ + replica))
                    self.head.step(LR)
                    self.step_alone(10 * victim + 2 * round_, 10 * victim + 2 * round_ + 1)
                    self.head.save_checkpoint(f"{victim}-{round_}")
                    if round_ == 0:
                        self.replicas[victim].kill()
                        self.replicas.start()
                        sessions = self.open_again(sessions)
                self.assert_weights()
                for session in sessions.values():
                    session.close()

    def test_a_tool_asks_whichever_answers(self):
        self.replicas[0].kill()
        run = [LOSSCTL, "status", "--server", self.target, "--json"]
        status = json.loads(subprocess.run(run, check=True, capture_output=True).stdout)
        self.assertEqual(status["state"], "serving")
        self.assertEqual(status["replicas"]["replica"], 1)
        for command, text in ((["status", "--server", "a:1, b:2"], "host-a:50051,host-b:50051"),
                              (["health", "--server", self.target], "health is that of one")):
            failed = subprocess.run([LOSSCTL, *command], capture_output=True, text=True)
            self.assertEqual(failed.returncode, 7, failed.stderr)
            self.assertIn(text, failed.stderr)


if __name__ == "__main__":
    unittest.main()
