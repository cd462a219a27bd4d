"""One lossd over several hosts, as tests and the soak start it: a node on each, that a launcher would start again."""
from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

from hosts import Hosts
from server import SoakServer

HEALTH_PORT = 50052


class Group(SoakServer):
    """A server of one rank a host, or more: `pid` and the exit status are those of node 0, which serves."""

    def __init__(self, binary: str, folder: Path, hosts: Hosts, *flags: str, tls: bool = False, devices: str = "cpu") -> None:
        super().__init__(binary, folder, *flags, tls=tls, devices=devices, address=hosts[0].address)
        self.hosts = hosts
        self.told = 0  # the node that signals go to
        self._others: dict[int, subprocess.Popen[bytes]] = {}
        self._token = folder / "token"
        self._token.write_text("known-to-the-nodes-of-a-group-alone\n", encoding="ascii")
        self._token.chmod(0o600)

    def flags(self) -> list[str]:
        """The same at every node, as launchers have it."""
        found = [*super().flags(), "--collective_network=trusted", "--collective_interface=eth0", f"--group_token_file={self._token}",
                 f"--health_listen=0.0.0.0:{HEALTH_PORT}"]
        return found if self.certificates else [*found, "--insecure"]

    def place(self, node: int) -> list[str]:
        return ["--group=flags", f"--group_nodes={len(self.hosts)}", f"--group_node={node}", f"--group_leader={self.hosts[0].name}"]

    def command(self) -> list[str]:
        return self.hosts[0].command(*super().command(), *self.place(0))

    def start(self, *flags: str, **options: object) -> None:
        """Those nodes that do not run."""
        for node in range(1, len(self.hosts)):
            if not self.node_runs(node):
                self.start_other(node, *flags)
        if self.node_runs(0):
            self.await_epoch()
        else:
            super().start(*flags, env=self.environment(), **options)

    def start_other(self, node: int, *flags: str) -> None:
        with open(self.log_of(node), "ab") as log:
            self._others[node] = self.hosts[node].popen(self._binary, *self.place(node), *self.flags(), *flags, stdout=log, stderr=log,
                                                        env=self.environment())

    @staticmethod
    def environment() -> dict[str, str]:
        """One thread a rank: four hosts share this machine's cores."""
        return {**os.environ, "OMP_NUM_THREADS": "1"}

    def log_of(self, node: int) -> Path:
        return self.folder / f"log{node or ''}"

    def log(self) -> str:
        logs = [self.log_of(node) for node in range(len(self.hosts))]
        return "\n".join(f"node {node}:\n{log.read_text(encoding='utf-8', errors='replace')[-3000:]}"
                         for node, log in enumerate(logs) if log.exists())

    # Nodes and ranks

    def node(self, node: int) -> subprocess.Popen[bytes] | None:
        return self._process if node == 0 else self._others.get(node)

    def node_runs(self, node: int) -> bool:
        process = self.node(node)
        return process is not None and process.poll() is None

    def ranks_of(self, node: int) -> list[int]:
        """Processes, in no order; none where no node runs."""
        if not self.node_runs(node):
            return []
        pid = self.node(node).pid
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()]

    def rank_pids(self) -> list[int]:
        return [pid for node in range(len(self.hosts)) for pid in self.ranks_of(node)]

    def await_end_of(self, ranks: Iterable[int]) -> None:
        """Until none of these processes runs any more; their nodes go on."""
        while set(ranks) & set(self.rank_pids()):
            self.require_running()
            time.sleep(0.01)

    def require_running(self) -> None:
        for node in range(len(self.hosts)):
            if not self.node_runs(node):
                raise AssertionError(f"node {node} has ended by itself:\n{self.log()}")

    # The whole of it

    def running(self) -> bool:
        return all(self.node_runs(node) for node in range(len(self.hosts)))

    def signal(self, number: int) -> None:
        """To one of the nodes, which is to be enough."""
        self.node(self.told).send_signal(number)

    def wait(self, seconds: float | None = None) -> int:
        """For all nodes, which are to end with one status."""
        end = None if seconds is None else time.monotonic() + seconds
        statuses = []
        for node in range(len(self.hosts)):
            statuses.append(self.node(node).wait(None if end is None else max(0.0, end - time.monotonic())))
        if len(set(statuses)) != 1:
            raise AssertionError(f"nodes ended with {statuses}:\n{self.log()}")
        return statuses[0]

    def kill_node(self, node: int) -> None:
        if self.node_runs(node):
            self.node(node).kill()
            self.node(node).wait()

    def kill(self) -> None:
        for node in range(len(self.hosts)):
            self.kill_node(node)
