#!/usr/bin/python3
"""The programs at the command line show a token, and say what is wrong without one.

usage: access_tools_test.py LOSSD LOSSCTL LOSSD_PERF TRAIN_LM
"""
import json
import os
import sys
import tempfile
import unittest

from lossd_server import LossdServer
from programs import run

from access_support import ROLES, TOKENS, write_tokens

LOSSD, LOSSCTL, LOSSD_PERF, TRAIN_LM = (sys.argv.pop(1) for _ in range(4))


class Tools(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.path = cls.enterClassContext(tempfile.TemporaryDirectory())
        write_tokens(cls.file("tokens"), TOKENS.items())
        for role in ROLES:
            with open(cls.file(role), "w", encoding="utf-8") as file:
                file.write(TOKENS[role] + "\n")
        cls.server = cls.enterClassContext(LossdServer(LOSSD, "--device=cpu", f"--tokens={cls.file('tokens')}"))

    @classmethod
    def file(cls, name):
        return os.path.join(cls.path, name)

    def run_tool(self, *command):
        done = run(*command)
        for token in TOKENS.values():
            self.assertNotIn(token, done.stdout + done.stderr)
        return done

    def lossctl(self, *arguments):
        return self.run_tool(LOSSCTL, *arguments, "--server", self.server.target)

    def test_lossctl(self):
        without = self.lossctl("status")
        self.assertNotEqual(without.returncode, 0)
        self.assertIn("--token_file", without.stderr)
        self.assertNotIn("is lossd running", without.stderr)
        self.assertEqual(self.lossctl("status", "--token_file", self.file("read-only")).returncode, 0)
        create = ("head", "create", "h", "--vocab", "64", "--hidden", "8")
        denied = self.lossctl(*create, "--token_file", self.file("read-only"))
        self.assertNotEqual(denied.returncode, 0)
        self.assertIn("needs a token of the role trainer", denied.stderr)
        created = self.lossctl(*create, "--token_file", self.file("trainer"))
        self.assertEqual(created.returncode, 0, created.stderr)
        delete = self.lossctl("head", "delete", "h", "--token_file", self.file("admin"))
        self.assertEqual(delete.returncode, 0, delete.stderr)

    def test_no_tool_sends_a_token_elsewhere_in_plain_text(self):
        done = self.run_tool(LOSSCTL, "status", "--server", "lossd.invalid:1", "--token_file", self.file("admin"))
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("--token_over_plain_text", done.stderr)

    def lossd_perf(self, role):
        return self.run_tool(LOSSD_PERF, f"--target={self.server.target}", f"--token_file={self.file(role)}",
                             "--tokens=64", "--vocab=256", "--hidden=32", "--batches=3")

    def train_lm(self, role):
        text = self.file("text")
        with open(text, "w", encoding="utf-8") as file:
            file.write("\n\n".join(f"A line of {word} and of {number}." for number in range(400)
                                   for word in ("tea", "bread", "salt", "oil")))
        return self.run_tool(TRAIN_LM, "--server", self.server.target, "--token_file", self.file(role),
                             "--text", text, "--vocabulary", "96", "--steps", "3", "--batch", "256", "--hidden",
                             "32", "--quiet")

    def heads(self):
        listed = self.lossctl("head", "list", "--json", "--token_file", self.file("read-only"))
        return [head["name"] for head in json.loads(listed.stdout)["heads"]]

    def test_with_a_token_of_an_admin_the_head_of_a_run_is_removed_without_a_word(self):
        for tool in (self.lossd_perf, self.train_lm):
            done = tool("admin")
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertNotIn("stays on the server", done.stderr)
            self.assertEqual(self.heads(), [])

    def test_with_a_token_of_a_trainer_the_head_of_a_run_stays_which_is_said(self):
        for program, tool in (("lossd-perf", self.lossd_perf), ("train_lm", self.train_lm)):
            done = tool("trainer")
            self.assertEqual(done.returncode, 0, done.stderr)
            (name,) = self.heads()
            said = [line for line in done.stderr.splitlines() if "stays on the server" in line]
            self.assertEqual(len(said), 1, done.stderr)
            self.assertTrue(said[0].startswith(f"{program}: head '{name}' stays on the server: "), said[0])
            self.assertIn("admin", said[0])
            command = said[0].partition(": lossctl ")[2].split()
            removed = self.lossctl(*command, "--token_file", self.file("admin"))
            self.assertEqual(removed.returncode, 0, removed.stderr)
            self.assertEqual(self.heads(), [])


if __name__ == "__main__":
    unittest.main()
