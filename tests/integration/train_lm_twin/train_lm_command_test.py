#!/usr/bin/python3
"""train_lm at the command line: what it says of a mistake.

usage: train_lm_command_test.py LOSSD TRAIN_LM
"""
import subprocess
import sys
import unittest

LOSSD, TRAIN_LM = (sys.argv.pop(1) for _ in range(2))


class Command(unittest.TestCase):
    def test_a_mistake_of_usage_is_named_with_the_program_and_ends_with_2(self):
        done = subprocess.run([TRAIN_LM, "--txt", "foo"], capture_output=True, text=True, timeout=60, check=False)
        self.assertEqual((done.returncode, done.stdout), (2, ""), done.stderr)
        self.assertTrue(done.stderr.startswith("train_lm: "), done.stderr)
        self.assertIn("--txt", done.stderr)
        self.assertIn("see 'train_lm --help'", done.stderr)
        self.assertEqual(subprocess.run([TRAIN_LM, "--help"], stdout=subprocess.DEVNULL, check=False).returncode, 0)


if __name__ == "__main__":
    unittest.main()
