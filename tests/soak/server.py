"""A lossd that keeps its addresses from one start to the next, with TLS, a socket file and checkpoints."""
from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import time
import urllib.request
from pathlib import Path


def free_port() -> int:
    """Below those that the system gives to connections, or one might have it when the server starts again."""
    while True:
        port = random.randrange(15000, 32000)
        with socket.socket() as taken, contextlib.suppress(OSError):
            taken.bind(("127.0.0.1", port))
            return port


class Certificates:
    """An authority of one's own, and the server's certificate, which can be replaced by a new one."""

    def __init__(self, folder: Path) -> None:
        self.ca, self.certificate, self.key = folder / "ca.pem", folder / "server.pem", folder / "server.key"
        self._folder, self._ca_key, self._serial = folder, folder / "ca.key", 0
        self._openssl("req", "-x509", *self._new_key(self._ca_key), "-out", self.ca, "-days", "2", "-subj", "/CN=soak")
        self.rotate()

    @staticmethod
    def _openssl(*arguments: object) -> None:
        subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)

    @staticmethod
    def _new_key(path: Path) -> tuple[object, ...]:
        return "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", path

    def rotate(self) -> None:
        """A new key and a new certificate, each put in place whole."""
        self._serial += 1
        key, request, certificate = (self._folder / f"new.{kind}" for kind in ("key", "csr", "pem"))
        self._openssl("req", *self._new_key(key), "-out", request, "-subj", "/CN=localhost",
                      "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1")
        self._openssl("x509", "-req", "-in", request, "-CA", self.ca, "-CAkey", self._ca_key, "-out", certificate,
                      "-days", "1", "-set_serial", str(1000 + self._serial), "-copy_extensions", "copy")
        key.rename(self.key)
        certificate.rename(self.certificate)


class SoakServer:
    """Started, drained and started again; everything that clients know of it stays."""

    def __init__(self, binary: str, folder: Path, *flags: str, tls: bool = True) -> None:
        self.folder, self.port, self.metrics_port = folder, free_port(), free_port()
        self.target, self.socket_target = f"127.0.0.1:{self.port}", f"unix:{folder}/lossd.sock"
        self.certificates = Certificates(folder) if tls else None
        self._binary, self._flags = binary, list(flags)
        self._process: subprocess.Popen[bytes] | None = None
        self.log_path = folder / "log"

    def flags(self) -> list[str]:
        found = [f"--listen={self.target},{self.socket_target}", f"--metrics_listen=127.0.0.1:{self.metrics_port}",
                 f"--checkpoint_dir={self.folder}/checkpoints", "--restore", "--device=cpu",
                 f"--port_file={self.folder}/ports", "--log_format=json", *self._flags]
        if self.certificates is not None:
            found += [f"--tls_certificate={self.certificates.certificate}", f"--tls_key={self.certificates.key}"]
        return found

    def start(self, *flags: str, **options: object) -> None:
        ports = self.folder / "ports"
        ports.unlink(missing_ok=True)
        with open(self.log_path, "ab") as log:
            self._process = subprocess.Popen([self._binary, *self.flags(), *flags], stdout=log, stderr=log, **options)
        while not ports.exists():
            if self._process.poll() is not None:
                raise RuntimeError(f"lossd ended with {self._process.returncode} before it served:\n{self.log()[-4000:]}")
            time.sleep(0.02)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def wait(self) -> int:
        assert self._process is not None
        return self._process.wait()

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
        return [json.loads(line) for line in self.log().splitlines() if line.startswith("{")]

    def metrics(self) -> dict[str, float]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=30) as response:
            text = response.read().decode()
        return {name: float(value) for name, value in re.findall(r"^([^#\s]\S*(?: \S+)*?) (\S+)$", text, re.MULTILINE)}

    def resident_bytes(self) -> int:
        with open(f"/proc/{self.pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def open_files(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))
