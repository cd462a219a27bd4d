#!/usr/bin/python3
"""Shell completion, in the shells themselves: bash, zsh and fish.

usage: lossctl_completion_test.py LOSSD LOSSCTL WINDOW_FILLER
"""
import os
import pty
import re
import select
import signal
import subprocess
import unittest

from certificates import Authority
from lossctl_harness import LOSSCTL, LOSSD, SERVER_FLAGS, USAGE, LossctlTest
from lossd_server import LossdServer
from programs import run
from waiting import wait_until

DTYPES = ["bfloat16", "float16", "float32"]
# What is typed, and what is offered at its end. The head and the file are made by setUp.
CASES = [
    ("lossctl ", ["checkpoint", "completion", "flush", "gradient-stats", "head", "health", "memory", "status", "step"]),
    ("lossctl st", ["status", "step"]),
    ("lossctl --json h", ["head", "health"]),
    ("lossctl head ", ["blend", "copy", "create", "delete", "list", "load", "park", "save"]),
    ("lossctl --server SERVER head l", ["list", "load"]),
    ("lossctl completion ", ["bash", "fish", "zsh"]),
    ("lossctl head delete offered-", ["offered-1", "offered-2"]),
    ("lossctl flush offered-1 --out gr", ["grad file.safetensors"]),
    ("lossctl head save offered-1 gr", ["grad file.safetensors"]),
    ("lossctl head load offered-1 --tensor t gr", ["grad file.safetensors"]),
    ("lossctl --tls_ca gr", ["grad file.safetensors"]),
    ("lossctl flush offered-1 --dtype ", DTYPES),
    ("lossctl head create new --vocab 5 --dtype b", ["bfloat16"]),
    ("lossctl head create new --vo", ["--vocab"]),
    ("lossctl head delete offered-1 --dis", ["--discard-gradient"]),
    ("lossctl head create ", []),
    ("lossctl flush offered-1 ", []),
    ("lossctl checkpoint ", ["delete", "list", "restore", "save"]),
    ("lossctl checkpoint restore offered-", ["offered-1", "offered-2"]),
    ("lossctl step offered-", ["offered-1", "offered-2"]),
    ("lossctl head create new --optimizer ad", ["adam", "adamw"]),
]


class Shell(LossctlTest):
    """Completes in a shell that finds lossctl by its name."""

    def setUp(self):
        super().setUp()
        for name in ("offered-1", "offered-2"):
            self.succeed("head", "create", name, "--vocab", "8", "--hidden", "4")
        with open(self.path("grad file.safetensors"), "w", encoding="utf-8"):
            pass

    def shell(self, *command):
        path = f"{os.path.dirname(LOSSCTL)}:{os.environ['PATH']}"
        result = run(*command, stdin=subprocess.DEVNULL, cwd=self.folder, env=self.environment(PATH=path))
        self.assertEqual((result.returncode, result.stderr), (0, ""), (command, result))
        return result.stdout

    def script(self, shell):
        path = self.path(f"completion.{shell}")
        with open(path, "w", encoding="utf-8") as file:
            file.write(self.succeed("completion", shell))
        return path

    def typed(self, command, setup, line, expected):
        """Types into an interactive shell on a terminal until `expected` shows; returns what showed."""
        environment = self.environment(PATH=f"{os.path.dirname(LOSSCTL)}:{os.environ['PATH']}", PS1="ready> ",
                                       TERM="dumb", HOME=self.folder)
        pid, terminal = pty.fork()
        if pid == 0:
            os.chdir(self.folder)
            os.execvpe(command[0], command, environment)
        shown = ""

        def wait_for(text):
            def has_shown():
                nonlocal shown
                if text not in shown and select.select([terminal], [], [], 0.1)[0]:
                    shown += os.read(terminal, 4096).decode(errors="replace")
                return text in shown

            wait_until(has_shown, lambda: f"{text!r} on the terminal, which shows {shown!r}", every=0)

        try:
            wait_for("ready> ")
            shown = ""
            os.write(terminal, f"{setup}; echo set''up\n".encode())
            wait_for("setup\r\n")
            wait_for("ready> ")
            shown = ""
            os.write(terminal, line.encode())
            wait_for(expected)
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(terminal)
        return shown


class Bash(Shell):
    def offered(self, line, setup=":"):
        # As readline cuts the line: at blanks, and before and behind ':' and '='.
        words = re.findall(r"[:=]+|[^\s:=]+", line) + ([""] if line.endswith(" ") else [])
        quoted = " ".join(f"'{word}'" for word in words)
        program = (f"source {self.script('bash')}; COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; COMP_LINE='{line}'; "
                   + setup + "; _lossctl; printf '%s\\n' \"${COMPREPLY[@]}\"")
        return sorted(filter(None, self.shell("bash", "--norc", "-c", program).split("\n")))

    def test_the_script_parses(self):
        self.shell("bash", "-n", self.script("bash"))

    def test_cases(self):
        cases = CASES + [("lossctl flush offered-1 --dtype=", DTYPES), ("lossctl flush offered-1 --dtype=fl", DTYPES[1:]),
                         ("lossctl --server=SERVER head delete offered-1", ["offered-1"])]
        for line, expected in cases:
            with self.subTest(line=line):
                self.assertEqual(self.offered(line.replace("SERVER", self.server.target)), expected)

    def test_names_of_heads_come_from_the_server_on_the_line(self):
        line = "lossctl --server 127.0.0.1:1 head delete "
        self.assertEqual(self.offered(line), [])
        self.assertEqual(self.offered(f"lossctl --server {self.server.target} head delete "),
                         sorted(head["name"] for head in self.succeed_json("head", "list")["heads"]))

    def test_names_of_heads_come_over_tls_if_the_line_says_so(self):
        authority = Authority(self.path("."))
        authority.issue("server", "DNS:lossd.example")
        with LossdServer(LOSSD, *SERVER_FLAGS, *authority.server_flags()) as server:
            ca = str(authority.certificate("ca"))
            options = ["--server", server.target, "--tls_ca", ca, "--tls_server_name=lossd.example"]
            self.succeed("head", "create", "secret", "--vocab", "8", "--hidden", "4", *options)
            self.assertEqual(self.offered(f"lossctl head delete {' '.join(options)} "), ["secret"])
            self.assertEqual(self.offered(f"lossctl head delete {' '.join(options[:2])} "), [])

    def test_all_that_says_how_to_connect_goes_to_the_call_for_the_names_of_heads(self):
        options = ["--server=SERVER", "--tls_ca", "ca", "--tls_server_name=name", "--token_file", "token",
                   "--token_over_plain_text"]
        offered = self.offered(f"lossctl {' '.join(options[:3])} head {' '.join(options[3:])} --json delete ",
                               setup="lossctl() { printf '%s\\n' \"$@\"; }")
        self.assertEqual(offered, sorted(" ".join(options).replace("=", " ").split() + ["__heads"]))

    def test_every_command_and_option_of_every_help_is_offered(self):
        commands = [[]]
        for command in commands:
            text = self.succeed(*command, "--help")
            options = sorted(set(re.findall(r"(?m)^  (?:-h,)?(--[a-z0-9_-]+)", text)))
            line = " ".join(["lossctl", *command])
            self.assertEqual([word for word in self.offered(line + " --") if word != "-h"], options, line)
            if "\nSubcommands:\n" in text:
                below = re.findall(r"(?m)^  ([a-z-]+) ", text.split("\nSubcommands:\n")[1].split("\n\n")[0])
                self.assertEqual(self.offered(line + " "), sorted(below), line)
                commands += [command + [name] for name in below]
        self.assertGreater(len(commands), 10, commands)

    def test_a_tab_in_an_interactive_shell(self):
        self.typed(["bash", "--norc", "-i"], "source <(lossctl completion bash)", "lossctl head cre\t", "head create ")
        self.typed(["bash", "--norc", "-i"], "source <(lossctl completion bash)",
                   f"lossctl --server={self.server.target} flush offered-1 --out gr\t", "grad\\ file.safetensors")


class Zsh(Shell):
    def test_the_script_parses(self):
        self.shell("zsh", "-n", self.script("zsh"))

    def test_a_tab_in_an_interactive_shell(self):
        # -D: no dump file; -u: no question about who owns the functions.
        sourced = "autoload -U compinit; compinit -u -D; source <(lossctl completion zsh)"
        for line, expected in (("lossctl head cre\t", "head create "),
                               (f"lossctl --server={self.server.target} head delete offered-2\t", "offered-2 "),
                               ("lossctl flush offered-1 --dtype=b\t", "--dtype=bfloat16"),
                               ("lossctl flush offered-1 --out gr\t", "grad\\ file.safetensors"),
                               ("lossctl \t", "Write a head's accumulated gradient")):
            with self.subTest(line=line):
                self.typed(["zsh", "-f", "-i"], sourced, line, expected)

    def test_autoloaded_from_the_function_path(self):
        os.rename(self.script("zsh"), self.path("_lossctl"))
        setup = f"fpath=({self.folder} $fpath); autoload -U compinit; compinit -u -D"
        self.typed(["zsh", "-f", "-i"], setup, "lossctl head cre\t", "head create ")


class Fish(Shell):
    def test_the_script_parses(self):
        self.shell("fish", "--no-config", "-n", self.script("fish"))

    def test_all_that_says_how_to_connect_goes_to_the_call_for_the_names_of_heads(self):
        options = ["--server=SERVER", "--tls_ca", "ca", "--token_file", "token", "--token_over_plain_text"]
        stand_in = "function lossctl; printf '%s\\n' $argv; end"
        offered = self.shell("fish", "--no-config", "-c", f"source {self.script('fish')}; {stand_in}; "
                             f"complete -C 'lossctl {' '.join(options)} head delete '")
        self.assertEqual(sorted(offered.split()), sorted([*options, "__heads"]))

    def test_cases(self):
        script = self.script("fish")
        for line, expected in CASES:
            with self.subTest(line=line):
                line = line.replace("SERVER", self.server.target)
                offered = self.shell("fish", "--no-config", "-c", f"source {script}; complete -C '{line}'")
                self.assertEqual(sorted(row.split("\t")[0] for row in offered.splitlines()), expected)


class Script(LossctlTest):
    def test_json_holds_the_same_script(self):
        for shell in ("bash", "zsh", "fish"):
            self.assertEqual(self.succeed_json("completion", shell),
                             {"shell": shell, "script": self.succeed("completion", shell)})

    def test_an_unknown_shell_is_a_usage_error(self):
        self.assertIn("bash", self.error_of(USAGE, "completion", "csh"))

    def test_no_server_is_needed(self):
        for shell in ("bash", "zsh", "fish"):
            self.assertTrue(self.succeed("completion", shell, LOSSD_SERVER="127.0.0.1:1"))


if __name__ == "__main__":
    unittest.main(verbosity=2)
