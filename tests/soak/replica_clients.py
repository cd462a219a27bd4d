"""A trainer of a head over replicas, as a process of the soak that kills them (replica_faults.py).

It has sessions at several replicas. A kill of any of them puts all back to a checkpoint, and this trainer with them. One that goes
back though nobody has killed a replica is an error, and so is anything that is not, to the last bit, what the checkpoint had.
"""
from __future__ import annotations

import lossd

from fault_clients import FaultTrainer, Kind, ServerWentBack, main

KINDS = {
    "steps": Kind(lanes=2, sessions=2, steps=True),
    "flushes": Kind(sessions=2, dtype="bfloat16", head={"bias": True}),
    "second_gradient": Kind(sessions=2, head={"double_buffer": True}),
    "impatient_steps": Kind(sessions=2, steps=True, reconnect_timeout=0.1, call_timeout=1),
    "three_sessions": Kind(lanes=2, sessions=3, steps=True),
    "impatient": Kind(sessions=2, reconnect_timeout=0.2, call_timeout=2),
}


class ReplicaTrainer(FaultTrainer):
    kinds = KINDS

    def may_have_gone_back(self) -> bool:
        return self.page.kills != self.kills_seen or self.page.kills % 2 == 1

    def require_same(self, number: int, session: lossd.Session) -> None:
        if self.may_have_gone_back():
            raise ServerWentBack


if __name__ == "__main__":
    main(ReplicaTrainer)
