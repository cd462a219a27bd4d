#!/usr/bin/python3
"""Runs c_api_test against servers of its own: starts them, kills them, and checks what it prints.

usage: c_api_test.py LOSSD C_API_TEST
"""
import json
import os
import struct
import subprocess
import sys
import tempfile
import unittest

from lossd_server import LossdServer
from programs import Program, run

LOSSD, PROGRAM = sys.argv[1:3]
VOCAB, HIDDEN = 37, 12  # check.h


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
        folder = cls.enterClassContext(tempfile.TemporaryDirectory())
        write_weights_file(os.path.join(folder, "weights.safetensors"))
        cls.target = f"unix:{folder}/lossd.sock"  # where the next one is found, too
        cls.server = cls.enterClassContext(LossdServer(
            LOSSD, "--device=cpu", f"--listen={cls.target}", f"--checkpoint_dir={folder}/checkpoints", f"--weights_dir={folder}",
            "--same_host_regions", "--parking_bytes=1MiB", folder=folder))

    def run_test(self, name, *arguments):
        done = run(PROGRAM, name, self.target, *arguments)
        self.assertEqual(done.returncode, 0, f"{name}: {done.stdout}{done.stderr}\n{self.server.last_words()}")
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
        with Program(PROGRAM, name, self.target, log=self.server.folder / name, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                     text=True) as program:
            self.assertEqual(program.read_line(), "ready\n")
            self.server.kill()
            if restart:
                self.server.start()
            program.stdin.write("\n")
            program.stdin.close()
            self.assertEqual(program.wait(), 0, program.log())

    def test_a_killed_server_is_a_window_lost(self):
        self.kill_under("window_lost", restart=True)

    def test_a_server_that_stays_away_is_unavailable(self):
        self.kill_under("server_gone", restart=False)
        self.server.start()

    def test_drain_ends_the_server_as_sigterm_does(self):
        self.run_test("drain")
        self.assertEqual(self.server.wait(), 0)
        self.server.start()


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
