"""A trainer of a head over replicas, as a process of the soak that kills them and cuts their connections (replica_faults.py).

It has sessions at several replicas. A kill of any of them puts all back to a checkpoint, and this trainer with them. A cut may do so
only while this trainer waits for a change of its weights or its window, which some replicas have made then and others not: any other
cut undoes nothing. A trainer that has to go back for no such reason is an error, and so is anything that is not, to the last bit, what
the checkpoint had.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lossd

from fault_clients import FaultTrainer, Kind, ServerWentBack, T, main
from oracle import Batch

KINDS = {
    "steps": Kind(lanes=2, sessions=2, steps=True),
    "flushes": Kind(sessions=2, dtype="bfloat16", head={"bias": True}),
    "second_gradient": Kind(sessions=2, head={"double_buffer": True}),
    "impatient_steps": Kind(sessions=2, steps=True, reconnect_timeout=0.1, call_timeout=1),
    "three_sessions": Kind(lanes=2, sessions=3, steps=True),
    "impatient": Kind(sessions=2, reconnect_timeout=0.2, call_timeout=2),
}
CHANGES = ("step", "flush", "commit_flush", "abort_flush", "write_weights", "commit")


class ReplicaTrainer(FaultTrainer):
    kinds = KINDS
    cuts_before: int | None = None  # a change was asked for after so many that may not be there yet, or may be undone

    def once(self, function: Callable[..., T], *arguments: Any, **options: Any) -> T:
        if self.cuts_before is None and function.__name__ in CHANGES:
            self.cuts_before = self.page.cuts
        result = super().once(function, *arguments, **options)
        if not self.was_cut():
            self.cuts_before = None
        return result

    def send(self, batches: list[Batch], places: list[int]) -> None:
        """Sessions hear here that they went back, even if the change was made again since, behind a checkpoint with all that it needs."""
        super().send(batches, places)
        self.cuts_before = None

    def go_back(self) -> None:
        self.cuts_before = None
        super().go_back()

    def was_cut(self) -> bool:
        """While it waited for a change."""
        return self.cuts_before is not None and (self.page.cuts != self.cuts_before or self.page.cuts % 2 == 1)

    def may_have_gone_back(self) -> bool:
        return self.was_killed() or self.was_cut()

    def require_kill(self, error: Exception) -> None:
        if self.was_cut() and not self.was_killed():
            self.seen["sent back by a cut"] += 1
        else:
            super().require_kill(error)

    def require_same(self, number: int, session: lossd.Session) -> None:
        if self.was_killed():
            raise ServerWentBack


if __name__ == "__main__":
    main(ReplicaTrainer)
