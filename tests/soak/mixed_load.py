#!/usr/bin/python3
"""Many kinds of clients at once, while certificates are rotated and the server is drained and started again.

  mixed_load.py LOSSD [--seconds S] [--clients N] [--rotate S] [--restart S] [--allowed BYTES] [--json]

Every loss, dX, dW, weight and logit is compared with NumPy's. Fails at the first that is wrong, and if a call fails that
has no reason to, the server ends otherwise than drained, the memory of a server grows after the first third of its time
by more than --allowed, or something is still held once all clients have left: a session, a stream, a call, a credit.
"""
from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import lossd
from clients import Client, Intruder, PairTrainer, Reader, RegionTrainer, Stepper, Trainer, Visitor
from programs import join
from server import SoakServer
from waiting import wait_until

SAMPLE_SECONDS = 0.25
HELD = ("lossd_sessions", "lossd_live_streams", "lossd_queued_chunks", "lossd_credit_bytes",
        "lossd_staging_reserved_bytes")


@dataclass
class Life:
    """The resident memory of one process of the server, over time."""

    began: float
    samples: list[tuple[float, int]] = field(default_factory=list)

    def settled(self) -> list[tuple[float, int]]:
        return self.samples[len(self.samples) // 3:]

    def growth(self) -> int:
        """From the lowest of the first third after it settled to the highest of the last third."""
        rest = [size for _, size in self.settled()]
        third = max(1, len(rest) // 3)
        return max(rest[-third:]) - max(rest[:third]) if rest else 0

    def slope(self) -> float:
        """Bytes a second, by least squares."""
        points = self.settled()
        if len(points) < 3:
            return 0.0
        mean_time = sum(at for at, _ in points) / len(points)
        mean_size = sum(size for _, size in points) / len(points)
        spread = sum((at - mean_time) ** 2 for at, _ in points)
        return sum((at - mean_time) * (size - mean_size) for at, size in points) / spread if spread else 0.0

    def report(self) -> dict[str, object]:
        return {"seconds": round(self.samples[-1][0] - self.began, 1),
                "peak_bytes": max(size for _, size in self.samples), "last_bytes": self.samples[-1][1], "growth_bytes": self.growth(),
                "slope_bytes_per_second": round(self.slope())}


class Soak:
    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options = options
        self.server = SoakServer(options.lossd, folder, f"--session_lease={options.lease}s", "--workspace_bytes=128M",
                                 "--drain_timeout=30s", "--same_host_regions", f"--region_socket_dir={folder}")
        self.lives: list[Life] = []
        self.rotations, self.drains, self.slowest_drain = 0, 0, 0.0
        self.clients: list[Client] = []

    def over_tls(self) -> lossd.Client:
        assert self.server.certificates is not None
        tls = lossd.Tls(ca_certificates=self.server.certificates.certificate("ca"), server_name="localhost")
        return lossd.connect(self.server.target, tls=tls, reconnect_timeout=120)

    def over_socket(self) -> lossd.Client:
        return lossd.connect(self.server.socket_target, reconnect_timeout=120)

    def make_clients(self) -> None:
        kinds = (Trainer, PairTrainer, RegionTrainer, Stepper, Reader, Visitor)
        ways = (self.over_tls, self.over_socket)
        for number in range(self.options.clients):
            kind = kinds[number % len(kinds)]
            way = self.over_socket if kind is RegionTrainer else ways[(number + number // len(kinds)) % 2]
            self.clients.append(kind(way, number))
        self.clients += [Intruder(self.over_tls, 1000 + number, self.server.port, self.server.socket_target)
                         for number in range(2)]

    def start_server(self) -> None:
        self.server.start()
        self.lives.append(Life(time.monotonic()))

    def restart(self) -> None:
        begun = time.monotonic()
        status = self.server.stop()
        self.slowest_drain = max(self.slowest_drain, time.monotonic() - begun)
        if status != 0:
            raise AssertionError(f"the server ended with {status} when it was drained:\n{self.server.log()[-4000:]}")
        self.drains += 1
        self.start_server()

    def check(self) -> None:
        for client in self.clients:
            if client.failure:
                raise AssertionError(client.failure)
        if not self.server.running():
            raise AssertionError(f"the server ended by itself:\n{self.server.log()[-4000:]}")

    def run(self) -> dict[str, object]:
        self.start_server()
        self.make_clients()
        begun = time.monotonic()
        for client in self.clients:
            client.start()
        next_rotation, next_restart = begun + self.options.rotate, begun + self.options.restart
        end = begun + self.options.seconds
        while (now := time.monotonic()) < end:
            self.check()
            self.lives[-1].samples.append((now, self.server.resident_bytes()))
            if now >= next_rotation:
                self.server.rotate_certificate()
                self.rotations += 1
                next_rotation += self.options.rotate
            if now >= next_restart and now < end - self.options.restart / 4:
                self.restart()
                next_restart += self.options.restart
            time.sleep(SAMPLE_SECONDS)
        seconds = time.monotonic() - begun
        self.leave()
        held = self.await_nothing_held()
        growth = max(life.growth() for life in self.lives)
        report = self.report(seconds, held, growth)
        if growth > self.options.allowed:
            raise AssertionError(f"the server's memory grew by {growth} bytes: {json.dumps(report)}")
        if self.server.stop() != 0:
            raise AssertionError("the server did not end in order")
        return report

    def leave(self) -> None:
        for client in self.clients:
            client.stopping.set()
        join(self.clients)
        self.check()

    def await_nothing_held(self) -> dict[str, float]:
        """Sessions of clients that vanished last as long as their lease."""
        def nothing_held() -> dict[str, float] | None:
            self.check()
            metrics = self.server.metrics()
            held = {name: value for name, value in metrics.items()
                    if value and (name in HELD or name.startswith("lossd_rpcs_in_flight"))}
            return None if held else {name: metrics[name] for name in HELD if name in metrics}

        return wait_until(nothing_held, "nothing is held any more", every=0.2)

    def report(self, seconds: float, held: dict[str, float], growth: int) -> dict[str, object]:
        kinds: dict[str, dict[str, int]] = {}
        for client in self.clients:
            kind = kinds.setdefault(client.kind, {"clients": 0, "rounds": 0, "tokens": 0})
            kind["clients"] += 1
            kind["rounds"] += client.rounds
            kind["tokens"] += client.tokens
        return {
            "seconds": round(seconds, 1), "rotations": self.rotations, "drains": self.drains,
            "slowest_drain_seconds": round(self.slowest_drain, 2), "kinds": kinds, "held_at_the_end": held,
            "lives": [life.report() for life in self.lives if life.samples],
            "most_growth_bytes": growth,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lossd")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--clients", type=int, default=12, help="beside two that send nonsense")
    parser.add_argument("--rotate", type=float, default=20, help="seconds from one certificate to the next")
    parser.add_argument("--restart", type=float, default=150, help="seconds from one drain to the next")
    parser.add_argument("--lease", type=int, default=20, help="seconds, longer than any client stands still on a busy machine")
    parser.add_argument("--allowed", type=int, default=32 << 20, help="bytes that the memory of a server may grow by")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(options, Path(folder))
        try:
            report = soak.run()
        finally:
            soak.server.kill()
    if options.json:
        print(json.dumps(report, indent=1))
    else:
        print(f"{report['seconds']} s, {report['rotations']} rotations, {report['drains']} drains: all answers right, "
              f"nothing held, most growth {report['most_growth_bytes']} bytes")


if __name__ == "__main__":
    threading.excepthook = lambda args: sys.stderr.write(f"{args.exc_value}\n")
    main()
