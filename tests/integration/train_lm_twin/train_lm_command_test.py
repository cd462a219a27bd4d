#!/usr/bin/python3
"""train_lm at the command line: what it says of a mistake, and of a server that is not there.

usage: train_lm_command_test.py LOSSD TRAIN_LM
"""
import os
import signal
import sys
import tempfile
import unittest

from lossd_server import LossdServer, free_port
from programs import Program, run

LOSSD, TRAIN_LM = (sys.argv.pop(1) for _ in range(2))


class Command(unittest.TestCase):
    def setUp(self):
        self.folder = self.enterContext(tempfile.TemporaryDirectory())
        self.text = os.path.join(self.folder, "text")
        with open(self.text, "w", encoding="utf-8") as file:
            file.write("\n\n".join(f"A line of {word} and of {number}." for number in range(400)
                                   for word in ("tea", "bread", "salt", "oil")))

    def begin(self, server, *arguments):
        return self.enterContext(Program(
            TRAIN_LM, "--server", server, "--text", self.text, "--vocabulary", "96", "--batch", "256", "--hidden", "32", *arguments,
            log=os.path.join(self.folder, f"said-{server}")))

    def test_a_mistake_of_usage_is_named_with_the_program_and_ends_with_2(self):
        done = run(TRAIN_LM, "--txt", "foo")
        self.assertEqual((done.returncode, done.stdout), (2, ""), done.stderr)
        self.assertTrue(done.stderr.startswith("train_lm: "), done.stderr)
        self.assertIn("--txt", done.stderr)
        self.assertIn("see 'train_lm --help'", done.stderr)
        self.assertEqual(run(TRAIN_LM, "--help").returncode, 0)

    def test_a_server_that_comes_late_is_waited_for_aloud(self):
        port = free_port()
        trainer = self.begin(f"127.0.0.1:{port}", "--steps", "3")
        trainer.await_log(f"no answer yet from 127.0.0.1:{port}")
        with LossdServer(LOSSD, "--device=cpu", f"--listen=127.0.0.1:{port}"):
            self.assertEqual(trainer.wait(), 0, trainer.log())

    def test_a_server_that_never_comes_is_asked_after_and_one_that_goes_is_asked_once(self):
        nowhere = f"127.0.0.1:{free_port()}"
        waiting = self.begin(nowhere, "--steps", "3")
        # At a port that no other test's server takes meanwhile: that one would answer.
        with LossdServer(LOSSD, "--device=cpu", f"--listen=127.0.0.1:{free_port()}") as server:
            trainer = self.begin(server.target, "--steps", "100000000")
            trainer.await_log("step")
            server.kill()
            self.assertEqual(trainer.wait(), 1)
        self.assertIn("the server cannot be reached; if it still runs, it holds head 'train_lm-", trainer.log())
        self.assertNotIn("lossctl head delete", trainer.log())
        self.assertEqual(waiting.wait(), 1)
        self.assertIn(f"is lossd running at '{nowhere}'?", waiting.log())

    def test_ctrl_c_ends_a_run_after_the_step_under_way(self):
        with LossdServer(LOSSD, "--device=cpu") as server:
            trainer = self.begin(server.target, "--steps", "100000000")
            trainer.await_log("step")
            trainer.signal(signal.SIGINT)
            self.assertEqual(trainer.wait(), 130)
            self.assertIn("train_lm: stopped after step", trainer.log())


if __name__ == "__main__":
    unittest.main()
