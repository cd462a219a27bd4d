#!/usr/bin/python3
"""Training on a group over four hosts whose nodes end and whose network is cut, as often as asked for.

  host_faults.py [LOSSD] [--faults N] [--seed S] [--clients N] [--rank_timeout S] [--json FILE]

The hosts are network namespaces (tests/hosts); packets take 2 ms from one to the other, and one in a thousand is lost. Clients are
those of faults.py, and so is what they compare; proxies cut their connections as well, which is not counted here. A fault is an
end of the group, or of one of its nodes, or a cut between two of them, while some client computes, flushes, steps or saves as the
seed says. First there is one of each kind, those of the network before the others; then the seed decides. The group has to come
back by itself each time. Exit status: 0 without a divergence, 1 with one, 77 where no hosts can be made.
"""
from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "hosts")]

from faults import FLAGS, PHASES, Faults, make_parser, run  # noqa: E402
from group import Group  # noqa: E402
from hosts import Host, Hosts, isolate  # noqa: E402

HOSTS = 4


class HostFaults(Faults):
    server: Group

    def make_server(self, folder: Path, at_end: contextlib.ExitStack) -> Group:
        self.hosts = at_end.enter_context(Hosts(HOSTS))
        self.kinds: dict[str, Callable[[], None]] = {
            "parted": self.part, "cut one way": self.cut_one_way, "parted for a moment": self.part_for_a_moment,
            "node killed": self.kill_node, "drained": self.drain_all, "rank killed": self.kill_one_rank,
            "leader killed": self.kill_leader, "rank stopped": self.stop_rank, "all nodes killed": self.kill_all}
        self.kinds_to_come, self.epoch = list(self.kinds), list[int]()
        return Group(str(self.options.lossd), folder, self.hosts, *FLAGS, "--group_short_life=0s",
                     f"--rank_timeout={self.options.rank_timeout}s", tls=True)

    def count(self) -> int:
        return self.ends.total()

    def end_is_due(self) -> bool:
        """Soon after the one before is over."""
        return time.monotonic() >= self.next_end

    def end_server(self) -> None:
        kind = self.kinds_to_come.pop(0) if self.kinds_to_come else self.random.choice(list(self.kinds))
        self.await_phase(self.random.choice(PHASES[:4]))
        under_way, self.epoch = self.page.phases_under_way(), self.server.rank_pids()
        self.server.forget_ports()
        self.page.count_kill()
        self.kinds[kind]()
        if set(self.server.rank_pids()) != set(self.epoch):
            self.server.await_serving()
        self.page.count_kill()
        self.ends[kind] += 1
        self.hit_while.update(under_way)
        self.next_end = time.monotonic() + self.random.random()

    # The kinds. Each returns once nothing of the epoch that it has ended runs any more, and no cut is left. `epoch`: its processes.

    def kill_one_rank(self) -> None:
        self.server.kill_rank(self.random.choice(self.epoch))

    def kill_leader(self) -> None:
        self.server.kill_rank(*self.server.ranks_of(0))

    def stop_rank(self) -> None:
        """It goes on when its epoch is over, which it does not know."""
        stopped = self.random.choice(self.epoch)
        os.kill(stopped, signal.SIGSTOP)
        self.server.await_end_of(set(self.epoch) - {stopped})
        time.sleep(self.random.random())
        with contextlib.suppress(ProcessLookupError):  # its node may have found out, and killed it
            os.kill(stopped, signal.SIGCONT)
        self.server.await_end_of([stopped])

    def kill_node(self) -> None:
        node = self.random.randrange(HOSTS)
        self.server.kill_node(node)
        time.sleep(self.random.random() * 0.2)
        self.server.start()
        self.server.await_end_of(self.epoch)

    def kill_all(self) -> None:
        self.server.kill()
        self.server.start()

    def drain_all(self) -> None:
        self.server.told = self.random.randrange(HOSTS)
        self.drain(None)
        self.server.start()

    def two_hosts(self) -> tuple[Host, Host]:
        return tuple(self.random.sample(list(self.hosts), 2))

    def part(self) -> None:
        one, other = self.two_hosts()
        self.lose_epoch(lambda: self.hosts.part([one], [other]))

    def cut_one_way(self) -> None:
        one, other = self.two_hosts()
        self.lose_epoch(lambda: self.hosts.cut(one, other))

    def lose_epoch(self, cut: Callable[[], None]) -> None:
        cut()
        self.server.await_end_of(self.epoch)
        time.sleep(self.random.random() * self.random.choice((0, 2)))  # what comes then does so with the cut, or without
        self.hosts.heal()

    def part_for_a_moment(self) -> None:
        """The group may live through it, or not."""
        one, other = self.two_hosts()
        self.hosts.part([one], [other])
        time.sleep(self.random.random() * self.options.rank_timeout)
        self.hosts.heal()
        time.sleep(1.5 * self.options.rank_timeout)  # until then it may find out that it was lost


def main() -> None:
    isolate()
    parser = make_parser(__doc__)
    parser.set_defaults(faults=200)
    parser.add_argument("--rank_timeout", type=float, default=3, help="of the group, in seconds")
    run(HostFaults, parser.parse_args())


if __name__ == "__main__":
    main()
