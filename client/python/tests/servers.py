"""Servers that tests stop, kill and start again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

from waiting import wait_until

import lossd


def stand_still(pid: int) -> None:
    """Stops the process, and returns when none of its threads runs any more, which the signal itself does not wait
    for. SIGCONT lets it go on."""
    os.kill(pid, signal.SIGSTOP)
    threads = Path(f"/proc/{pid}/task")
    wait_until(lambda: all(_state(stat) == "T" for stat in threads.glob("*/stat")), "no thread of the server runs")


def _state(stat: Path) -> str:
    return stat.read_text().rpartition(")")[2].split()[0]


class Restartable:
    """A server that can be ended and started again at the same address: a Unix socket, or a port of 127.0.0.1. With
    `saves` it has checkpoints, and restores the heads of its last drain, or those that were saved."""

    def __init__(self, folder: Path, *flags: str, tcp: bool = False, saves: bool = False) -> None:
        self.target = f"unix:{folder / 'socket'}"
        self._ports = folder / "ports.json"
        self._log = folder / "log"
        self._flags = [*flags, *([f"--checkpoint_dir={folder / 'saved'}", "--restore"] if saves else [])]
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
        with open(self._log, "ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        self._told = 0
        wait_until(lambda: self._ports.exists() or self.process.poll() is not None, "the server serves")
        assert self.process.poll() is None, self._log.read_text()
        if not self._listen.startswith("unix:"):
            self.target = self._listen = f"127.0.0.1:{json.loads(self._ports.read_text())['grpc']}"

    def end(self, how: signal.Signals) -> None:
        """SIGTERM drains: what clients had lives on in the next one. SIGKILL does not."""
        if self._ended():
            return
        self._told = how
        self.process.send_signal(how)
        self.process.wait(120)
        assert self._ended(), self._log.read_text()

    def _ended(self) -> bool:
        """Only a drain and end() end it."""
        status = self.process.poll()
        wanted = -self._told if self._told == signal.SIGKILL else 0
        assert status in (None, wanted), f"the server has ended with {status}:\n{self._log.read_text()}"
        return status is not None

    def kill(self) -> None:
        self.end(signal.SIGKILL)

    def stop(self) -> None:
        stand_still(self.process.pid)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def ready(self) -> None:
        """Started or continued if it is not running."""
        self.go_on()
        if self._ended():
            self.start()
