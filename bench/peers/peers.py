#!/usr/bin/env python3
"""Times lossd's peers, and lossd beside them, on linear + cross-entropy forward and backward. --help explains."""
from __future__ import annotations

import argparse
import dataclasses
import json
import os
import queue
import re
import subprocess
import sys
import threading
from typing import Any

from peer_config import FAILED, FAST_PEERS, HUNG, ISSUE_SHAPES, LIMIT, LOSSD, PEERS, WRONG, CaseConfig, Row, Shape
from peer_report import environment_line, markdown, ranking, ranking_table, table

_WRONG_RESULT = 1
_BAD_ARGUMENTS = 2

_DESCRIPTION = """\
Runs the best in-process implementations of "linear + cross-entropy, forward and backward" on one card and prints what each
takes beside the limit: the three bare matrix products that any of them needs, in sequence, in the same run. All get the same
seeded inputs in bf16 and deliver loss, dX and dW. Results are checked against fp64 before anything is timed."""

_EPILOG = """\
examples:
  peers.py                                                  every peer, the shapes of docs/performance.md
  peers.py --lossd-bench build/bin/lossd-bench --json peers.json --markdown peers.md      lossd too
  peers.py --shapes issue --peers fast --repetitions 6 --lossd-bench build/bin/lossd-bench      a few minutes
  peers.py --shapes 16384x131072x4096 --peers torch-compile,quack-fused,liger-cute --repetitions 20
  peers.py --ignored 0.3                                    three rows of ten without a label
  peers.py --self-test                                      the script's own logic, on the CPU, in a minute

columns:
  ms        median of the timed passes; every round times every peer, in another order, after untimed passes of its own
  ratio     median over the rounds of the peer's time over the limit's in the same round
  spread    interquartile range over median
  peak MiB  memory above inputs and weights, outputs included; work MiB: without dX and dW
  err ...   relative Frobenius errors; unlabel.: of dW's rows that are nobody's label, where nothing hides the softmax's part

After the last shape comes the ranking, by the geometric mean of the ratios of results that passed their check.
lossd runs in a process of its own, on the same inputs, in turns with the others, timed by events as they are.
A peer that is missing, fails, hangs, crashes or runs out of memory is a row that says so. A crash costs one more start.
exit codes: 0 done, 1 some peer's result was wrong, 2 bad arguments (a device that is not there, too)"""


def _peer_names(text: str) -> tuple[str, ...]:
    """Names from a list in which 'fast' and 'all' stand for several; order and first mention are kept."""
    known: dict[str, tuple[str, ...]] = {spec.name: (spec.name,) for spec in PEERS}
    known["fast"] = FAST_PEERS
    known["all"] = tuple(spec.name for spec in PEERS)
    names: dict[str, None] = {}
    for part in text.split(","):
        if part.strip() not in known:
            raise argparse.ArgumentTypeError(f"no peer '{part.strip()}'; there are {', '.join(known)}")
        names.update(dict.fromkeys(known[part.strip()]))
    return tuple(names)


def _shapes(text: str) -> tuple[Shape, ...]:
    try:
        return tuple(Shape.parse(part) for part in (ISSUE_SHAPES if text == "issue" else text).split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _share(text: str) -> float:
    value = float(text)
    if not 0.0 <= value < 1.0:
        raise argparse.ArgumentTypeError("a share is at least 0 and less than 1")
    return value


def _at_least_one(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _device(text: str) -> str:
    if re.fullmatch(r"cpu|cuda:\d+", text) is None:
        raise argparse.ArgumentTypeError(f"'{text}' is no device: write cuda:0, cuda:1, ...")
    return text


def _program(text: str) -> str:
    if not (os.path.isfile(text) and os.access(text, os.X_OK)):
        raise argparse.ArgumentTypeError(f"'{text}' is no program")
    return os.path.abspath(text)


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """Exits with 2 on bad arguments, as argparse does."""
    peers = "\n".join(f"  {spec.name:<20} {spec.about}" for spec in PEERS)
    parser = argparse.ArgumentParser(prog="peers.py", description=_DESCRIPTION, epilog=f"peers:\n{peers}\n\n{_EPILOG}",
                                     formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--shapes", type=_shapes, default=_shapes("issue"), metavar="NxVxH,...",
                        help=f"tokens x vocabulary x hidden; 'issue', the default, is {ISSUE_SHAPES}")
    parser.add_argument("--peers", type=_peer_names, default=_peer_names("all"), metavar="NAME,...",
                        help=f"which peers, see below; 'all', the default, and 'fast' ({', '.join(FAST_PEERS)}) are names too")
    parser.add_argument("--lossd-bench", type=_program, metavar="PATH", help="lossd's own benchmark; without it, no row of lossd")
    parser.add_argument("--lossd-workspace", type=_at_least_one, default=5 << 29, metavar="BYTES",
                        help="ceiling of lossd's workspace (default 2.5 GiB: 4096 rows at once at every default shape)")
    parser.add_argument("--lossd-adds", action="store_true",
                        help="time lossd adding to its dW; without it every pass makes dW anew, as every peer does")
    parser.add_argument("--device", type=_device, default="cuda:0", help="the card (default cuda:0)")
    parser.add_argument("--repetitions", type=_at_least_one, default=10, help="timed passes of every peer (default 10)")
    parser.add_argument("--seed", type=int, default=1, help="of the inputs (default 1)")
    parser.add_argument("--ignored", type=_share, default=0.0, metavar="SHARE", help="share of rows without a label (default 0)")
    parser.add_argument("--reference", choices=("fp64", "fp32"), default="fp64",
                        help="arithmetic of the reference; fp32 for cards whose fp64 is slow (default fp64)")
    parser.add_argument("--timeout", type=_at_least_one, default=180, metavar="S",
                        help="seconds that a peer's warm-up or one round of it may take (default 180)")
    parser.add_argument("--json", metavar="FILE", help="write everything measured there; '-': print it instead of the table")
    parser.add_argument("--markdown", metavar="FILE", help="write all tables and the ranking there")
    parser.add_argument("--self-test", action="store_true", help="test this script on the CPU and end; with --lossd-bench, its part in this too")
    return parser.parse_args(arguments)


class _Attempt:
    """One run of the measuring process, read until it ends or falls silent."""

    def __init__(self, config: CaseConfig, timeout_s: float):
        self.case: dict[str, Any] | None = None
        self.peer: str | None = None  # whom the process was busy with last
        self.why = ""
        self.status = FAILED
        command = [sys.executable, os.path.abspath(__file__), "--measure", config.to_json()]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            lines: queue.Queue[str | None] = queue.Queue()
            threading.Thread(target=self._read, args=(process.stdout, lines), daemon=True).start()
            while True:
                try:
                    line = lines.get(timeout=timeout_s)
                except queue.Empty:
                    process.kill()
                    self.status, self.why = HUNG, f"no sign of life for {timeout_s:.0f} s"
                    return
                if line is None:
                    break
                self._handle(json.loads(line))
            process.wait()
            if self.case is None and not self.why:
                self.why = f"the process ended with status {process.returncode}"

    @staticmethod
    def _read(stream: Any, lines: queue.Queue[str | None]) -> None:
        for line in stream:
            lines.put(line)
        lines.put(None)

    def _handle(self, event: dict[str, Any]) -> None:
        if event["event"] == "result":
            self.case = event["case"]
        elif event["event"] == "poisoned":
            self.peer, self.why = event["peer"], event["why"]
        else:
            self.peer = event["peer"]
            print(f"  {self.peer or 'problem'}: {event['what']}", file=sys.stderr, flush=True)


def run_case(config: CaseConfig, timeout_s: float) -> dict[str, Any]:
    """Measures one shape. Whoever kills the process is left out of the next attempt and gets a row that says so."""
    victims: dict[str, Row] = {}
    asked = config.peers
    while True:
        attempt = _Attempt(config, timeout_s)
        if attempt.case is not None:
            break
        if attempt.peer in config.peers:
            config = dataclasses.replace(config, peers=tuple(name for name in config.peers if name != attempt.peer))
        elif attempt.peer == LOSSD.name and config.lossd_bench is not None:
            config = dataclasses.replace(config, lossd_bench=None)
        else:
            return _empty_case(config, asked, attempt.why)
        victims[attempt.peer] = Row(attempt.peer, attempt.status, attempt.why)
        print(f"  {attempt.peer}: {attempt.why}; starting again without it", file=sys.stderr, flush=True)
    rows = {row["peer"]: row for row in attempt.case["peers"]}
    rows.update({name: row.to_dict() for name, row in victims.items()})
    attempt.case["peers"] = [rows[name] for name in (*asked, LOSSD.name) if name in rows]
    return attempt.case


def _empty_case(config: CaseConfig, asked: tuple[str, ...], why: str) -> dict[str, Any]:
    """A case in which nothing could be measured, for a reason that is no peer's."""
    note = f"inputs, reference or {LIMIT}: {why}"
    return {"tokens": config.shape.tokens, "vocab": config.shape.vocab, "hidden": config.shape.hidden, "dtype": "bf16",
            "ignored_share": config.ignored_share, "reference": config.reference, "limit_milliseconds": None,
            "limit_spread": None, "seconds": None, "limit": note, "all_limit_milliseconds": [], "bf16_rounding_error": {},
            "peers": [Row(name, FAILED, note).to_dict() for name in asked], "environment": None}


def _write_json(path: str, cases: list[dict[str, Any]]) -> None:
    text = json.dumps({"cases": cases, "ranking": ranking(cases)}, indent=2) + "\n"
    if path == "-":
        sys.stdout.write(text)
        return
    _write(path, text)


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def main(arguments: list[str]) -> int:
    if len(arguments) == 2 and arguments[0] == "--measure":
        import peer_worker
        return peer_worker.main(arguments[1])
    options = parse_arguments(arguments)
    if options.self_test:
        import peer_self_test
        return peer_self_test.main(options.lossd_bench)
    cases: list[dict[str, Any]] = []
    for number, shape in enumerate(options.shapes, 1):
        print(f"case {number} of {len(options.shapes)}: {shape}", file=sys.stderr, flush=True)
        config = CaseConfig(shape, options.peers, options.device, options.repetitions, options.seed, options.ignored,
                            options.reference, options.lossd_bench, options.lossd_workspace, max(1.0, 0.9 * options.timeout),
                            options.lossd_adds)
        cases.append(run_case(config, options.timeout))
        if options.json not in (None, "-"):
            _write_json(options.json, cases)  # after every case: a run that is cut short leaves what it had
        if options.markdown is not None:
            _write(options.markdown, markdown(cases))
        if options.json != "-":
            print(table(cases[-1]) + "\n", flush=True)
    if options.json == "-":
        _write_json("-", cases)
    measured = [case for case in cases if case["environment"] is not None]
    if not measured:
        print(f"nothing could be measured; {cases[-1]['limit']}", file=sys.stderr)
        return _BAD_ARGUMENTS
    if options.json != "-":
        print(ranking_table(cases) + "\n")
        print(environment_line(measured[-1]))
    wrong = any(row["status"] == WRONG for case in cases for row in case["peers"])
    return _WRONG_RESULT if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
