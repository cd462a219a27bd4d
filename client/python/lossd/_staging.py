"""Batches whose tensors are on a GPU, on their way to the server and back.

    caller's stream:  ... hidden is made ──┐                                ┌── dX may be used ...
    side stream:                           └ copy into the slot ─ ready     └ done ─ copy out of the slot
    thread:                                                       wait, compute, ─────┘

A slot is room for a batch's hidden states and dX: of a device region where the server runs on the same GPU (CUDA IPC:
the copies stay on the GPU and nothing is sent), otherwise pinned host memory. Everything goes through one side stream,
so that a slot is only overwritten once what was in it has been copied out. The caller's stream never waits for the
host, and the host waits for what it needs alone.
"""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import lossd._device as _device
import lossd._tensors as t
from lossd._batch import RETURNS, TOKEN_INPUTS, TOP, BatchOptions, TargetLists, prepare, result_of
from lossd.errors import LossdError, ResourceExhaustedError
from lossd.results import BatchResult

if TYPE_CHECKING:
    from lossd import _structs as s
    from lossd.client import Client
    from lossd.regions import Region

SLOTS = 2  # one batch is staged while another is computed
ALIGNMENT = 256
ROUNDING = 1 << 20

Run = Callable[["s.Batch", "s.Outputs"], "s.Result"]


def rounded(nbytes: int, to: int) -> int:
    return -(-max(nbytes, 1) // to) * to


@dataclass
class Slot:
    """`memory`: bytes, on the device in a region, or pinned on the host."""

    memory: Any
    region: Region | None = None

    def part(self, offset: int, shape: tuple[int, ...], dtype: str, torch: Any) -> Any:
        nbytes = t.token_count(shape) * t.ITEM_BYTES[dtype]
        return self.memory[offset : offset + nbytes].view(getattr(torch, dtype)).view(shape)

    def close(self) -> None:
        if self.region is not None:
            self.region.close()


class Staging:
    """The slots and the side stream of one session and one device. Thread-safe."""

    def __init__(self, client: Client, layer: _device.Layer, device: Any, torch: Any, *, regions: bool = True) -> None:
        self._client = client
        self.layer = layer
        self.device = device
        self.torch = torch
        self.stream = layer.new_stream(device)
        self._regions = regions  # until the server says that it cannot share its GPU's memory
        self._free: list[Slot] = []
        self._made = 0
        self._condition = threading.Condition()

    @property
    def uses_regions(self) -> bool:
        return self._regions

    def take(self, nbytes: int) -> Slot:
        """A slot of at least so many bytes, once one is free."""
        with self._condition:
            while not self._free and self._made == SLOTS:
                self._condition.wait()
            slot = self._free.pop() if self._free else None
            if slot is None:
                self._made += 1
        try:
            if slot is None or slot.memory.numel() < nbytes:
                old, slot = slot, None
                if old is not None:
                    self._discard(old)
                slot = self._new(rounded(nbytes, ROUNDING))
            return slot
        except BaseException:
            with self._condition:
                self._made -= 1
                self._condition.notify()
            raise

    def give(self, slot: Slot, *, usable: bool) -> None:
        """Not `usable`: the server may still be reading and writing it, after an error, so it is not used again."""
        with self._condition:
            if usable:
                self._free.append(slot)
            else:
                self._made -= 1
                self._discard(slot)
            self._condition.notify()

    def _discard(self, slot: Slot) -> None:
        """Once the copies from and to it are done: what was in a region is not there any more afterwards."""
        self.layer.wait(self.layer.record(self.stream))
        slot.close()

    def _new(self, nbytes: int) -> Slot:
        if self._regions:
            slot = self._new_in_region(nbytes)
            if slot is not None:
                return slot
        return Slot(self.layer.pinned((nbytes,), "uint8"))

    def _new_in_region(self, nbytes: int) -> Slot | None:
        try:
            region = self._client.create_region("device", nbytes)
        except ResourceExhaustedError:
            return None  # no room for this one
        except LossdError:
            self._regions = False  # no regions, another host, no GPU, another user
            return None
        memory = self.layer.region_memory(region, self.device)
        if memory is None:  # another GPU: the copy through the host is ours to make
            region.close()
            self._regions = False
            return None
        return Slot(memory, region)

    def close(self) -> None:
        with self._condition:
            slots, self._free = self._free, []
            self._made -= len(slots)
        for slot in slots:
            self._discard(slot)

    def __del__(self, _process_ends: Callable[[], bool] = sys.is_finalizing) -> None:
        if not _process_ends() and getattr(self, "_free", None):
            self.close()


@dataclass
class Staged:
    """A batch that is on its way into its slot."""

    staging: Staging
    slot: Slot
    hidden: t.View
    dx: t.View | None
    dx_tensors: tuple[Any, Any] | None  # in the slot, and where it goes
    labels: Any
    options: BatchOptions
    small: dict[str, tuple[Any, Any]]  # outputs: on the host, and where they go
    ready: Any
    current: Any
    keep: tuple[Any, ...]

    def cancel(self) -> None:
        """It is not going to be computed."""
        self.staging.give(self.slot, usable=True)

    def compute(self, run: Run, *, wait: bool) -> BatchResult:
        """`wait`: the outputs are complete when this returns; otherwise when the caller's stream comes to them."""
        staging, layer = self.staging, self.staging.layer
        usable = False
        try:
            layer.wait(self.ready)
            prepared = prepare(self.hidden, self.labels, t.Kind(torch=staging.torch), self.dx, self.options)
            result = run(prepared.batch, prepared.outputs)
            for host, target in self.small.values():
                layer.copy(target.detach(), host, staging.stream)
            if self.dx_tensors is not None:
                inside, outside = self.dx_tensors
                layer.copy(outside.detach(), inside, staging.stream)
            done = layer.record(staging.stream)
            if wait:
                layer.wait(done)
            else:
                layer.stream_wait(self.current, done)
            usable = True
        finally:
            staging.give(self.slot, usable=usable)
        arrays = {**prepared.arrays, **{name: target for name, (_, target) in self.small.items()}}
        if self.dx_tensors is not None:
            arrays["dx"] = self.dx_tensors[1]
        return result_of(result, arrays)


def _to_host(staging: Staging, value: Any) -> Any:
    """A copy of a small tensor, complete at `ready`; what is not on a device is left as it is."""
    if _device.layer_of(value) is None:
        return value
    if value.device != staging.device:  # of another GPU's stream, which `ready` does not wait for
        return value.detach().to("cpu")
    dtype = t.torch_name(value)
    host = staging.layer.pinned(tuple(value.shape), dtype)
    staging.layer.copy(host, value.detach(), staging.stream)
    return host


def _small_outputs(staging: Staging, leading: tuple[int, ...], options: BatchOptions) -> dict[str, tuple[Any, Any]]:
    """Host memory and destination of each output but dX; those that the caller wants on the host go there at once."""
    wanted = {options.returns} if isinstance(options.returns, str) else set(options.returns)
    shapes: dict[str, tuple[tuple[int, ...], str]] = {}
    if options.wanted("losses", options.losses):
        shapes["losses"] = (leading, "float32")
    shapes |= {name: (leading, dtype) for name, dtype in RETURNS.items() if name in wanted or name in options.out}
    if options.top_k:
        shapes |= {name: ((*leading, options.top_k), dtype) for name, dtype in TOP.items()}
    outputs = {}
    for name, (shape, dtype) in shapes.items():
        target = options.out.get(name)
        if target is None:
            target = staging.layer.empty(shape, dtype, staging.device)
        elif _device.layer_of(target) is None:
            continue
        elif target.device != staging.device:
            raise ValueError(f"out[{name!r}] is on {target.device}; want {staging.device}, where hidden is, or the CPU")
        elif tuple(target.shape) != shape or str(target.dtype) != f"torch.{dtype}":
            raise ValueError(
                f"out[{name!r}] has shape {tuple(target.shape)} of {target.dtype}; want {shape} of torch.{dtype}"
            )
        outputs[name] = (staging.layer.pinned(shape, dtype), target)
    return outputs


def _dx_target(staging: Staging, hidden: Any, options: BatchOptions) -> tuple[Any, str]:
    dtype = t.torch_name(hidden) if options.dx_dtype is None else t.dtype_name(options.dx_dtype, "dx_dtype")
    target = options.dx_array
    if target is None:
        return staging.layer.empty(tuple(hidden.shape), dtype, staging.device), dtype
    if t.torch_of(target) is None:
        raise TypeError(f"dx is a {type(target).__name__}; want a tensor on {hidden.device}, as hidden is")
    if target.device != hidden.device:
        raise ValueError(f"dx is on {target.device}; want {hidden.device}, where hidden is")
    if tuple(target.shape) != tuple(hidden.shape) or str(target.dtype) != f"torch.{dtype}":
        raise ValueError(
            f"dx has shape {tuple(target.shape)} of {target.dtype}; want {tuple(hidden.shape)} of torch.{dtype}"
        )
    return target, dtype


def stage(staging: Staging, hidden: Any, labels: Any, options: BatchOptions) -> Staged:
    """Begins to copy a batch into a slot, in the order of the caller's current stream."""
    layer, torch = staging.layer, staging.torch
    dtype = t.torch_name(hidden)
    t.require_float(dtype, "hidden")
    shape = tuple(hidden.shape)
    dx_target, dx_dtype = _dx_target(staging, hidden, options) if options.wants_dx else (None, dtype)
    small = _small_outputs(staging, shape[:-1], options)
    hidden_bytes = rounded(t.token_count(shape) * t.ITEM_BYTES[dtype], ALIGNMENT)
    dx_bytes = 0 if dx_target is None else t.token_count(shape) * t.ITEM_BYTES[dx_dtype]
    slot = staging.take(hidden_bytes + dx_bytes)
    try:
        current = layer.current_stream(staging.device)
        layer.stream_wait(staging.stream, layer.record(current))
        inside = slot.part(0, shape, dtype, torch)
        layer.copy(inside, hidden.detach(), staging.stream)
        host = {name: _to_host(staging, getattr(options, name)) for name in TOKEN_INPUTS}
        if options.kept_tokens is not None:
            host["kept_tokens"] = tuple(_to_host(staging, one) for one in options.kept_tokens)
        if isinstance(lists := options.target_lists, TargetLists):  # what is none is refused behind
            tensors = {name: _to_host(staging, getattr(lists, name)) for name in ("offsets", "ids", "probabilities")}
            host["target_lists"] = dataclasses.replace(lists, **tensors)
        if options.distillation is not None:
            teacher = _to_host(staging, options.distillation.hidden)
            host["distillation"] = dataclasses.replace(options.distillation, hidden=teacher)
        host_labels = _to_host(staging, labels)
        ready = layer.record(staging.stream)
    except BaseException:
        staging.give(slot, usable=True)
        raise
    base = slot.memory.data_ptr()
    dx = None if dx_target is None else t.View(base + hidden_bytes, dx_dtype, shape, slot)
    dx_tensors = None if dx_target is None else (slot.part(hidden_bytes, shape, dx_dtype, torch), dx_target)
    on_host = {name: one for name, one in options.out.items() if name not in small and name != "dx"}
    options = dataclasses.replace(
        options, **host, dx=False, losses=False,
        out={**on_host, **{name: one for name, (one, _) in small.items()}},
    )  # fmt: skip
    view = t.View(base, dtype, shape, slot)
    return Staged(staging, slot, view, dx, dx_tensors, host_labels, options, small, ready, current, (hidden, labels))
