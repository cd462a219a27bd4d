"""Servers that stand still."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path


def stand_still(pid: int) -> None:
    """Stops the process, and returns when none of its threads runs any more, which the signal itself does not wait
    for. SIGCONT lets it go on."""
    os.kill(pid, signal.SIGSTOP)
    while any(_state(stat) != "T" for stat in Path(f"/proc/{pid}/task").glob("*/stat")):
        time.sleep(0.01)


def _state(stat: Path) -> str:
    return stat.read_text().rpartition(")")[2].split()[0]
