"""Two ranks that have Megatron-Core, on the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ranks import Ranks


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    started = Ranks(
        2, tmp_path_factory.mktemp("megatron") / "store", daemon=False
    )  # checkpoints are written by processes of theirs
    yield started
    started.stop()
