"""The commands `lossd` and `lossctl` of an environment that has this package: its programs take their place."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn


def lossd() -> NoReturn:
    """Becomes the server, with this process' arguments. `python -m lossd` is the same."""
    _become("lossd")


def lossctl() -> NoReturn:
    """Becomes the tool for operators, with this process' arguments."""
    _become("lossctl")


def _become(name: str) -> NoReturn:
    program = Path(__file__).resolve().parent / "bin" / name
    if not os.access(program, os.X_OK):
        sys.exit(f"this package has no program {name} ({program}): install it with pip install ./client/python")
    os.execv(program, [name, *sys.argv[1:]])
