"""Processes of tests, forked from one that has imported PyTorch: an interpreter of its own takes seconds for that."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import pickle
from collections.abc import Callable, Sequence
from multiprocessing.context import ForkServerContext
from typing import Any


def context() -> ForkServerContext:
    """Where processes of tests come from. Nothing that is imported there may start threads."""
    forkserver = multiprocessing.get_context("forkserver")
    forkserver.set_forkserver_preload(["torch.distributed.pipelining", "lossd.torch"])
    return forkserver


def _pickled(work: Callable[..., Any], arguments: tuple[Any, ...]) -> bytes:
    """Tensors by value: otherwise PyTorch lends memory of a process that ends."""
    return pickle.dumps(work(*arguments))


def in_processes(work: Callable[..., Any], arguments: Sequence[tuple[Any, ...]], timeout: float = 300) -> list[Any]:
    """work(*arguments) for each of `arguments`, at the same time in as many new processes; what they returned."""
    with concurrent.futures.ProcessPoolExecutor(len(arguments), context()) as pool:
        futures = [pool.submit(_pickled, work, each) for each in arguments]
        concurrent.futures.wait(futures, timeout, concurrent.futures.FIRST_EXCEPTION)
        ended = [future for future in futures if future.done()]
        errors = [error for error in (future.exception() for future in ended) if error]
        if errors or len(ended) < len(futures):
            # One that fails leaves the others waiting for it.
            for process in list(pool._processes.values()):
                process.kill()
            raise errors[0] if errors else TimeoutError(f"{work.__name__} takes more than {timeout} s")
        return [pickle.loads(future.result()) for future in futures]
