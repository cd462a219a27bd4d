"""Servers of this process that have ended: calls to them need not wait for anything."""

from __future__ import annotations

import ctypes as c
from typing import Any

_servers: dict[str, Gone] = {}  # by their targets


class Gone:
    """What clients of one server are told when it is gone."""

    def __init__(self) -> None:
        self._text = c.c_char_p()
        # The library looks at it for as long as any handle lives.
        c.pythonapi.Py_IncRef(c.py_object(self))

    def tell(self, text: str) -> None:
        """Calls that wait for the server, and later ones, fail with UnavailableError and this text."""
        self._text.value = text.encode(errors="replace").replace(b"\0", b"")

    def install(self, options: Any) -> None:
        options.server_gone = c.pointer(self._text)


def watched(target: str) -> Gone:
    """What clients are told that will connect to `target`."""
    return _servers.setdefault(target, Gone())


def install(options: Any, target: str) -> None:
    """Into a s.ClientOptions."""
    server = _servers.get(target)
    if server is not None:
        server.install(options)
