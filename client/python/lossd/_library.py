"""Finds and loads liblossd_c.so, and declares its functions.

It is looked for in this order: the file that LOSSD_LIBRARY names; beside this package, where a wheel has it; in the
build folder of the repository that this file lies in. ctypes releases the GIL during every call.
"""

from __future__ import annotations

import ctypes as c
import functools
import json
import os
from pathlib import Path
from typing import Any

from lossd import _structs as s
from lossd.errors import LibraryError, VersionMismatchError, error_of

NAME = "liblossd_c.so"
API_VERSION = 3  # of lossd/c_api.h, as this package was written against it

_P = c.c_void_p
_PP = c.POINTER(c.c_void_p)
_S = c.c_char_p
_I32, _I64, _U64 = c.c_int32, c.c_int64, c.c_uint64
_MARKS = (c.POINTER(c.c_char_p), c.c_size_t)

# Functions that return a status, with their arguments.
_FALLIBLE: dict[str, tuple[Any, ...]] = {
    "lossd_connect": (_S, c.POINTER(s.ClientOptions), _PP),
    "lossd_client_status": (_P, _PP),
    "lossd_client_memory": (_P, _PP),
    "lossd_client_heads": (_P, _PP),
    "lossd_client_traffic": (_P, _PP),
    "lossd_client_drain": (_P,),
    "lossd_client_delete_head": (_P, _S, _I32),
    "lossd_client_restore_checkpoint": (_P, _S, _S, _PP),
    "lossd_client_checkpoints": (_P, _S, _PP),
    "lossd_client_delete_checkpoint": (_P, _S, _S, _PP),
    "lossd_client_create_region": (_P, _I32, _I64, _PP),
    "lossd_region_copy_in": (_P, _I64, _P, _I64),
    "lossd_region_copy_out": (_P, _I64, _P, _I64),
    "lossd_client_create_head": (_P, c.POINTER(s.HeadConfig), _PP),
    "lossd_client_get_head": (_P, _S, _PP),
    "lossd_head_info": (_P, _PP),
    "lossd_head_write_weights": (_P, _I32, _P, _P, s.Progress, _P, c.POINTER(_U64)),
    "lossd_head_read_weights": (_P, _I64, _I64, _I32, _P, _P, s.Progress, _P, c.POINTER(_U64)),
    "lossd_head_load_weights": (_P, _S, _S, _S, s.Progress, _P, _PP),
    "lossd_head_begin_write": (_P, _S, _I32, _PP),
    "lossd_weight_write_rows": (_P, _I64, _I64, _I32, _P, _P, s.Progress, _P),
    "lossd_weight_write_commit": (_P, c.POINTER(_U64)),
    "lossd_head_logits": (_P, c.POINTER(s.Logits), c.POINTER(_U64)),
    "lossd_head_save_checkpoint": (_P, _S, _PP),
    "lossd_head_open_session": (_P, c.POINTER(s.SessionOptions), _PP),
    "lossd_session_close": (_P,),
    "lossd_session_marks": (_P, _PP),
    "lossd_session_resume_at": (_P, c.POINTER(_U64), c.c_size_t),
    "lossd_session_compute": (_P, c.POINTER(s.Batch), c.POINTER(s.Outputs), c.POINTER(s.Result)),
    "lossd_head_flush": (_P, c.POINTER(s.FlushOptions), *_MARKS, c.POINTER(s.FlushResultStruct)),
    "lossd_head_discard": (_P, *_MARKS, c.POINTER(s.FlushResultStruct)),
    "lossd_head_commit_flush": (_P, _S),
    "lossd_head_abort_flush": (_P, _S),
    "lossd_head_gradient_stats": (_P, *_MARKS, c.c_double, c.POINTER(s.GradientStatsStruct)),
    "lossd_head_apply_step": (_P, c.POINTER(s.StepOptions), *_MARKS, c.POINTER(s.StepResultStruct)),
}
# The others: result and arguments.
_PLAIN: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "lossd_api_version": (c.c_uint32, ()),
    "lossd_version": (_S, ()),
    "lossd_status_code": (_I32, (_P,)),
    "lossd_status_message": (_S, (_P,)),
    "lossd_status_free": (None, (_P,)),
    "lossd_string_free": (None, (_P,)),
    "lossd_client_free": (None, (_P,)),
    "lossd_head_free": (None, (_P,)),
    "lossd_session_free": (None, (_P,)),
    "lossd_weight_write_free": (None, (_P,)),
    "lossd_region_free": (None, (_P,)),
    "lossd_region_data": (_P, (_P,)),
    "lossd_region_size": (_I64, (_P,)),
    "lossd_session_client_key": (_S, (_P,)),
    "lossd_session_reconnects": (_I64, (_P,)),
}


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
            for name, (result, arguments) in _PLAIN.items():
                self._declare(name, result, arguments)
            found = int(self._dll.lossd_api_version())
            if found < API_VERSION:
                raise VersionMismatchError(
                    f"{path} has C interface {found}, this package needs {API_VERSION}: they are of different builds"
                )
            for name, arguments in _FALLIBLE.items():
                self._declare(name, _P, arguments)
            for struct, name in s.INITIALIZERS.items():
                self._declare(name, None, (c.POINTER(struct), c.c_size_t))
        except AttributeError as error:
            raise VersionMismatchError(f"{path} is not a liblossd_c.so of this package: {error}") from error
        self.version = bytes(self._dll.lossd_version()).decode()

    def _declare(self, name: str, result: Any, arguments: tuple[Any, ...]) -> None:
        function = getattr(self._dll, name)
        function.restype = result
        function.argtypes = arguments

    def function(self, name: str) -> Any:
        """A function that cannot fail."""
        return getattr(self._dll, name)

    def call(self, name: str, *arguments: Any) -> None:
        """Calls a function that returns a status; raises a LossdError unless it is OK."""
        status = getattr(self._dll, name)(*arguments)
        if status:
            number = int(self._dll.lossd_status_code(status))
            message = bytes(self._dll.lossd_status_message(status)).decode(errors="replace")
            self._dll.lossd_status_free(status)
            raise error_of(number, message)

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

    def make(self, struct: type[s.Struct]) -> s.Struct:
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
