#!/usr/bin/python3
"""What ./check.sh says of its tests is what their reports say, and nothing that failed to run passes."""
import json
import os
import subprocess
import sys
import tempfile
import unittest

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), "../../.."))
PROGRAM = os.path.join(ROOT, "tools/check_report.py")

CTEST = """<testsuite>
<testcase name="unit/a_test" classname="unit/a_test" time="2.5" status="run"/>
<testcase name="script_test" classname="script_test" time="1.0" status="{script}"><system-out/>{why}</testcase>
</testsuite>"""
GTEST = """<testsuites><testsuite>
<testcase name="Passes" classname="A" time="0.25" status="run" result="completed"/>
<testcase name="Second" classname="A" time="0.75" status="run" result="{result}">{why}</testcase>
</testsuite></testsuites>"""

TIMES = "0m0.125s 0m0.250s\n1m2.500s 0m10.125s\n"  # of the shell, and of its children


class Report(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def write(self, name, text):
        path = os.path.join(self.folder, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        return path

    def suite(self, *arguments):
        out = os.path.join(self.folder, "suite.json")
        subprocess.run([PROGRAM, "suite", out, "unit", "7", self.write("times", TIMES), *arguments], check=True)
        with open(out, encoding="utf-8") as file:
            return json.load(file)

    def table(self, *suites, budgets="{}", speed="1"):
        arguments = [os.path.join(self.folder, "check.json"), "3", self.write("budgets.json", budgets), "--speed", speed]
        return subprocess.run([PROGRAM, "table", *arguments, *suites], capture_output=True, text=True, check=False)

    def ctest(self, *, result="completed", gtest_why="", script="run", script_why=""):
        self.write("results/unit/a_test.xml", GTEST.format(result=result, why=gtest_why))
        report = self.write("ctest.xml", CTEST.format(script=script, why=script_why))
        return self.suite("--ctest", report, os.path.join(self.folder, "results"))

    def test_tests_of_a_program_count_one_by_one_and_others_as_one(self):
        self.assertEqual(self.ctest(), {
            "name": "unit", "seconds": 7, "processor_seconds": 73, "passed": 3, "unchanged": 0, "failed": 0, "failures": [],
            "slowest": [["script_test", 1.0], ["unit/a_test: A.Second", 0.75], ["unit/a_test: A.Passes", 0.25]]})

    def test_a_test_that_failed_is_named_with_why(self):
        content = self.ctest(gtest_why='<failure message="1 is not 2&#x0A;more"/>')
        self.assertEqual((content["passed"], content["failures"]), (2, [["unit/a_test: A.Second", "failure: 1 is not 2"]]))

    def test_what_was_skipped_or_did_not_run_has_failed(self):
        self.assertEqual(self.ctest(result="skipped", gtest_why="<skipped/>")["failed"], 1)
        self.assertEqual(self.ctest(script="notrun")["failures"], [["script_test", "not run"]])

    def test_a_program_that_ends_badly_behind_its_last_test_has_failed(self):
        self.write("results/unit/a_test.xml", GTEST.format(result="completed", why=""))
        report = self.write("ctest.xml", CTEST.format(script="run", why="").replace(
            'time="2.5" status="run"/>', 'time="2.5" status="fail"><failure message="exit 66"/></testcase>'))
        content = self.suite("--ctest", report, os.path.join(self.folder, "results"))
        self.assertEqual(content["failures"], [["unit/a_test", "failure: exit 66"]])

    def test_what_passed_earlier_and_did_not_run_is_told(self):
        self.write("results/unit/a_test.xml", GTEST.format(result="completed", why=""))
        report = self.write("ctest.xml", CTEST.format(script="run", why="").replace(
            'time="2.5" status="run"/>', 'time="2.5" status="run"><system-out>unchanged since it passed\n</system-out></testcase>'))
        content = self.suite("--ctest", report, os.path.join(self.folder, "results"))
        self.assertEqual((content["passed"], content["unchanged"]), (3, 2))

    def test_a_suite_fails_with_a_quarter_more_than_its_budget_in_seconds_of_this_machine(self):
        self.suite("--check", "layout", "1", "ok")  # 73 processor seconds
        for budget, speed, failed in ((59, "1", 0), (58, "1", 1), (58, "0.9", 0), (45, "0.9", 1)):
            done = self.table(os.path.join(self.folder, "suite.json"), speed=speed,
                              budgets=json.dumps({"unit": {"wall": 6, "processor": budget}}))
            self.assertEqual(done.returncode, failed, done.stdout)
            self.assertRegex(done.stdout, f"unit .* 7 / 6 +73 / {budget} ")
            self.assertEqual("unit: the budget: it took 73 processor seconds" in done.stdout, failed == 1)

    def test_a_suite_that_left_nothing_has_failed(self):
        done = self.table(os.path.join(self.folder, "check-unit.json"))
        self.assertEqual(done.returncode, 1)
        self.assertIn("unit: the suite: ended without a result", done.stdout)

    def test_the_speed_of_this_machine_is_measured(self):
        out = os.path.join(self.folder, "check.json")
        subprocess.run([PROGRAM, "table", out, "3", self.write("budgets.json", "{}"), "none"], check=False, capture_output=True)
        with open(out, encoding="utf-8") as file:
            speed = json.load(file)["speed"]
        self.assertTrue(0 < speed <= 1, speed)

    def test_a_report_that_is_missing_or_broken_is_a_failure(self):
        log = os.path.join(self.folder, "none.log")
        self.assertEqual(self.suite("--pytest", os.path.join(self.folder, "none.xml"), log)["failed"], 1)
        self.assertEqual(self.suite("--pytest", self.write("broken.xml", "<testsuite>"), log)["failed"], 1)

    def told_by_faulthandler(self, title, thread, end):
        """The stack that the suite's one failure quotes."""
        report = self.write("passed.xml", "<testsuite><testcase name='a' time='1'/></testsuite>")
        stacks = ["Thread 0x01 (most recent call first):", '  File "b.py", line 2 in g', "", thread, '  File "a.py", line 1 in f']
        content = self.suite("--pytest", report, self.write("pytest.log", "\n".join(["...F", title, *stacks, end, "1 failed"])))
        self.assertEqual((content["passed"], content["failed"]), (1, 1))
        [[said, stack]] = content["failures"]
        self.assertIn(said, title)
        self.assertIn('File "a.py", line 1 in f', stack)
        self.assertNotIn("b.py", stack)
        self.assertNotIn(end, stack)
        return stack

    def test_where_an_interpreter_crashed_is_told(self):
        stack = self.told_by_faulthandler(
            "Fatal Python error: Segmentation fault", "Current thread 0x02 (most recent call first):", "Extension modules: numpy")
        self.assertTrue(stack.startswith("crashed"), stack)

    def test_where_a_test_hung_is_told(self):
        stack = self.told_by_faulthandler(
            "..Timeout (0:10:00)!", "Thread 0x02 (most recent call first):", "[gw1] node down: Not properly terminated")
        self.assertTrue(stack.startswith("hung"), stack)

    def test_a_report_without_a_test_is_a_failure(self):
        report = self.write("empty.xml", "<testsuites><testsuite tests='0'/></testsuites>")
        for kind in (["--pytest", report, report], ["--ctest", report, self.folder]):
            self.assertEqual(self.suite("--check", "style", "1", "ok", *kind)["failed"], 1)

    def test_who_reads_a_report_meanwhile_has_the_old_one_or_the_new_one(self):
        for name, arguments in (("suite.json", ["suite", None, "lint", "1", self.write("times", TIMES), "--check", "layout", "1", "ok"]),
                                ("check.json", ["table", None, "3", self.write("budgets", "{}"), "--speed", "1", "none"])):
            out, opened = self.write(name, "old"), os.path.join(self.folder, f"{name}-opened")
            os.link(out, opened)
            subprocess.run([PROGRAM, *(word or out for word in arguments)], check=False, capture_output=True)
            with open(opened, encoding="utf-8") as file:
                self.assertEqual(file.read(), "old")
            with open(out, encoding="utf-8") as file:
                json.load(file)
            self.assertEqual({file for file in os.listdir(self.folder) if file.startswith(name)}, {name, f"{name}-opened"})

    def test_a_program_that_ended_badly_is_run_again(self):
        note = self.write("results/unit/a_test.xml.passed", "key")
        self.test_a_program_that_ends_badly_behind_its_last_test_has_failed()
        self.assertFalse(os.path.exists(note))

    def test_nothing_at_all_is_a_failure(self):
        self.assertEqual((self.suite()["passed"], self.suite()["failed"]), (0, 1))

    def test_the_table_fails_with_one_of_its_suites(self):
        for verdict, status in (("ok", 0), ("failed", 1)):
            self.suite("--check", "layout", "1", verdict)
            done = self.table(os.path.join(self.folder, "suite.json"))
            self.assertEqual(done.returncode, status, done.stdout)
            self.assertIn(f"{1 - status} passed, {status} failed", done.stdout)
            with open(os.path.join(self.folder, "check.json"), encoding="utf-8") as file:
                self.assertEqual(json.load(file)["suites"][0]["name"], "unit")


if __name__ == "__main__":
    unittest.main()
