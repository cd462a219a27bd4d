#!/usr/bin/python3
"""What continuous integration makes of a nightly part: one that is cut short fails with the tests that had failed by then."""
import os
import pathlib
import subprocess
import tempfile
import unittest

PROGRAM = pathlib.Path(__file__).resolve().parents[3] / ".ci/in_bare_root"
CHECK = """#!/bin/bash
mkdir -p build/logs
echo "$*" >build/check.json
if [[ $1 == --no-setup ]]; then printf '%b\\n' "$SAID" | tee build/logs/check-nightly.log >build/logs/check-nightly-python.log; fi
"""


class InBareRoot(unittest.TestCase):
    def run_with(self, said, status):
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            for path, text in (("check.sh", CHECK), ("bin/git", "#!/bin/bash\necho 9\n"),
                               ("bin/timeout", f"#!/bin/bash\nshift\n\"$@\"\nexit {status}\n")):
                (folder / path).parent.mkdir(exist_ok=True)
                (folder / path).write_text(text, encoding="utf-8")
                (folder / path).chmod(0o755)
            environment = {**os.environ, "PATH": f"{folder}/bin:{os.environ['PATH']}", "SAID": said}
            done = subprocess.run([PROGRAM], cwd=folder, env=environment, capture_output=True, text=True, check=False)
            self.assertEqual((folder / "build/logs/check-all.json").read_text(encoding="utf-8"), "--cuda all\n")
            self.assertEqual((folder / "build/check.json").read_text(encoding="utf-8"), "--no-setup nightly --part 3/7\n")
            return done

    def test_a_part_that_is_cut_short_fails_with_what_had_failed(self):
        for said in ("1/9 Test  #1: soak_test ....***Failed   1.2 sec", "2/9 Test #2: a_test ...***Timeout 9.0 sec",
                     "3/9 Test #3: b_test ...***Exception: SegFault 1.0 sec", "4/9 Test #4: c_test ...***Skipped 1.0 sec",
                     "[gw1] [ 50%] FAILED tests/test_a.py::test_b ", "[gw0] [  3%] ERROR tests/test_a.py::test_b "):
            done = self.run_with(said, 124)
            self.assertEqual(done.returncode, 1, said)
            self.assertIn(said, done.stdout)

    def test_a_part_that_is_cut_short_passes_where_nothing_had_failed(self):
        done = self.run_with("1/9 Test #1: soak_test ......   Passed 1.0 sec\n[gw1] [ 50%] PASSED tests/test_error.py::test_FAILED ", 124)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertIn("nightly, part 3/7: cut short", done.stdout)

    def test_a_part_that_ends_has_its_own_status(self):
        for status in (0, 1):
            self.assertEqual(self.run_with("", status).returncode, status)


if __name__ == "__main__":
    unittest.main()
