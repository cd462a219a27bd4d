#!/usr/bin/python3
"""Training on servers that hold replicas of the same heads, which are killed and cut off from each other, as often as asked for.

  replica_faults.py [LOSSD] [--faults N] [--least N] [--replicas R] [--devices NAMES] [--seed S] [--clients N] [--json FILE]
                    [--sabotaged LOSSD]

Clients have their sessions at several replicas (replica_clients.py), and compute, flush, step, save and go back. Half of the
faults are kills, and half are cuts, of a replica of the seed's choice, the coordinator as likely as any other, soon after some
client has begun to wait for what was hit least often so far. Who is killed (SIGKILL) is started again after a moment, or killed
once more on its way. A cut resets the replica's connections with others: those for commands, those for gradients and weights, or
both; and those for commands sometimes once more while all meet again. The run goes on until there were N faults, and of each kind
at least --least while clients waited for each of these four. A kill puts all replicas back to a checkpoint, and so may a cut in
the middle of a change; since then what was accepted is in the window once: the first client that finds anything else ends the
run, as does one that goes back for another reason. Exit status: 0 without a divergence, 1 with one. With --sabotaged, a lossd that
leaves out sums and is the last replica, it is the other way around, and says how soon it was noticed.
"""
from __future__ import annotations

import argparse
import contextlib
import re
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "integration/replicas")]

from cut_connections import connections_between, reset  # noqa: E402
from faults import FLAGS, PATIENCE_SECONDS, PHASES, Faults, make_parser, run  # noqa: E402
from replica_servers import ReplicaServers  # noqa: E402
from waiting import wait_until  # noqa: E402

KINDS = ("steps", "flushes", "second_gradient", "impatient_steps", "three_sessions", "impatient")
CONFIRMED = PHASES[:4]
FAULTS = ("killed", "cut")
CUTS = {"commands": (True,), "payload": (False,), "all connections": (True, False)}  # whether the connection is one for commands


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
            total.update(server.metrics())
        return total

    def meeting(self) -> tuple[int, int]:
        """How often all have met, and how often heads went back then, as the coordinator knows; 0 while not all are there."""
        metrics = self[0].metrics()
        whole = metrics['lossd_replica_set_whole{set="t",replica="0"}']
        return (int(metrics["lossd_replica_epochs_total"]), int(metrics["lossd_replica_returns_total"])) if whole else (0, 0)

    @contextlib.contextmanager
    def connections(self, number: int, what: str) -> Iterator[list[socket.socket]]:
        """Those of this replica with others."""
        others = [pid for server in self if server.number != number for pid in server.pids()]
        with connections_between(self[number].pids(), others) as found:
            yield [end for ports, end in found.items() if (self.leader_port in ports) in CUTS[what]]

    def stop(self) -> int:
        """The first exit status that is none of success."""
        return next((status for status in super().stop() if status), 0)


class ReplicaFaults(Faults):
    server: SoakReplicas
    script = "replica_clients.py"

    def __init__(self, options: argparse.Namespace, folder: Path, at_end: contextlib.ExitStack) -> None:
        super().__init__(options, folder, at_end)
        self.faults: Counter[str] = Counter()
        self.after_cuts: Counter[str] = Counter()

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
        return self.faults.total()

    def wanting(self) -> list[str]:
        """The kinds of faults of which there are to be more."""
        return [kind for kind in FAULTS if self.faults[kind] < self.options.faults / 2
                or min(self.hit_while[f"{kind} while {phase}"] for phase in CONFIRMED) < self.options.least]

    def goes_on(self) -> bool:
        return bool(self.wanting())

    def end_is_due(self) -> bool:
        """Soon after the one before is over."""
        return time.monotonic() >= self.next_end

    def end_server(self) -> None:
        kind = self.random.choice(self.wanting())
        rarest = min(CONFIRMED, key=lambda phase: (self.hit_while[f"{kind} while {phase}"], self.random.random()))
        number = self.random.randrange(len(self.server))
        if kind == "killed":
            self.kill(number, rarest)
        else:
            self.cut(number, rarest)
        self.faults[kind] += 1
        self.next_end = time.monotonic() + self.random.random() * 0.5

    def begin_fault(self, kind: str, phase: str) -> None:
        self.await_phase(phase)
        self.hit_while.update(f"{kind} while {each}" for each in self.page.phases_under_way())

    def kill(self, number: int, phase: str) -> None:
        self.begin_fault("killed", phase)
        self.kill_now(number)
        if self.random.random() < 0.1:
            self.server[number].begin()
            time.sleep(self.random.random() * 0.5)
            self.kill_now(number)
        time.sleep(self.random.random() * 0.2)
        self.server[number].begin()
        self.server[number].await_serving()

    def kill_now(self, number: int) -> None:
        self.page.count_kill()
        self.server[number].kill()
        self.page.count_kill()
        self.ends[f"replica {number} killed"] += 1

    def cut(self, number: int, phase: str) -> None:
        """Returns when all have met again. Where payload alone is cut off that is after the next window to end."""
        epochs, returns = self.await_meeting(1)
        what = self.random.choice(list(CUTS))
        with self.server.connections(number, what) as ends:
            if not ends:
                raise AssertionError(f"all have met, and replica {number} has no connections for {what}")
            self.begin_fault("cut", phase)
            self.page.count_cut()
            reset(ends)
        if self.random.random() < 0.1:
            time.sleep(self.random.random() * 0.2)
            with self.server.connections(number, "commands") as ends:
                reset(ends)
            time.sleep(0.2)  # until that is known
        went_back = self.await_meeting(epochs + 1)[1] > returns
        self.page.count_cut()
        self.ends[f"{what} of replica {number} cut"] += 1
        self.after_cuts["went back" if went_back else "went on"] += 1

    def await_meeting(self, epoch: int) -> tuple[int, int]:
        """That one, or a later one: SoakReplicas.meeting()."""
        def met() -> tuple[int, int] | None:
            self.check()
            meeting = self.server.meeting()
            return meeting if meeting[0] >= epoch else None

        return wait_until(met, lambda: f"all replicas meet:\n{self.server.log()}", PATIENCE_SECONDS, every=0.005)

    def report(self) -> dict[str, object]:
        return {**super().report(), "heads_after_cuts": dict(self.after_cuts)}

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
        faults = re.search(r"after ({.*}) of seed", said)
        print(f"noticed after {time.monotonic() - began:.1f} s and {faults[1] if faults else '?'}:",
              *[line for line in said.splitlines() if line.startswith("AssertionError")])
        return
    sys.exit("nobody has noticed that sums were left out")


def main() -> None:
    parser = make_parser(__doc__)
    parser.set_defaults(faults=400, clients=len(KINDS))
    parser.add_argument("--least", type=int, default=30, help="faults of each kind while clients compute, flush, step and save, each")
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
