#!/usr/bin/env python3
"""How many log-probabilities change when a token is computed beside other tokens: what a sampler says of its tokens in
small batches, and what a trainer says of the same tokens, with the same weights, in a large one.

In a ratio exp(trainer - sampler) such a change is a bias that no update has made. Each implementation computes the
labels' log-probabilities of all tokens at once, and again in pieces of --pieces tokens. Printed are the tokens whose
two numbers differ, the largest difference, and the mean of the ratios less 1. torch is F.linear and a log_softmax in
fp32; lossd is token_log_probs.
Exit codes: 0 done, 1 lossd's differ, 2 bad arguments.

    log_ratios.py --device=cuda:0 --tokens=4096 --vocab=131072 --hidden=4096
    log_ratios.py --device=cpu --tokens=512 --vocab=4096 --hidden=256
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import lossd
import lossd.torch
import torch
import torch.nn.functional as F

LogProbs = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Moved:
    """What one implementation gives with pieces of one size."""

    name: str
    pieces: int
    tokens: int
    moved: int
    largest: float
    mean_ratio_less_1: float


def torch_log_probs(weight: torch.Tensor) -> LogProbs:
    def log_probs(hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, weight).float().log_softmax(-1).gather(-1, labels[:, None])[:, 0]

    return log_probs


def lossd_log_probs(head: lossd.torch.RemoteHead) -> LogProbs:
    def log_probs(hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        found = lossd.torch.token_log_probs(hidden, labels, head)
        assert isinstance(found, torch.Tensor)
        return found

    return log_probs


@torch.no_grad()
def moved(name: str, log_probs: LogProbs, hidden: torch.Tensor, labels: torch.Tensor, pieces: int) -> Moved:
    trainer = log_probs(hidden, labels)
    parts = zip(hidden.split(pieces), labels.split(pieces), strict=True)
    sampler = torch.cat([log_probs(*part) for part in parts])
    difference = (trainer - sampler).double()
    return Moved(
        name,
        pieces,
        len(labels),
        int((difference != 0).sum()),
        float(difference.abs().max()),
        float(difference.exp().mean() - 1),
    )


def compare(
    server: lossd.Server, device: str, tokens: int, vocab: int, hidden_size: int, pieces: Sequence[int]
) -> list[Moved]:
    """bf16 before fp32, and of each torch before lossd."""
    generator = torch.Generator(device=device).manual_seed(1)
    hidden = torch.randn(tokens, hidden_size, device=device, generator=generator)
    weight = 1.5 * torch.randn(vocab, hidden_size, device=device, generator=generator) / hidden_size**0.5
    labels = torch.randint(vocab, (tokens,), device=device, generator=generator)
    found = []
    with server.client() as client:
        for dtype in (torch.bfloat16, torch.float32):
            name = str(dtype).removeprefix("torch.")
            x, w = hidden.to(dtype), weight.to(dtype)
            head = lossd.torch.RemoteHead.create(client, name, vocab, hidden_size, dtype=dtype, weights=w)
            for what, log_probs in (("torch", torch_log_probs(w)), ("lossd", lossd_log_probs(head))):
                found += [moved(f"{what}, {name}", log_probs, x, labels, size) for size in pieces]
            head.close()
            client.delete_head(name, discard_gradient=True)  # losses alone leave marks, too
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--device", default="cuda:0" if torch.cuda.is_available() else "cpu", help="of both (default: %(default)s)"
    )
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=131072)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument(
        "--pieces", type=int, nargs="+", default=[8, 64, 1000], help="tokens beside each other at the sampler"
    )
    parser.add_argument("--program", help="the lossd to start (default: as lossd.launch finds it)")
    parser.add_argument("--json", action="store_true", help="print a JSON array")
    options = parser.parse_args()
    for number in (options.tokens, options.vocab, options.hidden, *options.pieces):
        if number < 1:
            parser.error("--tokens, --vocab, --hidden and --pieces must be at least 1")
    with lossd.launch(device=options.device, program=options.program) as server:
        found = compare(server, options.device, options.tokens, options.vocab, options.hidden, options.pieces)
    if options.json:
        print(json.dumps([asdict(one) for one in found]))
    else:
        print(f"{'':16} {'pieces of':>9} {'moved':>14} {'largest':>9} {'mean ratio - 1':>15}")
        for one in found:
            differing = f"{one.moved:6} of {one.tokens:5} {one.largest:9.1e} {one.mean_ratio_less_1:15.1e}"
            print(f"{one.name:16} {one.pieces:9} {differing}")
    return 1 if any(one.moved for one in found if one.name.startswith("lossd")) else 0


if __name__ == "__main__":
    sys.exit(main())
