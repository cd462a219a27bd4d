#!/usr/bin/python3
"""Runs c_api_test against servers of its own: starts them, kills them, and checks what it prints.

usage: c_api_test.py LOSSD C_API_TEST
"""
import json
import os
import signal
import struct
import subprocess
import sys
import tempfile
import time
import unittest

LOSSD, PROGRAM = sys.argv[1:3]
VOCAB, HIDDEN = 37, 12  # check.h


class Server:
    """One lossd on a socket file, so that the next one is found at the same place."""

    def __init__(self, folder):
        self.folder = folder
        self.target = f"unix:{folder}/lossd.sock"
        self.start()

    def start(self):
        ready = os.path.join(self.folder, "ready")
        with open(os.path.join(self.folder, "log"), "a", encoding="utf-8") as log:
            self.process = subprocess.Popen(
                [LOSSD, "--device=cpu", f"--listen={self.target}", "--metrics_listen=", f"--port_file={ready}",
                 f"--checkpoint_dir={self.folder}/checkpoints", f"--weights_dir={self.folder}", "--same_host_regions",
                 "--parking_bytes=1MiB"],
                stdout=log, stderr=subprocess.STDOUT)
        while not os.path.exists(ready):
            if self.process.poll() is not None:
                raise RuntimeError(f"lossd ended with {self.process.returncode}:\n{self.log()}")
            time.sleep(0.01)
        os.remove(ready)

    def log(self):
        with open(os.path.join(self.folder, "log"), encoding="utf-8") as file:
            return file.read()

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def close(self):
        if self.process.poll() is None:
            self.kill()


def write_weights_file(path):
    """A safetensors file with an fp32 weight of twos and a bias of threes."""
    weight, bias = [struct.pack("<f", value) * count for value, count in ((2, VOCAB * HIDDEN), (3, VOCAB))]
    header = json.dumps({
        "lm_head.weight": {"dtype": "F32", "shape": [VOCAB, HIDDEN], "data_offsets": [0, len(weight)]},
        "bias": {"dtype": "F32", "shape": [VOCAB], "data_offsets": [len(weight), len(weight) + len(bias)]},
    }).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header + weight + bias)


class CApiTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        write_weights_file(os.path.join(cls.folder.name, "weights.safetensors"))
        cls.server = Server(cls.folder.name)

    @classmethod
    def tearDownClass(cls):
        cls.server.close()
        cls.folder.cleanup()

    def run_test(self, name, *arguments):
        done = subprocess.run([PROGRAM, name, self.server.target, *arguments], capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 0, f"{name}: {done.stdout}{done.stderr}\n{self.server.log()[-1000:]}")
        return done.stdout

    def test_everything_of_one_process(self):
        for name in ("heads", "checkpoints", "weights", "compute", "token_returns", "distillation", "target_lists", "logits",
                     "resume", "flush", "sink", "step", "regions", "nulls", "values", "marks", "structs", "threads"):
            with self.subTest(name):
                self.run_test(name)

    def test_marks_of_another_process_are_taken(self):
        marks = self.run_test("contribute").strip()
        self.assertEqual(json.loads(marks)["lanes"][0]["accepted"], 1)
        self.run_test("step_for", marks)

    def kill_under(self, name, restart):
        with subprocess.Popen([PROGRAM, name, self.server.target], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, text=True) as program:
            self.assertEqual(program.stdout.readline(), "ready\n")
            self.server.kill()
            if restart:
                self.server.start()
            _, errors = program.communicate("\n")
            self.assertEqual(program.returncode, 0, errors)

    def test_a_killed_server_is_a_window_lost(self):
        self.kill_under("window_lost", restart=True)

    def test_a_server_that_stays_away_is_unavailable(self):
        self.kill_under("server_gone", restart=False)
        self.server.start()

    def test_drain_ends_the_server_as_sigterm_does(self):
        self.run_test("drain")
        self.assertEqual(self.server.process.wait(), 0)
        self.server.start()


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
