#!/usr/bin/env python3
"""How much longer a training step is while lossd saves the head by itself (--checkpoint_steps).

One process trains one head: a batch in memory that it shares with the server, then AdamW's step there.
Every --every steps a save begins. A step counts as one beside a save if a save was under way when it began. Before a
time is printed, the newest checkpoint is restored: its weights must be those of the step that its tag names, bit for
bit.

Columns: the median step without and beside a save, their ratio, and the longest step beside one. Of a save: its bytes,
the median of its seconds from the end of its step on, and how many were passed over.

Exit codes: 0 done, 1 a save failed, was of other weights or was beside no step, 2 bad arguments, 3 --most-ratio
exceeded.

    checkpoint_steps.py --device cuda:0 --folder /var/tmp --json checkpoint_steps.json
    checkpoint_steps.py --device cpu --vocab 4096 --hidden 256 --tokens 4096 --every 12 --saves 4
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import lossd
import numpy as np


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--device", default="cuda:0", help="cpu, cuda:0, cpu,cpu, ... (default: %(default)s)")
    sizes = {"vocab": 131072, "hidden": 4096, "tokens": 65536, "every": 40, "saves": 5, "warmup": 5}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value, help="default: %(default)s")
    parser.add_argument("--master", action="store_true", help="with an fp32 master of the weights")
    parser.add_argument("--folder", help="of checkpoints, with room for three (default: the system's temporary one)")
    parser.add_argument("--most-ratio", type=float, help="exit status 3 if steps beside a save are longer")
    parser.add_argument("--program", help="the lossd to start (default: as lossd.launch finds it)")
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    options = parser.parse_args(words)
    for name in sizes:
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1")
    return options


class Training:
    """A head at the server, and the batch that it is trained with again and again."""

    def __init__(self, options: argparse.Namespace, client: lossd.Client, head: lossd.Head) -> None:
        self.head = head
        self.options = options
        rng = np.random.default_rng(1)
        shape = (options.tokens, options.hidden)
        nbytes = options.tokens * options.hidden * 2
        self.region = client.create_region("system", 2 * nbytes)
        both = self.region.array((2, *shape), "bfloat16")
        # bf16 by its bits: the upper half of fp32.
        for row in both[0]:
            row[:] = (rng.standard_normal(options.hidden, np.float32).view(np.uint32) >> 16).astype(np.uint16)
        self.hidden, self.dx = both
        self.labels = rng.integers(0, options.vocab, options.tokens)

    def write_weights(self) -> None:
        rng = np.random.default_rng(0)
        shape = (self.options.vocab, self.options.hidden)
        self.head.write_weights(rng.standard_normal(shape, np.float32) * np.float32(shape[1] ** -0.5))

    def step(self, session: lossd.Session) -> float:
        begun = time.perf_counter()
        session.compute(self.hidden, self.labels, hidden_dtype="bfloat16", out={"dx": self.dx})
        self.head.step(lr=1e-4)
        return time.perf_counter() - begun

    def some_weights(self) -> bytes:
        rows = min(64, self.options.vocab)
        return np.ascontiguousarray(self.head.read_rows(0, rows)).tobytes()


def measure(options: argparse.Namespace, training: Training, session: lossd.Session) -> dict[str, Any]:
    beside: list[float] = []
    alone: list[float] = []
    weights = b""
    saved_step = 0
    saving_since: float | None = None
    seconds: list[float] = []
    for number in range(1, options.every * (options.saves + 1)):
        took = training.step(session)
        if number > options.warmup:
            (alone if saving_since is None else beside).append(took)
        unsaved = training.head.info().steps_since_checkpoint
        now = time.perf_counter()
        if saving_since is not None and unsaved < options.every:
            seconds.append(now - saving_since)
            saving_since = None
        if number % options.every == 0:
            saving_since = now
            saved_step, weights = number, training.some_weights()
    return {"alone": alone, "beside": beside, "seconds": seconds, "saved_step": saved_step, "weights": weights}


def check(client: lossd.Client, training: Training, measured: dict[str, Any]) -> int:
    """The bytes of the checkpoint; SystemExit if it is of other weights."""
    tag = f"auto-{measured['saved_step']}"
    end = time.monotonic() + 120
    while not (mine := [one for one in client.checkpoints(training.head.name) if one.tag == tag]):
        if time.monotonic() > end:
            raise SystemExit(f"no checkpoint {tag} has come: see the server's log")
        time.sleep(0.1)
    client.restore_checkpoint(training.head.name, tag)
    if training.some_weights() != measured["weights"]:
        raise SystemExit(f"the checkpoint {tag} has other weights than the head had after that step")
    return mine[0].bytes


def run(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        flags = [f"--checkpoint_steps={options.every}", "--checkpoint_keep=2"]
        optimizer = lossd.AdamW()
        with (
            lossd.launch(options.device, program=options.program, args=flags, checkpoint_dir=folder) as server,
            server.client() as client,
        ):
            head = client.create_head(
                "h", options.vocab, options.hidden, dtype="bfloat16", optimizer=optimizer, master_weights=options.master
            )
            training = Training(options, client, head)
            training.write_weights()
            with head.open_session() as session:
                measured = measure(options, training, session)
            size = check(client, training, measured)
    if not measured["beside"] or not measured["alone"]:
        raise SystemExit("no step was beside a save: raise --saves, or lower --tokens")
    alone, beside = statistics.median(measured["alone"]), statistics.median(measured["beside"])
    return {
        "device": options.device,
        "vocab": options.vocab,
        "hidden": options.hidden,
        "tokens": options.tokens,
        "master": options.master,
        "every": options.every,
        "step_seconds": alone,
        "step_seconds_beside_a_save": beside,
        "ratio": beside / alone,
        "longest_beside_a_save": max(measured["beside"]),
        "longest_without": max(measured["alone"]),
        "steps_beside_a_save": len(measured["beside"]),
        "steps_without": len(measured["alone"]),
        "checkpoint_bytes": size,
        "save_seconds": statistics.median(measured["seconds"]) if measured["seconds"] else None,
        "saves_passed_over": max(0, options.saves - len(measured["seconds"]) - 1),
    }


def main() -> int:
    options = arguments()
    figures = run(options)
    print(
        f"step {figures['step_seconds'] * 1e3:.1f} ms without a save ({figures['steps_without']} steps, longest "
        f"{figures['longest_without'] * 1e3:.1f}), {figures['step_seconds_beside_a_save'] * 1e3:.1f} ms beside one "
        f"({figures['steps_beside_a_save']} steps, longest {figures['longest_beside_a_save'] * 1e3:.1f}): "
        f"ratio {figures['ratio']:.3f}"
    )
    saved = f"{figures['save_seconds']:.2f} s" if figures["save_seconds"] is not None else "longer than --every steps"
    print(f"a save: {figures['checkpoint_bytes'] / 2**30:.2f} GiB, {saved}")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(figures, file, indent=2)
    return 3 if options.most_ratio is not None and figures["ratio"] > options.most_ratio else 0


if __name__ == "__main__":
    sys.exit(main())
