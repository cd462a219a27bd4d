"""`lossd`, `lossctl` and `python -m lossd` in an environment that has the package: its programs take their place."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tomllib

import lossd

PACKAGE = Path(lossd.__file__).parent
PROJECT = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())
SCRIPTS: dict[str, str] = PROJECT["project"]["scripts"]


def arguments_of(name: str) -> list[str]:
    """Python's, as pip writes them into the environment's bin/NAME."""
    module, function = SCRIPTS[name].split(":")
    return ["-c", f"import sys; from {module} import {function}; sys.exit({function}())"]


COMMANDS = [("lossd", arguments_of("lossd")), ("lossctl", arguments_of("lossctl")), ("lossd", ["-m", "lossd"])]


class Environment:
    """A copy of the package, as pip lays it out, with programs that only tell how they were called."""

    def __init__(self, folder: Path) -> None:
        shutil.copytree(PACKAGE, folder / "lossd", ignore=shutil.ignore_patterns("bin", "lib", "__pycache__"))
        self.folder = folder

    def add_program(self, name: str) -> None:
        program = self.folder / "lossd" / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f'#!/bin/sh\necho {name} $$ "$#:$1:$2"\nexit 7\n')
        program.chmod(0o755)

    def run(self, *arguments: str) -> tuple[int, subprocess.Popen[str], str, str]:
        environment = {**os.environ, "PYTHONPATH": str(self.folder)}
        process = subprocess.Popen(
            [sys.executable, *arguments],
            env=environment,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        out, err = process.communicate()
        return process.returncode, process, out, err


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return Environment(tmp_path)


@pytest.mark.parametrize(("name", "arguments"), COMMANDS, ids=["lossd", "lossctl", "python -m lossd"])
def test_the_program_takes_its_place_with_its_arguments(
    environment: Environment, name: str, arguments: list[str]
) -> None:
    for program in SCRIPTS:
        environment.add_program(program)
    status, process, out, err = environment.run(*arguments, "--one=a b", "two")
    assert (status, out, err) == (7, f"{name} {process.pid} 2:--one=a b:two\n", "")


@pytest.mark.parametrize(("name", "arguments"), COMMANDS, ids=["lossd", "lossctl", "python -m lossd"])
def test_without_the_program_it_says_how_to_get_it(environment: Environment, name: str, arguments: list[str]) -> None:
    status, _, out, err = environment.run(*arguments, "--help")
    assert status == 1 and out == "" and "Traceback" not in err
    assert err.startswith(f"this package has no program {name} ") and "pip install" in err


def test_pip_builds_every_program_that_has_a_command() -> None:
    assert set(SCRIPTS) == {"lossd", "lossctl"}
    assert set(SCRIPTS) <= set(PROJECT["tool"]["scikit-build"]["build"]["targets"])
