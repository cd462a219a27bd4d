#!/usr/bin/python3
"""Which files the checks look at, with git and on a machine without it."""
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest
from unittest import mock

ROOT = pathlib.Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tools"))
from source_files import recently_changed, source_files  # noqa: E402

IGNORED = ["build/a.cc", "build-asan/a.cc", "client/python/.mypy_cache/3.10/a.data.json", "tools/__pycache__/a.py",
           "a/.ruff_cache/a.json", ".pytest_cache/a.md", "a.pyc", "a/b.pyc", "notes/a.md", "a/only_here.md"]
OWN = [".gitignore", "a/build/a.cc", "a/builder.cc", "a/kept.pyc", "deep/a/only_here.md", "tools/a.py"]
RULES = (ROOT / ".gitignore").read_text(encoding="utf-8") + "\n# A comment.\n/a/only_here.md\n!kept.pyc\n"


class SourceFiles(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.root = pathlib.Path(scratch.name)
        for name in IGNORED + OWN:
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            (self.root / name).touch()
        (self.root / ".gitignore").write_text(RULES, encoding="utf-8")

    def exclude(self):
        (self.root / ".git/info").mkdir(parents=True, exist_ok=True)
        (self.root / ".git/info/exclude").write_text("/notes/\n", encoding="utf-8")

    def test_with_git(self):
        subprocess.run(["git", "init", "-q", self.root], check=True)
        self.exclude()
        self.assertEqual(source_files(root=self.root), OWN)

    def test_what_changed_recently(self):
        git = ["git", "-C", self.root, "-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "init", "-q", self.root], check=True)
        for number in range(26):
            (self.root / f"{number}.cc").touch()
            subprocess.run([*git, "add", f"{number}.cc"], check=True)
            subprocess.run([*git, "commit", "-q", "-m", "a"], check=True)
        self.assertEqual(recently_changed(("0.cc",), self.root), ["20.cc", "10.cc"])
        (self.root / "0.cc").write_text("a", encoding="utf-8")
        self.assertEqual(recently_changed(("0.cc",), self.root), ["0.cc", "20.cc", "10.cc"])

    def test_a_clone_without_git(self):
        self.assertEqual(recently_changed(root=self.root), [])
        self.exclude()
        with mock.patch.dict(os.environ, PATH=""):
            self.assertEqual(source_files(root=self.root), OWN)

    def test_an_unpacked_archive(self):
        self.assertEqual(source_files(root=self.root), sorted([*OWN, "notes/a.md"]))
        self.assertEqual(source_files((".py",), self.root), ["tools/a.py"])


if __name__ == "__main__":
    unittest.main()
