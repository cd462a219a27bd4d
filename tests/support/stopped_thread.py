"""A thread that stands still while the other threads of its process go on: what a hang looks like from outside."""
import contextlib
import ctypes
import os

_DETACH, _SEIZE, _INTERRUPT = 17, 0x4206, 0x4207
_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long
_ANY_THREAD = 0x40000000  # __WALL


def _ptrace(request, thread):
    if _libc.ptrace(request, thread, None, None) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"ptrace: {os.strerror(error)}")


@contextlib.contextmanager
def stopped_thread(thread):
    """By its number, which of a process's main thread is the process's. To be left by the thread that entered."""
    _ptrace(_SEIZE, thread)
    _ptrace(_INTERRUPT, thread)
    os.waitpid(thread, _ANY_THREAD)
    try:
        yield
    finally:
        _ptrace(_DETACH, thread)
