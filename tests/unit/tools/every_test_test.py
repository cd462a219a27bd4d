#!/usr/bin/python3
"""Every test of every GoogleTest program that CTest starts is run by exactly one of its entries, but for those of nightly, which run
some of them again with more cases. A script that skips a test has not passed.

usage: every_test_test.py BUILD_TREE
"""
import collections
import json
import re
import subprocess
import sys
import unittest

TREE = sys.argv.pop(1)


def tests_of(*command):
    listed = subprocess.run([*command, "--gtest_list_tests"], capture_output=True, text=True, check=True).stdout
    suite, names = "", []
    for line in listed.splitlines():
        if line.startswith("  "):
            names.append(suite + line.split("#")[0].strip())
        elif line.split("#")[0].rstrip().endswith("."):
            suite = line.split("#")[0].rstrip()
    return collections.Counter(names)


def registered():
    shown = subprocess.run(["ctest", "--test-dir", TREE, "--show-only=json-v1"], capture_output=True, text=True, check=True)
    return json.loads(shown.stdout)["tests"]


class EveryTest(unittest.TestCase):
    def test_a_script_that_skips_has_not_passed(self):
        scripts = [test for test in registered() if any(each.endswith("_test.py") for each in test.get("command", []))]
        self.assertGreater(len(scripts), 10)
        for test in scripts:
            [skips] = [one["value"] for one in test["properties"] if one["name"] == "SKIP_REGULAR_EXPRESSION"] or [[]]
            for said in ("OK (skipped=1)", "OK (skipped=1, expected failures=2)", "Ran 0 tests in 0.000s"):
                self.assertTrue(any(re.search(each, said) for each in skips), test["name"])

    def test_it_is_run_once(self):
        files = collections.defaultdict(list)
        for test in registered():
            if any(one["name"] == "LABELS" and "nightly" in one["value"] for one in test["properties"]):
                continue
            program, *arguments = test.get("command", [""])
            if len(arguments) == 1 and arguments[0].startswith(("--test_file=", "--gtest_filter=")):
                files[program].append(arguments[0])
        self.assertGreater(len(files), 10)
        for program, arguments in files.items():
            run = sum((tests_of(program, argument) for argument in arguments), collections.Counter())
            self.assertEqual(run, tests_of(program), program)


if __name__ == "__main__":
    unittest.main()
