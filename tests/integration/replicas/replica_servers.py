"""Servers that hold replicas of the same heads, as tests and the soak start them: each keeps its addresses from one start to the
next, so that clients find again who was killed."""
from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lossd_server import await_ports, free_port, free_ports, read_metrics
from programs import Program
from waiting import wait_until as until  # noqa: F401


def write_token(file: Path, text: str = "known-to-the-replicas-of-a-set-alone") -> Path:
    file.write_text(f"{text}\n", encoding="ascii")
    file.chmod(0o600)
    return file


class ReplicaServer(Program):
    """One of a set. `flags` are its own, and those that all have."""

    def __init__(self, binary: str, folder: Path, number: int, flags: list[str], *, devices: str, address: str = "127.0.0.1",
                 command: Callable[..., list[str]] | None = None) -> None:
        super().__init__(binary, log=folder / f"log{number}", env={**os.environ, "OMP_NUM_THREADS": "1"})
        self.number, self.folder, self.binary, self._flags = number, folder, binary, flags
        self._at_host = command or (lambda *arguments: list(arguments))
        self.target = f"{address}:{free_ports(devices.count(',') + 1)}"  # each rank takes one
        self.metrics_target = f"{address}:{free_port()}"
        self._devices, self._ports = devices, folder / f"ports{number}"

    def command(self) -> list[str]:
        return self._at_host(self.binary)

    def flags(self) -> list[str]:
        return [f"--listen={self.target}", f"--metrics_listen={self.metrics_target}", f"--devices={self._devices}",
                f"--replica={self.number}", f"--port_file={self._ports}", *self._flags]

    def begin(self, *flags: str) -> None:
        """Starts it. It serves once all of them have met."""
        self._ports.unlink(missing_ok=True)
        self.start(*self.flags(), *flags)

    def await_serving(self) -> None:
        await_ports(self, self._ports, self.last_words)

    def metrics(self) -> dict[str, float]:
        return read_metrics(f"http://{self.metrics_target}/metrics")

    def pids(self) -> list[int]:
        """Its process and, where the replica is a group, those of the ranks."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text(encoding="ascii")
        return [self.pid, *map(int, children.split())]


class ReplicaServers:
    """A set; `servers[i]` is replica i. From __enter__ to __exit__, or from start() to close(). `devices` of each; those of one after
    the other where there is a "+" between them. `hosts` (tests/hosts): each is on one of its own."""

    def __init__(self, binary: str, folder: Path, replicas: int, *flags: str, devices: str = "cpu", hosts: Any = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        token = write_token(folder / "token")
        self.leader_port = free_port()
        leader = hosts[0].name if hosts else f"127.0.0.1:{self.leader_port}"
        network = ["--collective_network=trusted", "--collective_interface=eth0", "--insecure"] if hosts else []
        common = ["--replica_set=t", f"--replicas={replicas}", f"--replica_leader={leader}", f"--group_token_file={token}", *network,
                  *flags]
        self._servers = []
        of_each = devices.split("+")
        for number in range(replicas):
            place = {"address": hosts[number].address, "command": hosts[number].command} if hosts else {}
            self._servers.append(ReplicaServer(binary, folder, number, common, devices=of_each[number % len(of_each)], **place))

    def __getitem__(self, number: int) -> ReplicaServer:
        return self._servers[number]

    def __iter__(self) -> Iterator[ReplicaServer]:
        return iter(self._servers)

    def __len__(self) -> int:
        return len(self._servers)

    @property
    def targets(self) -> list[str]:
        return [server.target for server in self._servers]

    def start(self) -> None:
        """Those that do not run. Returns once all serve."""
        for server in self._servers:
            if not server.running():
                server.begin()
        for server in self._servers:
            server.await_serving()

    def kill(self) -> None:
        for server in self._servers:
            server.kill()

    def stop(self) -> list[int]:
        """SIGTERM to all; their exit statuses."""
        for server in self._servers:
            server.signal(signal.SIGTERM)
        return [server.wait() for server in self._servers]

    def log(self) -> str:
        return "\n".join(f"replica {server.number}:\n{server.log()[-6000:]}" for server in self._servers)

    def __enter__(self) -> ReplicaServers:
        try:
            self.start()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *error: Any) -> None:
        with contextlib.ExitStack() as at_end:
            for server in self._servers:
                at_end.callback(server.__exit__, *error)

    def close(self) -> None:
        self.__exit__(None, None, None)
