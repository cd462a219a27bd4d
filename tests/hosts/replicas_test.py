#!/usr/bin/python3
"""Replicas of one head on three hosts, on a slow network that loses packets, train as one server does: also when a host is cut off
for a while, which costs a step at most, and when a replica is killed, after which all go back to the newest checkpoint.

usage: replicas_test.py LOSSD
"""
from __future__ import annotations

import threading
import unittest
from collections.abc import Callable

import numpy as np

from hosts import Hosts, isolate
from replica_client import Session, Trainer
from replica_servers import ReplicaServers, until
from replica_test_case import FLAGS, HIDDEN, TestCase, parse

STEPS, KEYS = 24, "abc"
LOST = " W not all replicas are there "


class ReplicasTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.hosts = self.enterContext(Hosts(3))
        self.servers = ReplicaServers(self.options.lossd, self.folder / "set", 3, *FLAGS, "--replica_timeout=2s", "--checkpoint_steps=1",
                                      f"--checkpoint_dir={self.folder}/checkpoints", "--restore", hosts=self.hosts)
        self.addCleanup(self.servers.close)
        self.servers.start()

    def train(self, disturb: Callable[[], None] = lambda: None, at: int = STEPS) -> list[Session]:
        """As one server does; `disturb` while they train, from step `at` on."""
        threads = []

        def begin(step: int, _: Trainer) -> None:
            if step == at:
                threads.append(threading.Thread(target=disturb))
                threads[0].start()

        reached = self.reach(self.servers)
        losses, final, sessions = self.trained(reached, STEPS, KEYS, begin)
        for thread in threads:
            thread.join()
        expected_losses, expected_final = self.trained_by_one(STEPS, KEYS)
        self.assert_close(losses, expected_losses, "losses")
        self.assert_close(final, expected_final, "weights")
        for server in reached:
            np.testing.assert_array_equal(server.read("h", HIDDEN), final)
        self.assertEqual({session.replica for session in sessions}, {0, 1, 2})
        return sessions

    def test_they_train_as_one_server_does(self) -> None:
        self.assertEqual([session.went_back for session in self.train()], [0, 0, 0])
        self.assertNotIn(LOST, self.servers[0].log().split(" serving version=")[1])
        self.assertGreater(sum(host.lost() for host in self.hosts), 0, "no packet was lost: that was no test of it")

    def test_a_host_that_was_cut_off_for_a_while_costs_a_step_at_most(self) -> None:
        for cut_off in (2, 0):
            with self.subTest(cut_off=cut_off):
                others = [host for host in self.hosts if host.number != cut_off]
                watched = self.servers[0 if cut_off else 1]

                def part() -> None:
                    before = watched.log().count(LOST)
                    self.hosts.part([self.hosts[cut_off]], [*others, self.hosts.here])
                    until(lambda: watched.log().count(LOST) > before)
                    self.hosts.heal()

                for session in self.train(part, STEPS // 2):
                    self.assertLessEqual(session.went_back, 1, "that is, where some had begun to step")
                self.reach(self.servers)[0].delete("h")

    def test_a_replica_that_is_killed_has_all_go_back_once(self) -> None:
        for killed in (1, 0):
            with self.subTest(killed=killed):
                def kill() -> None:
                    self.servers[killed].kill()
                    self.servers[killed].begin()

                sessions = self.train(kill, STEPS // 2)
                self.assertEqual([session.went_back for session in sessions], [1, 1, 1])
                self.servers.start()
                self.reach(self.servers)[0].delete("h")


if __name__ == "__main__":
    isolate()
    TestCase.options = parse()
    unittest.main()
