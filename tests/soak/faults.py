#!/usr/bin/python3
"""Training through a network that fails and servers that end, for as many faults as are asked for.

  faults.py [LOSSD] [--faults N] [--seed S] [--clients N] [--mean_bytes N] [--json FILE]

Clients in processes of their own reach a server through proxies (tests/proxy) that cut, stall, delay, mirror, repeat and
half close their connections at random bytes, half of them over TLS, and of a group the lanes at each rank; the server is killed, or drained, and started again with
--restore. Of a group (--devices=cpu,cpu) mostly a rank is killed, while some client computes, flushes, steps or saves as the
seed says, and the group has to come back by itself. A fault counts if it hit a client with a call under way, a kill or a drain if it ended a server that one was
talking to. Whatever a client is told is compared with what it must be, to the last bit (fault_clients.py); the first
divergence ends the run, as do an error that nothing explains, a client that stands still, and anything that is still held
once all clients have left. The seed decides what happens to which connection behind how many bytes, and what clients do;
when it happens does not repeat to the microsecond. Exit status: 0 without a divergence, 1 with one.
"""
from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PATHS = [str(ROOT / "client/python"), str(ROOT / "tests/support")]
sys.path[:0] = PATHS

from fault_page import PHASES, FaultPage  # noqa: E402
from programs import Program, StillRuns, stacks  # noqa: E402
from server import SoakServer  # noqa: E402
from waiting import wait_until  # noqa: E402

KINDS = ("plain", "lanes", "steps", "pair", "deterministic", "impatient", "impatient_steps", "phases",
         "deterministic_phases")
FLAGS = ("--workspace_bytes=128M", "--drain_timeout=30s")
HELD = ("lossd_live_streams", "lossd_queued_chunks", "lossd_credit_bytes")
PATIENCE_SECONDS = 300  # a guard: a client that has not ended any call for so long never will


class Proxies:
    """The process of all of them; `ports`: one for each way. Its faults are counted in `seen`."""

    def __init__(self, binary: Path, server: SoakServer, page_path: Path, options: argparse.Namespace, ways: int,
                 at_end: contextlib.ExitStack) -> None:
        arguments = [str(binary), f"--under_way={page_path}", f"--seed={options.seed}", f"--mean_bytes={options.mean_bytes}"]
        for way in range(ways):
            arguments += ["--tls", server.target] if way < tls_ways(ways) else ["--plain", server.socket_target]
        for target in server.lane_targets():
            arguments += ["--lanes", target]
        self.process = at_end.enter_context(Program(*arguments, log=page_path.with_name("proxies"), stdin=subprocess.PIPE,
                                                    stdout=subprocess.PIPE, text=True))
        self.ports: list[int] = json.loads(self.process.read_line())["ports"]
        self.seen: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._count, daemon=True)
        self._thread.start()

    def _count(self) -> None:
        for line in self.process.stdout:
            self.seen[json.loads(line)["fault"]] += 1

    def weather(self, what: str) -> None:
        """"storm": from now on there are faults; "calm": there are none."""
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()


def tls_ways(ways: int) -> int:
    return (ways + 1) // 2


def host_of(way: int, ways: int, server: SoakServer) -> str:
    """Where lanes at other ranks go through proxies, too, each way has its own address (lossd-fault-proxy --lanes)."""
    return f"127.0.0.{way + 2}" if server.lane_targets() and way < tls_ways(ways) else "localhost"


class Clients:
    """A process for each. `places`: of each the arguments that say what it is and where it finds the server."""

    def __init__(self, script: str, places: list[list[str]], options: argparse.Namespace, page_path: Path, page: FaultPage,
                 at_end: contextlib.ExitStack) -> None:
        self.page, self.ready, self.reports = page, set[int](), list[dict[str, object]]()
        self.processes: list[Program] = []
        at_end.callback(self.kill)
        self.moved = [(0, time.monotonic())] * len(places)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*PATHS, str(Path(__file__).parent)]),
                       "LOSSD_LIBRARY": os.environ.get("LOSSD_LIBRARY", str(options.lossd.parent.parent / "lib/liblossd_c.so")),
                       "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "GRPC_VERBOSITY": "NONE"}
        for way, place in enumerate(places):
            process = Program(sys.executable, Path(__file__).with_name(script), *place, f"--way={way}", f"--ways={len(places)}",
                              f"--page={page_path}", f"--seed={options.seed}", log=page_path.with_name(f"client{way}"),
                              env=environment, stdout=subprocess.PIPE, text=True)
            self.processes.append(process.start())
            threading.Thread(target=self._read, args=(process,), daemon=True).start()

    def _read(self, process: Program) -> None:
        for line in process.stdout:
            told = json.loads(line)
            if "ready" in told:
                self.ready.add(told["ready"])
            else:
                self.reports.append(told)

    def any_under_way(self) -> bool:
        return bool(self.page.under_way.any())

    def check(self) -> None:
        now = time.monotonic()
        for way, process in enumerate(self.processes):
            if process.poll():
                raise AssertionError(f"client {way} ended with status {process.poll()}:\n{process.log()}")
            progress, since = int(self.page.progress[way]), self.moved[way][1]
            if progress != self.moved[way][0] or process.poll() == 0:
                self.moved[way] = (progress, now)
            elif now - since > PATIENCE_SECONDS:
                raise AssertionError(f"client {way} stands still:\n{self.stacks(process)}")

    def stacks(self, process: Program) -> str:
        """Python's, and those of all threads."""
        process.signal(signal.SIGUSR1)
        time.sleep(1)
        threads = stacks(process.pid)
        process.kill()
        return f"{process.log()}\n{threads}"

    def running(self) -> bool:
        return any(process.running() for process in self.processes)

    def kill(self) -> None:
        for process in self.processes:
            process.close()


class Faults:
    """`at_end` ends every process that was started, however far it came."""

    script = "fault_clients.py"

    def __init__(self, options: argparse.Namespace, folder: Path, at_end: contextlib.ExitStack) -> None:
        self.options = options
        self.random = random.Random(options.seed)
        self.server = self.make_server(folder, at_end)
        at_end.callback(self.server.kill)
        self.server.start()
        self.page = FaultPage(folder / "page", options.clients)
        self.make_network(folder, at_end)
        self.clients = Clients(self.script, self.places(), options, folder / "page", self.page, at_end)
        self.ends: Counter[str] = Counter()
        self.hit_while: Counter[str] = Counter()  # ends, by what some client was waiting for
        self.next_end, self.slowest_drain, self.shown = 0.0, 0.0, 0.0
        self.began = time.monotonic()

    def make_server(self, folder: Path, at_end: contextlib.ExitStack) -> SoakServer:
        group = ["--group_short_life=0s"] if "," in self.options.devices else []  # so many kills are no crash loop
        return SoakServer(str(self.options.lossd), folder, *FLAGS, *group, devices=self.options.devices)

    def make_network(self, folder: Path, at_end: contextlib.ExitStack) -> None:
        """Between clients and the server."""
        self.proxies = Proxies(self.options.lossd.with_name("lossd-fault-proxy"), self.server, folder / "page", self.options,
                               self.options.clients, at_end)

    def weather(self, what: str) -> None:
        self.proxies.weather(what)

    def places(self) -> list[list[str]]:
        """What Clients has to know."""
        assert self.server.certificates is not None
        ports, found = self.proxies.ports, list[list[str]]()
        for way, port in enumerate(ports):
            found.append([KINDS[way % len(KINDS)], f"{host_of(way, len(ports), self.server)}:{port}"])
            if way < tls_ways(len(ports)):
                found[-1].append(f"--ca={self.server.certificates.certificate('ca')}")
        return found

    def count(self) -> int:
        return self.proxies.seen.total() + self.ends.total()

    def goes_on(self) -> bool:
        return self.count() < self.options.faults

    def end_is_due(self) -> bool:
        due = self.count() >= self.next_end
        if due:
            self.next_end = self.count() + 1 + self.random.expovariate(1 / self.options.faults_between_ends)
        return due

    def run(self) -> dict[str, object]:
        self.await_ready()
        self.weather("storm")
        while self.goes_on():
            self.check()
            self.show()
            if self.clients.any_under_way() and self.end_is_due():
                self.end_server()
            time.sleep(0.05)
        self.weather("calm")
        self.page.stop()
        while self.clients.running():
            self.check()
            time.sleep(0.05)
        self.check()
        self.await_nothing_held()
        if self.server.stop() != 0:
            raise AssertionError(f"the server did not end in order:\n{self.server.log()[-4000:]}")
        return self.report()

    def await_ready(self) -> None:
        """Before, a head may have no checkpoint that a killed server could go back to."""
        def ready() -> bool:
            self.check()
            return len(self.clients.ready) == self.options.clients

        wait_until(ready, lambda: f"ready: {self.clients.ready}", PATIENCE_SECONDS)

    def check(self) -> None:
        self.clients.check()
        if not self.server.running():
            raise AssertionError(f"the server ended by itself:\n{self.server.log()[-4000:]}")
        self.check_network()

    def check_network(self) -> None:
        if self.proxies.process.poll() is not None:
            raise AssertionError("the proxies have ended")

    def kinds_of_faults(self) -> dict[str, int]:
        return {**self.proxies.seen, **self.ends}

    def end_server(self) -> None:
        """Killed, drained, or killed while it drains; and started again after a moment."""
        if self.server.rank_pids() and self.random.random() < 0.8:
            return self.kill_rank(self.random.choice(PHASES[:4]))
        drains = self.random.random() < 0.5
        patience = self.random.random() * 0.1 if drains and self.random.random() < 0.2 else None
        if drains and self.drain(patience):
            self.ends["drain"] += 1
        else:
            self.page.count_kill()
            self.server.kill()
            self.page.count_kill()
            self.ends["kill"] += 1
        time.sleep(self.random.random() * 0.2)
        self.server.start()

    def kill_rank(self, phase: str) -> None:
        """One of the ranks, soon after a client has begun to wait for this."""
        self.await_phase(phase)
        self.server.forget_ports()
        under_way = self.page.phases_under_way()
        self.page.count_kill()
        self.server.kill_rank(self.random.choice(self.server.rank_pids()))
        self.page.count_kill()
        self.ends["rank killed"] += 1
        self.hit_while.update(under_way)
        self.server.await_serving()

    def await_phase(self, phase: str) -> None:
        """Until a moment after some client has begun to wait for this, or as long as none does."""
        end = time.monotonic() + 60
        while phase not in self.page.phases_under_way() and time.monotonic() < end:
            self.check()
            time.sleep(0.0005)
        time.sleep(self.random.random() * 0.003)

    def drain(self, patience: float | None) -> bool:
        """Whether the server came to its end in that time."""
        begun = time.monotonic()
        self.server.signal(signal.SIGTERM)
        try:
            status = self.server.wait(PATIENCE_SECONDS if patience is None else patience)
        except StillRuns:
            return False
        if status != 0:
            raise AssertionError(f"the server ended with {status} when it was drained:\n{self.server.log()[-4000:]}")
        self.slowest_drain = max(self.slowest_drain, time.monotonic() - begun)
        return True

    def await_nothing_held(self) -> None:
        def nothing_held() -> bool:
            self.check()
            return not self.held()

        wait_until(nothing_held, lambda: f"nothing is held any more: {self.held()}", PATIENCE_SECONDS, every=0.2)

    def held(self) -> dict[str, float]:
        return {name: value for name, value in self.server.metrics().items()
                if value and (name in HELD or name.startswith("lossd_rpcs_in_flight"))}

    def show(self) -> None:
        """A bar, or where nobody watches a line for every tenth."""
        done = min(1.0, self.count() / self.options.faults)
        bar = f"[{'#' * round(40 * done):40}] {self.count()} of {self.options.faults} faults, {time.monotonic() - self.began:.0f} s"
        if sys.stderr.isatty():
            sys.stderr.write(f"\r{bar} ")
        elif done >= self.shown + 0.1:
            self.shown = done
            print(bar, flush=True)

    def report(self) -> dict[str, object]:
        seconds = time.monotonic() - self.began
        clients: Counter[str] = Counter()
        for report in self.clients.reports:
            clients.update({name: value for name, value in report.items() if isinstance(value, int)})
        return {"seed": self.options.seed, "faults": self.count(), "divergences": 0, "seconds": round(seconds, 1),
                "faults_per_second": round(self.count() / seconds, 1), "kinds": self.kinds_of_faults(),
                "hit_while": dict(self.hit_while),
                "slowest_drain_seconds": round(self.slowest_drain, 2), "clients": self.options.clients,
                "all_clients": dict(sorted(clients.items()))}


def make_parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lossd", type=Path, nargs="?", default=ROOT / "build/bin/lossd", help="with lossd-fault-proxy beside it")
    parser.add_argument("--faults", type=int, default=10000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--clients", type=int, default=len(KINDS))
    parser.add_argument("--mean_bytes", type=int, default=40000, help="from one fault of a connection to the next")
    parser.add_argument("--json", type=Path, help="a file for the figures")
    return parser


def run(faults_of: Callable[[argparse.Namespace, Path, contextlib.ExitStack], Faults], options: argparse.Namespace) -> None:
    print(f"seed {options.seed}", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that nothing is left running
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as at_end:
        faults = faults_of(options, Path(folder), at_end)
        try:
            report = faults.run()
        except AssertionError as error:
            sys.exit(f"\nafter {faults.kinds_of_faults()} of seed {options.seed}: {error}\nthe server's last words:\n"
                     f"{faults.server.log()[-3000:]}")
    text = json.dumps(report, indent=1)
    print(f"\n{text}")
    if options.json:
        options.json.write_text(text + "\n", encoding="utf-8")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--faults_between_ends", type=float, default=60, help="of connections, between two ends of the server")
    parser.add_argument("--devices", default="cpu", help="of the server: with commas a group")
    run(Faults, parser.parse_args())


if __name__ == "__main__":
    main()
