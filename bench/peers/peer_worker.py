"""The measuring process: one shape, every peer, checked and then timed in interleaved rounds on one device.

It reports in JSON lines: {"event": "phase", "peer", "what"} before anything that may hang or crash, and at the end either
{"event": "result", "case"} or {"event": "poisoned", "peer", "why"} where a peer left the device unusable.
"""
from __future__ import annotations

import gc
import importlib.metadata
import json
import math
import os
import platform
import random
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch

import peer_adapters
from peer_adapters import Builder, Limit, Missing, Step
from peer_config import FAILED, LIMIT, LOSSD, MISSING, OK, OUT_OF_MEMORY, PEERS, WRONG, CaseConfig, PeerSpec, Row
from peer_lossd import Lossd
from peer_problem import Problem, Reference, compute_reference, errors_of, make_problem, rounding_floor, violations

_BURST = 2  # timed passes in a row, after untimed ones that warm the card up for this peer
# How long these take at least. A card that has just rested runs faster than it can go on for: passes of some 20 ms would be timed
# before or after it slows down, by chance.
_WARM_UP_MILLISECONDS = 250.0
_NOTE_LENGTH = 160
_POISON_BYTES = 16 << 30
_EXIT_POISONED = 3

Emit = Callable[[dict[str, Any]], None]


class Device:
    """What differs between a GPU and the self-test's CPU: clocks and the allocator's accounts."""

    def __init__(self, name: str):
        self.device = torch.device(name)
        self.is_cuda = self.device.type == "cuda"
        if self.is_cuda:
            torch.cuda.set_device(self.device)

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def release(self) -> None:
        """Gives back what no tensor uses, so that no peer lives off another's memory."""
        gc.collect()
        if self.is_cuda:
            torch.cuda.empty_cache()

    def poison(self) -> None:
        """Fills memory that the next allocations get with NaN: a peer that leaves a part unwritten shows it."""
        if self.is_cuda:
            size = min(torch.cuda.mem_get_info(self.device)[0] // 2, _POISON_BYTES)
            torch.full((size // 4,), math.nan, device=self.device)

    def allocated_bytes(self) -> int:
        return torch.cuda.memory_allocated(self.device) if self.is_cuda else 0

    def reset_peak(self) -> None:
        if self.is_cuda:
            torch.cuda.reset_peak_memory_stats(self.device)

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self.device) if self.is_cuda else 0

    def burst(self, run: Callable[[], object], untimed: int) -> list[float]:
        """Milliseconds of _BURST passes in a row. The host runs ahead during the untimed passes, so launches are hidden."""
        for _ in range(untimed):
            run()
        if not self.is_cuda:
            times = []
            for _ in range(_BURST):
                began = time.perf_counter()
                run()
                times.append((time.perf_counter() - began) * 1e3)
            return times
        events = [torch.cuda.Event(enable_timing=True) for _ in range(_BURST + 1)]
        events[0].record()
        for event in events[1:]:
            run()
            event.record()
        events[-1].synchronize()
        return [before.elapsed_time(after) for before, after in zip(events, events[1:])]


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _NOTE_LENGTH else line[: _NOTE_LENGTH - 3] + "..."


def _finite(value: float | None) -> float | None:
    """JSON knows no NaN."""
    return value if value is not None and math.isfinite(value) else None


class Case:
    """One shape's run: the problem, the peers still alive, their rows and times."""

    def __init__(self, config: CaseConfig, emit: Emit):
        self._began = time.monotonic()
        self._config = config
        self._emit = emit
        self._device = Device(config.device)
        self._specs: dict[str, PeerSpec] = {spec.name: spec for spec in PEERS}
        self._builders: dict[str, Builder] = dict(peer_adapters.BUILDERS)
        if config.fakes:
            import peer_self_test
            self._specs.update({spec.name: spec for spec in peer_self_test.FAKE_SPECS})
            self._builders.update(peer_self_test.FAKE_BUILDERS)
        self._rows: dict[str, Row] = {}
        self._bursts: dict[str, Callable[[int], list[float]]] = {}  # of those still alive, by the number of untimed passes
        self._lossd: Lossd | None = None
        self._rounds: dict[str, list[list[float]]] = {}  # milliseconds of every burst, round by round

    def run(self) -> dict[str, Any]:
        """Checks, times and describes the case."""
        config = self._config
        self._phase(None, "inputs")
        problem = make_problem(config.shape, config.seed, config.ignored_share, self._device.device)
        self._phase(None, "reference")
        wide = torch.float64 if config.reference == "fp64" else torch.float32
        torch.backends.cuda.matmul.allow_tf32 = False
        reference = compute_reference(problem, wide)
        floor = rounding_floor(reference)
        limit_kind = self._start_limit(problem)
        for name in config.peers:
            self._check(self._specs[name], problem, reference)
        if config.lossd_bench is not None:
            self._check_lossd(problem, reference)
        del reference
        try:
            self._time()
        finally:
            if self._lossd is not None:
                self._lossd.close()
        return self._describe(floor, limit_kind)

    def _phase(self, peer: str | None, what: str) -> None:
        self._emit({"event": "phase", "peer": peer, "what": what})

    def _fail(self, peer: str, status: str, error: BaseException) -> Row:
        """A row for a peer that raised. Ends the process if the device no longer answers: what runs next would fail too."""
        if status != MISSING:
            traceback.print_exception(error)
        text = _one_line(str(error)) or "no message"
        note = text if status in (MISSING, OUT_OF_MEMORY) else _one_line(f"{type(error).__name__}: {text}")
        try:
            self._device.synchronize()
        except Exception:  # whatever it is, the device is gone
            self._poisoned(peer, note)
        self._bursts.pop(peer, None)
        self._rounds.pop(peer, None)
        return Row(peer, status, note)

    def _poisoned(self, peer: str, note: str) -> NoReturn:
        self._emit({"event": "poisoned", "peer": peer, "why": note})
        os._exit(_EXIT_POISONED)

    def _guarded(self, peer: str, action: Callable[[], Row | None]) -> None:
        """Runs the action; what it raises becomes the peer's row, and the peer leaves the run."""
        row: Row | None = None
        try:
            row = action()
        except Missing as error:
            row = self._fail(peer, MISSING, error)
        except torch.OutOfMemoryError as error:
            row = self._fail(peer, OUT_OF_MEMORY, error)
        except (Exception, SystemExit) as error:
            row = self._fail(peer, FAILED, error)
        if row is not None:
            self._rows[peer] = row
        self._device.release()

    def _start_limit(self, problem: Problem) -> str:
        self._phase(LIMIT, "warm-up")
        kinds: list[str] = []

        def start() -> None:
            limit = Limit(problem)
            kinds.append(limit.kind)
            limit.run()
            self._device.synchronize()
            self._bursts[LIMIT], self._rounds[LIMIT] = partial(self._device.burst, limit.run), []

        self._guarded(LIMIT, start)
        return kinds[0] if kinds else "none"

    def _check(self, spec: PeerSpec, problem: Problem, reference: Reference) -> None:
        """Builds the peer, warms it up, then judges one pass and its memory."""
        self._phase(spec.name, "build, warm-up and check")

        def check() -> Row:
            self._device.release()
            before = self._device.allocated_bytes()
            step: Step = self._builders[spec.name](problem)
            step.run()
            self._device.synchronize()
            self._device.release()
            self._device.poison()
            self._device.reset_peak()
            outputs = step.run()
            self._device.synchronize()
            peak = self._device.peak_bytes() - before
            errors = errors_of(outputs, reference)
            wrong = violations(errors, spec.tolerance)
            self._bursts[spec.name], self._rounds[spec.name] = partial(self._device.burst, step.run), []
            return Row(
                spec.name, WRONG if wrong else OK, "; ".join(wrong + ([step.note] if step.note else [])),
                peak_bytes=peak if self._device.is_cuda else None,
                workspace_bytes=peak - outputs.dx.nbytes - outputs.dw.nbytes if self._device.is_cuda else None,
                dw_dtype=str(outputs.dw.dtype).removeprefix("torch."),
                relative_error={name: _finite(error) for name, error in errors.items()})

        self._guarded(spec.name, check)

    def _check_lossd(self, problem: Problem, reference: Reference) -> None:
        """Starts lossd beside this process on the same inputs, and judges its first pass like any other peer's."""
        self._phase(LOSSD.name, "start and check")

        def check() -> Row:
            self._device.release()
            lossd = self._lossd = Lossd(self._config, problem)
            outputs = lossd.outputs()
            errors = errors_of(outputs, reference)
            wrong = violations(errors, LOSSD.tolerance)
            self._bursts[LOSSD.name], self._rounds[LOSSD.name] = partial(lossd.burst, _BURST), []
            known = lossd.peak_bytes >= 0
            how = f"tiles of {lossd.tile_rows} rows; dW {'+=' if self._config.lossd_adds else 'made anew'} in fp32"
            return Row(
                LOSSD.name, WRONG if wrong else OK, "; ".join(wrong + [how]),
                peak_bytes=lossd.peak_bytes + outputs.dx.nbytes + outputs.dw.nbytes if known else None,
                workspace_bytes=lossd.peak_bytes if known else None, dw_dtype=str(outputs.dw.dtype).removeprefix("torch."),
                relative_error={name: _finite(error) for name, error in errors.items()})

        self._guarded(LOSSD.name, check)

    def _time(self) -> None:
        """Rounds over everything that is alive, each in another order."""
        rounds = -(-self._config.repetitions // _BURST)
        order = random.Random(self._config.seed)
        untimed: dict[str, int] = {}

        def count(name: str) -> None:
            enough = _WARM_UP_MILLISECONDS / statistics.median(self._bursts[name](1)) if self._device.is_cuda else 1
            untimed[name] = max(1, math.ceil(enough))

        for name in list(self._bursts):
            self._phase(name, "how long a pass takes")
            self._guarded(name, partial(count, name))
        for number in range(rounds):
            names = list(self._bursts)
            order.shuffle(names)
            for name in names:
                self._phase(name, f"round {number + 1} of {rounds}")
                self._guarded(name, lambda: self._rounds[name].append(self._bursts[name](untimed[name])))

    def _describe(self, floor: dict[str, float | None], limit_kind: str) -> dict[str, Any]:
        config = self._config
        limit_rounds = self._rounds.get(LIMIT, [])
        limits = [statistics.median(times) for times in limit_rounds]
        for name, rounds in self._rounds.items():
            if name == LIMIT:
                continue
            row = self._rows[name]
            row.all_milliseconds = [value for times in rounds for value in times]
            row.milliseconds = statistics.median(row.all_milliseconds)
            row.spread = spread(row.all_milliseconds)
            if limits:
                row.ratio = statistics.median(statistics.median(times) / limit for times, limit in zip(rounds, limits))
        all_limits = [value for times in limit_rounds for value in times]
        limit_row = self._rows.get(LIMIT)
        names = list(config.peers) + ([LOSSD.name] if LOSSD.name in self._rows else [])
        return {
            "tokens": config.shape.tokens, "vocab": config.shape.vocab, "hidden": config.shape.hidden, "dtype": "bf16",
            "ignored_share": config.ignored_share, "reference": config.reference,
            "limit_milliseconds": statistics.median(all_limits) if all_limits else None,
            "limit_spread": spread(all_limits) if all_limits else None,
            "limit": limit_kind if limit_row is None else limit_row.note,
            "all_limit_milliseconds": all_limits,
            "bf16_rounding_error": floor,
            "seconds": time.monotonic() - self._began,
            "peers": [self._rows[name].to_dict() for name in names],
            "environment": environment(self._device, [self._specs[name] for name in config.peers]),
        }


def spread(times: list[float]) -> float:
    """Interquartile range over median: how far to trust a difference."""
    if len(times) < 2:
        return 0.0
    quartiles = statistics.quantiles(times, n=4, method="inclusive")
    return (quartiles[2] - quartiles[0]) / quartiles[1]


def environment(device: Device, specs: list[PeerSpec]) -> dict[str, Any]:
    """Hardware and versions, for whoever reads the numbers later."""
    packages = {spec.package for spec in specs} | {"torch", "triton", "nvidia-cutlass-dsl"}
    versions = {}
    for package in sorted(packages):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    hardware = torch.cuda.get_device_name(device.device) if device.is_cuda else platform.processor() or "CPU"
    return {"hardware": hardware, "cuda": torch.version.cuda, "python": platform.python_version(), "versions": versions,
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}


def main(config_text: str) -> int:
    """Entry of the measuring process. Standard output carries events only; what peers print goes to standard error."""
    events = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    sys.stdout = sys.stderr

    def emit(event: dict[str, Any]) -> None:
        print(json.dumps(event), file=events, flush=True)

    config = CaseConfig.from_json(config_text)
    if config.device.startswith("cuda") and not torch.cuda.is_available():
        raise SystemExit("this torch sees no CUDA device")
    peer_adapters.enable_path_files()
    emit({"event": "result", "case": Case(config, emit).run()})
    # Left-over threads of peers' compilers must not hold the exit back.
    events.flush()
    os._exit(0)
