"""A server with several devices beside one with one of them: the same batches must give the same results. For machines
with GPUs, where the suite of tests has none; on CPUs it is tried with

    python client/python/tests/devices_check.py --devices cpu,cpu --vocab 4096 --hidden 64 --tokens 300

on two GPUs with

    python client/python/tests/devices_check.py --devices cuda:0,cuda:1

and between servers that run already, whose --checkpoint_dir are A and B, with

    python client/python/tests/devices_check.py --targets localhost:50051 localhost:50061 --folders A B

Prints one line for each check, with the largest relative difference that it has seen. Exit status 1 if a check fails.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import lossd

ADAMW = lossd.AdamW(lr=1e-3, weight_decay=0.1)


class Pair:
    """The same heads at both servers."""

    def __init__(self, given: argparse.Namespace, clients: list[lossd.Client], folders: Sequence[Path]) -> None:
        self.given = given
        self.clients = clients
        self.folders = folders  # of their checkpoints
        self.worst = 0.0

    def random(self, seed: int, *shape: int) -> Any:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))

    def heads(self, name: str, dtype: torch.dtype, vocab: int = 0, **options: Any) -> list[lossd.Head]:
        vocab, hidden = vocab or self.given.vocab, self.given.hidden
        weights = (self.random(1, vocab, hidden) * 0.05).to(dtype)
        bias = self.random(2, vocab) if options.get("bias") else None
        made = []
        for client in self.clients:
            head = client.create_head(name, vocab, hidden, dtype, **options)
            head.write_weights(weights, bias=bias)
            made.append(head)
        return made

    def batch(self, dtype: torch.dtype, vocab: int = 0, seed: int = 3) -> tuple[Any, Any]:
        tokens = self.given.tokens
        hidden = self.random(seed, tokens, self.given.hidden).to(dtype)
        random = torch.Generator().manual_seed(seed)
        labels = torch.randint(0, vocab or self.given.vocab, (tokens,), generator=random)
        labels[::7] = -100
        return hidden, labels

    def close(self, what: str, got: Any, wanted: Any, tolerance: float) -> None:
        got, wanted = (torch.as_tensor(one).double() for one in (got, wanted))
        scale = wanted.norm().item() or 1.0
        difference = (got - wanted).norm().item() / scale
        self.worst = max(self.worst, difference)
        assert difference <= tolerance, f"{what} differs by {difference:.3g} of its size, more than {tolerance}"

    def same(self, what: str, got: Any, wanted: Any) -> None:
        assert torch.equal(torch.as_tensor(got), torch.as_tensor(wanted)), f"{what} has other bits"

    def delete(self, name: str) -> None:
        for client in self.clients:
            client.delete_head(name, discard_gradient=True)


def tolerance_of(dtype: torch.dtype) -> float:
    return {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]


PLAIN: dict[str, Any] = {"bias": "ignore", "class_weights": "ignore"}
USED: dict[str, Any] = {}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1},
    "softcap": {"softcap": 8.0, "logit_scale": 0.5},
    "both": {"softcap": 8.0, "label_smoothing": 0.2, "lse_square_scale": 1e-3},
    "loss": {"mode": "loss"},
    "without dX": {"dx": False},
}


def batches(pair: Pair, dtype: torch.dtype) -> str:
    hidden, labels = pair.batch(dtype)
    weights = torch.rand(pair.given.vocab, generator=torch.Generator().manual_seed(4))
    heads = pair.heads("batches", dtype, bias=True, class_weights=weights)
    for name, options in OPTIONS.items():
        for once in PLAIN, USED:
            results = []
            for head in heads:
                with head.open_session() as session:
                    got = session.compute(hidden, labels, returns=["log_sum_exp"], **options, **once)
                results.append((got, None if name == "loss" else head.flush()))
            (one, one_flush), (many, many_flush) = results
            pair.close(f"{name}: losses", many.losses, one.losses, 1e-5)
            pair.close(f"{name}: lse", many.log_sum_exp, one.log_sum_exp, 1e-5)
            if one.dx is not None:
                pair.close(f"{name}: dX", many.dx.float(), one.dx.float(), tolerance_of(dtype))
            if one_flush is not None and many_flush is not None:
                pair.close(f"{name}: dW", many_flush.gradient, one_flush.gradient, tolerance_of(dtype))
                pair.close(f"{name}: norm", many_flush.norm, one_flush.norm, tolerance_of(dtype))
    pair.delete("batches")
    return f"{2 * len(OPTIONS)} batches"


def whole_rows(pair: Pair, dtype: torch.dtype) -> str:
    hidden, labels = pair.batch(dtype)
    heads = pair.heads("rows", dtype)
    wanted = ["entropies", "predictions", "target_ranks", "log_probabilities"]
    results = []
    for head in heads:
        with head.open_session() as session:
            results.append(session.compute(hidden, labels, returns=wanted, top_k=5))
        head.discard()
    one, many = results
    for name in ("losses", "entropies", "log_probabilities", "top_log_probabilities"):
        pair.close(name, getattr(many, name), getattr(one, name), 1e-4)
    for name in ("predictions", "target_ranks", "top_tokens"):
        same = (getattr(many, name) == getattr(one, name)).double().mean().item()
        assert same > 0.99, f"{name}: {100 * same:.1f} % are the same"
    pair.delete("rows")
    return "what whole rows tell"


def logits(pair: Pair, dtype: torch.dtype) -> str:
    heads = pair.heads("logits", dtype, bias=True)
    hidden, _ = pair.batch(dtype)
    one, many = (head.logits(hidden[:20]) for head in heads)
    pair.close("logits", many, one, 1e-5)
    one, many = (head.logits(hidden[:20], top_k=9) for head in heads)
    pair.same("tokens", many.tokens, one.tokens)
    pair.close("log_sum_exp", many.log_sum_exp, one.log_sum_exp, 1e-5)
    pair.delete("logits")
    return "all, and the largest"


def soft_targets(pair: Pair, dtype: torch.dtype) -> str:
    heads = pair.heads("student", dtype)
    pair.heads("teacher", dtype, frozen=True)
    hidden, labels = pair.batch(dtype)
    told, _ = pair.batch(dtype, seed=5)
    for divergence in ("forward_kl", "reverse_kl", "jensen_shannon"):
        soft = lossd.Distillation("teacher", told, divergence=divergence, temperature=2.0, label_weight=0.5)
        results = []
        for head in heads:
            with head.open_session() as session:
                got = session.compute(hidden, labels, distillation=soft, returns=["divergences"])
            results.append((got, head.flush().gradient))
        (one, one_dw), (many, many_dw) = results
        pair.close(f"{divergence}: losses", many.losses, one.losses, 1e-4)
        pair.close(f"{divergence}: dX", many.dx.float(), one.dx.float(), tolerance_of(dtype))
        pair.close(f"{divergence}: dW", many_dw, one_dw, tolerance_of(dtype))
    pair.delete("student")
    pair.delete("teacher")
    return "three divergences"


def steps(pair: Pair, dtype: torch.dtype) -> str:
    heads = pair.heads(
        "steps", dtype, vocab=pair.given.vocab + 13, optimizer=ADAMW, master_weights=dtype != torch.float32
    )
    sessions = [head.open_session() for head in heads]
    for step in range(4):
        hidden, labels = pair.batch(dtype, pair.given.vocab + 13, seed=10 + step)
        losses = []
        for head, session in zip(heads, sessions, strict=True):
            losses.append(session.compute(hidden, labels, reduction="mean").loss)
            head.step()
        pair.close(f"loss {step}", losses[1], losses[0], 1e-3)
    one, many = (head.read_weights(dtype="float32") for head in heads)
    pair.close("weights", many, one, 5e-3)
    for session in sessions:
        session.close()
    pair.delete("steps")
    return "four steps of AdamW"


def bits(pair: Pair, dtype: torch.dtype) -> str:
    heads = pair.heads("bits", dtype, fixed_segments=True, optimizer=ADAMW, master_weights=dtype != torch.float32)
    hidden, labels = pair.batch(dtype)
    results = []
    for head in heads:
        with head.open_session(client_key="bits", rank=0, deterministic=True) as session:
            got = session.compute(hidden, labels, label_smoothing=0.1)
            head.step()
            session.compute(hidden, labels)
            results.append((got.losses, got.dx, head.read_weights(dtype="float32"), head.flush()))
    (losses, dx, weights, flushed), many = results
    pair.same("losses", many[0], losses)
    pair.same("dX", many[1], dx)
    pair.same("weights", many[2], weights)
    pair.same("dW", many[3].gradient, flushed.gradient)
    pair.delete("bits")
    return "losses, dX, dW and weights, to the last"


def checkpoint(pair: Pair, dtype: torch.dtype) -> str:
    heads = pair.heads("kept", dtype, optimizer=ADAMW, master_weights=dtype != torch.float32)
    hidden, labels = pair.batch(dtype)
    for head in heads:
        with head.open_session() as session:
            session.compute(hidden, labels)
        head.step()
    heads[1].save_checkpoint("one")
    kept = heads[1].read_weights(dtype="float32")
    pair.delete("kept")
    shutil.copytree(pair.folders[1], pair.folders[0], dirs_exist_ok=True)
    for client in pair.clients:
        client.restore_checkpoint("kept", "one")
        pair.same("weights", client.head("kept").read_weights(dtype="float32"), kept)
    pair.delete("kept")
    return "of several devices, restored to one and to several"


def tensors_of_gpus(pair: Pair, dtype: torch.dtype) -> str:
    if not torch.cuda.is_available():
        return "no GPU"
    (_, head) = pair.heads("tensors", dtype)
    hidden, labels = pair.batch(dtype)
    with head.open_session() as session:
        wanted = session.compute(hidden, labels)
        for device in range(min(2, torch.cuda.device_count())):
            with torch.cuda.device(device):
                got = session.compute(hidden.to(f"cuda:{device}"), labels)
            pair.close(f"losses of cuda:{device}", got.losses.cpu(), wanted.losses, 1e-6)
            pair.close(f"dX of cuda:{device}", got.dx.cpu().float(), wanted.dx.float(), tolerance_of(dtype))
    head.discard()
    pair.delete("tensors")
    return "from each GPU"


def waits(pair: Pair, dtype: torch.dtype) -> str:
    """Ranks say how long they have waited for each other while they computed."""
    head = pair.heads("waits", dtype)[1]
    hidden, labels = pair.batch(dtype)

    def waited() -> list[float]:
        return [1e3 * rank.waited_seconds for rank in pair.clients[1].status().ranks]

    time.sleep(3)  # what ranks have waited for the head's weights is known by then
    before = waited()
    deadline = time.monotonic() + 30
    with head.open_session() as session:
        while True:
            session.compute(hidden, labels)
            since = [late - early for early, late in zip(before, waited(), strict=True)]
            if min(since) > 0:
                break
            assert time.monotonic() < deadline, f"ranks have waited for {since} ms"
            time.sleep(0.1)
    pair.delete("waits")
    return "each rank has waited for others"


CHECKS: list[Callable[[Pair, torch.dtype], str]] = [
    batches,
    whole_rows,
    logits,
    soft_targets,
    steps,
    bits,
    checkpoint,
    tensors_of_gpus,
    waits,
]


def start_servers(given: argparse.Namespace, at_end: contextlib.ExitStack) -> tuple[list[lossd.Client], Sequence[Path]]:
    """Clients of both, and the folders of their checkpoints."""
    if given.targets:
        return [at_end.enter_context(lossd.connect(target)) for target in given.targets], given.folders
    folder = Path(at_end.enter_context(tempfile.TemporaryDirectory()))
    folders = [folder / "one", folder / "many"]
    clients = []
    for devices, checkpoints in zip((given.devices.split(",")[0], given.devices), folders, strict=True):
        launched = lossd.launch(devices, program=given.program, checkpoint_dir=checkpoints)
        clients.append(at_end.enter_context(launched).client())
    return clients, folders


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", help="the server; found as lossd.launch finds it by default")
    parser.add_argument("--devices", default="cuda:0,cuda:1")
    parser.add_argument("--targets", nargs=2, help="of the server with one device, and of the one with several")
    parser.add_argument("--folders", nargs=2, type=Path, default=(), help="of the checkpoints of --targets")
    parser.add_argument("--tokens", type=int, default=5000)
    parser.add_argument("--vocab", type=int, default=50257)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--dtypes", nargs="+", default=("bfloat16", "float16"))
    parser.add_argument("--only", nargs="+", choices=[check.__name__ for check in CHECKS])
    given = parser.parse_args()
    checks = [check for check in CHECKS if not given.only or check.__name__ in given.only]
    failed = 0
    with contextlib.ExitStack() as at_end:
        pair = Pair(given, *start_servers(given, at_end))
        for dtype in given.dtypes:
            for check in checks:
                began = time.perf_counter()
                pair.worst = 0.0
                try:
                    said = f"{check(pair, getattr(torch, dtype))}; differences up to {pair.worst:.2g}"
                except Exception as error:  # the others are still worth knowing
                    failed += 1
                    said = f"FAILED: {type(error).__name__}: {error}"
                print(f"{dtype:9} {check.__name__:16} {time.perf_counter() - began:5.1f} s  {said}", flush=True)
    print(f"{len(given.dtypes) * len(checks) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
