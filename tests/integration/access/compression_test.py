#!/usr/bin/python3
"""Compressed messages are refused before they are inflated: a few kilobytes would become gigabytes, and health asks for no token."""
import itertools
import re
import sys
import unittest

import grpc
from lossd_server import LossdServer

from access_support import HEALTH, REFLECTION, REFUSALS, TOKENS, SecuredTest, bearer, methods

BINARY = sys.argv.pop(1)
ALGORITHMS = (grpc.Compression.Gzip, grpc.Compression.Deflate)
BOMB = bytes(64 << 20)  # 64 kB on the wire
MOST_GROWTH = 48 << 20
# The end of this one takes the server along.
DRAIN = "/lossd.v1.StatusService/Drain"


def peak_bytes(server):
    """The most memory that the server has had."""
    with open(f"/proc/{server.pid}/status", encoding="ascii") as file:
        return 1024 * int(re.search(r"^VmHWM:\s+(\d+)", file.read(), re.MULTILINE)[1])


def code_of(channel, path, message, compression, metadata=None):
    stream = channel.stream_stream(path)(iter([message]), metadata=metadata, compression=compression, timeout=60)
    try:
        for _ in stream:
            pass
    except grpc.RpcError:
        pass
    return stream.code()


def one_of_each_service():
    return list({path.rsplit("/", 1)[0]: path for path in [*methods(), HEALTH, REFLECTION] if path != DRAIN}.values())


class Compression(SecuredTest):
    def check(self, flags, connect, tokens):
        """Every method; and with one of each service, messages that would be large. From those who may call it, and from strangers."""
        flags = [*flags, f"--tokens={self.tokens}"] if tokens else flags
        mine = bearer(TOKENS["admin"]) if tokens else None
        with LossdServer(BINARY, "--device=cpu", *flags) as server, connect(server) as channel:
            before = peak_bytes(server)
            for algorithm in ALGORITHMS:
                for path in [*methods(), HEALTH, REFLECTION]:
                    self.assertEqual(code_of(channel, path, bytes(4096), algorithm, mine), grpc.StatusCode.UNIMPLEMENTED, path)
                    if tokens:
                        self.assertIn(code_of(channel, path, bytes(4096), algorithm), (*REFUSALS, grpc.StatusCode.UNIMPLEMENTED), path)
            for path, algorithm in zip(one_of_each_service(), itertools.cycle(ALGORITHMS)):
                self.assertEqual(code_of(channel, path, BOMB, algorithm, mine), grpc.StatusCode.UNIMPLEMENTED, path)
                if tokens:
                    code_of(channel, path, BOMB, algorithm)
            self.assertLess(peak_bytes(server) - before, MOST_GROWTH)
            self.assertEqual(code_of(channel, HEALTH, b"", grpc.Compression.NoCompression), grpc.StatusCode.OK)

    def test_plain_text(self):
        self.check([], lambda server: grpc.insecure_channel(server.target), tokens=False)

    def test_tokens(self):
        # For tokens a channel has to say that its connection is local.
        self.check([], lambda server: grpc.secure_channel(server.target, grpc.local_channel_credentials()), tokens=True)

    def test_tls(self):
        def connect(server):
            return grpc.secure_channel(server.target, self.certificates.client())
        self.check(self.certificates.server_flags(), connect, tokens=True)

    def test_the_port_of_health(self):
        with LossdServer(BINARY, "--device=cpu", "--health_listen=127.0.0.1:0") as server:
            with grpc.insecure_channel(server.health_target) as channel:
                before = peak_bytes(server)
                for algorithm in ALGORITHMS:
                    self.assertEqual(code_of(channel, HEALTH, BOMB, algorithm), grpc.StatusCode.UNIMPLEMENTED)
                self.assertLess(peak_bytes(server) - before, MOST_GROWTH)


if __name__ == "__main__":
    unittest.main()
