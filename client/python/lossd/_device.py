"""The streams, events and memory of a GPU, as far as batches need them, behind an interface that tests stand in for."""

from __future__ import annotations

import ctypes as c
import math
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import lossd._tensors as t

if TYPE_CHECKING:
    from lossd.regions import Region

ORDINAL_OF_POINTER = 9  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL


class Layer(Protocol):
    """Copies are asynchronous: ordered within their stream, and seen by the host after wait(event)."""

    def current_stream(self, device: Any) -> Any:
        """That of the calling thread."""

    def new_stream(self, device: Any) -> Any: ...

    def within(self, stream: Any) -> AbstractContextManager[Any]:
        """Makes it the calling thread's current stream."""

    def record(self, stream: Any) -> Any:
        """An event: everything that was put into the stream so far."""

    def stream_wait(self, stream: Any, event: Any) -> None:
        """Work that is put into the stream from now on runs after the event."""

    def wait(self, event: Any) -> None:
        """Blocks the calling thread alone."""

    def copy(self, destination: Any, source: Any, stream: Any) -> None: ...

    def empty(self, shape: tuple[int, ...], dtype: str, device: Any) -> Any:
        """Memory of the device, for use in the current stream."""

    def pinned(self, shape: tuple[int, ...], dtype: str) -> Any:
        """Host memory that the device copies from and to by itself."""

    def region_memory(self, region: Region, device: Any) -> Any:
        """A device region as bytes, or None if it is another device's."""


class CudaLayer:
    """Layer of PyTorch and CUDA."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch

    def current_stream(self, device: Any) -> Any:
        return self._torch.cuda.current_stream(device)

    def new_stream(self, device: Any) -> Any:
        return self._torch.cuda.Stream(device)

    def within(self, stream: Any) -> AbstractContextManager[Any]:
        made: AbstractContextManager[Any] = self._torch.cuda.stream(stream)
        return made

    def record(self, stream: Any) -> Any:
        event = self._torch.cuda.Event(blocking=True)  # the thread that waits sleeps
        event.record(stream)
        return event

    def stream_wait(self, stream: Any, event: Any) -> None:
        stream.wait_event(event)

    def wait(self, event: Any) -> None:
        event.synchronize()

    def copy(self, destination: Any, source: Any, stream: Any) -> None:
        with self._torch.cuda.stream(stream):
            destination.copy_(source, non_blocking=True)

    def empty(self, shape: tuple[int, ...], dtype: str, device: Any) -> Any:
        return self._torch.empty(shape, dtype=getattr(self._torch, dtype), device=device)

    def pinned(self, shape: tuple[int, ...], dtype: str) -> Any:
        return self._torch.empty(shape, dtype=getattr(self._torch, dtype), device="cpu", pin_memory=True)

    def region_memory(self, region: Region, device: Any) -> Any:
        if ordinal_of(region.pointer) != device.index:
            return None
        return device_tensor(region.pointer, (region.nbytes,), "uint8", region, device)


def layer_of(value: object) -> Layer | None:
    """The layer of a tensor on a GPU; None for everything else."""
    torch = t.torch_of(value)
    return CudaLayer(torch) if torch is not None and t.is_on_device(value) else None


def streams_of(values: Iterable[Any]) -> list[tuple[Layer, Any]]:
    """The calling thread's current stream on each GPU that has a tensor among `values`."""
    streams: dict[Any, tuple[Layer, Any]] = {}
    for value in values:
        layer = layer_of(value)
        if layer is not None and value.device not in streams:
            streams[value.device] = layer, layer.current_stream(value.device)
    return list(streams.values())


def ordinal_of(pointer: int) -> int:
    """The number of the GPU whose memory it is, as CUDA counts in this process; -1 if the driver does not say."""
    try:
        driver = c.CDLL("libcuda.so.1")
    except OSError:
        return -1
    ordinal = c.c_int(-1)
    failed = driver.cuPointerGetAttribute(c.byref(ordinal), c.c_int(ORDINAL_OF_POINTER), c.c_uint64(pointer))
    return -1 if failed else ordinal.value


class _CudaArray:
    """What PyTorch makes a tensor of without copying; the tensor keeps it, and it keeps the memory's owner."""

    def __init__(self, pointer: int, nbytes: int, owner: object) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "data": (pointer, False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "strides": None,
            "version": 3,
        }


def device_tensor(pointer: int, shape: tuple[int, ...], dtype: str, owner: object, device: Any = None) -> Any:
    """Device memory at `pointer` as a PyTorch tensor that keeps `owner` alive."""
    import torch

    if device is None:
        device = torch.device("cuda", ordinal_of(pointer))
    element = getattr(torch, dtype)
    nbytes = math.prod(shape) * element.itemsize
    flat: Any = torch.as_tensor(_CudaArray(pointer, nbytes, owner), device=device)
    return flat.view(element).view(shape)
