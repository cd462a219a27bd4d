"""What the tests of lossctl share: one server, runs of the binaries, and a reader and writer of safetensors of their own."""
import contextlib
import json
import os
import select
import struct
import subprocess
import sys
import tempfile
import unittest

from lossd_server import LossdServer
from programs import run
from waiting import PATIENCE

LOSSD, LOSSCTL, WINDOW_FILLER = sys.argv[1:4]
del sys.argv[1:4]

# docs/lossctl.md and --help promise these.
OK, FAILED, USAGE, NOT_FOUND, UNREACHABLE, REFUSED, EXHAUSTED, INVALID = range(8)

SERVER_FLAGS = ["--workspace_bytes=16777216", "--memory_limit_bytes=402653184", "--parking_bytes=1MiB"]


class Result:
    def __init__(self, process):
        self.code, self.out, self.err = process.returncode, process.stdout, process.stderr

    def __repr__(self):
        return f"exit {self.code}\nstdout: {self.out}\nstderr: {self.err}"


def read_to_end(terminal):
    """All that was written on the other side, until that is closed; it arrives in pieces. Closes this one."""
    text = b""
    with contextlib.suppress(OSError):  # EIO: there is no more
        while select.select([terminal], [], [], PATIENCE)[0] and (piece := os.read(terminal, 65536)):
            text += piece
    os.close(terminal)
    return text


class LossctlTest(unittest.TestCase):
    """A server for the whole class and a folder for each test."""

    @classmethod
    def server_flags(cls):
        return SERVER_FLAGS

    @classmethod
    def setUpClass(cls):
        cls.server = cls.enterClassContext(LossdServer(LOSSD, *cls.server_flags()))

    @classmethod
    def tearDownClass(cls):
        status = cls.server.stop()
        assert status == 0, f"lossd ended with {status}:\n{cls.server.log()}"

    def setUp(self):
        self.folder = self.enterContext(tempfile.TemporaryDirectory())

    def path(self, name):
        return os.path.join(self.folder, name)

    def make_unusable_files(self):
        for name, mode in (("dir", 0o755), ("closed", 0o555)):
            os.mkdir(self.path(name), mode)
        for name, mode in (("plain", 0o644), ("secret", 0)):
            os.close(os.open(self.path(name), os.O_CREAT | os.O_WRONLY, mode))

    def environment(self, **changes):
        return {**os.environ, "LOSSD_SERVER": self.server.target, "LC_ALL": "C", **changes}

    def lossctl(self, *arguments, preexec_fn=None, stdout=subprocess.PIPE, **environment):
        return Result(run(LOSSCTL, *arguments, capture_output=False, stdin=subprocess.DEVNULL, stdout=stdout, stderr=subprocess.PIPE,
                          preexec_fn=preexec_fn, cwd=self.folder, env=self.environment(**environment)))

    def succeed(self, *arguments, **options):
        """What it printed."""
        result = self.lossctl(*arguments, **options)
        self.assertEqual(result.code, OK, result)
        self.assertEqual(result.err, "", result)
        return result.out

    def succeed_json(self, *arguments, **options):
        return json.loads(self.succeed(*arguments, "--json", **options))

    def error_of(self, code, *arguments, **options):
        """The error for people, after checking that the one for programs says the same and that neither prints a result."""
        programs = self.lossctl(*arguments, "--json", **options)
        self.assertEqual((programs.code, programs.out), (code, ""), programs)
        error = json.loads(programs.err)["error"]
        self.assertEqual(error["exit_code"], code, programs)
        people = self.lossctl(*arguments, **options)
        self.assertEqual((people.code, people.out), (code, ""), people)
        self.assertTrue(people.err.startswith("lossctl: "), people)
        self.assertIn(error.get("advice", ""), people.err)
        return people.err

    def head(self, name):
        heads = [head for head in self.succeed_json("head", "list")["heads"] if head["name"] == name]
        self.assertEqual(len(heads), 1, name)
        return heads[0]

    def filler(self, *arguments):
        return run(WINDOW_FILLER, self.server.target, *arguments, check=True).stdout

    def feed(self, head, tokens):
        """Returns the number of valid tokens."""
        return int(self.filler(head, "feed", str(tokens)))

    def peek(self, head):
        self.filler(head, "peek", self.path("peek"))
        with open(self.path("peek"), "rb") as file:
            return file.read()


def write_safetensors(path, tensors, padding=0):
    """tensors: {name: (dtype, shape, bytes)}; `padding` blanks behind the header shift the data."""
    header, offset = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header).encode() + b" " * padding
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in tensors.values()))


def read_safetensors(path):
    """{name: (dtype, shape, bytes)}, metadata"""
    with open(path, "rb") as file:
        content = file.read()
    (length,) = struct.unpack_from("<Q", content)
    header, data = json.loads(content[8:8 + length]), content[8 + length:]
    metadata = header.pop("__metadata__", {})
    tensors = {}
    for name, tensor in header.items():
        begin, end = tensor["data_offsets"]
        tensors[name] = (tensor["dtype"], tensor["shape"], data[begin:end])
    assert sum(len(tensor[2]) for tensor in tensors.values()) == len(data), path
    return tensors, metadata


def to_bfloat16(fp32):
    """Round to nearest even, on bytes."""
    words = struct.unpack(f"<{len(fp32) // 4}I", fp32)
    return struct.pack(f"<{len(words)}H", *((word + 0x7FFF + (word >> 16 & 1)) >> 16 for word in words))


def to_float32(bfloat16):
    words = struct.unpack(f"<{len(bfloat16) // 2}H", bfloat16)
    return struct.pack(f"<{len(words)}I", *(word << 16 for word in words))
