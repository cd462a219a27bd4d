"""lossd.aio: the same, as coroutines."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import numpy as np
import pytest

import lossd
import lossd.aio

V, H = 32, 16


def batch(tokens: int = 4, seed: int = 0) -> tuple[Any, Any]:
    random = np.random.default_rng(seed)
    return random.standard_normal((tokens, H), np.float32), random.integers(0, V, tokens)


def test_the_whole_way(server: lossd.Server) -> None:
    async def work() -> None:
        async with lossd.aio.connect(server.target) as client:
            assert (await client.status()).device == os.environ.get("LOSSD_TEST_DEVICE", "cpu")
            head = await client.create_head("aio", V, H, "float32", optimizer=lossd.SGD())
            assert await head.write_weights(np.zeros((V, H), np.float32)) == 1
            async with await head.open_session() as session:
                batches = [batch(seed=seed) for seed in range(5)]
                results = await asyncio.gather(*(session.compute(*one) for one in batches))
                assert [one.valid_tokens for one in results] == [4] * 5
                firsts = [one.first_sequences for one in results]
                assert firsts == sorted(firsts)  # in the order of the calls
                assert (await head.gradient_stats()).window_tokens == 20
                assert (await head.step(0.1)).window_tokens == 20
            assert tuple((await head.logits(batch()[0])).shape) == (4, V)
            assert (await head.discard()).window_tokens == 0
            write = await head.begin_write("w")
            await write.write_rows(0, np.ones((V, H), np.float32))
            assert await write.commit() == 3
            assert (await head.read_weights()).min() == 1
            assert (await head.logits(batch()[0])).shape == (4, V)
            assert (await (await client.head("aio")).flush()).rows == V
            await client.delete_head("aio")

    asyncio.run(work())


def test_errors_and_cancelling(server: lossd.Server) -> None:
    async def work() -> None:
        client = await lossd.aio.connect(server.target)
        with pytest.raises(lossd.NotFoundError):
            await client.head("nobody")
        head = await client.create_head("aio", V, H, "float32")
        await head.write_weights(np.zeros((V, H), np.float32))
        session = await head.open_session()
        with pytest.raises(TypeError, match="hidden"):
            await session.compute("text", [1])
        begun = asyncio.ensure_future(session.compute(*batch(100_000)))
        waiting = asyncio.ensure_future(session.compute(*batch(1000)))
        queue = session._executor._work_queue  # type: ignore[attr-defined]
        while queue.qsize() != 1:
            await asyncio.sleep(0)
        for task in (waiting, begun):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert (await session.compute(*batch())).valid_tokens == 4
        # What was under way counts, as documented, and the next call has waited for it; what was not does not.
        assert (await head.flush()).window_tokens == 100_004
        await session.close()
        await client.delete_head("aio")
        await client.close()

    asyncio.run(work())


def test_the_loop_goes_on_during_a_call(server: lossd.Server) -> None:
    async def work() -> int:
        async with lossd.aio.connect(server.target) as client:
            call = asyncio.ensure_future(client.status())
            turns = 0
            while not call.done():
                await asyncio.sleep(0)
                turns += 1
            await call
            return turns

    assert asyncio.run(work()) > 1
