#!/usr/bin/python3
"""A head over four hosts, on a slow network that loses packets, gives what one device gives: losses, dX and dW of several losses,
logits, steps and checkpoints, and a training of train_lm, whose deterministic session has every bit in common.

usage: conformance_test.py LOSSD TRAIN_LM PYTHON

PYTHON: one with PyTorch, for client/python/tests/devices_check.py.
"""
from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import train_lm_kills

from group import Group
from hosts import Hosts, isolate
from programs import run
from server import SoakServer

CHECKS = Path(__file__).resolve().parents[2] / "client/python/tests/devices_check.py"


class ConformanceTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        cls.hosts = cls.enterClassContext(Hosts(4))
        cls.folder = Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        for name in ("one", "many"):
            (cls.folder / name).mkdir()
        cls.one = SoakServer(BINARY, cls.folder / "one", tls=False)
        cls.many = Group(BINARY, cls.folder / "many", cls.hosts)
        for server in (cls.one, cls.many):
            cls.addClassCleanup(server.kill)
            server.start()

    def test_a_batch_has_the_results_of_one_device(self) -> None:
        servers = (self.one, self.many)
        checks = run(
            PYTHON, CHECKS, "--targets", *(server.target for server in servers),
            "--folders", *(server.folder / "checkpoints" for server in servers),
            "--vocab", "512", "--hidden", "64", "--tokens", "200", "--dtypes", "float32", "bfloat16",
            capture_output=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"})
        print(checks.stdout, flush=True)
        self.assertEqual(checks.returncode, 0, f"{checks.stdout}\n{self.many.log()}")
        self.assertGreater(sum(host.lost() for host in self.hosts), 0, "no packet was lost: that was no test of it")

    def test_train_lm_has_the_losses_of_one_device(self) -> None:
        arguments = argparse.Namespace(train_lm=TRAIN_LM, every=20, steps=40, vocabulary=300, hidden=64, batch=512)
        text = self.folder / "text.txt"
        train_lm_kills.write_text(text)
        losses = []
        for server in (self.one, self.many):
            with train_lm_kills.Run(arguments, server.target, str(text), str(server.folder)) as training:
                losses.append(training.result()[0]["losses"])
        self.assertEqual(len(losses[0]), arguments.steps)
        self.assertLess(losses[0][-1], 0.95 * losses[0][0], "nothing was learnt")
        self.assertEqual(losses[1], losses[0])


if __name__ == "__main__":
    isolate()
    BINARY, TRAIN_LM, PYTHON = sys.argv[1:4]
    del sys.argv[1:4]
    unittest.main()
