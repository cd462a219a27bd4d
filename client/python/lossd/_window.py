"""Whose marks a flush or a step has to name: the server wants exactly those sessions that added to the window."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable

from lossd.results import HeadInfo, SessionMarks, StepResult

Accepted = dict[int, int]
"""The accepted mark of each lane."""


def accepted_of(text: str) -> tuple[str, Accepted]:
    """The session of marks, and what it has of each lane."""
    data = json.loads(text)
    return str(data["session_id"]), {int(lane["lane"]): int(lane["accepted"]) for lane in data["lanes"]}


Past = tuple[str, int]
"""The incarnation of the server that marks are of, and how often its head had been restored by then."""


def generation_of(text: str) -> int:
    """The window that marks were told in."""
    return int(json.loads(text).get("generation", 0))


def past_of(text: str) -> Past:
    data = json.loads(text)
    return str(data.get("incarnation", "")), int(data.get("restores", 0))


class Contributor:
    """A session that may have added to a head's window: its marks as they are, or as they were when it ended, and
    where they stood when the window began."""

    def __init__(self, client_key: str, read_marks: Callable[[], str]) -> None:
        self.client_key = client_key
        self._read: Callable[[], str] | None = read_marks
        self._final: str | None = None
        self._base: tuple[str, Accepted] = "", {}  # of that session: another one that took its place begins anew
        self._followed: tuple[Past, SessionMarks] | None = None
        self._lock = threading.RLock()  # a session that is collected in the middle comes here, too

    def marks(self) -> str:
        with self._lock:
            text = self._own()
            if self._followed is None or past_of(text) != self._followed[0]:
                return text
            told = self._followed[1]
            past = {"incarnation": told.incarnation, "restores": told.restores, "generation": told.generation}
            return json.dumps({**json.loads(text), **past})

    def follow(self, session: SessionMarks) -> None:
        """The head went back to a checkpoint that has all of these marks, and the caller knows that it did: from now on
        they are those of `session`, as the server tells it."""
        with self._lock:
            self._followed = past_of(self._own()), session

    def _own(self) -> str:
        if self._final is not None or self._read is None:
            return self._final or ""
        return self._read()

    def contributed(self) -> bool:
        """Whether it has added anything since the window began."""
        session_id, accepted = accepted_of(self.marks())
        base_id, counts = self._base
        base = counts if session_id == base_id else {}
        return any(count > base.get(lane, 0) for lane, count in accepted.items())

    def begin_window(self, marks: str) -> None:
        """Everything up to `marks` belongs to windows that have ended."""
        self._base = accepted_of(marks)

    @property
    def ended(self) -> bool:
        return self._final is not None

    def end(self) -> None:
        """Takes the marks for the last time, and lets the session go."""
        with self._lock:
            self._final = self._own()
            self._read = None


class Windows:
    """The windows of the heads of one client, by their names. Thread-safe."""

    def __init__(self) -> None:
        self._windows: dict[str, Window] = {}
        self._lock = threading.Lock()

    def of(self, name: str) -> Window:
        with self._lock:
            return self._windows.setdefault(name, Window())

    def forget(self, name: str) -> None:
        with self._lock:
            self._windows.pop(name, None)


class Window:
    """The contributors of one head, as far as one client knows them. Thread-safe."""

    def __init__(self) -> None:
        self._contributors: list[Contributor] = []
        self._frozen: dict[Contributor, str] = {}  # by a flush that was not committed yet
        self._unsure: dict[Contributor, str] = {}  # by a step that may have been taken, or not
        self._untold: tuple[bytes, int, StepResult] | None = None  # a step that was taken, unknown to its caller
        self._gradients = 0  # batches that this client has sent
        self._open_flush = ""  # whose commit has no answer
        self._interrupted = ""  # the flush whose end a signal kept from the caller
        self._wants_marks = False  # those that it had named
        self._lock = threading.RLock()  # a session that is collected in the middle comes here, too

    def add(self, contributor: Contributor) -> dict[Contributor, str]:
        """A session that was opened again by its client_key takes the place of the one before, unless that one had
        added what this one does not have. Returns the marks of those, which stay."""
        with self._lock:
            same_key = [one for one in self._contributors if one.client_key == contributor.client_key]
        session_id, accepted = accepted_of(contributor.marks())

        def has_all(one: Contributor) -> bool:
            its_id, its = accepted_of(one.marks())
            return its_id == session_id and all(accepted.get(lane, 0) >= count for lane, count in its.items())

        replaced = [one for one in same_key if has_all(one) or not one.contributed()]
        with self._lock:
            self._contributors = [*(one for one in self._contributors if one not in replaced), contributor]
        return {one: one.marks() for one in same_key if one not in replaced}

    def drop(self, contributor: Contributor) -> None:
        with self._lock:
            self._contributors = [one for one in self._contributors if one is not contributor]

    def marks(self) -> dict[Contributor, str]:
        """The marks of those that have added to the window."""
        with self._lock:
            contributors = list(self._contributors)
        return {one: one.marks() for one in contributors if one.contributed()}

    def named_by(self, marks: dict[Contributor, str]) -> None:
        """These marks were named by a step that may or may not have been taken."""
        with self._lock:
            self._unsure = marks

    def keep_step(self, options: bytes, result: StepResult) -> None:
        """A signal kept this answer from the caller, who will ask for the same step again."""
        with self._lock:
            self._untold = options, self._gradients, result

    def take_step(self, options: bytes) -> StepResult | None:
        """The answer that such a call is about, if there is one, and nothing was added to the window since."""
        with self._lock:
            untold, self._untold = self._untold, None
            asked = options, self._gradients
        return untold[2] if untold is not None and untold[:2] == asked else None

    def note_gradient(self) -> None:
        """A batch is about to add to the window."""
        with self._lock:
            self._gradients += 1

    def open_step(self) -> dict[Contributor, str]:
        """What the same step names again, so that the server knows it; with what was added since, if there is any: it
        can only be another step then. Empty if there is no such step."""
        with self._lock:
            unsure = self._unsure
        return {**unsure, **self.marks()} if unsure else {}

    def has_ended(self) -> bool:
        with self._lock:
            return any(one.ended for one in self._contributors)

    def forget_consumed(self, info: HeadInfo) -> None:
        """Leaves out sessions that are over and that the server does not want named any more: another process has
        flushed, or stepped, what they had added."""
        if info.window_state != "open":  # what is listed then is the frozen window's
            return
        known = {session.session_id for session in info.sessions}
        with self._lock:
            contributors = list(self._contributors)
        for one in contributors:
            if one.ended and accepted_of(one.marks())[0] not in known:
                self.drop(one)

    def froze(self, marks: dict[Contributor, str]) -> None:
        with self._lock:
            self._frozen = marks

    def left_open(self, marks: dict[Contributor, str], flush_id: str) -> None:
        """The commit of a flush has no answer; told again, with marks that may have moved, when there is none yet."""
        with self._lock:
            if flush_id != self._open_flush:
                self._frozen, self._open_flush = marks, flush_id

    def note_interrupted(self, flush_id: str) -> None:
        """A signal came while the library ended this flush, and the caller does not know that it did; empty: no flush
        had been ended."""
        with self._lock:
            if flush_id:
                self._interrupted = flush_id
                self._wants_marks = flush_id != self._open_flush  # of an open one they are known

    def keep_interrupted(self, marks: dict[Contributor, str]) -> None:
        """The call that note_interrupted() was about had named these marks."""
        with self._lock:
            if self._wants_marks:
                self._frozen = marks
            self._wants_marks = False

    def interrupted(self) -> str:
        with self._lock:
            return self._interrupted

    def is_open_flush(self, flush_id: str) -> bool:
        return flush_id == self._open_flush

    def committed(self) -> None:
        """The window of the last froze() or left_open() has ended."""
        with self._lock:
            frozen, self._frozen = self._frozen, {}
            self._open_flush = self._interrupted = ""
        self.consumed(frozen)

    def consumed(self, marks: dict[Contributor, str]) -> None:
        """The window of these marks has ended. Sessions that are over and added nothing since are forgotten, as the
        server has forgotten them."""
        self.named_by({})
        for contributor, text in marks.items():
            contributor.begin_window(text)
        self.forget_ended()

    def forget_ended(self) -> None:
        with self._lock:
            self._contributors = [one for one in self._contributors if not one.ended or one.contributed()]

    def drop_lost(self, marks: dict[Contributor, str], info: HeadInfo, *, told: bool) -> list[str]:
        """After a window was lost: forgets contributors of which the server lacks something, and returns the marks of
        these. A flush must still name the others, which follow the head if the caller was `told` that it went back."""
        dropped: list[str] = []
        if info.window_state != "open":  # what is listed then is the frozen window's
            return dropped
        known = {session.session_id: session for session in info.sessions}
        for contributor, text in marks.items():
            session_id, mine = accepted_of(text)
            session = known.get(session_id)
            accepted = {lane.lane: lane.accepted for lane in session.lanes} if session else {}
            if any(accepted.get(lane, 0) < count for lane, count in mine.items()):
                self.drop(contributor)
                dropped.append(text)
            elif told and session is not None:
                contributor.follow(session)
        return dropped
