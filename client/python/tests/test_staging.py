"""Batches of a GPU, with a device of our own in its place: its copies happen when somebody waits for them, and never
earlier, so that a wait that is missing is seen in the values."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import lossd
import lossd.aio
from lossd import _device, _staging

MakeHead = Callable[..., lossd.Head]
V, H = 32, 16
GARBAGE = 7.0


class FakeStream:
    """Work that was put into it, in order; done up to an event when that is waited for."""

    def __init__(self) -> None:
        self.work: list[Callable[[], None]] = []
        self.done = 0

    def run(self, until: int) -> None:
        while self.done < until:
            self.done += 1
            self.work[self.done - 1]()


class FakeLayer:
    """_device.Layer over host memory."""

    def __init__(self) -> None:
        self.current = FakeStream()
        self.of_thread = threading.local()
        self.copies = 0
        self.pinned_bytes = 0

    def current_stream(self, device: Any) -> Any:
        """Other threads than the test's have one of their own, unless they are within another."""
        if threading.current_thread() is threading.main_thread():
            return self.current
        if not hasattr(self.of_thread, "stream"):
            self.of_thread.stream = FakeStream()
        return self.of_thread.stream

    @contextlib.contextmanager
    def within(self, stream: Any) -> Iterator[None]:
        before, self.of_thread.stream = self.current_stream(None), stream
        yield
        self.of_thread.stream = before

    def new_stream(self, device: Any) -> Any:
        return FakeStream()

    def record(self, stream: Any) -> Any:
        return stream, len(stream.work)

    def stream_wait(self, stream: Any, event: Any) -> None:
        stream.work.append(lambda: event[0].run(event[1]))

    def wait(self, event: Any) -> None:
        event[0].run(event[1])

    def copy(self, destination: Any, source: Any, stream: Any) -> None:
        self.copies += 1
        stream.work.append(lambda: destination.copy_(source))

    def empty(self, shape: tuple[int, ...], dtype: str, device: Any) -> Any:
        return on_device(torch.full(shape, GARBAGE).to(getattr(torch, dtype)))

    def pinned(self, shape: tuple[int, ...], dtype: str) -> Any:
        made = torch.empty(shape, dtype=getattr(torch, dtype))
        self.pinned_bytes += made.numel() * made.element_size()
        return made

    def region_memory(self, region: Any, device: Any) -> Any:
        return torch.from_numpy(region.array((region.nbytes // 4,))).view(torch.uint8)

    def finish(self) -> None:
        """As torch.cuda.synchronize of the caller's stream."""
        self.wait(self.record(self.current))


def on_device(tensor: Any) -> Any:
    tensor._is_fake_device = True
    return tensor


@pytest.fixture
def layer(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeLayer]:
    fake = FakeLayer()
    monkeypatch.setattr(_device, "layer_of", lambda one: fake if getattr(one, "_is_fake_device", False) else None)
    return fake


@pytest.fixture(params=["region", "pinned"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, client: lossd.Client) -> str:
    """Device regions, which are system regions here, or pinned memory, as the server on a CPU has it."""
    if client.status().device != "cpu":
        pytest.skip("the GPU stood in for here is there: cuda_check.py looks at it")
    if request.param == "region":
        create = type(client).create_region
        monkeypatch.setattr(type(client), "create_region", lambda self, kind, nbytes: create(self, "system", nbytes))
    return str(request.param)


def batch(layer: FakeLayer, *shape: int, seed: int = 0, dtype: Any = torch.float32) -> tuple[Any, ...]:
    """Hidden states that the caller's stream has yet to make, labels on the device, and both as they will be."""
    random = torch.Generator().manual_seed(seed)
    wanted = torch.randn(*shape, H, generator=random).to(dtype)
    labels = torch.randint(0, V, shape, generator=random)
    hidden, device_labels = on_device(torch.full_like(wanted, GARBAGE)), on_device(torch.full_like(labels, 1))
    layer.copy(hidden, wanted, layer.current)
    layer.copy(device_labels, labels, layer.current)
    return hidden, device_labels, wanted, labels


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_order_of_the_callers_stream(make_head: MakeHead, layer: FakeLayer, way: str, dtype: Any) -> None:
    head = make_head(V, H)
    with head.open_session() as session, head.open_session() as plain:
        for seed in range(4):
            hidden, labels, host_hidden, host_labels = batch(layer, 3, 5 + seed, seed=seed, dtype=dtype)
            wanted = plain.compute(host_hidden, host_labels, returns=["entropies"], top_k=2)
            got = session.compute(hidden, labels, returns=["entropies"], top_k=2)
            assert torch.all(got.dx == GARBAGE)  # not before the caller's stream comes to it
            layer.finish()
            assert got.loss == wanted.loss and got.dx.dtype == dtype
            for name in ("dx", "losses", "entropies", "top_tokens", "top_log_probabilities"):
                assert torch.equal(getattr(got, name), getattr(wanted, name)), name
                assert getattr(getattr(got, name), "_is_fake_device", False)
        (staging,) = session._stagings.values()
        assert staging.uses_regions == (way == "region")
    assert head.flush().window_tokens == 2 * sum(3 * (5 + seed) for seed in range(4))


def test_nothing_is_sent_from_regions(client: lossd.Client, make_head: MakeHead, layer: FakeLayer, way: str) -> None:
    head = make_head(V, H)
    with head.open_session() as session:
        session.compute(*batch(layer, 1)[:2])
        before = client.traffic()
        session.compute(*batch(layer, 512)[:2])
        after = client.traffic()
    sent = after.bytes_sent - before.bytes_sent
    assert (sent < 512 * H * 4) == (way == "region")


def test_futures(make_head: MakeHead, layer: FakeLayer, way: str) -> None:
    head = make_head(V, H)
    with head.open_session() as session, head.open_session() as plain:
        futures, wanted = [], []
        for seed in range(6):
            hidden, labels, host_hidden, host_labels = batch(layer, 8, seed=seed)
            layer.finish()  # FakeStream is for one thread at a time
            futures.append(session.compute_async(hidden, labels, dx_dtype="float16"))
            wanted.append(plain.compute(host_hidden, host_labels, dx_dtype="float16"))
        for future, one in zip(futures, wanted, strict=True):
            assert torch.equal(future.result().dx, one.dx)  # complete, without a wait for any stream
            assert torch.equal(future.result().losses, one.losses)


def test_tensors_of_the_caller(make_head: MakeHead, layer: FakeLayer, way: str) -> None:
    head = make_head(V, H)
    hidden, labels, host_hidden, host_labels = batch(layer, 6)
    weights = torch.rand(6)
    device_weights = on_device(torch.zeros(6))
    layer.copy(device_weights, weights, layer.current)
    dx, losses, lse = on_device(torch.zeros(6, H)), on_device(torch.zeros(6)), torch.zeros(6)
    with head.open_session() as session:
        wanted = session.compute(host_hidden, host_labels, token_weights=weights, returns=["log_sum_exp"])
        got = session.compute(
            hidden, host_labels, dx=dx, token_weights=device_weights, out={"losses": losses, "log_sum_exp": lse}
        )
        layer.finish()
        assert got.dx is dx and got.losses is losses and got.log_sum_exp is lse
        assert (
            torch.equal(dx, wanted.dx) and torch.equal(losses, wanted.losses) and torch.equal(lse, wanted.log_sum_exp)
        )
        only = session.compute(hidden, labels, mode="loss", losses=False)
        assert only.dx is None and only.losses is None and only.loss == wanted.loss_sum or only.valid_tokens == 6
        nothing = session.compute(on_device(torch.zeros(0, H)), on_device(torch.zeros(0, dtype=torch.int64)))
        assert nothing.dx.shape == (0, H) and nothing.loss == 0


def test_lists_of_the_caller(make_head: MakeHead, layer: FakeLayer, way: str) -> None:
    head = make_head(V, H)
    hidden, labels, host_hidden, host_labels = batch(layer, 6)
    offsets, probabilities = 2 * torch.arange(7), torch.tensor([0.5, 0.25]).repeat(6)
    ids = torch.stack([host_labels, (host_labels + 1) % V], dim=1).flatten()

    def there(host: torch.Tensor) -> Any:
        device = on_device(torch.zeros_like(host))
        layer.copy(device, host, layer.current)
        return device

    with head.open_session() as session:
        for lists in (
            {"kept_tokens": (offsets, ids)},
            {"target_lists": lossd.TargetLists(offsets, ids, probabilities, label_weight=0.5)},
        ):
            wanted = session.compute(host_hidden, host_labels, **lists)
            ((name, given),) = lists.items()
            if isinstance(given, tuple):
                staged = tuple(there(one) for one in given)
            else:
                staged = lossd.TargetLists(there(offsets), there(ids), there(probabilities), label_weight=0.5)
            got = session.compute(hidden, labels, **{name: staged})
            layer.finish()
            assert torch.equal(got.losses, wanted.losses) and torch.equal(got.dx, wanted.dx)


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"dx": torch.zeros(6, H).numpy()}, TypeError, "dx is a ndarray; want a tensor on"),
        ({"dx": torch.zeros(6, H, dtype=torch.float16)}, ValueError, "dx has shape .* of torch.float16"),
        ({"dx": torch.zeros(5, H)}, ValueError, r"dx has shape \(5, 16\)"),
        ({"labels": torch.zeros(5, dtype=torch.int64)}, ValueError, r"labels has shape \(5,\); want \(6,\)"),
        ({"labels": [1, 2, 3]}, ValueError, r"labels has shape \(3,\); want \(6,\)"),
        ({"labels": torch.zeros(6)}, TypeError, "labels has dtype torch.float32"),
        ({"labels": torch.full((6,), V)}, lossd.InvalidArgumentError, "32"),
        ({"returns": ["lse"]}, ValueError, "'lse'"),
        ({"token_weights": torch.zeros(5)}, ValueError, "token_weights has shape"),
        ({"target_lists": (torch.arange(7), torch.arange(6), torch.ones(6))}, TypeError, "target_lists is a tuple"),
    ],
)
def test_bad_input_gives_its_slot_back(
    make_head: MakeHead, layer: FakeLayer, way: str, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    head = make_head(V, H)
    with head.open_session() as session:
        for _ in range(_staging.SLOTS + 1):
            hidden, labels, _, _ = batch(layer, 6)
            arguments = {"labels": labels, **options}
            with pytest.raises(error, match=message):
                session.compute(hidden, **arguments)
        assert session.compute(*batch(layer, 6)[:2]).valid_tokens == 6
        with pytest.raises(TypeError, match="hidden has dtype float64"):
            session.compute(on_device(torch.zeros(6, H, dtype=torch.float64)), labels)


def test_slots_are_used_again(make_head: MakeHead, layer: FakeLayer, way: str) -> None:
    head = make_head(V, H)
    with head.open_session() as session:
        for seed in range(10):
            session.compute(*batch(layer, 8, seed=seed)[:2])
        (staging,) = session._stagings.values()
        assert staging._made == 1
    assert staging._made == 0


def test_outputs_survive_their_slots(
    make_head: MakeHead, layer: FakeLayer, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots that are too small, and those of a session that closes, go when what was in them has been copied out."""
    monkeypatch.setattr(_staging, "ROUNDING", 4096)
    head = make_head(V, H)
    results, wanted = [], []
    with head.open_session() as session, head.open_session() as plain:
        for tokens in (8, 200, 4000):
            hidden, labels, host_hidden, host_labels = batch(layer, tokens)
            results.append(session.compute(hidden, labels).dx)
            wanted.append(plain.compute(host_hidden, host_labels).dx)
    layer.finish()
    assert all(torch.equal(one, other) for one, other in zip(results, wanted, strict=True))


def test_cancelled_futures_give_their_slots_back(make_head: MakeHead, layer: FakeLayer, way: str) -> None:
    head = make_head(V, H)
    with head.open_session() as session:
        layer.finish()
        slow = session.compute_async(np.zeros((100_000, H), np.float32), np.zeros(100_000, int))
        for seed in range(3 * _staging.SLOTS):
            hidden, labels, _, _ = batch(layer, 8, seed=seed)
            layer.finish()
            assert session.compute_async(hidden, labels).cancel() or slow.done()
        slow.result()
        hidden, labels, _, _ = batch(layer, 8)
        layer.finish()
        assert session.compute_async(hidden, labels).result().valid_tokens == 8


def test_deterministic_sessions_do_not_use_regions(make_head: MakeHead, layer: FakeLayer, way: str) -> None:
    head = make_head(V, H)
    with head.open_session(deterministic=True) as session:
        session.compute(*batch(layer, 8)[:2])
        (staging,) = session._stagings.values()
        assert not staging.uses_regions and layer.pinned_bytes > 8 * H * 4


def test_coroutines_are_in_order_of_the_callers_stream(
    server: lossd.Server, make_head: MakeHead, layer: FakeLayer, way: str
) -> None:
    """Though the calls are made in other threads, whose streams know nothing of the caller's."""
    plain, head = make_head(V, H).open_session(), make_head(V, H)

    async def work() -> None:
        async with lossd.aio.connect(server.target) as client:
            async with await (await client.head(head.name)).open_session() as session:
                for seed in range(3):
                    hidden, labels, host_hidden, host_labels = batch(layer, 6, seed=seed)
                    dx = on_device(torch.zeros(6, H))
                    got = await session.compute(hidden, labels, dx=dx)
                    wanted = plain.compute(host_hidden, host_labels)
                    layer.finish()
                    assert torch.equal(got.dx, wanted.dx) and torch.equal(got.losses, wanted.losses)

    asyncio.run(work())
    plain.close()


class ElsewhereTensor(torch.Tensor):
    """On another GPU than hidden states are."""

    @property
    def device(self) -> Any:  # type: ignore[override]
        return torch.device("cuda", 1)


def elsewhere(tensor: Any) -> Any:
    return on_device(tensor.as_subclass(ElsewhereTensor))


def test_small_tensors_of_another_device(make_head: MakeHead, layer: FakeLayer, way: str) -> None:
    head = make_head(V, H)
    hidden, labels, host_hidden, host_labels = batch(layer, 6)
    weights = torch.rand(6)
    with head.open_session() as session:
        wanted = session.compute(host_hidden, host_labels, token_weights=weights)
        before = layer.copies
        session.compute(hidden, labels, token_weights=elsewhere(weights), dx=False, losses=False)
        assert layer.copies == before + 2  # hidden and labels; the event of another device's copy is never waited for
        got = session.compute(hidden, elsewhere(host_labels), token_weights=elsewhere(weights))
        layer.finish()
        assert torch.equal(got.dx, wanted.dx)
        with pytest.raises(ValueError, match=r"out\['losses'\] is on cuda:1; want cpu"):
            session.compute(hidden, labels, out={"losses": elsewhere(torch.zeros(6))})
