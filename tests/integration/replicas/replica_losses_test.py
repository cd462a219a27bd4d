#!/usr/bin/python3
"""Servers that hold replicas of the same heads, of which one is killed: all of them go back to the newest checkpoint, and a trainer
that goes on from there comes to the weights of one server that was never killed.

usage: replica_losses_test.py LOSSD [--devices=NAMES]

Nothing here is late: what has to happen is waited for as long as CTest allows.
"""
from __future__ import annotations

import random
import threading
import time
import unittest

import numpy as np
from lossd.v1 import head_pb2

from replica_client import Code, Trainer, WentBack, again
from replica_servers import until
from replica_test_case import ADAMW, HIDDEN, RATE, TOKENS, VOCAB, TestCase, apply_step, batch_of, code_of, parse, weights


class Losses(TestCase):
    """Replicas are lost in the middle of training."""

    STEPS = 40

    def kills(self, number: int, replicas: int = 2, keys: str = "ab") -> None:
        servers = self.start(replicas, "--replica_timeout=2s", *self.saves(1))
        rng = random.Random(number)
        kills, threads = [], list[threading.Thread]()

        def kill(wait: float) -> None:
            time.sleep(wait)
            servers[number].kill()
            servers[number].begin()

        def kill_in_some_steps(step: int, _: Trainer) -> None:
            if step == 0:  # until the first step is saved
                again(reached[0].heads.SaveCheckpoint, head_pb2.SaveCheckpointRequest(head="h", tag="begun"))
            for thread in threads:
                thread.join()
            threads.clear()
            if step % 6 == 2:  # not in the last one: what nobody goes on from stays as an earlier checkpoint has it
                kills.append(step)
                threads.append(threading.Thread(target=kill, args=(rng.random() * 0.02,)))
                threads[0].start()

        reached = self.reach(servers)
        losses, final, sessions = self.trained(reached, self.STEPS, keys, kill_in_some_steps)
        for thread in threads:
            thread.join()
        servers.start()
        expected_losses, expected_final = self.trained_by_one(self.STEPS, keys)
        self.assertEqual(len(kills), 7)
        self.assert_close(losses, expected_losses, "losses")
        self.assert_close(final, expected_final, "weights")
        ends = [again(server.read, "h", HIDDEN) for server in (reached[0], reached[-1])]
        np.testing.assert_array_equal(*ends)
        for session in sessions:  # who opens it again between two losses is told of both at once
            self.assertIn(session.went_back, range(1, len(kills) + 1))

    def saves(self, steps: int) -> tuple[str, ...]:
        return f"--checkpoint_dir={self.folder / 'checkpoints'}", f"--checkpoint_steps={steps}", "--restore"

    def test_one_that_is_killed_has_all_go_back(self) -> None:
        self.kills(1)

    def test_so_does_the_coordinator(self) -> None:
        self.kills(0)

    def test_so_does_one_of_three(self) -> None:
        self.kills(2, 3, "abc")

    def test_without_one_there_are_losses_and_logits_and_no_window_ends(self) -> None:
        servers = self.start(2, "--replica_timeout=2s", *self.saves(0))
        reached = self.reach(servers)
        reached[0].create("h", VOCAB, HIDDEN, optimizer=ADAMW)
        reached[0].write("h", weights())
        reached[0].heads.SaveCheckpoint(head_pb2.SaveCheckpointRequest(head="h", tag="written"))
        sessions = self.open(reached)
        for client, session in enumerate(sessions):
            session.compute(batch_of(0, client))
        for lost in (1, 0):
            generation = again(reached[0].get, "h").generation
            told = servers[1 - lost].log().count("not all replicas are there")
            servers[lost].kill()
            left = reached[1 - lost]
            # Before it knows, a step would seal the window, which then opens with the next meeting.
            until(lambda: servers[1 - lost].log().count("not all replicas are there") > told)
            (here,) = [session for session in sessions if session.replica == 1 - lost]
            here.compute(batch_of(1, here.replica))
            code, details = code_of(apply_step, left, generation, sessions)
            self.assertEqual(code, Code.UNAVAILABLE, details)
            self.assertRegex(details, f"not all replicas .* (replica|rank) {lost}" if lost else "not all replicas")
            self.assertEqual(code_of(left.get, "h")[0], Code.UNAVAILABLE, "it cannot know all marks")
            if lost == 1:
                self.assertEqual(left.names(), ["h"])
            here.compute(batch_of(2, here.replica))
            hidden, _ = batch_of(0, 0)
            self.assertEqual(len(left.logits("h", hidden)), TOKENS)
            servers.start()
            trainer = Trainer(reached, "h", sessions)
            with self.assertRaises(WentBack):
                trainer.step(left, RATE)
            self.assertEqual(trainer.begin_again(), 0)
            for client, session in enumerate(sessions):
                session.compute(batch_of(3, client))
            trainer.step(left, RATE)
            for client, session in enumerate(sessions):
                session.compute(batch_of(4, client))
        np.testing.assert_array_equal(again(reached[0].read, "h", HIDDEN), again(reached[1].read, "h", HIDDEN))

    def test_heads_come_back_to_one_that_was_killed_but_those_without_a_checkpoint(self) -> None:
        servers = self.start(2, "--replica_timeout=2s", *self.saves(1))
        reached = self.reach(servers)
        reached[0].create("h", VOCAB, HIDDEN, optimizer=ADAMW)
        reached[1].write("h", weights())
        reached[0].heads.SaveCheckpoint(head_pb2.SaveCheckpointRequest(head="h", tag="written"))
        reached[0].create("unsaved", VOCAB, HIDDEN, optimizer=ADAMW)
        for number in (0, 1):
            servers[number].kill()
            servers[number].begin()
            servers[number].await_serving()
            for server in reached:
                until(lambda server=server: again(server.names) == ["h"])
                np.testing.assert_array_equal(again(server.read, "h", HIDDEN), weights())


if __name__ == "__main__":
    TestCase.options = parse()
    unittest.main()
