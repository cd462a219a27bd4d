#!/usr/bin/python3
"""When cmake/LossdCuda.cmake looks for a CUDA compiler: by LOSSD_CUDA, and by whether there is an NVIDIA driver."""
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[3]
PROJECT = """cmake_minimum_required(VERSION 3.25)
project(probe LANGUAGES NONE)
set(LOSSD_SANITIZER "" CACHE STRING "")
include(cmake/LossdCuda.cmake)
"""
# A compiler that works for nobody: what is of interest is that it was tried.
NVCC = '#!/bin/sh\ntouch "$(dirname "$0")/tried"\nexit 1\n'


def write_program(path, text):
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)


class Decision(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.root = pathlib.Path(scratch.name)
        (self.root / "CMakeLists.txt").write_text(PROJECT, encoding="utf-8")
        shutil.copytree(ROOT / "cmake", self.root / "cmake")
        write_program(self.root / "bin" / "nvcc", NVCC)

    def configure(self, driver, *options):
        """The line that tells what was decided, and whether the compiler was tried."""
        script = f'#!/bin/sh\n[ "$*" = --driver ] || exit 99\nexit {0 if driver else 1}\n'
        write_program(self.root / "tools" / "cuda_toolkit.sh", script)
        tried = self.root / "bin" / "tried"
        tried.unlink(missing_ok=True)
        shutil.rmtree(self.root / "build", ignore_errors=True)
        environment = {**os.environ, "CUDACXX": str(self.root / "bin" / "nvcc")}
        command = ["cmake", "-G", "Ninja", "-S", self.root, "-B", self.root / "build", *options]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        status = re.search(r"^-- CUDA: (.*)$", done.stdout, re.MULTILINE)
        return status.group(1) if status else done.stderr, tried.exists()

    def test_by_default_the_driver_does_not_count(self):
        for driver in (False, True):
            self.assertTrue(self.configure(driver)[1])

    def test_with_driver_it_is_looked_for_where_there_is_one(self):
        self.assertTrue(self.configure(True, "-DLOSSD_CUDA=DRIVER")[1])

    def test_with_driver_it_says_why_not_and_how_to_insist(self):
        status, tried = self.configure(False, "-DLOSSD_CUDA=DRIVER")
        self.assertFalse(tried)
        self.assertIn("no NVIDIA driver", status)
        self.assertIn("LOSSD_CUDA=ON", status)

    def test_on_insists_without_a_driver(self):
        status, tried = self.configure(False, "-DLOSSD_CUDA=ON")
        self.assertTrue(tried)
        self.assertIn("LOSSD_CUDA=ON, but", status)

    def test_off_never_looks(self):
        self.assertFalse(self.configure(True, "-DLOSSD_CUDA=OFF")[1])

    def test_instrumented_builds_leave_it_out(self):
        for value in ("AUTO", "DRIVER"):
            self.assertFalse(self.configure(True, f"-DLOSSD_CUDA={value}", "-DLOSSD_SANITIZER=address")[1])


class Driver(unittest.TestCase):
    def test_nvidia_smi_is_one(self):
        with tempfile.TemporaryDirectory() as folder:
            write_program(pathlib.Path(folder, "nvidia-smi"), "#!/bin/sh\n")
            environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
            subprocess.run([ROOT / "tools" / "cuda_toolkit.sh", "--driver"], env=environment, check=True)


if __name__ == "__main__":
    unittest.main()
