"""Owners of what the C library makes."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from types import TracebackType

from lossd._library import library

_connected_in: int | None = None  # the process that has made a client: this one, or one that forked it


def refuse_if_forked() -> None:
    """RuntimeError in a child of a process that had made a client before."""
    if _connected_in not in (None, os.getpid()):
        raise RuntimeError(
            f"process {_connected_in} had connected to a lossd server before it forked this one, and gRPC does not "
            "survive that: start the process with multiprocessing's 'spawn' or 'forkserver', or connect only after "
            "forking"
        )


def note_connecting() -> None:
    """Before a client is made."""
    global _connected_in
    refuse_if_forked()
    _connected_in = os.getpid()


class Handle:
    """Owns one pointer. `with handle as pointer:` keeps it alive during a call, whoever closes it meanwhile.

    A forked child has copies of its parent's handles but not of the library's threads: it must not use them, and
    leaves them alone when it ends.
    """

    def __init__(self, pointer: int | None, free: str, what: str) -> None:
        self._pointer = pointer
        self._free = library().function(free)
        self._what = what
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._users = 0
        self._closed = False

    @property
    def closed(self) -> bool:
        # The garbage collector may end a handle before the objects around it that ask for this.
        return self._closed or self._pointer is None

    @property
    def is_ours(self) -> bool:
        """Whether this process made it, not one that forked this one."""
        return os.getpid() == self._pid

    def __enter__(self) -> int:
        if not self.is_ours:
            raise RuntimeError(
                f"{self._what} belongs to process {self._pid}, which forked this one: start the process with "
                f"multiprocessing's 'spawn' or 'forkserver', or connect only after forking"
            )
        with self._lock:
            if self._closed or self._pointer is None:
                raise ValueError(f"{self._what} is closed")
            self._users += 1
            return self._pointer

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._lock:
            self._users -= 1
        self._free_if_unused()

    def close(self) -> None:
        """Frees the pointer, once calls that use it have ended. May be called again."""
        with self._lock:
            self._closed = True
        self._free_if_unused()

    def _free_if_unused(self) -> None:
        with self._lock:
            if not self._closed or self._users or self._pointer is None:
                return
            pointer, self._pointer = self._pointer, None
        if self.is_ours:
            self._free(pointer)

    def __del__(self, _process_ends: Callable[[], bool] = sys.is_finalizing) -> None:
        pointer = getattr(self, "_pointer", None)
        # When the interpreter ends, nothing is left of this module, and the process ends with everything.
        if pointer is not None and not _process_ends() and os.getpid() == self._pid:
            self._pointer = None
            self._free(pointer)
