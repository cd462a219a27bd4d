"""What the processes of the fault soak tell each other while calls are under way: numbers in a file that all of them map."""
from __future__ import annotations

from pathlib import Path

import numpy as np


# What a client waits for.
PHASES = ("computing", "flushing", "stepping", "saving", "other")


class FaultPage:
    """`under_way`, `progress` and `phases` (an index of PHASES) have a number for each client's way to the server; the first
    ones of the file are those that the proxy looks at."""

    def __init__(self, path: Path, ways: int) -> None:
        if not path.exists():
            path.write_bytes(bytes(4 * (3 * ways + 3)))
        numbers = np.memmap(path, np.uint32, "r+", shape=(3 * ways + 3,))
        self.under_way, self.progress, self.phases = numbers[:ways], numbers[ways:2 * ways], numbers[2 * ways:3 * ways]
        self._rest = numbers[3 * ways:]

    def phases_under_way(self) -> set[str]:
        return {PHASES[phase] for phase, calls in zip(self.phases, self.under_way) if calls}

    @property
    def kills(self) -> int:
        """Odd from before the server is killed until it is dead."""
        return int(self._rest[0])

    def count_kill(self) -> None:
        self._rest[0] += 1

    @property
    def cuts(self) -> int:
        """Odd from before a connection between replicas is cut until all have met again."""
        return int(self._rest[2])

    def count_cut(self) -> None:
        self._rest[2] += 1

    @property
    def stopping(self) -> bool:
        """Clients finish what they are doing, and leave."""
        return bool(self._rest[1])

    def stop(self) -> None:
        self._rest[1] = 1
