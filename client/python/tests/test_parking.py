"""Heads that wait in the memory of the server's host while nobody uses them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import pytest

import lossd
import lossd.aio

MakeHead = Callable[..., lossd.Head]


def test_a_parked_head_comes_back_when_it_is_used(client: lossd.Client, make_head: MakeHead) -> None:
    head = make_head(32, 16, "bfloat16", master_weights=True)
    before = head.read_weights()
    parked = head.park()
    assert parked.parked_bytes == 32 * 16 * 4  # the master, of which the weights are made
    assert not parked.memory
    assert head.info() == parked == client.park_head(head.name)
    assert parked in client.heads()
    assert np.array_equal(head.read_weights(), before)
    assert head.info().parked_bytes == 0
    assert head.info().memory


def test_a_head_in_use_is_not_parked(make_head: MakeHead) -> None:
    head = make_head()
    with head.open_session(), pytest.raises(lossd.FailedPreconditionError, match="1 open session"):
        head.park()
    head.park()


def test_a_parked_head_trains_on(make_head: MakeHead) -> None:
    head = make_head(optimizer=lossd.SGD())
    hidden = np.ones((4, 16), np.float32)
    labels = np.arange(4)
    with head.open_session() as session:
        first = session.compute(hidden, labels).losses
    head.park()
    head.step(0.1)
    with head.open_session() as session:
        second = session.compute(hidden, labels).losses
    assert head.info().optimizer_steps == 1
    assert np.all(second != first)


def test_asyncio_parks_too(server: lossd.Server, make_head: MakeHead) -> None:
    name = make_head().name

    async def park() -> int:
        async with lossd.aio.connect(server.target) as client:
            head = await client.head(name)
            await client.park_head(name)
            return (await head.park()).parked_bytes

    assert asyncio.run(park()) == 32 * 16 * 4
