"""One server for every test here; heads are told apart by name."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch

import lossd

_numbers = itertools.count()


@pytest.fixture(scope="session")
def server() -> Iterator[lossd.Server]:
    with lossd.launch(device="cpu") as server:
        yield server


@pytest.fixture(scope="session")
def client(server: lossd.Server) -> Iterator[lossd.Client]:
    with server.client() as client:
        yield client


@pytest.fixture
def name() -> str:
    """A head name that no other test has."""
    return f"integrations-{next(_numbers)}"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def seeded() -> Callable[[int], torch.Generator]:
    return lambda seed: torch.Generator().manual_seed(seed)
