#!/usr/bin/python3
"""Training on servers that hold replicas of the same heads, of which one after the other is killed, as often as asked for.

  replica_faults.py [LOSSD] [--faults N] [--least N] [--replicas R] [--devices NAMES] [--seed S] [--clients N] [--json FILE]
                    [--sabotaged LOSSD]

Clients have their sessions at several replicas (replica_clients.py), and compute, flush, step, save and go back. A fault is a
SIGKILL to a replica of the seed's choice, the coordinator as likely as any other, soon after some client has begun to wait for
what was killed least often so far; it is started again after a moment, or killed once more on its way. The run goes on until there
were N faults, and at least --least of them while clients waited for each of these four. A kill puts all replicas back to a
checkpoint, and since then what was accepted is in the window once: the first client that finds anything else ends the run, as does
one that goes back without a kill. Exit status: 0 without a divergence, 1 with one. With --sabotaged, a lossd that leaves
out sums and is the last replica, it is the other way around, and says how soon it was noticed.
"""
from __future__ import annotations

import argparse
import contextlib
import re
import sys
import time
from collections import Counter
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "integration/replicas")]

from faults import FLAGS, PHASES, Faults, make_parser, run  # noqa: E402
from lossd_server import read_metrics  # noqa: E402
from replica_servers import ReplicaServers  # noqa: E402

KINDS = ("steps", "flushes", "second_gradient", "impatient_steps", "three_sessions", "impatient")
CONFIRMED = PHASES[:4]


class SoakReplicas(ReplicaServers):
    """As the soak knows a server. Only replica 0 has checkpoints."""

    def __init__(self, options: argparse.Namespace, folder: Path, *flags: str) -> None:
        super().__init__(str(options.lossd), folder, options.replicas, f"--checkpoint_dir={folder}/checkpoints", "--restore",
                         *flags, devices=options.devices)
        if options.sabotaged:
            self[len(self) - 1].binary = str(options.sabotaged)

    def running(self) -> bool:
        return all(server.running() for server in self)

    def metrics(self) -> Counter[str]:
        """Summed over all."""
        total: Counter[str] = Counter()
        for server in self:
            total.update(read_metrics(f"http://{server.metrics_target}/metrics"))
        return total

    def stop(self) -> int:
        """The first exit status that is none of success."""
        return next((status for status in super().stop() if status), 0)


class ReplicaFaults(Faults):
    server: SoakReplicas
    script = "replica_clients.py"

    def make_server(self, folder: Path, at_end: contextlib.ExitStack) -> SoakReplicas:
        return SoakReplicas(self.options, folder / "servers", *FLAGS, f"--replica_timeout={self.options.replica_timeout}s")

    def make_network(self, folder: Path, at_end: contextlib.ExitStack) -> None:
        """Nothing lies between: sessions are where their replica says."""

    def weather(self, what: str) -> None:
        pass

    def check_network(self) -> None:
        pass

    def kinds_of_faults(self) -> dict[str, int]:
        return dict(self.ends)

    def places(self) -> list[list[str]]:
        """Each calls another one first."""
        targets, kinds = self.server.targets, KINDS
        found = []
        for way in range(self.options.clients):
            first = way % len(targets)
            found.append([kinds[way % len(kinds)], ",".join(targets[first:] + targets[:first])])
        return found

    def count(self) -> int:
        return self.ends.total()

    def goes_on(self) -> bool:
        return super().goes_on() or min(self.killed_while[phase] for phase in CONFIRMED) < self.options.least

    def end_is_due(self) -> bool:
        """Soon after the one before is over."""
        return time.monotonic() >= self.next_end

    def end_server(self) -> None:
        rarest = min(CONFIRMED, key=lambda phase: (self.killed_while[phase], self.random.random()))
        self.await_phase(rarest)
        number = self.random.randrange(len(self.server))
        self.killed_while.update(self.page.phases_under_way())
        self.kill(number)
        if self.random.random() < 0.1:
            self.server[number].begin()
            time.sleep(self.random.random() * 0.5)
            self.kill(number)
        time.sleep(self.random.random() * 0.2)
        self.server[number].begin()
        self.server[number].await_serving()
        self.next_end = time.monotonic() + self.random.random() * 0.5

    def kill(self, number: int) -> None:
        self.page.count_kill()
        self.server[number].kill()
        self.page.count_kill()
        self.ends[f"replica {number} killed"] += 1

    def check(self) -> None:
        self.clients.check()
        for server in self.server:
            if not server.running():
                raise AssertionError(f"replica {server.number} ended by itself with {server.wait()}:\n{server.log()[-4000:]}")


def require_noticed(options: argparse.Namespace) -> None:
    """By a client that compares what it is told, and not by an error that stands for something else."""
    began = time.monotonic()
    try:
        run(ReplicaFaults, options)
    except SystemExit as end:
        said = str(end.code)
        if not re.search(r"AssertionError: .* is wrong at ", said):
            raise
        faults = re.search(r"after (\d+) faults", said)
        print(f"noticed after {time.monotonic() - began:.1f} s and {faults[1] if faults else '?'} kills:",
              *[line for line in said.splitlines() if line.startswith("AssertionError")])
        return
    sys.exit("nobody has noticed that sums were left out")


def main() -> None:
    parser = make_parser(__doc__)
    parser.set_defaults(faults=200, clients=len(KINDS))
    parser.add_argument("--least", type=int, default=30, help="faults while clients compute, flush, step and save, each")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--devices", default="cpu", help="of each replica; with commas each is a group; cuda:0+cuda:1: one each")
    parser.add_argument("--replica_timeout", type=float, default=3, help="of the set, in seconds")
    parser.add_argument("--sabotaged", type=Path, help="what the last replica is, in the place of LOSSD")
    options = parser.parse_args()
    if options.sabotaged:
        require_noticed(options)
    else:
        run(ReplicaFaults, options)


if __name__ == "__main__":
    main()
