"""TCP connections between processes of this host, which a test cuts while both live on: it needs the rights of a debugger."""
import contextlib
import ctypes
import errno
import os
import socket

_PIDFD_GETFD = 438  # the number of the call, which Python has no name for
_NOBODY = bytes(16)  # an address of AF_UNSPEC: to connect with it resets a connection
_libc = ctypes.CDLL(None, use_errno=True)


def _sockets(pids):
    """A copy of each socket of these processes, for as long as the caller looks at it. A copy has its flags in common with the
    process: Python's dup(), for one, would make both of them blocking."""
    for pid in pids:
        process = os.pidfd_open(pid)
        try:
            for number in os.listdir(f"/proc/{pid}/fd"):
                copy = _libc.syscall(_PIDFD_GETFD, process, int(number), 0)
                if copy < 0 and ctypes.get_errno() != errno.EBADF:  # the process has closed it since
                    raise OSError(ctypes.get_errno(), f"pidfd_getfd of process {pid}: {os.strerror(ctypes.get_errno())}")
                if copy >= 0:
                    try:
                        end = socket.socket(fileno=copy)
                    except OSError:  # it is something else
                        os.close(copy)
                    else:
                        with end:
                            yield end
        finally:
            os.close(process)


def _ports(end):
    """Here and there; (0, 0) of what is no connection."""
    with contextlib.suppress(OSError):
        if end.family in (socket.AF_INET, socket.AF_INET6):
            return end.getsockname()[1], end.getpeername()[1]
    return 0, 0


@contextlib.contextmanager
def connections_between(pids, other_pids):
    """Copies of the sockets that `pids` have of connections with `other_pids`, by the ports here and there."""
    others = {_ports(end)[::-1] for end in _sockets(other_pids)} - {(0, 0)}
    with contextlib.ExitStack() as at_end:
        yield {_ports(end): at_end.enter_context(socket.socket(fileno=end.detach()))
               for end in _sockets(pids) if _ports(end) in others}


def reset(ends):
    """Both ends of each connection hear of a reset, where `ends` has a copy of one of them."""
    for end in ends:
        if _libc.connect(end.fileno(), _NOBODY, len(_NOBODY)) != 0:
            raise OSError(ctypes.get_errno(), f"resetting a connection: {os.strerror(ctypes.get_errno())}")
        with contextlib.suppress(OSError):  # it is no connection any more
            end.shutdown(socket.SHUT_RDWR)  # so that there is something to read at this end, too: an error
