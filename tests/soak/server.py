"""A lossd that keeps its addresses from one start to the next, with TLS, a socket file and checkpoints."""
from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import urllib.request
from pathlib import Path

from certificates import Authority
from lossd_server import await_ports, free_port


class SoakServer:
    """Started, drained and started again; everything that clients know of it stays."""

    def __init__(self, binary: str, folder: Path, *flags: str, tls: bool = True) -> None:
        self.folder, self.port, self.metrics_port = folder, free_port(), free_port()
        self.target, self.socket_target = f"127.0.0.1:{self.port}", f"unix:{folder}/lossd.sock"
        self.certificates = Authority(folder) if tls else None
        self.rotate_certificate()
        self._binary, self._flags = binary, list(flags)
        self._process: subprocess.Popen[bytes] | None = None
        self.log_path = folder / "log"

    def flags(self) -> list[str]:
        found = [f"--listen={self.target},{self.socket_target}", f"--metrics_listen=127.0.0.1:{self.metrics_port}",
                 f"--checkpoint_dir={self.folder}/checkpoints", "--restore", "--device=cpu",
                 f"--port_file={self.folder}/ports", "--log_format=json", *self._flags]
        if self.certificates is not None:
            found += self.certificates.server_flags()
        return found

    def rotate_certificate(self) -> None:
        """A new key and a new certificate, if there is TLS."""
        if self.certificates is not None:
            self.certificates.issue("server")

    def start(self, *flags: str, **options: object) -> None:
        ports = self.folder / "ports"
        ports.unlink(missing_ok=True)
        with open(self.log_path, "ab") as log:
            self._process = subprocess.Popen([self._binary, *self.flags(), *flags], stdout=log, stderr=log, **options)
        await_ports(self._process, ports, self.log_path)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

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
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=30) as response:
            text = response.read().decode()
        return {name: float(value) for name, value in re.findall(r"^([^#\s]\S*(?: \S+)*?) (\S+)$", text, re.MULTILINE)}

    def resident_bytes(self) -> int:
        with open(f"/proc/{self.pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def open_files(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))
