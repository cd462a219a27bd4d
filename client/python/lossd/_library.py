"""Finds and loads liblossd_c.so.

It is looked for in this order: the file that LOSSD_LIBRARY names; beside this package, where a wheel has it; in the
build folder of the repository that this file lies in. ctypes releases the GIL during every call.
"""

from __future__ import annotations

import ctypes as c
import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import lossd._interrupts as _interrupts
import lossd._structs as s
from lossd.errors import LibraryError, LossdError, VersionMismatchError, error_of

NAME = "liblossd_c.so"

Struct = TypeVar("Struct", bound=c.Structure)


def candidates() -> list[Path]:
    """Where the library is looked for; LOSSD_LIBRARY, if it is set, is the only place."""
    named = os.environ.get("LOSSD_LIBRARY")
    if named:
        return [Path(named)]
    package = Path(__file__).resolve().parent
    places = [package / "lib" / NAME, package / NAME]
    if len(package.parents) >= 3:  # ROOT/client/python/lossd
        places += [package.parents[2] / "build" / folder / NAME for folder in ("lib", "client/c_api")]
    return places


class Library:
    """The loaded library. Functions that can fail are called through call(), which raises what they return."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._dll = c.CDLL(str(path))
        except OSError as error:
            raise LibraryError(f"{path} could not be loaded: {error}") from error
        try:
            found, needed = int(self._dll.lossd_api_version()), s.LOSSD_C_API_VERSION
            if found < needed:
                raise VersionMismatchError(
                    f"{path} has C interface {found}, this package needs {needed}: they are of different builds"
                )
            for name, (result, arguments) in s.FUNCTIONS.items():
                function = getattr(self._dll, name)
                function.restype, function.argtypes = result, arguments
        except AttributeError as error:
            raise VersionMismatchError(f"{path} is not a liblossd_c.so of this package: {error}") from error
        self.version = bytes(self._dll.lossd_version()).decode()

    def function(self, name: str) -> Any:
        """A function that cannot fail."""
        return getattr(self._dll, name)

    def call(self, name: str, *arguments: Any, interrupted: Callable[[bool], None] | None = None) -> None:
        """Calls a function that returns a status; raises a LossdError unless it is OK, or what the handler of a signal
        raised while the call waited: KeyboardInterrupt, mostly, because of the LossdError that this has led to. Before
        that `interrupted` is told whether the call has succeeded all the same."""
        status, interruption = _interrupts.call(getattr(self._dll, name), arguments)
        if interruption is None:
            if status:
                raise self._error_of(status)
            return
        try:
            if interrupted is not None:
                interrupted(not status)
            raise interruption from (self._error_of(status) if status else None)
        finally:
            del interruption  # its traceback would hold it, and all its frames

    def _error_of(self, status: int) -> LossdError:
        number = int(self._dll.lossd_status_code(status))
        message = bytes(self._dll.lossd_status_message(status)).decode(errors="replace")
        flush_id = bytes(self._dll.lossd_status_flush_id(status)).decode()
        self._dll.lossd_status_free(status)
        return error_of(number, message, flush_id)

    def text(self, name: str, *arguments: Any) -> str:
        """Calls a function whose last argument is a char** that it fills."""
        pointer = c.c_void_p()
        self.call(name, *arguments, c.byref(pointer))
        try:
            return c.string_at(pointer.value).decode() if pointer.value else ""
        finally:
            self._dll.lossd_string_free(pointer)

    def json(self, name: str, *arguments: Any) -> Any:
        return json.loads(self.text(name, *arguments))

    def make(self, struct: type[Struct]) -> Struct:
        """A struct with the library's defaults."""
        made = struct()
        getattr(self._dll, s.INITIALIZERS[struct])(c.byref(made), c.sizeof(struct))
        return made


@functools.cache
def library() -> Library:
    """The library, loaded by the first call."""
    places = candidates()
    for path in places:
        if path.is_file():
            return Library(path)
    tried = ", ".join(str(path) for path in places)
    raise LibraryError(
        f"{NAME} is not there (looked at {tried}): install the package with pip, or build the target lossd_c and let "
        f"LOSSD_LIBRARY name the file"
    )


def encoded(text: str | os.PathLike[str], field: str) -> bytes:
    """For a const char*: UTF-8 without zero bytes."""
    if not isinstance(text, (str, os.PathLike)):
        raise TypeError(f"{field} must be a str, not {type(text).__name__}")
    data = os.fsencode(text)
    if b"\0" in data:
        raise ValueError(f"{field} must not contain a zero byte")
    return data


def marks_array(marks: list[str]) -> tuple[Any, int]:
    array = (c.c_char_p * len(marks))(*[encoded(mark, "marks") for mark in marks])
    return array, len(marks)
