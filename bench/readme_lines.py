#!/usr/bin/env python3
"""Times the PyTorch lines of README.md, as they stand there, beside the line that they replace.

The lines are read from README.md. The line that they replace stands there too, behind "was:"; torch.compile compiles
it. Both have the same weights, hidden states and labels in bfloat16, in one process, in turns: first the loss with its
backward pass, then AdamW's step. Before a time is printed, losses and dX are compared, and the losses once more after
all steps: relative differences of at most 2 % at first and 5 % at the end.

Over `ipc`, lossd.launch() starts the server, and both processes share device memory (on a CPU, the host's). Over
`socket`, a server without shared memory runs already, as in README.md's lossd.connect("...").

Exit codes: 0 done, 1 results differ, 2 bad arguments.

    readme_lines.py --json readme_lines.json
    readme_lines.py --device cpu --tokens 64 --vocab 512 --hidden 64 --rounds 2
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import statistics
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

README = Path(__file__).resolve().parents[1] / "README.md"
TRANSPORTS = ("ipc", "socket")
FIRST, LAST = 2e-2, 5e-2  # relative, the dX of Frobenius norms
WARM_UP = 2


def readme_lines() -> list[str]:
    """README.md's block of code that trains a model of PyTorch."""
    text = README.read_text(encoding="utf-8").split("## Your own model", 1)[1].split("In C++:", 1)[0]
    block = [line for line in text.split("\n") if line.startswith("    ")]
    return textwrap.dedent("\n".join(block[block.index("    import lossd") :])).split("\n")


def parts(lines: list[str]) -> tuple[list[str], str, str, str]:
    """What comes before the step, the loss with its backward pass, the optimizer's step, and what the loss was."""
    (at,) = [number for number, line in enumerate(lines) if ".backward()" in line]
    (step,) = [line for line in lines[at + 1 :] if line]
    return lines[:at], lines[at], step, lines[at].split("# was: ", 1)[1]


def connecting(lines: list[str], target: str) -> list[str]:
    """The lines with the other half of "lossd.launch() ... or lossd.connect(...)"."""
    (at,) = [number for number, line in enumerate(lines) if "lossd.launch()" in line]
    instead = re.sub(r'"[^"]*"', repr(target), lines[at].split("# or ", 1)[1])
    return [*lines[:at], f"client = {instead}", *lines[at + 1 :]]


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default: %(default)s")
    parser.add_argument("--transports", default=",".join(TRANSPORTS), help="default: %(default)s")
    parser.add_argument("--local", choices=("compile", "eager"), default="compile", help="default: %(default)s")
    for name, value in {"tokens": 16384, "vocab": 128256, "hidden": 4096, "rounds": 9}.items():
        parser.add_argument(f"--{name}", type=int, default=value, help="default: %(default)s")
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    options = parser.parse_args(words)
    options.transports = options.transports.split(",")
    for transport in options.transports:
        if transport not in TRANSPORTS:
            parser.error(f"--transports: there is no {transport!r}; name ipc, socket or both")
    for name in ("tokens", "vocab", "hidden", "rounds"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1")
    return options


class Side:
    """A model's head with its inputs, and the lines that train it."""

    def __init__(self, names: dict[str, Any], backward: Callable[[], Any], loss: str, step: str):
        self.names = names
        self._backward = backward
        self._loss = loss
        self._step = compile(step, str(README), "exec")
        self.times: list[tuple[float, float]] = []  # of the backward pass, and of it with the step

    def round(self, synchronize: Callable[[], None]) -> None:
        self.names["hidden"].grad = None
        synchronize()
        began = time.perf_counter()
        self._backward()
        synchronize()
        middle = time.perf_counter()
        exec(self._step, self.names)
        synchronize()
        self.times.append((middle - began, time.perf_counter() - began))
        self.names["optimizer"].zero_grad()

    def loss(self) -> float:
        import torch

        with torch.no_grad():
            return float(eval(self._loss, self.names))


def problem(options: argparse.Namespace) -> dict[str, Any]:
    """The names that README.md's lines use, but for client and optimizer; the same for all sides."""
    import torch

    generator = torch.Generator(device=options.device).manual_seed(1)
    given = {"device": options.device, "generator": generator}
    model = torch.nn.Module()
    model.lm_head = torch.nn.Linear(options.hidden, options.vocab, False, options.device, torch.bfloat16)
    with torch.no_grad():
        model.lm_head.weight.normal_(std=options.hidden**-0.5, generator=generator)
    hidden = torch.randn(options.tokens, options.hidden, **given).bfloat16().requires_grad_()
    labels = torch.randint(options.vocab, (options.tokens,), **given)
    return {"torch": torch, "F": torch.nn.functional, "model": model, "hidden": hidden, "labels": labels}


def local_side(options: argparse.Namespace, loss: str, step: str) -> Side:
    names = problem(options)
    torch, model = names["torch"], names["model"]
    names["optimizer"] = torch.optim.AdamW(model.parameters(), lr=1e-4)
    exec(f"def loss_of(model, hidden, labels):\n    return {loss}", names)
    loss_of = torch.compile(names["loss_of"]) if options.local == "compile" else names["loss_of"]
    return Side(names, lambda: loss_of(model, names["hidden"], names["labels"]).backward(), loss, step)


def lossd_side(options: argparse.Namespace, before: list[str], backward: str, step: str) -> Side:
    names = problem(options)
    exec("\n".join(before), names)
    code = compile(backward, str(README), "exec")
    loss = backward.split(".backward()", 1)[0]
    return Side(names, lambda: exec(code, names), loss, step)


def difference(got: Any, wanted: Any) -> float:
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


def measure(options: argparse.Namespace, local: Side, ours: Side) -> dict[str, Any]:
    import torch

    synchronize: Callable[[], None] = (lambda: None) if options.device == "cpu" else torch.cuda.synchronize
    differences = {"loss": abs(ours.loss() / local.loss() - 1)}
    for number in range(WARM_UP + options.rounds):
        for side in (local, ours) if number % 2 else (ours, local):
            side.round(synchronize)
        if number == 0:
            differences["dx"] = difference(ours.names["hidden"].grad, local.names["hidden"].grad)
        print(f"round {number + 1} of {WARM_UP + options.rounds}", file=sys.stderr, flush=True)
    losses = {"local": local.loss(), "lossd": ours.loss()}
    differences["last_loss"] = abs(losses["lossd"] / losses["local"] - 1)
    report: dict[str, Any] = {"differences": differences, "last_losses": losses}
    for at, name in enumerate(("loss", "with_step")):
        medians = [1e3 * statistics.median(times[at] for times in side.times[WARM_UP:]) for side in (local, ours)]
        report[name] = {"local_ms": medians[0], "lossd_ms": medians[1], "ratio": medians[1] / medians[0]}
    report["right"] = all(value <= (LAST if name == "last_loss" else FIRST) for name, value in differences.items())
    return report


def run(options: argparse.Namespace, transport: str) -> dict[str, Any]:
    import lossd

    before, backward, step, was = parts(readme_lines())
    with contextlib.ExitStack() as stack:
        if transport == "socket":
            server = lossd.launch("auto" if options.device == "cuda" else "cpu", regions=False)
            stack.enter_context(server)
            before = connecting(before, server.target)
        elif options.device == "cpu":
            before = [line.replace("lossd.launch()", 'lossd.launch("cpu")') for line in before]
        ours = lossd_side(options, before, backward, step)
        stack.callback(ours.names["client"].close)
        return {"transport": transport, **measure(options, local_side(options, was, step), ours)}


def main() -> int:
    options = arguments()
    reports = []
    for transport in options.transports:
        print(f"over {transport}", file=sys.stderr, flush=True)
        reports.append(run(options, transport))
    if options.json:
        report = {**vars(options), "readme": readme_lines(), "results": reports}
        Path(options.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    wrong = [f"{r['transport']}: results differ: {r['differences']}" for r in reports if not r["right"]]
    if wrong:
        print("\n".join(wrong), file=sys.stderr)
        return 1
    local = f"{options.local}, ms | ratio"
    print(f"| lossd over | loss and backward, ms | {local} | with the step: ms | {local} |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for report in reports:
        cells = [
            f"{r['lossd_ms']:.1f} | {r['local_ms']:.1f} | {r['ratio']:.2f}"
            for r in (report["loss"], report["with_step"])
        ]
        print(f"| {report['transport']} | {' | '.join(cells)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
