"""The wait of tests for what another process or thread does."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 120.0) -> None:
    """Fails with `what`, which does not come about, if the condition does not hold after so long."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.01)
