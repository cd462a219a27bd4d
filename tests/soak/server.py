"""A lossd that keeps its addresses from one start to the next, with TLS, a socket file and checkpoints."""
from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
import urllib.request
from pathlib import Path

from certificates import Authority
from lossd_server import await_ports, free_port, free_ports


def read_metrics(target: str) -> dict[str, float]:
    """What the server that is scraped at `target` counts, by name and labels."""
    with urllib.request.urlopen(f"http://{target}/metrics", timeout=30) as response:
        text = response.read().decode()
    return {name: float(value) for name, value in re.findall(r"^([^#\s]\S*(?: \S+)*?) (\S+)$", text, re.MULTILINE)}


class SoakServer:
    """Started, drained and started again; everything that clients know of it stays."""

    def __init__(self, binary: str, folder: Path, *flags: str, tls: bool = True, devices: str = "cpu",
                 address: str = "127.0.0.1") -> None:
        self.folder, self.metrics_port, self.devices = folder, free_port(), devices
        self.port = free_ports(devices.count(",") + 1)  # each rank takes one
        self.target, self.socket_target = f"{address}:{self.port}", f"unix:{folder}/lossd.sock"
        self.metrics_target = f"{address}:{self.metrics_port}"
        self.certificates = Authority(folder) if tls else None
        self.rotate_certificate()
        self._binary, self._flags = binary, list(flags)
        self._process: subprocess.Popen[bytes] | None = None
        self.log_path = folder / "log"

    def flags(self) -> list[str]:
        found = [f"--listen={self.target},{self.socket_target}", f"--metrics_listen={self.metrics_target}",
                 f"--checkpoint_dir={self.folder}/checkpoints", "--restore", f"--devices={self.devices}",
                 "--log_format=json", *self._flags]
        if self.certificates is not None:
            found += self.certificates.server_flags()
        return found

    def lane_targets(self) -> list[str]:
        """Where the ranks of a group take lanes, beside the leader."""
        return [f"127.0.0.1:{self.port + rank}" for rank in range(1, self.devices.count(",") + 1)]

    def rotate_certificate(self) -> None:
        """A new key and a new certificate, if there is TLS."""
        if self.certificates is not None:
            self.certificates.issue("server")

    def start(self, *flags: str, **options: object) -> None:
        """Returns when it serves."""
        self.forget_ports()
        with open(self.log_path, "ab") as log:
            self._process = subprocess.Popen([*self.command(), *self.flags(), f"--port_file={self.folder}/ports", *flags],
                                             stdout=log, stderr=log, **options)
        self.await_epoch()

    def command(self) -> list[str]:
        return [self._binary]

    def forget_ports(self) -> None:
        """So that await_epoch() waits for the next group."""
        (self.folder / "ports").unlink(missing_ok=True)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def rank_pids(self) -> list[int]:
        """The processes of a group, in no order; none of a server of one device."""
        try:
            return [int(pid) for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()]
        except FileNotFoundError:
            return []

    def kill_rank(self, pid: int) -> None:
        """Returns when nothing of its epoch runs any more: nobody is told anything by it from then on."""
        epoch = self.rank_pids()
        os.kill(pid, signal.SIGKILL)
        while set(self.rank_pids()) & set(epoch):
            if not self.running():
                raise AssertionError(f"the server ended when a rank was killed:\n{self.log()[-4000:]}")
            time.sleep(0.002)

    def await_epoch(self) -> None:
        """Until the server, or the group that was started again, serves."""
        assert self._process is not None
        await_ports(self._process, self.folder / "ports", self.log_path)

    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def wait(self, seconds: float | None = None) -> int:
        """Its exit status; subprocess.TimeoutExpired if it goes on for longer than that."""
        assert self._process is not None
        return self._process.wait(seconds)

    def stop(self) -> int:
        """Drains it; returns its exit status."""
        self.signal(signal.SIGTERM)
        return self.wait()

    def kill(self) -> None:
        if self.running():
            self.signal(signal.SIGKILL)
            self.wait()

    def log(self) -> str:
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    def log_lines(self) -> list[dict[str, object]]:
        """Those that are complete: who reads a file that is being written may see the beginning of one."""
        complete = self.log().rpartition("\n")[0]
        return [json.loads(line) for line in complete.splitlines() if line.startswith("{")]

    def metrics(self) -> dict[str, float]:
        return read_metrics(self.metrics_target)

    def resident_bytes(self) -> int:
        with open(f"/proc/{self.pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def open_files(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))
