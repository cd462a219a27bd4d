"""Heads for trainers, and ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from glue_support import HIDDEN, VOCAB, Ranks

from lossd.torch.head import RemoteHead


@pytest.fixture
def make_remote(make_head: Callable[..., Any]) -> Callable[..., RemoteHead]:
    """make_remote(optimizer=..., rank=..., ...): a RemoteHead [11, 6] in fp32 with random weights."""

    def make(vocab: int = VOCAB, hidden: int = HIDDEN, dtype: str = "float32", **options: Any) -> RemoteHead:
        remote = {name: options.pop(name) for name in ("rank", "client_key", "device") if name in options}
        return RemoteHead(make_head(vocab, hidden, dtype, **options), **remote)

    return make


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    started = Ranks(3, tmp_path_factory.mktemp("ranks") / "store")
    yield started
    started.stop()
