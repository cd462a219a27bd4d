"""What the tests of integrations have in common; the server is that of all tests."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections.abc import Iterator

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything of Hugging Face is imported

import pytest
import torch

import lossd

_numbers = itertools.count()


@pytest.fixture
def name(client: lossd.Client) -> Iterator[str]:
    """A head name that no other test has. Heads whose names begin with it are deleted afterwards."""
    name = f"integrations-{next(_numbers)}."
    yield name
    for head in client.heads():
        if head.config.name.startswith(name):
            with contextlib.suppress(lossd.NotFoundError):  # the copy of a model that was collected in this moment
                client.delete_head(head.config.name, discard_gradient=True)


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)
    # What accelerate knows of all Trainers of a process: one that an error ended was perhaps accumulating.
    accelerate = sys.modules.get("accelerate.state")
    if accelerate is not None:
        accelerate.GradientState()._set_sync_gradients(True)
