"""Whose marks a flush or a step has to name."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable

from lossd.results import HeadInfo


class Contributor:
    """A session that may have added to a head's window: its marks as they are, or as they were when it ended."""

    def __init__(self, client_key: str, read_marks: Callable[[], str]) -> None:
        self.client_key = client_key
        self._read: Callable[[], str] | None = read_marks
        self._final: str | None = None
        self._lock = threading.Lock()

    def marks(self) -> str:
        with self._lock:
            return self._now()

    def _now(self) -> str:
        if self._final is not None or self._read is None:
            return self._final or ""
        return self._read()

    @property
    def ended(self) -> bool:
        return self._final is not None

    def end(self) -> None:
        """Takes the marks for the last time, and lets the session go."""
        with self._lock:
            self._final = self._now()
            self._read = None


class Window:
    """The contributors of one head, as far as one client knows them. Thread-safe."""

    def __init__(self) -> None:
        self._contributors: list[Contributor] = []
        self._lock = threading.Lock()

    def add(self, contributor: Contributor) -> None:
        """A session that was opened again by its client_key takes the place of the one before."""
        with self._lock:
            kept = [one for one in self._contributors if one.client_key != contributor.client_key]
            self._contributors = [*kept, contributor]

    def drop(self, contributor: Contributor) -> None:
        with self._lock:
            self._contributors = [one for one in self._contributors if one is not contributor]

    def contributors(self) -> list[Contributor]:
        with self._lock:
            return list(self._contributors)

    def consumed(self, contributors: list[Contributor]) -> None:
        """The window that these had added to has ended: those that were over already add nothing to the next."""
        with self._lock:
            self._contributors = [one for one in self._contributors if not (one.ended and one in contributors)]

    def drop_lost(self, contributors: list[Contributor], info: HeadInfo) -> None:
        """After a window was lost: leaves out those whose contributions the server does not have. What it does have
        must still be named."""
        known = {session.session_id: session for session in info.sessions}
        for contributor in contributors:
            marks = json.loads(contributor.marks())
            session = known.get(marks["session_id"])
            accepted = {lane.lane: lane.accepted for lane in session.lanes} if session else {}
            if session is None or any(accepted.get(lane["lane"], 0) < lane["accepted"] for lane in marks["lanes"]):
                self.drop(contributor)
