"""Signals while the library waits: Ctrl-C, and whatever else has a handler.

Python runs a signal's handler in the main thread when that comes to Python code, which a call of the library keeps it
from. So the library calls back now and then, into a generator: what a handler raises there is raised within its `try`,
while in a function it could be raised before the first line of it, where nobody but ctypes would see it.
"""

from __future__ import annotations

import ctypes as c
import inspect
import itertools
import operator
import threading
from collections.abc import Generator
from typing import Any

import lossd._structs as s


class Wait:
    """What happens to one call while it waits. Used again by later calls."""

    def __init__(self) -> None:
        self.error: BaseException | None = None  # of a handler
        self.asked = self._ask()
        next(self.asked)

    def _ask(self) -> Generator[int, None, None]:
        while True:
            try:
                while True:  # so that a second signal, at the end of the first one's `except`, comes to the outer `try`
                    try:
                        while True:
                            yield int(self.error is not None)
                    except GeneratorExit:
                        return
                    except BaseException as error:  # noqa: BLE001 - it is raised again when the call has ended
                        self.error = error
            except BaseException as error:  # noqa: BLE001 - likewise
                self.error = error


class _Current:
    asked: Any = itertools.repeat(0)  # of the innermost call: a handler may make others


_current = _Current()
_idle: list[Wait] = []
# next() of it is next() of the current generator, without any Python function between.
_asked = map(next, map(operator.attrgetter("asked"), itertools.repeat(_current)))
_callback = c.CFUNCTYPE(c.c_int32, c.py_object)(next)
# Handles may be freed after this module is.
for _kept in (_asked, _callback):
    c.pythonapi.Py_IncRef(c.py_object(_kept))


def install(options: Any) -> None:
    """Into a s.ClientOptions."""
    options.interrupted = c.cast(_callback, s.Interrupted)
    options.interrupted_user = id(_asked)
    options.interrupted_thread = threading.main_thread().native_id or 0


def call(function: Any, arguments: tuple[Any, ...]) -> tuple[Any, BaseException | None]:
    """function(*arguments), which asks the callback while it waits; and what a signal's handler raised meanwhile.

    A short call does not ask. Then the handler runs when the call has returned, before Python has stored its result: so
    `results` takes that, without any Python between."""
    if threading.get_ident() != threading.main_thread().ident:
        return function(*arguments), None
    wait = _idle.pop() if _idle else Wait()
    outer, _current.asked = _current.asked, wait.asked
    results: list[Any] = []
    late: BaseException | None = None
    try:
        results.extend(itertools.starmap(function, (arguments,)))
    except BaseException as raised:
        if not results:
            raise
        late = raised
    finally:
        _current.asked = outer
        error, wait.error = wait.error or late, None
        if inspect.getgeneratorstate(wait.asked) == inspect.GEN_SUSPENDED:
            _idle.append(wait)
    return results[0], error
