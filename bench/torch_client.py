#!/usr/bin/env python3
"""Times a trainer's step through lossd.torch beside torch.compile of the local head and loss, in one process and one
run.

Both get the same hidden states, labels and weights and deliver the mean loss and the gradient of the hidden states; the
local one also its weights' gradient in their own dtype, lossd its in fp32 at the server. Before anything is timed their
results are compared. The rounds alternate; what is printed are medians, and the median of the rounds' ratios.

On a GPU the server shares device memory with this process (--transport=ipc) or gets what it needs over its socket
(--transport=socket).
Exit codes: 0 done, 1 results differ, 2 bad arguments.

    torch_client.py --device=cuda:0 --tokens=16384 --vocab=131072 --hidden=4096 --dtype=bfloat16
    torch_client.py --device=cpu --tokens=512 --vocab=4096 --hidden=256 --dtype=float32 --local=eager
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable

import lossd
import lossd.torch
import torch
import torch.nn.functional as F

_MOST = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}  # relative, of Frobenius norms


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--device", default="cuda:0" if torch.cuda.is_available() else "cpu", help="of both (default: %(default)s)"
    )
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--vocab", type=int, default=131072)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16", help="of head and hidden states"
    )
    parser.add_argument(
        "--transport",
        choices=("ipc", "socket"),
        default="ipc",
        help="shared memory, or messages (default: %(default)s)",
    )
    parser.add_argument("--local", choices=("compile", "eager"), default="compile", help="what lossd is compared with")
    parser.add_argument(
        "--two_phase", action="store_true", help="do not declare the loss's upstream gradient: one product more"
    )
    parser.add_argument(
        "--held_bytes", type=int, default=0, help="of the head: what the first phase may leave for the second"
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--program", help="the lossd to start (default: as lossd.launch finds it)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    for name in ("tokens", "vocab", "hidden", "rounds"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1")
    return options


class Problem:
    """The same inputs for both."""

    def __init__(self, options: argparse.Namespace):
        self.device = torch.device(options.device)
        self.dtype = getattr(torch, options.dtype)
        generator = torch.Generator(device=self.device).manual_seed(1)
        self.hidden = torch.randn(options.tokens, options.hidden, device=self.device, generator=generator).to(
            self.dtype
        )
        self.hidden.requires_grad_()
        weight = (
            torch.randn(options.vocab, options.hidden, device=self.device, generator=generator) / options.hidden**0.5
        )
        self.weight = weight.to(self.dtype).requires_grad_()
        self.target = torch.randint(options.vocab, (options.tokens,), device=self.device, generator=generator)


def _local(problem: Problem, how: str) -> Callable[[], torch.Tensor]:
    def loss_of(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(F.linear(hidden, weight).float(), target)

    function = torch.compile(loss_of) if how == "compile" else loss_of

    def step() -> torch.Tensor:
        problem.hidden.grad = problem.weight.grad = None
        loss = function(problem.hidden, problem.weight, problem.target)
        loss.backward()
        return loss.detach()

    return step


def _remote(problem: Problem, head: lossd.torch.RemoteHead, two_phase: bool) -> Callable[[], torch.Tensor]:
    def step() -> torch.Tensor:
        problem.hidden.grad = None
        loss = lossd.torch.linear_cross_entropy(
            problem.hidden, problem.target, head, grad_scale=None if two_phase else 1.0
        )
        loss.backward()
        return loss.detach()

    return step


def _seconds(step: Callable[[], torch.Tensor], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def _difference(got: torch.Tensor, wanted: torch.Tensor) -> float:
    wanted = wanted.double()
    return float((got.to(wanted.device).double() - wanted).norm() / wanted.norm())


def _differences(
    problem: Problem,
    head: lossd.torch.RemoteHead,
    local: Callable[[], torch.Tensor],
    remote: Callable[[], torch.Tensor],
) -> dict[str, float]:
    wanted_loss = local()
    wanted = problem.hidden.grad.clone()
    wanted_weight = problem.weight.grad.float().cpu()
    problem.weight.grad = None
    loss = remote()
    weight = torch.from_numpy(head.head.flush().gradient)
    return {
        "loss": _difference(loss, wanted_loss),
        "dx": _difference(problem.hidden.grad, wanted),
        "dw": _difference(weight, wanted_weight),
    }


def _measure(options: argparse.Namespace, server: lossd.Server) -> dict[str, object]:
    problem = Problem(options)
    with server.client() as client:
        head = lossd.torch.RemoteHead.create(
            client,
            "bench",
            options.vocab,
            options.hidden,
            dtype=problem.dtype,
            weights=problem.weight.detach(),
            held_bytes=options.held_bytes,
        )
        local, remote = _local(problem, options.local), _remote(problem, head, options.two_phase)
        differences = _differences(problem, head, local, remote)
        times: dict[str, list[float]] = {"local": [], "lossd": []}
        for measured in range(options.rounds + 2):
            for name, step in (("local", local), ("lossd", remote)):
                seconds = _seconds(step, problem.device)
                if measured >= 2:
                    times[name].append(seconds)
        ratios = [ours / theirs for ours, theirs in zip(times["lossd"], times["local"], strict=True)]
        return {
            "device": options.device,
            "tokens": options.tokens,
            "vocab": options.vocab,
            "hidden": options.hidden,
            "dtype": options.dtype,
            "transport": options.transport,
            "local": options.local,
            "two_phase": options.two_phase,
            "held_bytes": options.held_bytes,
            "torch": torch.__version__,
            "local_ms": 1e3 * statistics.median(times["local"]),
            "lossd_ms": 1e3 * statistics.median(times["lossd"]),
            "ratio": statistics.median(ratios),
            "all_ratios": ratios,
            "differences": differences,
            "right": all(value <= _MOST[problem.dtype] for value in differences.values()),
        }


def main() -> int:
    options = _arguments()
    with lossd.launch(device=options.device, program=options.program, regions=options.transport == "ipc") as server:
        report = _measure(options, server)
    if options.json:
        print(json.dumps(report))
    else:
        local, remote = f"{report['local_ms']:.2f} ms", f"{report['lossd_ms']:.2f} ms"
        print(f"{report['local']}: {local}, lossd: {remote}, ratio {report['ratio']:.3f}")
        print("differences: " + ", ".join(f"{name} {value:.1e}" for name, value in report["differences"].items()))
    if not report["right"]:
        print("results differ by more than their dtype explains", file=sys.stderr)
    return 0 if report["right"] else 1


if __name__ == "__main__":
    sys.exit(main())
