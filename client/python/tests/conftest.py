"""One server and two ranks for all tests of a process; each test has heads of its own. LOSSD_TEST_DEVICE=cuda:0 puts
the server on a GPU."""

from __future__ import annotations

import importlib.util
import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import lossd

# TorchInductor compiles a kernel or two here: it needs neither a pool of processes nor headers compiled beforehand.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")

# The process that hands out tests reads the warnings of each worker in a thread of its own. Two threads that begin to
# import modules of one package at the same time may both get them in pieces, so it is there before.
if importlib.util.find_spec("torch") is not None:
    importlib.import_module("lossd.torch")

_numbers = itertools.count()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", default="1/1", help="K/N: every N-th test, beginning with the K-th")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part, parts = (int(number) for number in config.getoption("--part").split("/"))
    items[:] = items[part - 1 :: parts]


@pytest.fixture(scope="session")
def server() -> Iterator[lossd.Server]:
    device = os.environ.get("LOSSD_TEST_DEVICE", "cpu")
    limit = 1 << 30 if device == "cpu" else 4 << 30
    with lossd.launch(device, memory_limit_bytes=limit, args=["--parking_bytes=64MiB", "--max_heads=1000"]) as server:
        yield server
        assert server.stop() == 0, server.log()


@pytest.fixture(scope="session")
def client(server: lossd.Server) -> Iterator[lossd.Client]:
    with server.client() as client:
        yield client


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Two of them, on the CPU."""
    from ranks import Ranks

    started = Ranks(2, tmp_path_factory.mktemp("ranks") / "store")
    yield started
    started.stop()


@pytest.fixture
def make_head(client: lossd.Client) -> Iterator[Callable[..., lossd.Head]]:
    """make_head(vocab_size=32, hidden_size=16, dtype="float32", *, weights=..., **options): a head that is deleted
    afterwards, with weights (seeded random ones unless given; None: no weights)."""
    names: list[str] = []

    def make(
        vocab_size: int = 32, hidden_size: int = 16, dtype: str = "float32", *, weights: Any = "random", **options: Any
    ) -> lossd.Head:
        name = f"head-{next(_numbers)}"
        head = client.create_head(name, vocab_size, hidden_size, dtype, **options)
        names.append(name)
        if isinstance(weights, str):
            weights = np.random.default_rng(1).standard_normal((vocab_size, hidden_size), np.float32) * 0.3
        if weights is not None:
            bias = np.zeros(vocab_size, np.float32) if options.get("bias") else None
            head.write_weights(weights, bias)
        return head

    yield make
    for name in names:
        client.delete_head(name, discard_gradient=True)
