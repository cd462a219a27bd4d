"""Batches, and ranks that live as long as the tests."""

from __future__ import annotations

import signal
import subprocess
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import context

import lossd
from lossd.server import find_program
from lossd.torch.head import RemoteHead

VOCAB, HIDDEN = 11, 6


def batch(
    seed: int = 0, tokens: int = 8, vocab: int = VOCAB, hidden: int = HIDDEN
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden_states = torch.randn(tokens, hidden, generator=generator)
    return hidden_states, torch.randint(vocab, (tokens,), generator=generator)


def weights_of(head: RemoteHead) -> torch.Tensor:
    return head.read_weights(dtype=torch.float32)[0]


class Ranks:
    """Processes with a gloo group of the first 2 and one of all 3, which run what they are given."""

    def __init__(self, size: int, store: Path) -> None:
        forkserver = context()
        self._processes, self._pipes = [], []
        for rank in range(size):
            here, there = forkserver.Pipe()
            process = forkserver.Process(target=_serve, args=(there, rank, size, str(store)), daemon=True)
            process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)

    def run(self, work: Callable[..., Any], *arguments: Any, count: int = 2) -> list[Any]:
        """work(rank, group, *arguments) on `count` ranks; what they returned, by rank. Fails with the ranks'
        tracebacks."""
        for pipe in self._pipes[:count]:
            pipe.send((work, count, arguments))
        outcomes = [pipe.recv() for pipe in self._pipes[:count]]
        errors = [f"rank {rank}:\n{text}" for rank, (_, text) in enumerate(outcomes) if text]
        if errors:
            pytest.fail("\n".join(errors))
        return [answer for answer, _ in outcomes]

    def stop(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join()


def _serve(pipe: Connection, rank: int, size: int, store: str) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    groups = {count: dist.new_group(list(range(count))) for count in range(1, size + 1)}
    while True:
        try:
            work, count, arguments = pipe.recv()
        except EOFError:
            break
        try:
            pipe.send((work(rank, groups[count], *arguments), ""))
        except Exception:
            pipe.send((None, traceback.format_exc()))
    dist.destroy_process_group()


class Restartable:
    """A server with checkpoints that comes back at the same address."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.target = f"unix:{folder / 'socket'}"
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        flags = ["--device=cpu", f"--listen={self.target}", "--metrics_listen=", "--memory_limit_bytes=1073741824"]
        checkpoints = [f"--checkpoint_dir={self._folder / 'checkpoints'}", "--restore"]
        with open(self._folder / "log", "ab") as log:
            self.process = subprocess.Popen([str(find_program()), *flags, *checkpoints], stdout=log, stderr=log)
        try:
            lossd.connect(self.target).close()  # waits until it serves
        except lossd.LossdError as error:
            raise RuntimeError(f"{error}; its log:\n{(self._folder / 'log').read_text()}") from error

    def end(self, how: signal.Signals) -> None:
        """SIGTERM drains: what clients had lives on in the next one. SIGKILL does not."""
        assert self.process is not None
        self.process.send_signal(how)
        self.process.wait()
