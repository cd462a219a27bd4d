"""What lossd raises.

    LossdError
      InvalidArgumentError   (also a ValueError)
      NotFoundError, AlreadyExistsError, FailedPreconditionError, PermissionDeniedError, UnauthenticatedError
      ResourceExhaustedError
      UnavailableError       (also a ConnectionError)
      DeadlineExceededError  (also a TimeoutError)
      AbortedError, CancelledError, DataLossError, InternalError, UnimplementedError, UnknownError
      WindowLostError
      VersionMismatchError, LibraryError, LaunchError
    VersionMismatchWarning   (a UserWarning)

Arguments of a wrong Python type, dtype or shape are a TypeError or a ValueError before anything is sent. Every
other error comes from the server or the way to it, with its message, and leaves the process able to go on.
"""

from __future__ import annotations

import lossd._structs as s


class LossdError(Exception):
    """Base of all. `code`: the name of the status, such as "NOT_FOUND"; `message`: what the server said. `flush_id`: of
    flush and discard, the flush whose commit has no answer (Head.flush), or had none until now; otherwise empty."""

    code: str = "UNKNOWN"
    flush_id: str = ""

    def __init__(self, message: str = "") -> None:
        super().__init__(message)
        self.message = message


class InvalidArgumentError(LossdError, ValueError):
    """The server, or the library, cannot work with an argument; the message names it. Trying again is no use."""

    code = "INVALID_ARGUMENT"


class NotFoundError(LossdError):
    """There is no such head, session, checkpoint or file."""

    code = "NOT_FOUND"


class AlreadyExistsError(LossdError):
    """There is one of that name with another configuration. Of flush, discard and step: the flush before, whose commit
    had no answer, is committed now (Head.flush)."""

    code = "ALREADY_EXISTS"


class FailedPreconditionError(LossdError):
    """The server's state does not allow it: weights of another version, a frozen head, no optimizer, ..."""

    code = "FAILED_PRECONDITION"


class PermissionDeniedError(LossdError):
    """The role of this client's token may not make the call; the message names the one that may."""

    code = "PERMISSION_DENIED"


class UnauthenticatedError(LossdError):
    """The server asks for a token, or does not know the one in token_file. (Certificates that are not accepted end the
    connection: UnavailableError.)"""

    code = "UNAUTHENTICATED"


class ResourceExhaustedError(LossdError):
    """The server has no room (memory, sessions, disk) for it; the message says what of."""

    code = "RESOURCE_EXHAUSTED"


class UnavailableError(LossdError, ConnectionError):
    """The server was not reached for `reconnect_timeout` seconds, or is one of lossd.launch that has ended. Once it is
    back, the same call may be made again; a session whose compute() ended like this is over: open one with the same
    client_key."""

    code = "UNAVAILABLE"


class DeadlineExceededError(LossdError, TimeoutError):
    """No answer within `call_timeout` seconds. Whether the call took effect is not known; calls that change anything
    may be repeated with the same arguments, and count once; a session whose compute() ended like this is over."""

    code = "DEADLINE_EXCEEDED"


class AbortedError(LossdError):
    """Somebody else got in between: another process took the session over, or an earlier flush was aborted."""

    code = "ABORTED"


class CancelledError(LossdError):
    """Something of the caller's own cut the call short: a signal in a sink, for instance, after which the window is
    whole; or, of a session, the interruption of an earlier compute."""

    code = "CANCELLED"


class DataLossError(LossdError):
    """What arrived is damaged: a checksum does not match."""

    code = "DATA_LOSS"


class InternalError(LossdError):
    """A fault of the server's own: its log has more."""

    code = "INTERNAL"


class UnimplementedError(LossdError):
    """The server is older than this client: it does not know the call, or lacks what the call needs, which the message
    names. Nothing was sent then, and a session goes on."""

    code = "UNIMPLEMENTED"


class OutOfRangeError(LossdError):
    """A position beyond the end, of rows for instance; the message names it."""

    code = "OUT_OF_RANGE"


class UnknownError(LossdError):
    """A status that this package does not know, or one without a code."""

    code = "UNKNOWN"


class WindowLostError(LossdError):
    """The gradients accumulated since the last flush are gone: the server was killed, or the head restored from a
    checkpoint. Open a new session and compute the window's batches again; weights that were only at the server are
    written again, or restored."""

    code = "WINDOW_LOST"


class VersionMismatchError(LossdError):
    """Client and server, or package and library, are of versions that do not work together."""

    code = "FAILED_PRECONDITION"


class VersionMismatchWarning(UserWarning):
    """Client and server differ in more than the last number of their versions, and go on together (connect)."""


class LibraryError(LossdError, ImportError):
    """liblossd_c.so was not found or could not be loaded."""

    code = "FAILED_PRECONDITION"


class LaunchError(LossdError):
    """lossd.launch could not start a server; the message holds the end of its log."""

    code = "UNAVAILABLE"


_BY_NUMBER: dict[int, type[LossdError]] = {
    s.LOSSD_CANCELLED: CancelledError,
    s.LOSSD_UNKNOWN: UnknownError,
    s.LOSSD_INVALID_ARGUMENT: InvalidArgumentError,
    s.LOSSD_DEADLINE_EXCEEDED: DeadlineExceededError,
    s.LOSSD_NOT_FOUND: NotFoundError,
    s.LOSSD_ALREADY_EXISTS: AlreadyExistsError,
    s.LOSSD_PERMISSION_DENIED: PermissionDeniedError,
    s.LOSSD_RESOURCE_EXHAUSTED: ResourceExhaustedError,
    s.LOSSD_FAILED_PRECONDITION: FailedPreconditionError,
    s.LOSSD_ABORTED: AbortedError,
    s.LOSSD_OUT_OF_RANGE: OutOfRangeError,
    s.LOSSD_UNIMPLEMENTED: UnimplementedError,
    s.LOSSD_INTERNAL: InternalError,
    s.LOSSD_UNAVAILABLE: UnavailableError,
    s.LOSSD_DATA_LOSS: DataLossError,
    s.LOSSD_UNAUTHENTICATED: UnauthenticatedError,
    s.LOSSD_WINDOW_LOST: WindowLostError,
}


def error_of(number: int, message: str, flush_id: str = "") -> LossdError:
    """The exception for a status of the C library."""
    error = _BY_NUMBER.get(number, UnknownError)(message)
    error.flush_id = flush_id
    return error
