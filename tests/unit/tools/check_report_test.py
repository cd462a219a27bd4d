#!/usr/bin/python3
"""What ./check.sh says of its tests is what their reports say, and nothing that failed to run passes."""
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
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

TESTS = {"tests": [
    {"name": "unit/a_test", "properties": [{"name": "ENVIRONMENT", "value": ["A=1", "GTEST_OUTPUT=xml:{folder}/results/unit/a_test.xml"]}]},
    {"name": "script_test", "properties": []}]}
TIMES = "0m0.125s 0m0.250s\n1m2.500s 0m10.125s\n"  # of the shell, and of its children


class Report(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        self.speeds = f"{time.time():.0f} 1.000\n"

    def write(self, name, text):
        path = os.path.join(self.folder, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        return path

    def suite(self, *arguments, times=TIMES):
        out = os.path.join(self.folder, "suite.json")
        speeds = self.write("speeds", self.speeds)
        subprocess.run([PROGRAM, "suite", out, "unit", "7", self.write("times", times), speeds, *arguments], check=True)
        with open(out, encoding="utf-8") as file:
            return json.load(file)

    def table(self, *suites, budgets='{"unit": null}'):
        arguments = [os.path.join(self.folder, "check.json"), "3", self.write("budgets.json", budgets)]
        return subprocess.run([PROGRAM, "table", *arguments, *suites], capture_output=True, text=True, check=False)

    def ctest(self, *, result="completed", gtest_why="", script="run", script_why=""):
        self.write("results/unit/a_test.xml", GTEST.format(result=result, why=gtest_why))
        return self.ctest_suite(CTEST.format(script=script, why=script_why))

    def ctest_suite(self, report):
        tests = self.write("tests.json", json.dumps(TESTS).replace("{folder}", self.folder))
        return self.suite("--ctest", self.write("ctest.xml", report), tests)

    def test_tests_of_a_program_count_one_by_one_and_others_as_one(self):
        self.assertEqual(self.ctest(), {
            "name": "unit", "seconds": 7, "processor_seconds": 73, "speed": 1.0, "passed": 3, "unchanged": 0, "failed": 0, "failures": [],
            "slowest": [["script_test", 1.0], ["unit/a_test: A.Second", 0.75], ["unit/a_test: A.Passes", 0.25]]})

    def test_a_test_that_failed_is_named_with_why(self):
        content = self.ctest(gtest_why='<failure message="1 is not 2&#x0A;more"/>')
        self.assertEqual((content["passed"], content["failures"]), (2, [["unit/a_test: A.Second", "failure: 1 is not 2"]]))

    def test_what_was_skipped_or_did_not_run_has_failed(self):
        self.assertEqual(self.ctest(result="skipped", gtest_why="<skipped/>")["failed"], 1)
        self.assertEqual(self.ctest(script="notrun")["failures"], [["script_test", "not run"]])

    def test_a_program_that_ends_badly_behind_its_last_test_has_failed(self):
        self.write("results/unit/a_test.xml", GTEST.format(result="completed", why=""))
        content = self.ctest_suite(CTEST.format(script="run", why="").replace(
            'time="2.5" status="run"/>', 'time="2.5" status="fail"><failure message="exit 66"/></testcase>'))
        self.assertEqual(content["failures"], [["unit/a_test", "failure: exit 66"]])

    def test_a_program_that_ends_well_in_the_middle_of_its_tests_has_failed(self):
        content = self.ctest_suite(CTEST.format(script="run", why=""))
        self.assertEqual((content["passed"], [name for name, _ in content["failures"]]), (1, ["unit/a_test"]))

    def test_what_passed_earlier_and_did_not_run_is_told(self):
        self.write("results/unit/a_test.xml", GTEST.format(result="completed", why=""))
        content = self.ctest_suite(CTEST.format(script="run", why="").replace(
            'time="2.5" status="run"/>', 'time="2.5" status="run"><system-out>unchanged since it passed\n</system-out></testcase>'))
        self.assertEqual((content["passed"], content["unchanged"]), (3, 2))

    def test_a_suite_fails_with_a_quarter_more_than_its_budget_at_the_speed_of_its_time(self):
        now = time.time()
        for budget, speeds, failed in ((59, [1.0], 0), (58, [1.0], 1), (58, [0.8, 1.0], 0), (52, [0.8, 1.0], 1)):
            # What was measured before the suite began does not count.
            self.speeds = "".join(f"{at:.0f} {speed}\n" for at, speed in [(now - 60, 0.1), *((now, speed) for speed in speeds)])
            self.suite("--check", "layout", "1", "ok")  # 73 processor seconds
            done = self.table(os.path.join(self.folder, "suite.json"), budgets=json.dumps({"unit": {"wall": 6, "processor": budget}}))
            self.assertEqual(done.returncode, failed, done.stdout)
            self.assertRegex(done.stdout, f"unit .* 7 / 6 +73 / {budget} +{sum(speeds) / len(speeds):.2f} ")
            self.assertEqual("unit: the budget: it took 73 processor seconds" in done.stdout, failed == 1)

    def test_a_machine_is_taken_for_half_as_fast_at_most(self):
        self.speeds = f"{time.time():.0f} 0.1\n"
        self.suite("--check", "layout", "1", "ok")  # 73 processor seconds
        for budget, failed in ((30, 0), (29, 1)):
            done = self.table(os.path.join(self.folder, "suite.json"), budgets=json.dumps({"unit": {"wall": 6, "processor": budget}}))
            self.assertEqual(done.returncode, failed, done.stdout)

    def test_a_suite_that_has_no_budget_fails(self):
        self.suite("--check", "layout", "1", "ok")
        for budgets, failed in (({"unit": None}, 0), ({}, 1)):
            done = self.table(os.path.join(self.folder, "suite.json"), budgets=json.dumps(budgets))
            self.assertEqual(done.returncode, failed, done.stdout)

    def test_a_comma_is_a_decimal_point_too(self):
        self.assertEqual(self.suite("--check", "layout", "1", "ok", times=TIMES.replace(".", ","))["processor_seconds"], 73)

    def test_times_that_are_not_there_are_a_failure(self):
        for times in ("", TIMES.splitlines()[0], "1 2 3 4"):
            self.assertEqual(self.suite("--check", "layout", "1", "ok", times=times)["failed"], 1)

    def test_a_suite_that_left_nothing_has_failed(self):
        done = self.table(os.path.join(self.folder, "check-unit.json"))
        self.assertEqual(done.returncode, 1)
        self.assertIn("unit: the suite: ended without a result", done.stdout)

    def test_the_speed_of_this_machine_is_measured(self):
        path = self.write("watched", "")
        with subprocess.Popen([PROGRAM, "watch", path, str(os.getpid())]) as watching:
            self.addCleanup(watching.kill)
            while not (lines := pathlib.Path(path).read_text(encoding="utf-8").splitlines()):
                self.assertIsNone(watching.poll())
                time.sleep(0.05)
            watching.kill()
        at, speed = map(float, lines[0].split())
        self.assertLess(abs(time.time() - at), 3600)
        self.assertTrue(0 < speed <= 1, speed)
        self.speeds = ""  # none was measured: it is now
        self.assertTrue(0 < self.suite("--check", "layout", "1", "ok")["speed"] <= 1)

    def test_who_measures_the_speed_ends_with_the_check(self):
        path = self.write("watched", "")
        watch = f"{PROGRAM} watch {path} $$ & echo $!; wait"
        with subprocess.Popen(["bash", "-c", watch], stdout=subprocess.PIPE, text=True) as check:
            watching = int(check.stdout.readline())
            while not pathlib.Path(path).stat().st_size:
                self.assertIsNone(check.poll())
                time.sleep(0.05)
            check.kill()
        deadline = time.monotonic() + 60
        while os.path.exists(f"/proc/{watching}") and " Z " not in pathlib.Path(f"/proc/{watching}/stat").read_text(encoding="utf-8"):
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.05)
        # Nor does it begin where the check has ended meanwhile.
        subprocess.run([PROGRAM, "watch", path, str(watching)], check=True, timeout=60)
        self.assertEqual(pathlib.Path(path).read_text(encoding="utf-8"), "")

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
        for kind in (["--pytest", report, report], ["--ctest", report, self.write("tests.json", json.dumps(TESTS))]):
            self.assertEqual(self.suite("--check", "style", "1", "ok", *kind)["failed"], 1)

    def test_who_reads_a_report_meanwhile_has_the_old_one_or_the_new_one(self):
        measured = [self.write("times", TIMES), self.write("speeds", self.speeds)]
        for name, arguments in (("suite.json", ["suite", None, "lint", "1", *measured, "--check", "layout", "1", "ok"]),
                                ("check.json", ["table", None, "3", self.write("budgets", "{}"), "none"])):
            out, opened = self.write(name, "old"), os.path.join(self.folder, f"{name}-opened")
            os.link(out, opened)
            subprocess.run([PROGRAM, *(word or out for word in arguments)], check=False, capture_output=True)
            with open(opened, encoding="utf-8") as file:
                self.assertEqual(file.read(), "old")
            with open(out, encoding="utf-8") as file:
                json.load(file)
            self.assertEqual({file for file in os.listdir(self.folder) if file.startswith(name)}, {name, f"{name}-opened"})

    def test_a_program_is_noted_as_passed_where_ctest_says_so(self):
        self.write("results/unit/a_test.xml.key", "key")
        note = os.path.join(self.folder, "results/unit/a_test.xml.passed")
        self.test_a_program_that_ends_badly_behind_its_last_test_has_failed()
        self.assertFalse(os.path.exists(note))
        self.ctest()
        self.assertEqual(pathlib.Path(note).read_text(encoding="utf-8"), "key")

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
