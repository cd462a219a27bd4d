"""Servers of tests that are killed, stopped and started again."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import lossd


class Restartable:
    """A server that can be killed and started again at the same address: a Unix socket, or a port of 127.0.0.1."""

    def __init__(self, folder: Path, *flags: str, tcp: bool = False) -> None:
        self.target = f"unix:{folder / 'socket'}"
        self._ports = folder / "ports.json"
        self._flags = flags
        self._listen = "127.0.0.1:0" if tcp else self.target
        self.start()

    def start(self) -> None:
        self._ports.unlink(missing_ok=True)
        command = [
            str(lossd.server.find_program()),
            "--device=cpu",
            "--metrics_listen=",
            f"--listen={self._listen}",
            f"--port_file={self._ports}",
            *self._flags,
        ]
        self.process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        while not self._ports.exists():
            assert self.process.poll() is None
            time.sleep(0.01)
        if not self._listen.startswith("unix:"):
            self.target = self._listen = f"127.0.0.1:{json.loads(self._ports.read_text())['grpc']}"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
