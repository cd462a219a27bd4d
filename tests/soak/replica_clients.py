"""A trainer of a head over replicas, as a process of the soak that kills them (replica_faults.py).

It has sessions at several replicas. When one is killed it asks which of its sessions are gone: what these had in the window is not
in it any more, and everything else is, to the last bit. A session that is gone though nobody has killed its replica is an error,
and so is one that stays although its window is gone.
"""
from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lossd

from fault_clients import Contribution, FaultTrainer, Kind, ServerWentBack, accepted_of, main
from fault_page import MOST_REPLICAS
from oracle import Batch, Oracle, check_equal

MOST_TRIES = 1000  # of what nothing but a kill explains; a guard

KINDS = {
    "steps": Kind(lanes=2, sessions=2, steps=True),
    "flushes": Kind(sessions=2, dtype="bfloat16", head={"bias": True}),
    "second_gradient": Kind(sessions=2, head={"double_buffer": True}),
    "impatient_steps": Kind(sessions=2, steps=True, reconnect_timeout=0.1, call_timeout=1),
    "three_sessions": Kind(lanes=2, sessions=3, steps=True),
    "impatient": Kind(sessions=2, reconnect_timeout=0.2, call_timeout=2),
}


@dataclass
class Place:
    """Where a session was opened, and how often each replica had been killed then."""

    session_id: str
    replica: int
    kills: list[int]


def place_of(session: lossd.Session, kills: list[int]) -> Place:
    """`kills`: of each replica, before it was opened."""
    named = re.match(r"r(\d+)\.", session.session_id)
    if not named:
        raise AssertionError(f"session {session.session_id} names no replica")
    return Place(session.session_id, int(named[1]), kills)


class ReplicaTrainer(FaultTrainer):
    kinds = KINDS

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        # By the session's number: where it was opened when the window was known last, and just now.
        self.opened: dict[int, Place] = {}
        self.found: dict[int, Place] = {}
        self.contributed: set[int] = set()  # whose handle has added to the window itself
        self.closes = False  # its sessions, which are gone then without a kill
        self.leans = False  # on all replicas: a restored window is dropped whole with any of them

    # Sessions

    def open_session(self, number: int) -> lossd.Session:
        kills = self.kills_of_each()
        try:
            session = super().open_session(number)
        except lossd.WindowLostError:  # that one of the client_key had added something; it is compared below
            session = super().open_session(number)
        self.contributed.discard(number)
        self.found[number] = place_of(session, kills)
        self.opened.setdefault(number, self.found[number])
        return session

    def kills_of_each(self) -> list[int]:
        return [self.page.kills_of(replica) for replica in range(MOST_REPLICAS)]

    def require_same(self, number: int, session: lossd.Session) -> None:
        if session.session_id != self.opened[number].session_id:
            raise ServerWentBack

    def may_have_gone_back(self) -> bool:
        return self.page.kills != self.kills_seen or self.page.kills % 2 == 1

    def require_loss_explained(self, place: Place) -> None:
        costly = range(len(place.kills)) if self.leans else [place.replica]
        if all(self.page.kills_of(replica) == place.kills[replica] and place.kills[replica] % 2 == 0 for replica in costly):
            raise AssertionError(f"session {place.session_id} is gone, but nobody has killed replica {place.replica}")

    # After a kill

    def guarded(self, part: Callable[[], None]) -> bool:
        try:
            part()
            return True
        except (lossd.WindowLostError, ServerWentBack) as error:
            self.require_kill(error)
        while True:
            try:
                self.find_again()
                return False
            except (lossd.WindowLostError, ServerWentBack) as error:
                self.require_kill(error)

    def find_again(self) -> None:
        """What there is of the window, and whether it has ended."""
        self.kills_seen = self.page.kills
        self.sessions = [self.open_session(number) for number in range(self.work_as.sessions)]
        info = self.again(self.head.info)
        if info.flush_id and info.generation == self.state.generation:
            self.again(self.head.abort_flush, info.flush_id)
            info = self.again(self.head.info)
        if info.generation == self.state.generation + 1:
            self.end_unseen(info)
        check_equal("the generation after a kill", info.generation, self.state.generation)
        self.fold_later()
        for number, session in enumerate(self.sessions):
            self.settle_session(number, session)
        self.seen["found again"] += 1

    def end_unseen(self, info: lossd.HeadInfo) -> None:
        """What was asked for last has been done; its answer was lost, and with it what could be compared."""
        if self.work_as.steps:
            gradient = Oracle(self.state.weights).weight_gradient(self.state.batches)
            self.end_by_step(gradient, info.weight_version)
        else:
            self.end_window()
        self.seen["ended unseen"] += 1

    def fold_later(self) -> None:
        """A flush that was aborted: what was in the next window is in this one."""
        if self.later is not None:
            for contribution, batches in zip(self.state.contributions, self.later):
                contribution.batches = contribution.batches + batches
        self.later = None

    def settle_session(self, number: int, session: lossd.Session) -> None:
        place, contribution = self.opened[number], self.state.contributions[number]
        if session.session_id == place.session_id:
            check_equal("marks after a kill", accepted_of(session), contribution.accepted)
            return
        if not self.closes:
            self.require_loss_explained(place)
        self.opened[number] = self.found[number]
        self.seen["sessions lost"] += 1
        self.seen["batches lost"] += len(contribution.batches)
        self.state.contributions[number] = Contribution(accepted_of(session))

    # Batches

    def send(self, batches: list[Batch], places: list[int]) -> None:
        """To its end for every session, whatever has become of another."""
        oracle, kills = Oracle(self.state.weights), self.kills_of_each()
        options = [self.batch_options(place) for place in places]
        with self.under_way():
            futures = [session.compute_async(batch.hidden, batch.labels, **option)
                       for session, batch, option in zip(self.sessions, batches, options)]
            errors = [future.exception() for future in futures]
        gone: Exception | None = None
        for number, (batch, future, error) in enumerate(zip(batches, futures, errors)):
            try:
                result = self.result_or_loss(number, batch, options[number], future, error)
            except (lossd.WindowLostError, ServerWentBack) as loss:
                gone = loss
                continue
            self.check_result(oracle, batch, result)
            self.note_replaced(number, kills)
            self.put_in_window(number, batch, places[number])
        if gone is not None:
            raise gone

    def note_replaced(self, number: int, kills: list[int]) -> None:
        """The library opens another session by itself if nothing is lost with the one that is gone."""
        session, place = self.sessions[number], self.opened[number]
        if session.session_id == place.session_id:
            return
        self.require_loss_explained(place)
        if number in self.contributed:
            raise AssertionError(f"session {place.session_id} is gone with what it had in the window, and nobody has said so")
        # What a handle before this one had added is not known to the library.
        self.seen["batches lost"] += len(self.state.contributions[number].batches)
        self.state.contributions[number].batches = []
        self.opened[number] = place_of(session, kills)
        self.seen["sessions replaced"] += 1

    def result_or_loss(self, number: int, batch: Batch, options: dict[str, Any], future: Any,
                       error: BaseException | None) -> lossd.BatchResult:
        """An error of a session that is still there says nothing: the batch is sent again, under its numbers."""
        for _ in range(MOST_TRIES):
            try:
                return self.once(self.result_of, number, batch, options, future, error)
            except (lossd.WindowLostError, ServerWentBack):
                session = self.open_session(number)
                self.require_same(number, session)
                self.sessions[number] = session
                error = lossd.UnavailableError("it is to be sent again")
        raise AssertionError(f"a batch of session {self.opened[number].session_id} is never taken: {error!r}") from error

    def close_sessions(self) -> None:
        self.closes = True
        super().close_sessions()

    # Windows

    def put_in_window(self, number: int, batch: Batch, place: int) -> None:
        super().put_in_window(number, batch, place)
        if (batch.labels >= 0).any():  # else nothing of it is in the window
            self.contributed.add(number)

    def end_window(self) -> None:
        super().end_window()
        self.contributed = {number for number in self.contributed if self.state.contributions[number].batches}
        self.leans = False

    # Weights and checkpoints

    def write_weights(self) -> None:
        """A write that a kill has undone is begun again: it says the same."""
        for _ in range(MOST_TRIES):
            try:
                super().write_weights()
                return
            except ServerWentBack:
                self.seen["weights begun again"] += 1
        raise AssertionError("weights are never taken")

    def save(self) -> None:
        """What is saved is whole, whoever is killed meanwhile: otherwise the window is lost, and this says so."""
        before = self.page.kills
        if before != self.kills_seen or before % 2 == 1:
            raise ServerWentBack
        super().save()
        if self.page.kills != before:
            self.seen["checkpoints during kills"] += 1

    def save_checkpoint(self, tag: str) -> lossd.SavedCheckpoint:
        return self.head.save_checkpoint(tag, marks=self.head.marks())

    def go_back(self) -> None:
        while True:
            before = self.page.kills
            self.opened.clear()
            try:
                super().go_back()
                self.leans = True
                return
            except AssertionError:
                if self.page.kills == before and before % 2 == 0:
                    raise
            except (lossd.WindowLostError, ServerWentBack) as error:
                self.require_kill(error)


if __name__ == "__main__":
    main(ReplicaTrainer)
