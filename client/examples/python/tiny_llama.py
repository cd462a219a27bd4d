#!/usr/bin/env python3
"""Trains a tiny Llama from scratch on real text, twice: with its head in lossd, and with the head in this process.

    python tiny_llama.py                                  # starts a private lossd on this host
    python tiny_llama.py --server host:50051 --dtype bfloat16 --plot curves.svg --json curves.json

Same seeds, same batches. Only the last stage differs:

    local     loss = F.cross_entropy(F.linear(hidden, weight), labels);     torch.optim.AdamW
    remote    loss = linear_cross_entropy(hidden, labels, head);            head.step(lr), AdamW in the server

The two loss curves should be one. In float32 every step's losses have to agree to 1e-3 (relative). In bfloat16 two runs
whose rounding differs drift apart whatever computes the head, so the bar is what that does: three more local runs add
their numbers up in another order (the batch reversed, the vocabulary in two halves, the head in float32), and remote
and local may not differ by more than the two of these local runs that differ most.

The text: the manuals that tools/setup.sh installs, or yours (--text FILE..., plain or .gz). The tokenizer, byte-level
BPE, is trained on it first. Needs torch, transformers and tokenizers; tqdm and matplotlib if they are there.

Exit status: 0 the curves agree, 1 something failed, 2 bad arguments, 3 the curves differ.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

import lossd
import tiny_llama_runs as runs
from tiny_llama_text import TextError, default_texts, load_tokens

# Pairs of local runs in bfloat16, for the bar; float32 needs none.
CONTROLS = ("reversed", "halves", "float32-head")
FLOAT32_BAR = 1e-3


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--server", help="a running lossd, as host:port or unix:PATH; without it a private one is started"
    )
    parser.add_argument("--text", type=Path, nargs="+", metavar="FILE", help="train on these instead of the manuals")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32",
        help="of the arithmetic; bfloat16: autocast, with float32 masters (%(default)s)",
    )  # fmt: skip
    parser.add_argument("--device", help="of trunk and local head: cpu, cuda, cuda:1 (a GPU if there is one)")
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps (%(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="sequences in a batch (%(default)s)")
    parser.add_argument("--length", type=int, default=128, help="tokens in a sequence (%(default)s)")
    parser.add_argument("--vocab", type=int, default=4096, help="vocabulary of the tokenizer (%(default)s)")
    parser.add_argument("--hidden", type=int, default=128, help="hidden size (%(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="transformer layers (%(default)s)")
    parser.add_argument("--lr", type=float, default=1e-3, help="peak learning rate (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of weights and batches (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write settings, losses and differences there")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw both curves and their difference: .svg, .png or .pdf"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    options = parser.parse_args(arguments)
    for name, least in (("steps", 1), ("batch", 1), ("length", 2), ("vocab", 300), ("layers", 1)):
        if getattr(options, name) < least:
            parser.error(f"--{name} must be at least {least}")
    if options.hidden < 32 or options.hidden % 32:
        parser.error("--hidden must be a multiple of 32 (heads of 32)")
    if options.device is None:
        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.plot and options.plot.suffix not in (".svg", ".png", ".pdf"):
        parser.error(f"--plot: {options.plot} ends neither in .svg nor in .png nor in .pdf")
    return options


@contextlib.contextmanager
def client_of(options: argparse.Namespace) -> Iterator[lossd.Client]:
    with contextlib.ExitStack() as stack:
        if options.server:
            yield stack.enter_context(lossd.connect(options.server))
        else:
            server = stack.enter_context(lossd.launch())
            yield stack.enter_context(server.client())


def difference(one: list[float], other: list[float]) -> list[float]:
    """(one - other) / other at each step."""
    return [(a - b) / b for a, b in zip(one, other)]


def largest(values: list[float]) -> float:
    return max(map(abs, values))


def root_mean_square(values: list[float]) -> float:
    return (sum(value * value for value in values) / len(values)) ** 0.5


def judge(options: argparse.Namespace, losses: dict[str, list[float]]) -> dict:
    """The figures of the runs, and whether remote and local are the same but for rounding."""
    remote = difference(losses["remote"], losses["local"])
    result = {"largest_relative_difference": largest(remote), "rms_relative_difference": root_mean_square(remote)}
    if options.dtype == "float32":
        return {**result, "bar": FLOAT32_BAR, "agree": result["largest_relative_difference"] <= FLOAT32_BAR}
    local = [name for name in losses if name != "remote"]
    pairs = {
        f"{one}, {other}": difference(losses[one], losses[other]) for i, one in enumerate(local) for other in local[:i]
    }
    result["local_pairs"] = {
        name: {"largest": largest(values), "rms": root_mean_square(values)} for name, values in pairs.items()
    }
    result["bar"] = max(pair["largest"] for pair in result["local_pairs"].values())
    result["rms_bar"] = max(pair["rms"] for pair in result["local_pairs"].values())
    result["agree"] = (
        result["largest_relative_difference"] <= result["bar"]
        and result["rms_relative_difference"] <= result["rms_bar"]
    )
    return result


def report(
    options: argparse.Namespace, losses: dict[str, list[float]], seconds: dict[str, float], result: dict
) -> None:
    for name, values in losses.items():
        print(
            f"{name:>14}: loss {values[0]:.4f} -> {values[-1]:.4f}, {1000 * seconds[name] / len(values):.0f} ms a step"
        )
    print(
        f"remote against local, {options.dtype}: largest relative difference of a step "
        f"{result['largest_relative_difference']:.2e} "
        f"(bar {result['bar']:.2e}), rms {result['rms_relative_difference']:.2e}"
    )
    for name, pair in result.get("local_pairs", {}).items():
        print(f"  two local runs ({name}): largest {pair['largest']:.2e}, rms {pair['rms']:.2e}")
    print("the curves agree" if result["agree"] else "the curves DIFFER")


def compare(options: argparse.Namespace) -> int:
    tokens = load_tokens(options.text or default_texts(), options.vocab)
    print(f"{len(tokens):,} tokens, vocabulary {options.vocab}", flush=True)
    kinds = ["remote", "local", *(CONTROLS if options.dtype == "bfloat16" else ())]
    losses: dict[str, list[float]] = {}
    seconds: dict[str, float] = {}
    with client_of(options) as client:
        for kind in kinds:
            began = time.perf_counter()
            losses[kind] = runs.train(kind, tokens, client, options)
            seconds[kind] = time.perf_counter() - began
    result = judge(options, losses)
    report(options, losses, seconds, result)
    if options.json:
        settings = {name: value for name, value in vars(options).items() if isinstance(value, (int, float, str))}
        options.json.write_text(
            json.dumps({"settings": settings, "torch": torch.__version__, "losses": losses, **result}, indent=1) + "\n"
        )
    if options.plot:
        import tiny_llama_plot

        tiny_llama_plot.draw(options.plot, {options.dtype: losses})
    return 0 if result["agree"] else 3


def main() -> int:
    options = parse(sys.argv[1:])
    try:
        return compare(options)
    except (TextError, lossd.LossdError, OSError) as error:
        print(f"tiny_llama.py: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
