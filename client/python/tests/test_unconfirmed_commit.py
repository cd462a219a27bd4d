"""A flush whose commit has no answer: the server stands still just when the gradient has been read."""

from __future__ import annotations

import contextlib
import itertools
import signal
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from servers import stand_still
from waiting import wait_until

import lossd
from lossd import _flush
from lossd._library import Library

V, H = 32, 16
HIDDEN = np.random.default_rng(0).standard_normal((4, H), np.float32)
LABELS = np.arange(4)
_numbers = itertools.count()


class Stalled:
    """A head, and a client that does not wait long."""

    def __init__(self, server: lossd.Server) -> None:
        self.process = server.process
        name = f"stalled-{next(_numbers)}"
        with server.client() as patient:
            head = patient.create_head(name, V, H, "float32", optimizer=lossd.SGD())
            head.write_weights(np.zeros((V, H), np.float32))
        self.client = server.client(call_timeout=1.0, reconnect_timeout=1.0)
        self.head = self.client.head(name)
        self.session = self.head.open_session()
        self.rows: list[Any] = []

    def compute(self) -> None:
        self.session.compute(HIDDEN, LABELS)

    def flush_unanswered(self) -> lossd.LossdError:
        check = _flush._Callbacks.check

        def stop_behind(callbacks: _flush._Callbacks, rows: int) -> None:
            check(callbacks, rows)
            stand_still(self.process.pid)

        with (
            pytest.MonkeyPatch.context() as patch,
            pytest.raises((lossd.DeadlineExceededError, lossd.UnavailableError)) as caught,
        ):
            patch.setattr(_flush._Callbacks, "check", stop_behind)  # the rows are here, and the commit comes next
            self.head.flush(sink=lambda _first, rows, _bias: self.rows.append(rows.copy()))
        return caught.value

    def go_on(self) -> None:
        """What the server has to answer first may take longer than this client waits."""
        self.process.send_signal(signal.SIGCONT)
        wait_until(self._answers, "the server answers again")

    def _answers(self) -> bool:
        try:
            self.head.info()
        except (lossd.DeadlineExceededError, lossd.UnavailableError):
            return False
        return True


@pytest.fixture(scope="module")
def server() -> Iterator[lossd.Server]:
    """Which stands still at times."""
    with lossd.launch("cpu") as server:
        yield server


@pytest.fixture
def stalled(server: lossd.Server) -> Iterator[Stalled]:
    stalled = Stalled(server)
    yield stalled
    server.process.send_signal(signal.SIGCONT)
    stalled.client.close()


Again = Callable[[Stalled], Any]


@pytest.mark.parametrize(
    "again",
    [lambda s: s.head.flush(), lambda s: s.head.step(0.1)],
    ids=["flush", "step"],
)
def test_the_next_call_says_that_it_is_committed_now(stalled: Stalled, again: Again) -> None:
    stalled.compute()
    error = stalled.flush_unanswered()
    assert error.flush_id and error.flush_id in str(error)
    assert stalled.rows[0].any()
    with pytest.raises((lossd.DeadlineExceededError, lossd.UnavailableError)):
        again(stalled)
    stalled.go_on()
    with pytest.raises(lossd.AlreadyExistsError, match=error.flush_id):
        again(stalled)
    info = stalled.head.info()
    assert info.window_tokens == 0 and info.weight_version == 1
    assert stalled.head.marks() == []  # nobody has added to the next window
    stalled.compute()
    assert stalled.head.flush().window_tokens == 4


def test_a_session_that_added_nothing_since_is_not_named_in_the_next_window(stalled: Stalled) -> None:
    with stalled.head.open_session(rank=1) as other:
        other.compute(HIDDEN, LABELS)
        stalled.flush_unanswered()
        stalled.go_on()
        with pytest.raises(lossd.AlreadyExistsError):
            stalled.head.flush()
        stalled.compute()
        result = stalled.head.flush()
    assert result.window_tokens == 4
    np.testing.assert_allclose(result.gradient, stalled.rows[0], rtol=1e-5)  # it has the same tokens


def test_commit_flush_finishes_it(stalled: Stalled) -> None:
    stalled.compute()
    error = stalled.flush_unanswered()
    stalled.go_on()
    stalled.head.commit_flush(error.flush_id)
    assert stalled.head.marks() == []
    stalled.compute()
    assert stalled.head.flush().window_tokens == 4


def interrupt_behind(function: str, action: Callable[[], Any]) -> None:
    """Python raises KeyboardInterrupt only when the library has returned, be it with an error."""
    call = Library.call

    def call_and_interrupt(library: Library, name: str, *arguments: Any) -> None:
        with contextlib.suppress(lossd.LossdError):
            call(library, name, *arguments)
        if name == function:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Library, "call", call_and_interrupt)
        action()


def test_an_interruption_of_the_call_that_settles_it_hides_nothing(stalled: Stalled) -> None:
    stalled.compute()
    error = stalled.flush_unanswered()
    stalled.go_on()
    interrupt_behind("lossd_head_flush", stalled.head.flush)
    stalled.compute()
    with pytest.raises(lossd.AlreadyExistsError, match=error.flush_id):
        stalled.head.flush()
    assert stalled.head.flush().window_tokens == 4  # the session is named, as what it added since is there


def test_another_interruption_changes_nothing(stalled: Stalled) -> None:
    stalled.compute()
    interrupt_behind("lossd_head_flush", stalled.head.flush)
    stalled.compute()
    interrupt_behind("lossd_head_gradient_stats", stalled.head.gradient_stats)
    with pytest.raises(lossd.AlreadyExistsError):
        stalled.head.flush()
    assert stalled.head.flush().window_tokens == 4


@pytest.mark.parametrize(
    ("function", "end"),
    [("lossd_head_flush", lambda head: head.flush()), ("lossd_head_discard", lambda head: head.discard())],
    ids=["flush", "discard"],
)
@pytest.mark.parametrize("again", [lambda h: h.flush(), lambda h: h.step(0.1), lambda h: h.discard()])
def test_an_interrupted_flush_that_ended_the_window_is_told_of(
    stalled: Stalled, function: str, end: Callable[[lossd.Head], Any], again: Callable[[lossd.Head], Any]
) -> None:
    stalled.compute()
    interrupt_behind(function, lambda: end(stalled.head))
    stalled.compute()
    with pytest.raises(lossd.AlreadyExistsError) as caught:
        again(stalled.head)
    assert caught.value.flush_id and caught.value.flush_id in str(caught.value)
    assert stalled.head.flush().window_tokens == 4


def test_another_handle_knows_of_it_too(stalled: Stalled) -> None:
    stalled.compute()
    error = stalled.flush_unanswered()
    stalled.go_on()
    other = stalled.client.head(stalled.head.name)
    with pytest.raises(lossd.AlreadyExistsError, match=error.flush_id):
        other.flush()
    assert stalled.head.info().generation == 2


def test_other_errors_name_no_flush(stalled: Stalled) -> None:
    with pytest.raises(lossd.FailedPreconditionError) as caught:
        stalled.compute()
        stalled.head.flush(marks=[])
    assert caught.value.flush_id == ""


def test_a_flush_that_meets_it_does_not_reopen_it(stalled: Stalled) -> None:
    """What a flush of its own would abort after an error is not its own."""
    stalled.compute()
    error = stalled.flush_unanswered()
    with pytest.raises((lossd.DeadlineExceededError, lossd.UnavailableError)) as caught:
        stalled.head.flush(progress=lambda *_: None, commit=False)
    assert caught.value.flush_id == error.flush_id
    stalled.go_on()
    assert stalled.head.discard().flush_id == error.flush_id  # whose marks are the same
    assert stalled.head.info().window_state == "open" and stalled.head.marks() == []


def test_a_discard_of_the_window_behind_it_drops_nothing_at_first(stalled: Stalled) -> None:
    stalled.compute()
    error = stalled.flush_unanswered()
    stalled.go_on()
    with pytest.raises(lossd.AlreadyExistsError, match=error.flush_id):
        stalled.head.discard(marks=[])
    assert stalled.head.info().generation == 2 and stalled.head.marks() == []
