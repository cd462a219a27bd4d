"""One lossd over several hosts, as tests and the soak start it: a node on each, that a launcher would start again."""
from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from hosts import Hosts
from programs import Program
from server import SoakServer
from waiting import PATIENCE

HEALTH_PORT = 50052


class Group(SoakServer):
    """A server of one rank a host, or more: `pid` and the exit status are those of node 0, which serves."""

    def __init__(self, binary: str, folder: Path, hosts: Hosts, *flags: str, tls: bool = False, devices: str = "cpu") -> None:
        super().__init__(binary, folder, *flags, tls=tls, devices=devices, address=hosts[0].address)
        self.hosts = hosts
        self.told = 0  # the node that signals go to
        self._others = [Program(*hosts[node].command(binary, *self.place(node)), log=self.log_of(node), env=self.environment())
                        for node in range(1, len(hosts))]
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
        for other in self._others:
            if not other.running():
                other.start(*self.flags(), *flags)
        if self.leader_runs():
            self.await_serving()
        else:
            super().start(*flags, env=self.environment(), **options)

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

    last_words = log

    # Nodes and ranks

    def leader_runs(self) -> bool:
        return super().running()

    def node_runs(self, node: int) -> bool:
        return self._others[node - 1].running() if node else self.leader_runs()

    def ranks_of(self, node: int) -> list[int]:
        """Processes, in no order; none where no node runs."""
        if not self.node_runs(node):
            return []
        pid = self._others[node - 1].pid if node else self.pid
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()]

    def rank_pids(self) -> list[int]:
        return [pid for node in range(len(self.hosts)) for pid in self.ranks_of(node)]

    def await_end_of(self, ranks: Iterable[int]) -> None:
        """Until none of these processes runs any more; their nodes go on."""
        self.wait_until(lambda: not set(ranks) & set(self.rank_pids()), f"the end of ranks {ranks}", every=0.01)

    # The whole of it

    def running(self) -> bool:
        return all(self.node_runs(node) for node in range(len(self.hosts)))

    def signal(self, number: int) -> None:
        """To one of the nodes, which is to be enough."""
        if self.told:
            self._others[self.told - 1].signal(number)
        else:
            super().signal(number)

    def wait(self, seconds: float = PATIENCE) -> int:
        """For all nodes, which are to end with one status."""
        statuses = [super().wait(seconds)]
        statuses += [other.wait(seconds) for other in self._others]
        if len(set(statuses)) != 1:
            raise AssertionError(f"nodes ended with {statuses}:\n{self.log()}")
        return statuses[0]

    def kill_node(self, node: int) -> None:
        if node:
            self._others[node - 1].kill()
        elif self.leader_runs():
            self._process.kill()
            super().wait()

    def kill(self) -> None:
        for node in range(len(self.hosts)):
            self.kill_node(node)
