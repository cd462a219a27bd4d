#!/usr/bin/env python3
"""How long two replicas take to step again after one of them was killed.

Each kill is followed at once by another start of the process; the time is that from the start to the answer of a step,
for which all replicas have gone back to a checkpoint of the step before. Replica 1 and replica 0 are killed in turns.
After each, the head must be where the checkpoint was: the step's number says so.

Columns: the seconds of each kill, by replica, their median, and the bytes of the checkpoint.

Exit codes: 0 done, 1 the head was somewhere else, 2 bad arguments, 3 --most-seconds exceeded.

    replica_restart.py --devices cuda:0 cuda:1 --folder /var/tmp --json replica_restart.json
    replica_restart.py --devices cpu cpu --vocab 4096 --hidden 256
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lossd
import numpy as np
from lossd.server import LaunchError, find_program

PATIENCE = 300.0


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--devices", nargs=2, default=["cuda:0", "cuda:1"], help="of the two (default: %(default)s)")
    sizes = {"vocab": 131072, "hidden": 4096, "tokens": 1024, "kills": 3}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value, help="default: %(default)s")
    parser.add_argument("--folder", help="of the checkpoint (default: the system's temporary one)")
    parser.add_argument("--flag", action="append", default=[], help="of both servers; may be repeated")
    parser.add_argument("--most-seconds", type=float, help="exit status 3 if the slower median is more")
    parser.add_argument("--program", help="the lossd to start (default: as lossd.launch finds it)")
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    options = parser.parse_args(words)
    for name in sizes:
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1")
    try:
        options.program = str(find_program(options.program))
    except LaunchError as error:
        parser.error(str(error))
    return options


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Servers:
    """Two replicas, each with addresses of its own that stay."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        token = folder / "token"
        token.write_text("known-to-these-two-replicas-alone\n", encoding="ascii")
        token.chmod(0o600)
        self._log = folder / "log"
        self.targets = [f"127.0.0.1:{free_port()}" for _ in options.devices]
        leader = f"127.0.0.1:{free_port()}"
        self._commands = [
            [
                options.program,
                f"--listen={target}",
                f"--devices={device}",
                "--metrics_listen=127.0.0.1:0",
                "--replica_set=bench",
                "--replicas=2",
                f"--replica={number}",
                f"--replica_leader={leader}",
                f"--group_token_file={token}",
                f"--checkpoint_dir={folder / 'checkpoints'}",
                "--restore",
                *options.flag,
            ]
            for number, (device, target) in enumerate(zip(options.devices, self.targets, strict=True))
        ]
        self._running: list[subprocess.Popen[bytes] | None] = [None, None]

    def start(self, number: int) -> None:
        with self._log.open("ab") as log:
            self._running[number] = subprocess.Popen(self._commands[number], stdout=log, stderr=log)

    def kill(self, number: int) -> None:
        running = self._running[number]
        if running is not None:
            running.kill()
            running.wait()

    def check(self) -> None:
        """SystemExit if one has ended."""
        for number, running in enumerate(self._running):
            if running is not None and running.poll() is not None:
                last = self._log.read_text(encoding="utf-8", errors="replace")[-2000:]
                raise SystemExit(f"replica {number} has ended with status {running.returncode}:\n{last}")


@contextlib.contextmanager
def serving(options: argparse.Namespace) -> Iterator[Servers]:
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        servers = Servers(options, Path(folder))
        try:
            for number in range(2):
                servers.start(number)
            yield servers
        finally:
            for number in range(2):
                servers.kill(number)


def until_answered(servers: Servers, ask: Any) -> Any:
    end = time.monotonic() + PATIENCE
    while True:
        try:
            return ask()
        except lossd.LossdError as error:
            servers.check()
            if time.monotonic() > end:
                raise SystemExit(f"no answer within {PATIENCE:.0f} s: {error}") from error
            time.sleep(0.02)


def connected(servers: Servers) -> lossd.Client:
    # A short timeout: until_answered then reports soon that a server has ended.
    return until_answered(servers, lambda: lossd.connect(",".join(servers.targets), reconnect_timeout=2))


class Training:
    """A head of both, stepped by one session."""

    def __init__(self, options: argparse.Namespace, servers: Servers, client: lossd.Client) -> None:
        self._client, self._servers = client, servers
        rng = np.random.default_rng(1)
        shape = (options.tokens, options.hidden)
        self._hidden = (rng.standard_normal(shape, np.float32).view(np.uint32) >> 16).astype(np.uint16)
        self._labels = rng.integers(0, options.vocab, options.tokens)
        self._head = until_answered(
            servers,
            lambda: client.create_head(
                "h", options.vocab, options.hidden, dtype="bfloat16", optimizer=lossd.AdamW(), master_weights=True
            ),
        )
        weights = np.random.default_rng(0).standard_normal((options.vocab, options.hidden), np.float32)
        self._head.write_weights(weights * np.float32(options.hidden**-0.5))

    def step(self) -> int:
        """The number of the step."""
        with self._head.open_session() as session:
            session.compute(self._hidden, self._labels, hidden_dtype="bfloat16")
            return int(self._head.step(lr=1e-4).step)

    def save(self) -> int:
        self._head.save_checkpoint("newest")
        return next(one.bytes for one in self._client.checkpoints("h") if one.tag == "newest")


def measure(servers: Servers, training: Training, number: int, saved: int) -> float:
    servers.kill(number)
    begun = time.monotonic()
    servers.start(number)
    step = until_answered(servers, training.step)
    took = time.monotonic() - begun
    if step != saved + 1:
        raise SystemExit(f"step {step} was answered; the checkpoint was of step {saved}")
    return took


def run(options: argparse.Namespace) -> dict[str, Any]:
    seconds: list[list[float]] = [[], []]
    with serving(options) as servers, connected(servers) as client:
        training = Training(options, servers, client)
        saved = training.step()
        size = training.save()
        training.step()
        for _ in range(options.kills):
            for number in (1, 0):
                seconds[number].append(measure(servers, training, number, saved))
    return {
        "devices": options.devices,
        "vocab": options.vocab,
        "hidden": options.hidden,
        "checkpoint_bytes": size,
        "seconds": seconds,
        "median_seconds": [statistics.median(one) for one in seconds],
    }


def main() -> int:
    options = arguments()
    figures = run(options)
    for number, (each, median) in enumerate(zip(figures["seconds"], figures["median_seconds"], strict=True)):
        times = " ".join(f"{one:.2f}" for one in each)
        print(f"replica {number} killed: stepping again after {median:.2f} s ({times})")
    print(f"a checkpoint of {figures['checkpoint_bytes'] / 2**30:.2f} GiB")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(figures, file, indent=2)
    slowest = max(figures["median_seconds"])
    return 3 if options.most_seconds is not None and slowest > options.most_seconds else 0


if __name__ == "__main__":
    sys.exit(main())
