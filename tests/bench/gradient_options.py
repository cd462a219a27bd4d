#!/usr/bin/env python3
"""Times a trainer's step with and without HeadConfig.double_buffer, in the case that it was made for.

With it the next window accumulates while a flush holds the last one. The case: a flush of dW in fp32 into host memory of the trainer,
who goes on with the micro-batches of its next step as soon as the window is frozen, one after the other. The step lasts from the begin
of one flush until the next one could begin. Without the option the trainer does the same: its first forward pass overlaps the flush,
then its batch waits for the commit. It is a trainer whose next step can do without what this one will change of the weights. upload:
once the window is read, the weights are written while the next step goes on, and a step ends with both.

The trainer's own passes are --ratio times the FLOP of the head's three products, a third of them forward, two thirds backward:
  other  on another GPU: it sleeps for as long as these take at --trainer_tflops. Hidden states and dX are in host memory, sent over
         gRPC (socket)
  same   on the server's device: bf16 products of torch. Hidden states and dX are in a region of the device (ipc), on a CPU in one
         that is shared with the server (region)

Losses, dX and dW of both are compared before anything is timed, norm and tokens of each window that is. That the option took part is
asserted, and that it did not without it: by micro-batches that were answered before the flush had been read. Rounds alternate, and so
does who goes first. `saved` is 1 - median with / median without.

Exit codes: 0 done, 1 results differ, or the option never took part, or a case marked * was not measured in time, 2 bad arguments, 3 out of time.

    gradient_options.py --device=cuda:0 --out=gradient_options.json
    gradient_options.py --device=cpu --small
"""
from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gradient_trainer import DISTINCT, Elsewhere, Here, Size, Trainer, World, begin_flush, check, create_heads, fill, rounded, run_window

import lossd

BAR = 0.10  # of a step's time: what saves less is not worth its code
MOST = {"losses": 1e-5, "dx": 4e-3, "dw": 1e-4}  # relative, of Frobenius norms; between the head with the option and that without
MOST_NORM = 1e-3  # of a timed window's gradient, relative
SLACK = 20.0  # seconds beyond the limit after which the process ends whatever it is doing


# Arguments


def _arguments() -> argparse.Namespace:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--device", default="cuda:0" if cuda else "cpu", help="of server and `same` (default: %(default)s)")
    parser.add_argument("--small", action="store_true", help="sizes for trying it out on a CPU: times mean nothing")
    parser.add_argument("--trainers", default="other,same", help="with commas (default: %(default)s)")
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    parser.add_argument("--tokens", type=int, help="of a micro-batch (4096; small: 16)")
    parser.add_argument("--vocab", type=int, help="(131072; small: 65536)")
    parser.add_argument("--hidden", type=int, help="(4096; small: 256)")
    parser.add_argument("--micro_batches", type=int, help=f"of a step, rounded up to a multiple of {DISTINCT} (32; small: 8)")
    parser.add_argument("--under_way", type=int, default=4, help="micro-batches, where there is more than one (default: %(default)s)")
    parser.add_argument("--ratio", type=float, help="of the trainer's FLOP to the head's (1; small: 0.2)")
    parser.add_argument("--trainer_tflops", type=float, help="of the trainer that sleeps (600; small: 0.1)")
    parser.add_argument("--repeats", type=int, default=7, help="timed rounds of each case; at least 7 but with --small (default: %(default)s)")
    parser.add_argument("--limit_seconds", type=float, default=240, help="of everything; cases that would not fit are left out")
    parser.add_argument("--transport", choices=("tcp", "unix"), default="tcp", help="of gRPC (default: %(default)s)")
    parser.add_argument("--program", help="the lossd to start (default: as lossd.launch finds it)")
    parser.add_argument("--out", help="file for all numbers, as JSON")
    options = parser.parse_args()
    usual = (16, 65536, 256, 8, 0.2, 0.1) if options.small else (4096, 131072, 4096, 32, 1.0, 600.0)
    names = ("tokens", "vocab", "hidden", "micro_batches", "ratio", "trainer_tflops")
    for name, value in zip(names, usual, strict=True):
        if getattr(options, name) is None:
            setattr(options, name, value)
        if getattr(options, name) <= 0:
            parser.error(f"--{name} must be above 0")
    options.micro_batches = rounded(options.micro_batches, DISTINCT)
    options.trainers = options.trainers.split(",")
    if not {"other", "same"}.issuperset(options.trainers):
        parser.error(f"--trainers is {','.join(options.trainers)!r}; it takes other, same")
    if options.repeats < (1 if options.small else 7) or options.under_way < 1:
        parser.error("--repeats must be at least 7, --under_way at least 1")
    return options


# Rounds


class Left(Exception):
    """There is no time for this case."""


class Deadline:
    def __init__(self, seconds: float):
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        return self._end - time.monotonic()


@dataclass
class Round:
    seconds: float
    tokens: int
    norm: float
    window: int  # which of the two contents
    counts: dict[str, float]


def in_turns(variants: dict[str, Callable[[], Round]], repeats: int, deadline: Deadline) -> dict[str, list[Round]]:
    """`repeats` rounds of each, after one that is not counted."""
    began = time.monotonic()
    for run in variants.values():
        run()
    if (time.monotonic() - began) * 1.1 * repeats > deadline.left():
        raise Left
    rounds: dict[str, list[Round]] = {name: [] for name in variants}
    for turn in range(repeats):
        for name in list(variants) if turn % 2 == 0 else list(reversed(variants)):
            rounds[name].append(variants[name]())
    return rounds


@dataclass(frozen=True)
class Case:
    trainer: str
    ratio: float
    under_way: int
    sessions: int
    path: str
    counts: bool  # whether it is one that the option is judged by
    upload: bool = False  # a flush is followed by a write of the weights

    def name(self) -> str:
        sessions = "1 session" if self.sessions == 1 else f"{self.sessions} sessions"
        upload = " upload" if self.upload else ""
        return f"{self.trainer} ratio={self.ratio:g} under_way={self.under_way} {sessions} {self.path}{upload}"


def cases_of(options: argparse.Namespace) -> list[Case]:
    many = options.under_way
    cases = [
        Case("other", options.ratio, 1, 1, "socket", True),
        Case("same", options.ratio, 1, 1, "ipc" if options.device.startswith("cuda") else "region", True),
        Case("other", options.ratio, 1, 1, "socket", False, upload=True),
        Case("other", options.ratio, many, many, "socket", False),
    ]
    return [case for case in cases if case.trainer in options.trainers and options.only in case.name()]


def rounds_of(world: World, case: Case, trainer: Trainer, stack: ExitStack) -> dict[str, Callable[[], Round]]:
    count = world.options.micro_batches
    scale = 1.0 / (count * world.size.tokens)
    thread = stack.enter_context(ThreadPoolExecutor(1))
    out = torch.zeros(world.size.vocab, world.size.hidden)  # of the trainer; touched before it is timed
    here = isinstance(trainer, Here)

    def variant(head_name: str) -> Callable[[], Round]:
        head = world.heads[head_name]
        lanes = world.lanes(head_name, case.path, case.sessions, case.under_way, scale, from_device=here, stack=stack)
        windows = 0

        def run() -> Round:
            nonlocal windows
            if windows == 0:
                run_window(None, lanes, world.batches(0, count, case.path), case.under_way)
            windows += 1
            began = time.perf_counter()
            frozen, flushed = begin_flush(head, out, thread, world.weights if case.upload else None)
            frozen.wait()
            at_freeze = time.perf_counter()
            answered = run_window(trainer, lanes, world.batches(windows, count, case.path), case.under_way)
            computed = time.perf_counter()
            result, read = flushed.result()
            seconds = time.perf_counter() - began
            counts = {"answered_before_read": sum(moment < read for moment in answered), "freeze_seconds": at_freeze - began,
                      "flush_seconds": read - began, "compute_seconds": computed - at_freeze}
            return Round(seconds, result.window_tokens, result.norm, (windows - 1) % 2, counts)

        stack.callback(head.discard)  # before the sessions go
        return run

    return {"without": variant("plain"), "with": variant("double_buffer")}


def took_part(name: str, rounds: list[Round]) -> str:
    """What is wrong, or nothing."""
    key = "answered_before_read"
    counted = [one.counts[key] for one in rounds]
    if name != "with":
        return f"without the option, {key} is {counted}; want 0" if any(counted) else ""
    return "" if statistics.median(counted) > 0 else f"with the option, {key} is {counted}: it did not take part"


def same_windows(rounds: dict[str, list[Round]], tokens: int) -> str:
    """What is wrong, or nothing."""
    wanted: dict[int, float] = {}
    for name, of_variant in rounds.items():
        for one in of_variant:
            if one.tokens != tokens:
                return f"{name}: a window has {one.tokens} tokens; want {tokens}"
            norm = wanted.setdefault(one.window, one.norm)
            if not abs(one.norm - norm) <= MOST_NORM * norm:
                return f"{name}: a gradient's norm is {one.norm}; that of another window of the same content {norm}"
    return ""


def measure(world: World, case: Case, deadline: Deadline) -> dict[str, Any]:
    options = world.options
    used = world.used
    try:
        with ExitStack() as stack:
            trainer: Trainer
            if case.trainer == "same":
                trainer = Here(world.size, case.ratio, world.device)
            else:
                trainer = Elsewhere(world.size, case.ratio, options.trainer_tflops)
            rounds = in_turns(rounds_of(world, case, trainer, stack), options.repeats, deadline)
    finally:
        world.used = used
    count = options.micro_batches
    problems = [took_part(name, of_variant) for name, of_variant in rounds.items()]
    problems.append(same_windows(rounds, count * world.size.tokens))
    report: dict[str, Any] = {
        "case": case.name(), "counts": case.counts, "micro_batches": count, "trainer_flop": trainer.flop,
        "forward_ms": 1e3 * trainer.forward_seconds, "backward_ms": 1e3 * trainer.backward_seconds,
        "problems": [problem for problem in problems if problem],
        "variants": {name: _summary(of_variant) for name, of_variant in rounds.items()}}
    medians = {name: report["variants"][name]["median_ms"] for name in rounds}
    report["ratio"] = medians["with"] / medians["without"]
    report["saved"] = 1 - report["ratio"]
    pairs = zip(rounds["with"], rounds["without"], strict=True)
    report["pair_ratios"] = sorted(one.seconds / other.seconds for one, other in pairs)
    return report


def _summary(rounds: list[Round]) -> dict[str, Any]:
    times = [1e3 * one.seconds for one in rounds]
    quartiles = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else times * 3
    counts = {name: statistics.median([one.counts[name] for one in rounds]) for name in rounds[0].counts}
    return {"median_ms": statistics.median(times), "least_ms": min(times), "most_ms": max(times), "spread_ms": quartiles[2] - quartiles[0],
            "times_ms": times, "counts": counts}


# What is printed


def _show(report: dict[str, Any]) -> None:
    star = "*" if report["counts"] else " "
    print(f"\n{star} {report['case']}: {report['micro_batches']} micro-batches, trainer {report['trainer_flop'] / 1e12:.3g} TFLOP each, "
          f"{report['forward_ms']:.1f} + {report['backward_ms']:.1f} ms")
    for name, one in report["variants"].items():
        counts = ", ".join(f"{key} {value:.4g}" for key, value in one["counts"].items())
        print(f"    {name:8} {one['median_ms']:9.2f} ms a step, {one['least_ms']:.2f} to {one['most_ms']:.2f}, "
              f"middle half within {one['spread_ms']:.2f}; {counts}")
    pairs = report["pair_ratios"]
    print(f"    with / without {report['ratio']:.3f} (rounds {pairs[0]:.3f} to {pairs[-1]:.3f}): saved {100 * report['saved']:+.1f} %")
    for problem in report["problems"]:
        print(f"    WRONG: {problem}")
    sys.stdout.flush()


def _verdict(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Nothing if no case that counts was measured."""
    measured = {report["case"]: report["saved"] for report in reports if report["counts"]}
    if not measured:
        return {}
    best = max(measured, key=lambda name: measured[name])
    return {"best_saved": measured[best], "best_case": best, "reaches_bar": measured[best] >= BAR}


# All of it


def run_all(options: argparse.Namespace, server: lossd.Server, deadline: Deadline, report: dict[str, Any]) -> bool:
    """Fills `report`. Whether everything is as it has to be."""
    ports = json.loads(Path(server.target.removeprefix("unix:")).with_name("ports.json").read_text())
    target = f"127.0.0.1:{ports['grpc']}" if options.transport == "tcp" else server.target
    size = Size(options.tokens, options.vocab, options.hidden)
    with lossd.connect(target) as client:
        world = World(options, size, torch.device(options.device), client, notes=report["notes"])
        create_heads(world)
        fill(world)
        report["server"] = client.status().device_description
        report["differences"] = check(world)
        right = all(value <= MOST[what] for found in report["differences"].values() for what, value in found.items())
        for name, found in report["differences"].items():
            print(f"{name} beside plain: " + ", ".join(f"{what} {value:.1e} (most {MOST[what]:.0e})" for what, value in found.items()))
        if not right:
            print("results differ by more than rounding explains: nothing is timed")
            return False
        for case in cases_of(options):
            try:
                measured = measure(world, case, deadline)
            except Left:
                report["left_out"].append(case.name())
                print(f"\n{'*' if case.counts else ' '} {case.name()}: left out, no time", flush=True)
                right = right and not case.counts
                continue
            report["cases"].append(measured)
            right = right and not measured["problems"]
            _show(measured)
        for head in world.heads:
            client.delete_head(head, discard_gradient=True)
        world.unlock_region()
    return right


def main() -> int:
    options = _arguments()
    began = time.monotonic()
    deadline = Deadline(options.limit_seconds)
    watch = threading.Timer(options.limit_seconds + SLACK, _out_of_time)
    watch.daemon = True
    watch.start()
    report: dict[str, Any] = {
        "options": {name: value for name, value in vars(options).items() if name not in ("out", "program")}, "torch": torch.__version__,
        "device": torch.cuda.get_device_name(options.device) if options.device.startswith("cuda") else "CPU",
        "head_flop": 6.0 * options.tokens * options.vocab * options.hidden, "bar": BAR, "most": MOST,
        "notes": [], "cases": [], "left_out": []}
    flags = ["--listen=127.0.0.1:0"] if options.transport == "tcp" else []
    with lossd.launch(device=options.device, program=options.program, args=flags) as server:
        right = run_all(options, server, deadline, report)
    report["verdict"] = verdict = _verdict(report["cases"])
    report["right"] = right
    report["seconds"] = time.monotonic() - began
    print()
    for note in report["notes"]:
        print(f"note: {note}")
    if verdict:
        print(f"double_buffer: saves {100 * verdict['best_saved']:+.1f} % at best ({verdict['best_case']}); "
              f"the bar of {100 * BAR:.0f} % is {'reached' if verdict['reaches_bar'] else 'missed'}")
    print(f"{report['seconds']:.0f} s in all; {'right' if right else 'NOT RIGHT'}")
    if options.out:
        Path(options.out).write_text(json.dumps(report, indent=1) + "\n")
    watch.cancel()
    return 0 if right else 1


def _out_of_time() -> None:
    print("out of time: a call did not come back", file=sys.stderr, flush=True)
    os._exit(3)  # the server ends with this process


if __name__ == "__main__":
    sys.exit(main())
