#!/usr/bin/python3
"""A program that ends by itself fails the test that started it, unless the test has seen or asked for its end (tests/support)."""
import contextlib
import io
import os
import signal
import sys
import tempfile
import unittest
from pathlib import Path

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../support"))
from programs import Program  # noqa: E402
from waiting import wait_until  # noqa: E402


class Ends(unittest.TestCase):
    def setUp(self):
        self.folder = self.enterContext(tempfile.TemporaryDirectory())

    def program(self, line):
        return Program("bash", "-c", line, log=os.path.join(self.folder, "log"))

    def await_end(self, program):
        """As one who does not look at the program."""
        wait_until(lambda: " Z " in Path(f"/proc/{program.pid}/stat").read_text(encoding="utf-8"))

    def test_an_end_that_nobody_asked_for_fails_the_test(self):
        for line in ("exit 0", "exit 3", "kill -SEGV $$"):
            with self.assertRaisesRegex(AssertionError, "bash has ended by itself"):
                with self.program(line) as program:
                    self.await_end(program)
            program = self.program(line).start()
            self.await_end(program)
            program.kill()  # asks for nothing: it had ended
            with self.assertRaisesRegex(AssertionError, "bash has ended by itself"):
                program.close()

    def test_nor_may_it_end_before_it_is_started_again(self):
        program = self.program("exit 0").start()
        self.await_end(program)
        with self.assertRaisesRegex(AssertionError, "bash has ended by itself"):
            program.start()

    def test_what_the_test_has_seen_or_asked_for_is_no_failure(self):
        with self.program("sleep 60") as program:
            program.signal(signal.SIGUSR1)
            self.await_end(program)
        looks = [lambda each: wait_until(lambda: each.poll() is not None), lambda each: wait_until(lambda: not each.running())]
        for see in (Program.wait, Program.stop, Program.kill, *looks):
            with self.program("sleep 0.1") as program:
                see(program)

    def test_the_failure_of_a_test_stays_what_it_is(self):
        with self.assertRaisesRegex(ValueError, "mine"), contextlib.redirect_stderr(io.StringIO()):
            with self.program("exit 3") as program:
                self.await_end(program)
                raise ValueError("mine")


if __name__ == "__main__":
    unittest.main()
