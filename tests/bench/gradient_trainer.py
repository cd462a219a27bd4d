"""What gradient_options.py measures with: a trainer, the server's heads, what is sent to them, and whether answers are right."""
from __future__ import annotations

import argparse
import ctypes
import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch

import lossd

DISTINCT = 4  # micro-batches of different content in a window
LAYERS = 8  # of the trainer's stage
ALIGNMENT = 256


def rounded(number: int, to: int) -> int:
    return -(-number // to) * to


# The trainer


@dataclass(frozen=True)
class Size:
    tokens: int
    vocab: int
    hidden: int

    def head_flop(self) -> float:
        """The head's own, in a micro-batch."""
        return 6.0 * self.tokens * self.vocab * self.hidden


@dataclass
class MicroBatch:
    hidden: torch.Tensor  # on the host
    labels: torch.Tensor
    on_device: torch.Tensor | None = None  # the hidden states of a trainer on the server's device


@dataclass
class Slot:
    """Memory of a micro-batch that is under way."""

    dx: torch.Tensor
    losses: torch.Tensor
    hidden: torch.Tensor | None = None  # where a trainer on the server's device puts them; otherwise they are where they are


class Elsewhere:
    """A trainer whose passes are another GPU's: it sleeps."""

    def __init__(self, size: Size, ratio: float, tflops: float):
        self.flop = ratio * size.head_flop()
        self.forward_seconds = self.flop / 3 / (tflops * 1e12)
        self.backward_seconds = 2 * self.forward_seconds

    def forward(self, _batch: MicroBatch, _slot: Slot) -> None:
        time.sleep(self.forward_seconds)

    def backward(self, _slot: Slot) -> None:
        time.sleep(self.backward_seconds)


class Here:
    """A trainer on the server's device. Each pass is over before the next is chosen, so that the server's work goes between them."""

    def __init__(self, size: Size, ratio: float, device: torch.device):
        step = 64 if device.type == "cuda" else 8
        width = max(step, round(math.sqrt(ratio * size.vocab * size.hidden / LAYERS) / step) * step)
        self.flop = 3 * LAYERS * 2.0 * size.tokens * width * width
        self._device = device
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._weights = torch.randn(LAYERS, width, width, device=device).mul_(width**-0.5).to(dtype)
        self._x, self._y = (torch.randn(size.tokens, width, device=device).to(dtype) for _ in range(2))
        self._dx = torch.empty(size.tokens, size.hidden, dtype=torch.bfloat16, device=device)
        times = [self._alone(1) for _ in range(6)]
        self.forward_seconds = statistics.median(times[1:])
        self.backward_seconds = statistics.median([self._alone(2) for _ in range(5)])

    def forward(self, batch: MicroBatch, slot: Slot) -> None:
        self._products(1)
        if slot.hidden is not None:
            assert batch.on_device is not None
            slot.hidden.copy_(batch.on_device, non_blocking=True)
        self._wait()

    def backward(self, slot: Slot) -> None:
        self._dx.copy_(slot.dx, non_blocking=True)
        self._products(2)
        self._wait()

    def _products(self, passes: int) -> None:
        for _ in range(passes):
            for weight in self._weights:
                torch.mm(self._x, weight, out=self._y)
                self._x, self._y = self._y, self._x

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _alone(self, passes: int) -> float:
        self._wait()
        began = time.perf_counter()
        self._products(passes)
        self._wait()
        return time.perf_counter() - began


Trainer = Elsewhere | Here


class Lane:
    """A session, the thread that waits for its answers, and a slot for each of its micro-batches that are under way."""

    def __init__(self, session: lossd.Session, slots: list[Slot], scale: float, *, ipc: bool = False):
        self._session = session
        self._scale = scale
        self._ipc = ipc
        self._stream = torch.cuda.Stream(slots[0].dx.device) if ipc else None
        self._thread = ThreadPoolExecutor(1)
        self.slots = slots
        self._turn = 0

    def take(self) -> Slot:
        self._turn += 1
        return self.slots[self._turn % len(self.slots)]

    def send(self, batch: MicroBatch, slot: Slot) -> Future[float]:
        """When it was answered."""
        return self._thread.submit(self._compute, batch, slot)

    def _compute(self, batch: MicroBatch, slot: Slot) -> float:
        if self._stream is not None:
            with torch.cuda.stream(self._stream):
                self._session.compute(batch.on_device, batch.labels, dx=slot.dx, gradient_scale=self._scale, out={"losses": slot.losses})
                self._stream.synchronize()
            return time.perf_counter()
        hidden = batch.hidden if slot.hidden is None else slot.hidden
        self._session.compute(hidden, batch.labels, dx=slot.dx, gradient_scale=self._scale, out={"losses": slot.losses})
        return time.perf_counter()

    def close(self) -> None:
        self._thread.shutdown(wait=True)
        self._session.close()


def run_window(trainer: Trainer | None, lanes: list[Lane], batches: list[MicroBatch], under_way: int,
               look: Callable[[int, Slot], None] | None = None) -> list[float]:
    """A step's micro-batches: a backward pass as soon as its dX is there, otherwise the next forward pass, if it may be under way.
    Returns when each was answered."""
    answered: list[float] = []
    waiting: deque[tuple[Future[float], Slot]] = deque()
    begun = 0
    while begun < len(batches) or waiting:
        full = begun == len(batches) or len(waiting) == under_way
        if waiting and (full or waiting[0][0].done()):
            future, slot = waiting[0]
            answered.append(future.result())
            if look is not None:
                look(len(answered) - 1, slot)
            if trainer is not None:
                trainer.backward(slot)
            waiting.popleft()
        else:
            lane = lanes[begun % len(lanes)]
            slot = lane.take()
            if trainer is not None:
                trainer.forward(batches[begun], slot)
            elif slot.hidden is not None:
                assert batches[begun].on_device is not None
                slot.hidden.copy_(batches[begun].on_device)
            waiting.append((lane.send(batches[begun], slot), slot))
            begun += 1
    return answered


# The server


@dataclass
class World:
    """One server, its two heads, and what is sent to them."""

    options: argparse.Namespace
    size: Size
    device: torch.device
    client: lossd.Client
    heads: dict[str, lossd.Head] = field(default_factory=dict)
    windows: list[list[MicroBatch]] = field(default_factory=list)  # of two contents, of host memory
    in_region: list[list[MicroBatch]] = field(default_factory=list)  # the same in a region
    notes: list[str] = field(default_factory=list)
    weights: torch.Tensor | None = None  # on the host
    region: lossd.Region | None = None
    page_locked: bool = False  # the region, in this process
    used: int = 0

    def batches(self, window: int, count: int, path: str) -> list[MicroBatch]:
        distinct = (self.in_region if path == "region" else self.windows)[window % 2]
        return [distinct[index % DISTINCT] for index in range(count)]

    def region_tensor(self, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        assert self.region is not None
        tensor = self.region.tensor(shape, dtype, offset=self.used)
        self.used += rounded(tensor.numel() * tensor.element_size(), ALIGNMENT)
        return tensor

    def lock_region(self) -> None:
        """Copies between it and the device need not wait then. By the driver's call: where that fails, PyTorch is not told."""
        assert self.region is not None
        memory, nbytes = ctypes.c_void_p(self.region.pointer), ctypes.c_size_t(self.region.nbytes)
        failed = ctypes.CDLL("libcuda.so.1").cuMemHostRegister_v2(memory, nbytes, ctypes.c_uint(0))
        self.page_locked = failed == 0
        if failed:
            self.notes.append(f"the region is not page-locked in the trainer (error {failed}): its copies are slower")

    def unlock_region(self) -> None:
        if self.page_locked and self.region is not None:
            torch.cuda.synchronize(self.device)
            ctypes.CDLL("libcuda.so.1").cuMemHostUnregister(ctypes.c_void_p(self.region.pointer))
            self.page_locked = False

    def lanes(self, head: str, path: str, sessions: int, under_way: int, scale: float, *, from_device: bool, stack: ExitStack) -> list[Lane]:
        shape = (self.size.tokens, self.size.hidden)
        lanes = []
        each = -(-under_way // sessions)
        for _ in range(sessions):
            slots = []
            for _ in range(each):
                if path == "ipc":
                    slots.append(Slot(torch.empty(shape, dtype=torch.bfloat16, device=self.device), torch.empty(shape[0])))
                elif path == "region":
                    hidden = self.region_tensor(shape, "bfloat16") if from_device else None
                    slots.append(Slot(self.region_tensor(shape, "bfloat16"), torch.empty(shape[0]), hidden))
                else:
                    slots.append(Slot(torch.empty(shape, dtype=torch.bfloat16), torch.empty(shape[0])))
            lane = Lane(self.heads[head].open_session(), slots, scale, ipc=path == "ipc")
            stack.callback(lane.close)
            lanes.append(lane)
        return lanes


def fill(world: World) -> None:
    """Weights, hidden states and labels, and a region with the same."""
    size, device = world.size, world.device
    generator = torch.Generator(device=device).manual_seed(1)
    weights = (torch.randn(size.vocab, size.hidden, device=device, generator=generator) / size.hidden**0.5).to(torch.bfloat16)
    for head in world.heads.values():
        head.write_weights(weights)
    world.weights = weights.cpu()
    del weights
    shape = (size.tokens, size.hidden)
    micro_batch_bytes = rounded(2 * size.tokens * size.hidden, ALIGNMENT)
    slots = 2 * 2 * world.options.under_way  # hidden states and dX, of two heads
    nbytes = (2 * DISTINCT + slots) * micro_batch_bytes
    world.region = world.client.create_region("system", nbytes)
    if device.type == "cuda":
        world.lock_region()
    for _ in range(2):
        window, in_region = [], []
        for _ in range(DISTINCT):
            on_device = torch.randn(shape, device=device, generator=generator).to(torch.bfloat16)
            labels = torch.randint(size.vocab, (size.tokens,), device=device, generator=generator).cpu()
            hidden = on_device.cpu().clone()
            window.append(MicroBatch(hidden, labels, on_device))
            shared = world.region_tensor(shape, "bfloat16")
            shared.copy_(hidden)
            in_region.append(MicroBatch(shared, labels, on_device))
        world.windows.append(window)
        world.in_region.append(in_region)
    if device.type == "cuda":
        torch.cuda.empty_cache()


def create_heads(world: World) -> None:
    size = world.size
    common: dict[str, Any] = {"dtype": "bfloat16", "optimizer": lossd.SGD()}
    for name, double_buffer in (("plain", False), ("double_buffer", True)):
        world.heads[name] = world.client.create_head(name, size.vocab, size.hidden, double_buffer=double_buffer, **common)


# Are the results the same?


def _difference(got: torch.Tensor, wanted: torch.Tensor, device: torch.device) -> float:
    """Relative, of Frobenius norms; in pieces, since they may have gigabytes."""
    apart = whole = 0.0
    for one, other in zip(got.flatten().split(1 << 26), wanted.flatten().split(1 << 26), strict=True):
        one, other = one.to(device).float(), other.to(device).float()
        apart += float((one - other).double().square().sum())
        whole += float(other.double().square().sum())
    return math.sqrt(apart / whole) if whole > 0 else math.inf


@dataclass
class Window:
    losses: list[torch.Tensor] = field(default_factory=list)
    dx: list[torch.Tensor] = field(default_factory=list)
    dw: torch.Tensor | None = None
    tokens: int = 0

    def note(self, _index: int, slot: Slot) -> None:
        self.losses.append(slot.losses.clone())
        self.dx.append(slot.dx.clone())


def begin_flush(head: lossd.Head, out: torch.Tensor, thread: ThreadPoolExecutor,
                 upload: torch.Tensor | None = None) -> tuple[threading.Event, Future[tuple[lossd.FlushResult, float]]]:
    """The flush, under way in its thread, and then the write of what is to be uploaded. The event: the window is frozen, or never
    will be. The future: when all was read."""
    frozen = threading.Event()

    def flush() -> tuple[lossd.FlushResult, float]:
        try:
            result = head.flush(out, on_frozen=frozen.set, commit=False)
            read = time.perf_counter()
            head.commit_flush(result.flush_id)
            if upload is not None:
                head.write_weights(upload)
            return result, read
        finally:
            frozen.set()

    return frozen, thread.submit(flush)


def check(world: World) -> dict[str, dict[str, float]]:
    """Both contents, through each head, with the second one sent while the first is flushed."""
    found: dict[str, dict[str, float]] = {}
    results: dict[str, list[Window]] = {}
    count = DISTINCT
    scale = 1.0 / (count * world.size.tokens)
    for name, head in world.heads.items():
        with ExitStack() as stack:
            thread = stack.enter_context(ThreadPoolExecutor(1))
            lanes = world.lanes(name, "socket", 1, 1, scale, from_device=False, stack=stack)
            windows = [Window(), Window()]
            run_window(None, lanes, world.batches(0, count, "socket"), 1, windows[0].note)
            for index, window in enumerate(windows):
                out = torch.empty(world.size.vocab, world.size.hidden)
                frozen, flushed = begin_flush(head, out, thread)
                frozen.wait()
                if index == 0:
                    run_window(None, lanes, world.batches(1, count, "socket"), 1, windows[1].note)
                result, _ = flushed.result()
                window.dw, window.tokens = out, result.window_tokens
            results[name] = windows
    for name, windows in results.items():
        if name == "plain":
            continue
        worst = {"losses": 0.0, "dx": 0.0, "dw": 0.0}
        for got, wanted in zip(windows, results["plain"], strict=True):
            if not got.tokens == wanted.tokens == count * world.size.tokens:
                worst["dw"] = math.inf
            for what in ("losses", "dx"):
                pairs = zip(getattr(got, what), getattr(wanted, what), strict=True)
                worst[what] = max([worst[what], *(_difference(one, other, world.device) for one, other in pairs)])
            assert got.dw is not None and wanted.dw is not None
            worst["dw"] = max(worst["dw"], _difference(got.dw, wanted.dw, world.device))
        found[name] = worst
    # That the comparison sees anything: the two windows are of different content.
    first, second = results["plain"]
    assert first.dw is not None and second.dw is not None
    if _difference(first.dw, second.dw, world.device) < 0.01:
        raise AssertionError("two windows of different content have the same gradient")
    return found
