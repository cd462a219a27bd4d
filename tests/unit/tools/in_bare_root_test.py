#!/usr/bin/python3
"""What continuous integration makes of the suites that have the minutes left: one that is cut short fails with what had failed by then."""
import os
import pathlib
import re
import subprocess
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[3]
CHECK = """#!/bin/bash
mkdir -p build/logs
echo "$*" >build/check.json
if [[ $1 == --no-setup ]]; then echo >"build/logs/check-$2.log"; fi
if [[ $2 == "$SUITE" ]]; then printf '%b\\n' "$SAID" | tee -a "build/logs/check-$2.log" >"build/logs/check-$2-python.log"; fi
"""
WITHOUT_FAILURE = {
    "tsan": "1/9 Test #1: replicas_test ......   Passed 1.0 sec",
    "tidy": "[1/9] server/main.cc: ok\n[2/9] client/FAILED.cc: ok",
    "nightly": "1/9 Test #1: soak_test ......   Passed 1.0 sec\n[gw1] [ 50%] PASSED tests/test_error.py::test_FAILED ",
}
FAILURES = (
    ("tsan", "1/9 Test  #1: replicas_test ....***Failed   1.2 sec"),
    ("tidy", "[12/863] server/main.cc: FAILED"),
    ("nightly", "1/9 Test  #1: soak_test ....***Failed   1.2 sec"),
    ("nightly", "2/9 Test #2: a_test ...***Timeout 9.0 sec"),
    ("nightly", "3/9 Test #3: b_test ...***Exception: SegFault 1.0 sec"),
    ("nightly", "4/9 Test #4: c_test ...***Skipped 1.0 sec"),
    ("nightly", "[gw1] [ 50%] FAILED tests/test_a.py::test_b "),
    ("nightly", "[gw0] [  3%] ERROR tests/test_a.py::test_b "),
)


def suites_of_check():
    """The suites of `./check.sh all`."""
    text = (ROOT / "check.sh").read_text(encoding="utf-8")
    return [name for each in ("functional", "more") for name in re.search(rf"^{each}=\((.*)\)$", text, re.MULTILINE)[1].split()]


class InBareRoot(unittest.TestCase):
    def run_with(self, suite, said, status):
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            for path, text in (("check.sh", CHECK), ("bin/git", "#!/bin/bash\necho 9\n"),
                               ("bin/timeout", f"#!/bin/bash\nshift\n\"$@\"\nexit {status}\n")):
                (folder / path).parent.mkdir(exist_ok=True)
                (folder / path).write_text(text, encoding="utf-8")
                (folder / path).chmod(0o755)
            environment = {**os.environ, "PATH": f"{folder}/bin:{os.environ['PATH']}", "SUITE": suite, "SAID": said}
            done = subprocess.run([ROOT / ".ci/in_bare_root"], cwd=folder, env=environment, capture_output=True, text=True, check=False)
            cuda, *whole = (folder / "build/logs/check-all.json").read_text(encoding="utf-8").split()
            self.assertEqual(cuda, "--cuda")
            self.assertEqual(sorted([*whole, "tsan", "tidy"]), sorted(suites_of_check()))
            return done, (folder / "build/check.json").read_text(encoding="utf-8")

    def test_what_is_cut_short_fails_with_what_had_failed(self):
        for suite, said in FAILURES:
            done, last = self.run_with(suite, said, 124)
            self.assertEqual(done.returncode, 1, said)
            self.assertIn(said, done.stdout)
            self.assertTrue(last.startswith(f"--no-setup {suite}"), last)

    def test_what_is_cut_short_passes_where_nothing_had_failed(self):
        for suite, said in WITHOUT_FAILURE.items():
            done, last = self.run_with(suite, said, 124)
            self.assertEqual((done.returncode, done.stderr, last), (0, "", "--no-setup nightly --part 3/7\n"), said)
            for title in ("ThreadSanitizer", "clang-tidy", "nightly, part 3/7"):
                self.assertIn(f"{title}: cut short", done.stdout)

    def test_what_ends_has_its_own_status(self):
        for status in (0, 1):
            self.assertEqual(self.run_with("", "", status)[0].returncode, status)


if __name__ == "__main__":
    unittest.main()
