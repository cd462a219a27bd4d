"""What the tests of this folder cannot look at without a GPU: batches of CUDA tensors, through device regions and
through pinned memory, against the same batches from the host. For a machine with an NVIDIA GPU and PyTorch with CUDA:

    python client/python/tests/cuda_check.py [--program build/bin/lossd] [--tokens 4096 --vocab 32768 --hidden 1024]

Prints one line for each check and, in the end, how long a batch takes each way. Exit status 1 if a check fails.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

import lossd

Check = Callable[[lossd.Client, argparse.Namespace, str], str]


def make(client: lossd.Client, name: str, given: argparse.Namespace) -> tuple[lossd.Head, Any]:
    head = client.create_head(name, given.vocab, given.hidden, "bfloat16")
    weights = torch.randn(given.vocab, given.hidden, generator=torch.Generator().manual_seed(1)) * 0.02
    head.write_weights(weights.bfloat16().cuda())  # in pieces, from the GPU
    back = torch.empty(given.vocab, given.hidden, dtype=torch.bfloat16, device="cuda")
    head.read_weights(out=back)
    assert torch.equal(back.cpu(), weights.bfloat16()), "weights came back different"
    return head, weights.bfloat16()


def batch(given: argparse.Namespace, seed: int = 0) -> tuple[Any, Any]:
    random = torch.Generator().manual_seed(seed)
    hidden = torch.randn(given.tokens, given.hidden, generator=random).bfloat16()
    return hidden, torch.randint(0, given.vocab, (given.tokens,), generator=random)


def way_of(session: lossd.Session) -> str:
    (staging,) = session._stagings.values()
    return "regions" if staging.uses_regions else "pinned"


def same_as_from_the_host(client: lossd.Client, given: argparse.Namespace, way: str) -> str:
    head, weights = make(client, "same", given)
    hidden, labels = batch(given)
    with head.open_session() as session:
        wanted = session.compute(hidden, labels, returns=["log_sum_exp"], top_k=2)
        dw = head.flush().gradient
        got = session.compute(hidden.cuda(), labels.cuda(), returns=["log_sum_exp"], top_k=2)
        assert way_of(session) == way, f"went through {way_of(session)}, not {way}"
        for name in ("losses", "log_sum_exp", "top_log_probabilities", "dx"):
            assert getattr(got, name).is_cuda, f"{name} is not on the GPU"
            torch.testing.assert_close(getattr(got, name).cpu(), getattr(wanted, name), rtol=1e-2, atol=1e-5)
        out = torch.empty(given.vocab, given.hidden, device="cuda")
        head.flush(out)
        torch.testing.assert_close(out.cpu(), torch.from_numpy(dw), rtol=1e-2, atol=1e-5)
    logits = hidden[:256].float() @ weights.float().T
    reference = torch.nn.functional.cross_entropy(logits, labels[:256], reduction="none")
    torch.testing.assert_close(got.losses[:256].cpu(), reference, rtol=1e-3, atol=1e-3)
    client.delete_head("same")
    return "losses, dX and dW as from the host"


def in_order_of_streams(client: lossd.Client, given: argparse.Namespace, way: str) -> str:
    """Hidden states that a busy stream has yet to make, and a dX that is used at once: never a wrong value."""
    head, _ = make(client, "order", given)
    hidden, labels = batch(given, seed=2)
    device_hidden, labels = hidden.cuda(), labels.cuda()
    busy = torch.randn(4096, 4096, device="cuda")
    stream = torch.cuda.Stream()
    with head.open_session() as session:
        wanted = session.compute(hidden, labels.cpu(), mode="gradients").dx.cuda()
        torch.cuda.synchronize()
        for _ in range(20):
            with torch.cuda.stream(stream):
                for _ in range(20):
                    busy = torch.nn.functional.normalize(busy @ busy)
                made = torch.full_like(device_hidden, 7) + busy[0, 0] * 0
                made.copy_(device_hidden)
                twice = session.compute(made, labels).dx * 2
                made.fill_(7)
                del made
                difference = (twice - wanted * 2).abs().max()
            assert difference.item() <= wanted.abs().max().item() * 0.02, "a wait between streams is missing"
    client.delete_head("order", discard_gradient=True)
    return "dX in the order of the stream"


def futures_overlap(client: lossd.Client, given: argparse.Namespace, way: str) -> str:
    head, _ = make(client, "futures", given)
    batches = [tuple(one.cuda() for one in batch(given, seed)) for seed in range(4)]
    with head.open_session() as session:
        wanted = [session.compute(*one).dx for one in batches]
        torch.cuda.synchronize()
        futures = [session.compute_async(*batches[index % 4]) for index in range(12)]
        for index, future in enumerate(futures):
            other = torch.cuda.Stream()
            with torch.cuda.stream(other):  # complete in any stream
                torch.testing.assert_close(future.result().dx, wanted[index % 4], rtol=1e-2, atol=1e-5)
    client.delete_head("futures", discard_gradient=True)
    return "twelve futures in order"


def memory_stays(client: lossd.Client, given: argparse.Namespace, way: str) -> str:
    head, _ = make(client, "memory", given)
    hidden, labels = (one.cuda() for one in batch(given))
    with head.open_session() as session:
        for _ in range(5):
            session.compute(hidden, labels)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(50):
            session.compute(hidden, labels)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        assert torch.cuda.memory_allocated() <= before + (1 << 20), "memory of the GPU is not given back"
        assert peak < 4 * hidden.numel() * hidden.element_size() + (1 << 22), f"{peak} bytes at the peak"
    client.delete_head("memory", discard_gradient=True)
    return f"peak of the trainer's memory beyond the batch: {peak / 2**20:.1f} MiB"


def threads_go_on(client: lossd.Client, given: argparse.Namespace, way: str) -> str:
    head, _ = make(client, "threads", given)
    hidden, labels = (one.cuda() for one in batch(given))
    counted = 0
    with head.open_session() as session:
        session.compute(hidden, labels)
        done = threading.Event()

        def work() -> None:
            for _ in range(20):
                session.compute(hidden, labels)
            done.set()

        thread = threading.Thread(target=work)
        thread.start()
        while not done.is_set():
            counted += 1
            time.sleep(0.0005)
        thread.join()
    assert counted > 20, "other threads stood still"
    client.delete_head("threads", discard_gradient=True)
    return "other threads go on"


def time_of(client: lossd.Client, given: argparse.Namespace, way: str) -> str:
    head, _ = make(client, "time", given)
    hidden, labels = (one.cuda() for one in batch(given))
    times = []
    with head.open_session() as session:
        for _ in range(12):
            torch.cuda.synchronize()
            began = time.perf_counter()
            session.compute(hidden, labels, gradient_scale=1 / given.tokens)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
    client.delete_head("time", discard_gradient=True)
    times = sorted(times[2:])
    median, least, most = (1000 * one for one in (times[len(times) // 2], times[0], times[-1]))
    return f"{median:.2f} ms a batch (median of {len(times)}; {least:.2f} to {most:.2f})"


CHECKS: list[Check] = [
    same_as_from_the_host,
    in_order_of_streams,
    futures_overlap,
    memory_stays,
    threads_go_on,
    time_of,
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", help="the server; found as lossd.launch finds it by default")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--ways", nargs="+", choices=("regions", "pinned"), default=("regions", "pinned"))
    given = parser.parse_args()
    failed = 0
    for way in given.ways:
        with (
            lossd.launch("cuda:0", program=given.program, regions=way == "regions") as server,
            server.client() as client,
        ):
            for check in CHECKS:
                try:
                    said = check(client, given, way)
                except Exception as error:  # the others are still worth knowing
                    failed += 1
                    said = f"FAILED: {type(error).__name__}: {error}"
                print(f"{way:8} {check.__name__:22} {said}", flush=True)
    print(f"{len(given.ways) * len(CHECKS) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
