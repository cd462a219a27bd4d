#!/usr/bin/python3
"""What brought other tensor servers down or open, tried here (docs/security.md has the list, and the other tests)."""
import os
import random
import re
import socket
import struct
import sys
import tempfile
import unittest
import urllib.request

import grpc
from lossd.v1 import head_pb2, region_pb2, region_pb2_grpc, status_pb2, status_pb2_grpc
from lossd_server import LossdServer
from waiting import PATIENCE

from access_support import TOKENS, bearer, call, methods, with_token, write_tokens
from http2 import ACK, DATA, END_HEADERS, END_STREAM, GOAWAY, HEADERS, PING, PREFACE, RST_STREAM, SETTINGS, frame, literal

BINARY = sys.argv.pop(1)
DRAIN = "/lossd.v1.StatusService/Drain"
SMALL_FRAMES = 60_000


def varint(number):
    data = b""
    while number > 127:
        data += bytes([number & 127 | 128])
        number >>= 7
    return data + bytes([number])


def read_exactly(connection, size):
    data = b""
    while len(data) < size:
        piece = connection.recv(size - len(data))
        if not piece:
            raise AssertionError("the server closed the connection")
        data += piece
    return data


def alive(channel):
    return bool(status_pb2_grpc.StatusServiceStub(channel).GetStatus(status_pb2.GetStatusRequest()).version)


class Parsing(unittest.TestCase):
    def test_a_message_in_very_many_very_small_pieces_takes_no_stack(self):
        request = head_pb2.GetHeadRequest(name="x" * (SMALL_FRAMES - 20)).SerializeToString()
        message = b"\0" + struct.pack(">I", len(request)) + request
        with LossdServer(BINARY, "--device=cpu") as server:
            host, port = server.target.split(":")
            with socket.create_connection((host, int(port)), timeout=PATIENCE) as connection:
                headers = b"".join(literal(*field) for field in (
                    (":method", "POST"), (":scheme", "http"), (":path", "/lossd.v1.HeadService/GetHead"),
                    (":authority", server.target), ("content-type", "application/grpc"), ("te", "trailers")))
                connection.sendall(PREFACE + frame(SETTINGS, 0, 0) +
                                   frame(HEADERS, END_HEADERS, 1, headers))
                connection.sendall(b"".join(frame(DATA, 0, 1, bytes([byte])) for byte in message[:-1]))
                connection.sendall(frame(DATA, END_STREAM, 1, message[-1:]))
                self.wait_for_end(connection)
            with grpc.insecure_channel(server.target) as channel:
                self.assertTrue(alive(channel))

    def wait_for_end(self, connection):
        """Until the server has answered the stream with its last headers."""
        while True:
            head = read_exactly(connection, 9)
            kind, flags = head[3], head[4]
            payload = read_exactly(connection, int.from_bytes(head[:3], "big"))
            self.assertNotIn(kind, (RST_STREAM, GOAWAY), payload)
            if kind == HEADERS and flags & END_STREAM:
                return
            if kind in (SETTINGS, PING) and not flags & ACK:
                connection.sendall(frame(kind, ACK, 0, payload if kind == PING else b""))

    def test_whatever_bytes_come_to_whatever_method_the_server_goes_on(self):
        rng = random.Random(1)
        nested = b"\x0b" * 100_000  # groups in groups, which parsers follow by calling themselves
        deep = b""
        for _ in range(200):  # messages in messages, of fields that every service knows as some
            deep = b"\x0a" + varint(len(deep)) + deep
        endless = b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\x7f"  # a field that says it is longer than memory
        with LossdServer(BINARY, "--device=cpu", "--same_host_regions") as server:
            with grpc.insecure_channel(server.target) as channel:
                for path in methods():
                    if path == DRAIN:
                        continue
                    for message in (nested, deep, endless, *(rng.randbytes(rng.randrange(1, 64)) for _ in range(40))):
                        code, _ = call(channel, path, message=message)
                        self.assertNotEqual(code, grpc.StatusCode.UNAVAILABLE, path)
                self.assertTrue(alive(channel))
            self.assertEqual(server.stop(), 0)


class Secrets(unittest.TestCase):
    def test_nobody_is_told_the_regions_of_others_where_they_are_or_a_path(self):
        with tempfile.TemporaryDirectory() as folder:
            tokens = os.path.join(folder, "tokens")
            write_tokens(tokens, TOKENS.items())
            with LossdServer(BINARY, "--device=cpu", "--same_host_regions", "--region_bytes=65536", "--log_level=debug",
                             f"--tokens={tokens}", f"--weights_dir={folder}") as server:
                with grpc.insecure_channel(server.target) as channel:
                    trainer = with_token(channel, TOKENS["trainer"])
                    region = region_pb2_grpc.RegionServiceStub(trainer).CreateRegion(
                        region_pb2.CreateRegionRequest(kind=region_pb2.REGION_KIND_SYSTEM, bytes=4096))
                    self.assertEqual(len(region.handle), 16, "128 bits")
                    handle = [region.handle.hex(), repr(region.handle)[2:-1]]
                    heard = []
                    for request in (region_pb2.CreateRegionRequest(kind=region_pb2.REGION_KIND_SYSTEM, bytes=1 << 40),
                                    region_pb2.CreateRegionRequest(bytes=4096)):
                        heard.append(call(channel, "/lossd.v1.RegionService/CreateRegion", bearer(TOKENS["trainer"]),
                                          request.SerializeToString())[1])
                    heard.append(call(channel, "/lossd.v1.RegionService/DeleteRegion", bearer(TOKENS["trainer"]),
                                      region_pb2.DeleteRegionRequest(handle=b"x" * 16).SerializeToString())[1])
                    for path in ("../tokens", "tokens", "/etc/passwd", "no_such_file"):
                        heard.append(call(channel, "/lossd.v1.HeadService/LoadWeights", bearer(TOKENS["admin"]),
                                          head_pb2.LoadWeightsRequest(head="h", path=path).SerializeToString())[1])
                    reader = status_pb2_grpc.StatusServiceStub(with_token(channel, TOKENS["read-only"]))
                    heard += [str(reader.GetStatus(status_pb2.GetStatusRequest())),
                              str(reader.GetMemory(status_pb2.GetMemoryRequest()))]
                    for page in ("/metrics", "/", "/status.json"):
                        with urllib.request.urlopen(re.sub("/metrics$", page, server.metrics_url)) as response:
                            heard.append(response.read().decode())
                    for text in heard:
                        for secret in (*handle, region.socket_path, folder, *TOKENS.values()):
                            self.assertNotIn(secret, text)
                    for secret in (*handle, *TOKENS.values()):
                        self.assertNotIn(secret, server.log())


class Documented(unittest.TestCase):
    def test_every_test_that_the_list_names_is_there(self):
        root = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "..")
        known = set()
        for folder, _, files in os.walk(os.path.join(root, "tests")):
            for name in files:
                if name.endswith((".cc", ".py")):
                    known.add(name.rsplit(".", 1)[0])
                    with open(os.path.join(folder, name), encoding="utf-8") as file:
                        known |= {word.removeprefix("test_") for word in re.findall(r"\w+", file.read())}
        with open(os.path.join(root, "docs", "security.md"), encoding="utf-8") as file:
            rows = file.read().split("## Learned from others")[1].splitlines()
        rows = [row.split("|")[1:-1] for row in rows if row.startswith("|")][2:]
        self.assertGreater(len(rows), 10)
        for flaw, _, _, tests in rows:
            names = [word for word in re.findall(r"\w+", tests) if re.search(r"_|[A-Z].*[A-Z]", word)]
            self.assertTrue(names, flaw)
            for name in names:
                self.assertTrue(name in known, f"{flaw.strip()}: there is no test {name}")


if __name__ == "__main__":
    unittest.main()
