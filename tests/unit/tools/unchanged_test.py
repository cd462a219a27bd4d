#!/usr/bin/python3
"""A hermetic test program that has passed is run again when, and only when, it has changed (tests/test_main.cc).

usage: unchanged_test.py WIRE_TESTS
"""
import os
import shutil
import subprocess
import sys
import tempfile
import unittest

PROGRAM = sys.argv.pop(1)
FILTER = "--gtest_filter=Trace*"  # some that take no time


class UnchangedTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.program = shutil.copy(PROGRAM, folder.name)
        self.report = os.path.join(folder.name, "report.xml")

    def runs(self, *arguments, ctest_passed=True, **environment):
        """Whether the tests were run, not only remembered. Where they passed, tools/check_report.py says so as here."""
        environment = {"LOSSD_HERMETIC": "1", "LOSSD_UNCHANGED": "pass", "GTEST_OUTPUT": f"xml:{self.report}", **environment}
        done = subprocess.run([self.program, FILTER, *arguments], env={**os.environ, **environment}, check=False,
                              capture_output=True, text=True)
        self.status = done.returncode
        if done.stdout == "unchanged since it passed\n":
            self.assertTrue(os.path.exists(self.report))
            return False
        if ctest_passed and os.path.exists(f"{self.report}.key"):
            os.rename(f"{self.report}.key", f"{self.report}.passed")
        return True

    def test_what_passed_is_not_run_again(self):
        self.assertTrue(self.runs())
        self.assertFalse(self.runs())
        self.assertFalse(self.runs())

    def test_it_is_where_nobody_said_that_it_may_be_left_out(self):
        self.runs()
        self.assertTrue(self.runs(LOSSD_UNCHANGED=""))
        self.assertTrue(self.runs(LOSSD_HERMETIC=""))

    def test_what_has_changed_is_run(self):
        self.runs()
        with open(self.program, "ab") as file:
            file.write(b"another")
        self.assertTrue(self.runs())
        self.assertFalse(self.runs())
        os.remove(self.report)
        self.assertTrue(self.runs())
        self.assertTrue(self.runs("--gtest_also_run_disabled_tests"))

    def test_another_number_of_threads_is_another_test(self):
        self.runs(OMP_NUM_THREADS="1")
        self.assertTrue(self.runs(OMP_NUM_THREADS="2"))

    def test_what_tests_ask_of_the_environment_makes_another_test(self):
        self.runs()
        self.assertTrue(self.runs(LOSSD_SEEDS="2"))

    def test_who_may_have_crashed_at_the_end_is_run_again(self):
        self.runs(ctest_passed=False)
        self.assertTrue(self.runs())

    def test_what_passed_when_run_by_hand_is_not_remembered(self):
        self.assertTrue(self.runs(LOSSD_UNCHANGED=""))
        self.assertTrue(self.runs())

    def test_a_program_without_a_test_fails(self):
        self.runs("--gtest_filter=Nothing*")
        self.assertEqual(self.status, 1)

    def test_what_failed_is_run_again_and_leaves_no_report_of_before(self):
        self.runs()
        with open(self.program, "ab") as file:
            file.write(b"another")
        self.assertTrue(self.runs(GTEST_TOTAL_SHARDS="1", GTEST_SHARD_INDEX="1"))
        self.assertNotEqual(self.status, 0)
        self.assertFalse(os.path.exists(self.report))
        self.assertTrue(self.runs())


if __name__ == "__main__":
    unittest.main()
