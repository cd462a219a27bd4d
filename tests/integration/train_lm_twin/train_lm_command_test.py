#!/usr/bin/python3
"""train_lm at the command line: what it says of a mistake, and of a server that is not there.

usage: train_lm_command_test.py LOSSD TRAIN_LM
"""
import os
import signal
import subprocess
import sys
import tempfile
import time
import unittest

from lossd_server import LossdServer, free_port

LOSSD, TRAIN_LM = (sys.argv.pop(1) for _ in range(2))


class Command(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.text, self.said = (os.path.join(folder.name, name) for name in ("text", "said"))
        with open(self.text, "w", encoding="utf-8") as file:
            file.write("\n\n".join(f"A line of {word} and of {number}." for number in range(400)
                                   for word in ("tea", "bread", "salt", "oil")))

    def begin(self, server, *arguments):
        with open(self.said, "w", encoding="utf-8") as said:
            process = subprocess.Popen(
                [TRAIN_LM, "--server", server, "--text", self.text, "--vocabulary", "96", "--batch", "256", "--hidden",
                 "32", *arguments], stdout=said, stderr=said)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        return process

    def output(self):
        with open(self.said, encoding="utf-8") as said:
            return said.read()

    def await_words(self, process, words):
        while words not in self.output():
            self.assertIsNone(process.poll(), self.output())
            time.sleep(0.05)

    def test_a_mistake_of_usage_is_named_with_the_program_and_ends_with_2(self):
        done = subprocess.run([TRAIN_LM, "--txt", "foo"], capture_output=True, text=True, timeout=60, check=False)
        self.assertEqual((done.returncode, done.stdout), (2, ""), done.stderr)
        self.assertTrue(done.stderr.startswith("train_lm: "), done.stderr)
        self.assertIn("--txt", done.stderr)
        self.assertIn("see 'train_lm --help'", done.stderr)
        self.assertEqual(subprocess.run([TRAIN_LM, "--help"], stdout=subprocess.DEVNULL, check=False).returncode, 0)

    def test_a_server_that_comes_late_is_waited_for_aloud(self):
        port = free_port()
        trainer = self.begin(f"127.0.0.1:{port}", "--steps", "3")
        self.await_words(trainer, f"no answer yet from 127.0.0.1:{port}")
        with LossdServer(LOSSD, "--device=cpu", f"--listen=127.0.0.1:{port}"):
            self.assertEqual(trainer.wait(timeout=60), 0, self.output())

    def test_a_server_that_never_comes_is_asked_after_and_one_that_goes_is_asked_once(self):
        nowhere = f"127.0.0.1:{free_port()}"
        waiting, said = self.begin(nowhere, "--steps", "3"), self.said
        with LossdServer(LOSSD, "--device=cpu") as server:
            self.said += "-other"
            trainer = self.begin(server.target, "--steps", "100000000")
            self.await_words(trainer, "step")
            server.signal(signal.SIGKILL)
            self.assertEqual(trainer.wait(timeout=200), 1)
        self.assertIn("the server cannot be reached; if it still runs, it holds head 'train_lm-", self.output())
        self.assertNotIn("lossctl head delete", self.output())
        self.assertEqual(waiting.wait(timeout=120), 1)
        self.said = said
        self.assertIn(f"is lossd running at '{nowhere}'?", self.output())

    def test_ctrl_c_ends_a_run_after_the_step_under_way(self):
        with LossdServer(LOSSD, "--device=cpu") as server:
            trainer = self.begin(server.target, "--steps", "100000000")
            self.await_words(trainer, "step")
            trainer.send_signal(signal.SIGINT)
            self.assertEqual(trainer.wait(timeout=60), 130)
            self.assertIn("train_lm: stopped after step", self.output())


if __name__ == "__main__":
    unittest.main()
