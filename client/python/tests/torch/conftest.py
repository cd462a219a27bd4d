"""Heads of the tests' server by their configuration, each made once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from problem import HeadSpec, TestHead

import lossd


class Heads:
    def __init__(self, client: lossd.Client) -> None:
        self._client = client
        self._heads: dict[HeadSpec, TestHead] = {}

    def __call__(self, **config: object) -> TestHead:
        """With the head's window empty, and in training, whatever a test before has made of it."""
        spec = HeadSpec(**config)  # type: ignore[arg-type]
        if spec not in self._heads:
            self._heads[spec] = TestHead(self._client, f"torch-{len(self._heads)}", spec)
        head = self._heads[spec]
        head.remote.zero_grad()
        head.remote.train()
        return head


@pytest.fixture(scope="session")
def heads(client: lossd.Client) -> Heads:
    return Heads(client)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(7)


@dataclass(frozen=True)
class Pass:
    """One call of Session.compute: what it was for, and whether dX came back."""

    mode: str
    dx: bool


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[Pass]:
    """What has been sent since the test began, or since it was cleared."""
    made: list[Pass] = []
    compute = lossd.Session.compute

    def recorded(self: lossd.Session, *arguments: Any, **options: Any) -> Any:
        made.append(Pass(options["mode"], bool(options["dx"])))
        return compute(self, *arguments, **options)

    monkeypatch.setattr(lossd.Session, "compute", recorded)
    return made
