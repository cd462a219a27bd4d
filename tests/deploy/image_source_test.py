#!/usr/bin/python3
"""What deploy/image.sh writes into the label that says where an image's source is, with a podman that only tells how it was
called, and a git that knows one remote.

usage: image_source_test.py REPOSITORY
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

REPOSITORY = Path(sys.argv.pop(1)).absolute()
PODMAN = '#!/bin/sh\nfor word; do echo "$word"; done >>"$(dirname "$0")/called"\n'
# Its arguments: -C REPOSITORY, then `config --get remote.origin.url` or another command. Without ORIGIN it is not installed.
GIT = '#!/bin/sh\n[ -n "$ORIGIN" ] || exit 127\n[ "$3 $4 $5" = "config --get remote.origin.url" ] && echo "$ORIGIN"\n'


class Source(unittest.TestCase):
    def label(self, origin: str) -> str:
        with tempfile.TemporaryDirectory() as folder:
            for name, text in (("podman", PODMAN), ("git", GIT)):
                program = Path(folder, name)
                program.write_text(text, encoding="utf-8")
                program.chmod(0o755)
            environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "ORIGIN": origin}
            command = [REPOSITORY / "deploy/image.sh", "--tool", "podman", "cpu"]
            subprocess.run(command, env=environment, capture_output=True, check=True)
            (label,) = re.findall(r"^SOURCE=(.*)$", Path(folder, "called").read_text(encoding="utf-8"), re.MULTILINE)
            return str(label)

    def test_the_address_of_the_repository(self) -> None:
        for address in ("https://git.example.com/lossd.git", "ssh://git.example.com:2222/lossd"):
            self.assertEqual(self.label(address), address)

    def test_who_fetches_it_with_which_password_is_not_told(self) -> None:
        for user in ("me", "me:secret", "me:se%40cret", ":secret"):
            self.assertEqual(self.label(f"https://{user}@git.example.com/lossd"), "https://git.example.com/lossd")

    def test_a_password_that_cannot_be_told_from_the_address_is_not_told(self) -> None:
        for user in ("me:sec/ret", "me:sec@ret", "me:s@c/r@t", "me:/@"):
            self.assertEqual(self.label(f"https://{user}@git.example.com/lossd"), "unknown", user)

    def test_a_path_is_unknown_to_others(self) -> None:
        for path in ("/srv/lossd", "../lossd", "me@git.example.com:lossd"):
            self.assertEqual(self.label(path), "unknown")

    def test_without_git_it_is_unknown(self) -> None:
        self.assertEqual(self.label(""), "unknown")


if __name__ == "__main__":
    unittest.main()
