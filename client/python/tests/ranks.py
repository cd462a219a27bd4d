"""Processes of tests: ranks that live as long as the tests, and new ones."""

from __future__ import annotations

import datetime
import gc
import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
import torch


def _context() -> ForkServerContext:
    """Forks a process that has imported PyTorch, for which an interpreter takes seconds. Nothing that is imported there
    may start threads."""
    forkserver = multiprocessing.get_context("forkserver")
    forkserver.set_forkserver_preload(["torch.distributed.pipelining", "lossd.torch"])
    return forkserver


def in_a_process(work: Callable[..., Any], *arguments: Any) -> Any:
    """What work(*arguments) returns in a new process."""
    with _context().Pool(1) as pool:
        return pool.apply_async(work, arguments).get(timeout=300)


class Ranks:
    """Processes with a gloo group of the first two and one of all, which run what they are given.
    They may have processes of their own."""

    def __init__(self, size: int, store: Path) -> None:
        forkserver = _context()
        self._processes, self._pipes = [], []
        for rank in range(size):
            here, there = forkserver.Pipe()
            process = forkserver.Process(target=_serve, args=(there, rank, size, str(store)))
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


def _forget_groups(kept: set[Any]) -> None:
    """Each group has a thread that wakes up a hundred times a second: those of hundreds of tests take a processor."""
    import torch.distributed as dist

    gc.collect()
    for group in set(dist.distributed_c10d._world.pg_map) - kept:
        dist.destroy_process_group(group)


def _serve(pipe: Connection, rank: int, size: int, store: str) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    # A rank that fails leaves the other in a collective: not for ever.
    limit = datetime.timedelta(minutes=2)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=limit)
    groups = {count: dist.new_group(list(range(count))) for count in range(1, size + 1)}
    own = set(dist.distributed_c10d._world.pg_map)
    while True:
        try:
            work, count, arguments = pipe.recv()
        except EOFError:
            break
        _forget_groups(own)  # only now: all ranks have ended what came before
        try:
            pipe.send((work(rank, groups[count], *arguments), ""))
        except Exception:
            pipe.send((None, traceback.format_exc()))
    dist.destroy_process_group()
