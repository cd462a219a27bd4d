#!/usr/bin/python3
"""What one build tree compiled another one takes from the cache, whatever started the compiler (cmake/LossdCompiler.cmake)."""
import os
import pathlib
import shutil
import subprocess
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[3]
PROJECT = """cmake_minimum_required(VERSION 3.25)
project(probe LANGUAGES CXX)
set(LOSSD_SANITIZER "" CACHE STRING "")
include(cmake/LossdCompiler.cmake)
add_library(probe OBJECT probe.cc)
"""


class CompilerCache(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.root = pathlib.Path(scratch.name)
        (self.root / "CMakeLists.txt").write_text(PROJECT, encoding="utf-8")
        (self.root / "probe.cc").write_text("int Probe() { return 1; }\n", encoding="utf-8")
        shutil.copytree(ROOT / "cmake", self.root / "cmake")
        self.log = self.root / "log"

    def results(self, tree, **environment):
        """What the cache says of the one file, compiled in `tree`."""
        inherited = {name: value for name, value in os.environ.items()
                     if not name.startswith(("CCACHE_", "LC_", "LANG"))}
        environment = {**inherited, "CCACHE_DIR": str(self.root / "cache"), "CCACHE_LOGFILE": str(self.log), **environment}
        self.log.unlink(missing_ok=True)
        build = self.root / tree
        configure = ["cmake", "-G", "Ninja", "-S", self.root, "-B", build, "-DCMAKE_CXX_COMPILER=c++"]
        for command in (configure, ["cmake", "--build", build]):
            subprocess.run(command, env=environment, capture_output=True, check=True)
        return self.log.read_text(encoding="utf-8")

    def test_a_locale_that_python_sets_for_its_children_is_none_of_its_business(self):
        """Where there is no LANG (a container), what pip starts has an LC_CTYPE which a shell's commands have not."""
        self.assertIn("Result: cache_miss", self.results("build"))
        self.assertIn("Result: direct_cache_hit", self.results("build-python", LC_CTYPE="C.UTF-8"))


if __name__ == "__main__":
    unittest.main(verbosity=2)
