"""Copies of heads and moving averages, which the server makes by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import lossd
import lossd.aio

MakeHead = Callable[..., lossd.Head]
V, H = 32, 16


@pytest.fixture(autouse=True)
def _no_copies_are_left(client: lossd.Client) -> Iterator[None]:
    before = {head.config.name for head in client.heads()}
    yield
    for head in client.heads():
        if head.config.name not in before:
            client.delete_head(head.config.name, discard_gradient=True)


def random_weights(seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal((V, H), np.float32)


def test_a_snapshot_is_frozen_and_named_by_its_version(make_head: MakeHead) -> None:
    head = make_head(V, H, "bfloat16", weights=random_weights())
    head.write_weights(random_weights(1))
    snapshot = head.snapshot()
    assert snapshot.name == f"{head.name}.v2"
    assert snapshot.config.frozen and not snapshot.config.master_weights
    assert snapshot.info().weight_version == 2
    then = head.read_weights(dtype="bfloat16")
    head.write_weights(random_weights(2))
    assert np.array_equal(snapshot.read_weights(dtype="bfloat16"), then)
    with pytest.raises(lossd.AlreadyExistsError, match="give the copy another name"):
        head.snapshot(snapshot.name)
    with pytest.raises(lossd.FailedPreconditionError, match="source_version is 2; the weights of head"):
        head.snapshot("another", source_version=2)


def test_a_head_without_weights_has_no_snapshot(make_head: MakeHead) -> None:
    with pytest.raises(lossd.FailedPreconditionError, match="has no weights yet"):
        make_head(V, H, weights=None).snapshot()


def test_a_snapshot_has_the_version_that_its_name_says(make_head: MakeHead, monkeypatch: pytest.MonkeyPatch) -> None:
    head = make_head(V, H, weights=None)
    copy_head = lossd.Client.copy_head

    def written_before(*arguments: Any, **options: Any) -> lossd.Head:
        monkeypatch.undo()
        head.write_weights(random_weights())
        return copy_head(*arguments, **options)

    monkeypatch.setattr(lossd.Client, "copy_head", written_before)
    snapshot = head.snapshot()
    assert snapshot.name == f"{head.name}.v{snapshot.info().weight_version}"


def test_a_copy_trains_on_as_its_source(make_head: MakeHead) -> None:
    head = make_head(V, H, weights=random_weights(), optimizer=lossd.AdamW(lr=0.1))
    copy = head.client.copy_head(head.name, head.name + ".copy")
    assert copy.config.optimizer == head.config.optimizer
    hidden, labels = random_weights(3), np.arange(V) % V
    for one in (head, copy):
        with one.open_session() as session:
            session.compute(hidden, labels)
        one.step(lr=0.1)
    assert np.array_equal(copy.read_weights(), head.read_weights())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_average_follows_torch_lerp(make_head: MakeHead, dtype: str) -> None:
    import torch

    head = make_head(V, H, dtype, weights=random_weights(), master_weights=dtype != "float32")
    average = head.ema(0.75)
    assert average.head.name == head.name + ".ema"
    assert average.head.config.master_weights == (dtype != "float32")
    expected = torch.from_numpy(head.read_weights())
    for seed in range(1, 5):
        head.write_weights(random_weights(seed))
        assert average.update() == seed + 1
        expected = torch.lerp(expected, torch.from_numpy(head.read_weights()), 0.25)
        np.testing.assert_allclose(average.head.read_weights(), expected.numpy(), rtol=1e-6, atol=1e-6)
    average.decay = 0
    average.update()
    assert np.array_equal(average.head.read_weights(), head.read_weights())


def test_an_update_whose_fate_is_open_is_made_once(make_head: MakeHead, monkeypatch: pytest.MonkeyPatch) -> None:
    head = make_head(V, H, weights=np.zeros((V, H), np.float32))
    average = head.ema(0.5)
    head.write_weights(np.ones((V, H), np.float32))
    blend = lossd.Head.blend

    def answer_lost(*arguments: Any, **options: Any) -> int:
        blend(*arguments, **options)
        raise lossd.UnavailableError("the answer was lost")

    def call_lost(*_arguments: Any, **_options: Any) -> int:
        raise lossd.UnavailableError("the call was lost")

    for lost, version, weight in ((answer_lost, 2, 0.5), (call_lost, 3, 0.75)):
        with monkeypatch.context() as patched:
            patched.setattr(lossd.Head, "blend", lost)
            with pytest.raises(lossd.UnavailableError):
                average.update()
        assert average.update() == version
        assert np.all(average.head.read_weights() == weight)


def test_an_update_that_comes_about_behind_the_next_call_is_made_once(
    make_head: MakeHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update whose caller has given up waits at the server still, until after the next one has asked for it."""
    head = make_head(V, H, weights=np.zeros((V, H), np.float32))
    average = head.ema(0.5)
    head.write_weights(np.ones((V, H), np.float32))
    blend = lossd.Head.blend

    def given_up(*_arguments: Any, **_options: Any) -> int:
        raise lossd.DeadlineExceededError("nobody waits any more")

    def behind_it(*arguments: Any, **options: Any) -> int:
        blend(*arguments, **options)
        return blend(*arguments, **options)

    for stub in (given_up, behind_it):
        with monkeypatch.context() as patched:
            patched.setattr(lossd.Head, "blend", stub)
            if stub is given_up:
                with pytest.raises(lossd.DeadlineExceededError):
                    average.update()
            else:
                assert average.update() == 2
    assert np.all(average.head.read_weights() == 0.5)
    assert average.update() == 3
    assert np.all(average.head.read_weights() == 0.75)


def test_an_average_that_others_write_is_refused(make_head: MakeHead) -> None:
    head = make_head(V, H, weights=random_weights())
    average = head.ema(0.5)
    average.head.write_weights(random_weights(1))
    with pytest.raises(lossd.FailedPreconditionError, match="target_version is 1; the weights"):
        average.update()
    # After a restart one goes on with what is there.
    again = lossd.MovingAverage(head, head.client.head(average.head.name), 0.5)
    assert again.update() == 3
    with pytest.raises(lossd.AlreadyExistsError):
        head.ema(0.5)


@pytest.mark.parametrize("decay", [-0.1, 1.5, float("nan")])
def test_a_decay_is_between_0_and_1(make_head: MakeHead, decay: float) -> None:
    head = make_head(V, H, weights=random_weights())
    with pytest.raises(ValueError, match="decay is"):
        head.ema(decay)
    average = head.ema(0.5)
    with pytest.raises((ValueError, lossd.InvalidArgumentError), match="decay is"):
        average.update(decay)
    with pytest.raises(ValueError, match="the source itself"):
        lossd.MovingAverage(head, head, 0.5)
    assert average.update() == 2


def test_copies_for_asyncio(server: lossd.Server, make_head: MakeHead) -> None:
    head = make_head(V, H, weights=np.zeros((V, H), np.float32))

    async def run() -> None:
        async with lossd.aio.connect(server.target) as client:
            source = await client.head(head.name)
            snapshot = await source.snapshot()
            average = await source.ema(0.5)
            copy = await client.copy_head(head.name, head.name + ".copy")
            await source.write_weights(np.ones((V, H), np.float32))
            assert await average.update() == 2
            assert np.all(await average.head.read_weights() == 0.5)
            assert await copy.blend(source, 0.25) == 2
            assert np.all(await copy.read_weights() == 0.75)
            assert np.all(await snapshot.read_weights() == 0)

    asyncio.run(run())
