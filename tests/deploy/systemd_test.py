#!/usr/bin/python3
"""deploy/systemd: systemd takes the unit, finds it confined, and lossd starts with its configuration.

usage: systemd_test.py LOSSD REPOSITORY   with tests/support in PYTHONPATH
"""

from __future__ import annotations

import configparser
import ctypes
import errno
import json
import os
import re
import signal
import socket
import struct
import sys
import tempfile
import unittest
from collections.abc import Callable
from pathlib import Path

from lossd_server import LossdServer
from programs import run

LOSSD, REPOSITORY = Path(sys.argv.pop(1)), Path(sys.argv.pop(1))
FOLDER = REPOSITORY / "deploy" / "systemd"
# systemd's own scale of exposure times ten: up to 20 is "OK", from 50 on "EXPOSED".
MOST_EXPOSED = 20


def seconds(duration: str) -> int:
    number, unit = re.fullmatch(r"(\d+)([smh])", duration).groups()  # type: ignore[union-attr]
    return int(number) * {"s": 1, "m": 60, "h": 3600}[unit]


def restrict_address_families(names: str) -> Callable[[], None]:
    """What systemd does for RestrictAddressFamilies= before it executes a program of this machine's own architecture."""
    socket_call = {"x86_64": 41, "aarch64": 198}[os.uname().machine]
    allowed = [int(getattr(socket, name)) for name in names.split()]
    load, equal, give = 0x20, 0x15, 0x06
    refuse = (give, 0, 0, 0x00050000 | errno.EAFNOSUPPORT)
    program = [(load, 0, 0, 0), (equal, 0, len(allowed) + 2, socket_call), (load, 0, 0, 16),
               *((equal, len(allowed) - i, 0, family) for i, family in enumerate(allowed)), refuse, (give, 0, 0, 0x7FFF0000)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in program))
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def restrict() -> None:
        no_new_privileges, seccomp, by_filter = 38, 22, 2
        filters = struct.pack("HP", len(program), ctypes.addressof(code))
        if prctl(no_new_privileges, 1, 0, 0, 0) != 0 or prctl(seccomp, by_filter, filters, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "seccomp")

    return restrict


class Configured(LossdServer):
    """Listens where its configuration says."""

    def flags(self) -> list[str]:
        return [f"--port_file={self.port_file()}", *self._flags]


class Unit(unittest.TestCase):
    def setUp(self) -> None:
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        # The unit starts the program that was built, since none is installed.
        text = (FOLDER / "lossd.service").read_text(encoding="utf-8")
        self.assertIn("ExecStart=/usr/local/bin/lossd ", text)
        self.unit = self.folder / "lossd.service"
        self.unit.write_text(text.replace("/usr/local/bin/lossd ", f"{LOSSD} "), encoding="utf-8")
        parser = configparser.ConfigParser(strict=False, interpolation=None)
        parser.optionxform = str  # type: ignore[assignment,method-assign]
        parser.read_string(text)
        self.service = dict(parser["Service"])
        self.config = json.loads((FOLDER / "lossd.json").read_text(encoding="utf-8"))

    def analyze(self, *arguments: str) -> str:
        done = run("systemd-analyze", *arguments)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return done.stdout + done.stderr

    def test_systemd_understands_every_line(self) -> None:
        # Warnings (an unknown key, say) do not make it fail. Other units of this machine are not our concern.
        said = [line for line in self.analyze("verify", "--man=no", str(self.unit)).splitlines() if "lossd" in line]
        self.assertEqual(said, [])

    def test_it_is_confined(self) -> None:
        self.analyze("security", "--offline=yes", f"--threshold={MOST_EXPOSED}", str(self.unit))

    def test_it_runs_as_a_user_of_its_own_that_is_made(self) -> None:
        users = (FOLDER / "lossd.sysusers").read_text(encoding="utf-8")
        self.assertRegex(users, rf"(?m)^u {self.service['User']} ")

    def test_systemd_waits_longer_than_the_server_drains(self) -> None:
        self.assertGreater(int(self.service["TimeoutStopSec"]), seconds(self.config["drain_timeout"]))
        self.assertEqual(self.service["KillSignal"], "SIGTERM")

    def test_the_server_starts_with_the_configuration_and_stops_by_the_signal(self) -> None:
        for key in ("listen", "health_listen", "metrics_listen", "checkpoint_dir"):
            value = self.config[key].replace("/run/lossd", str(self.folder)).replace("/var/lib/lossd", str(self.folder))
            self.config[key] = re.sub(r":\d+$", ":0", value)
        config = self.folder / "lossd.json"
        config.write_text(json.dumps(self.config | {"device": "cpu"}), encoding="utf-8")
        server = Configured(LOSSD, f"--config={config}", folder=self.folder, umask=0o077)
        self.addCleanup(server.close)
        server.begin()
        self.assertTrue(all(server.await_serving().values()))
        socket = self.folder / "socket"
        self.assertEqual(os.stat(socket).st_mode & 0o777, 0o660)
        self.assertEqual(self.service["ExecReload"], "/bin/kill -HUP $MAINPID")
        server.signal(signal.SIGHUP)
        self.assertEqual(server.stop(), 0)

    def test_several_devices_start_with_its_address_families_and_name_the_one_that_is_missing(self) -> None:
        families = self.service["RestrictAddressFamilies"]
        with LossdServer(LOSSD, "--devices=cpu,cpu", "--same_host_regions", "--workspace_bytes=16M",
                         preexec_fn=restrict_address_families(families)) as server:
            self.assertEqual(server.stop(), 0)
        less = restrict_address_families(families.replace("AF_NETLINK", ""))
        for flags in (["--devices=cpu,cpu"],
                      ["--replica_set=s", "--replicas=2", "--replica=0", "--replica_leader=127.0.0.1"]):
            done = run(LOSSD, "--listen=127.0.0.1:0", "--metrics_listen=", *flags, preexec_fn=less)
            self.assertEqual(done.returncode, 2, done.stderr)
            self.assertIn("add AF_NETLINK to RestrictAddressFamilies= of its unit", done.stderr)


if __name__ == "__main__":
    unittest.main()
