"""What the tests of integrations have in common; the server is that of all tests."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

_numbers = itertools.count()


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
