"""A lossd that keeps its addresses from one start to the next, with TLS, a socket file and checkpoints."""
from __future__ import annotations

import os
import signal
from pathlib import Path

from certificates import Authority
from lossd_server import LossdServer, await_ports, free_port, free_ports


class SoakServer(LossdServer):
    """Started, drained and started again; everything that clients know of it stays."""

    def __init__(self, binary: str, folder: Path, *flags: str, tls: bool = True, devices: str = "cpu",
                 address: str = "127.0.0.1") -> None:
        super().__init__(binary, *flags, folder=folder)
        self.devices = devices
        self.port = free_ports(devices.count(",") + 1)  # each rank takes one
        self.target, self.socket_target = f"{address}:{self.port}", f"unix:{folder}/lossd.sock"
        self.metrics_url = f"http://{address}:{free_port()}/metrics"
        self.certificates = Authority(folder) if tls else None
        self.rotate_certificate()

    def flags(self) -> list[str]:
        found = [*super().flags(), f"--listen={self.target},{self.socket_target}",
                 f"--metrics_listen={self.metrics_url.split('/')[2]}", f"--checkpoint_dir={self.folder}/checkpoints", "--restore",
                 f"--devices={self.devices}", "--lanes_at_ranks=true", "--log_format=json"]
        if self.certificates is not None:
            found += self.certificates.server_flags()
        return found

    def await_serving(self) -> dict[str, int]:
        """Until the server, or the group that was started again, serves."""
        return await_ports(self, self.port_file(), self.last_words)

    def lane_targets(self) -> list[str]:
        """Where the ranks of a group take lanes, beside the leader."""
        return [f"127.0.0.1:{self.port + rank}" for rank in range(1, self.devices.count(",") + 1)]

    def rotate_certificate(self) -> None:
        """A new key and a new certificate, if there is TLS."""
        if self.certificates is not None:
            self.certificates.issue("server")

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
        self.wait_until(lambda: not set(self.rank_pids()) & set(epoch), "the ranks of the epoch end", every=0.002)

    def resident_bytes(self) -> int:
        with open(f"/proc/{self.pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def open_files(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))
