"""Heads of the tests' server by their configuration, each made once."""

from __future__ import annotations

import itertools
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
        self._numbers = itertools.count()

    def __call__(self, **config: object) -> TestHead:
        """With the head's window empty, and in training, whatever a test before has made of it."""
        spec = HeadSpec(**config)  # type: ignore[arg-type]
        if spec not in self._heads:
            self._make_room()
            self._heads[spec] = TestHead(self._client, f"torch-{next(self._numbers)}", spec)
        head = self._heads[spec]
        head.remote.zero_grad()
        head.remote.train()
        return head

    def _make_room(self) -> None:
        """A deterministic session takes a tenth of the server's memory."""
        deterministic = [spec for spec in self._heads if spec.deterministic]
        if len(deterministic) > 2:
            oldest = self._heads.pop(deterministic[0]).remote
            oldest.close()
            self._client.delete_head(oldest.name, discard_gradient=True)


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
