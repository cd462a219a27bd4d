"""Memory that this process and a server on the same host share."""

from __future__ import annotations

from typing import Any

import numpy as np

import lossd._tensors as t
from lossd._arguments import integer
from lossd._handles import Handle
from lossd._library import library


class Region:
    """Made by Client.create_region. Batches whose hidden states and dX lie in it are not sent: Session.compute finds
    out by itself. Tensors in it must begin at multiples of 16 bytes and must not overlap; leave them alone while
    compute runs. A context manager, which closes it: no array of it may be used after that.
    """

    def __init__(self, pointer: int | None, kind: str) -> None:
        self._handle = Handle(pointer, "lossd_region_free", "this region")
        self._kind = kind
        with self._handle as region:
            self._data = int(library().function("lossd_region_data")(region))
            self._size = int(library().function("lossd_region_size")(region))

    @property
    def kind(self) -> str:
        """ "system" or "device"."""
        return self._kind

    @property
    def nbytes(self) -> int:
        return self._size

    @property
    def pointer(self) -> int:
        """Aligned to a page; of a device region an address in device memory."""
        return self._data

    def array(self, shape: tuple[int, ...], dtype: Any = "float32", *, offset: int = 0) -> Any:
        """A part of a system region as a NumPy array (bfloat16 as uint16) that must not outlive it."""
        if self._kind != "system":
            raise ValueError("a device region has no NumPy arrays; use tensor")
        name = t.dtype_name(dtype, "dtype")
        address = self._part(offset, t.token_count(tuple(shape)) * t.ITEM_BYTES[name])
        return t.array_at(address, tuple(shape), name, self)

    def tensor(self, shape: tuple[int, ...], dtype: Any = "float32", *, offset: int = 0) -> Any:
        """A part of the region as a PyTorch tensor, on the CPU or, of a device region, on its GPU."""
        import torch

        name = t.dtype_name(dtype, "dtype")
        if self._kind == "device":
            from lossd._device import device_tensor

            address = self._part(offset, t.token_count(tuple(shape)) * t.ITEM_BYTES[name])
            return device_tensor(address, tuple(shape), name, self)
        tensor = torch.from_numpy(self.array(shape, name, offset=offset))
        return tensor.view(torch.bfloat16) if name == "bfloat16" else tensor

    def _part(self, offset: int, nbytes: int) -> int:
        begin = integer(offset, "offset")
        if nbytes > self._size - begin:
            raise ValueError(f"{nbytes} bytes from offset {begin} on are not in a region of {self._size} bytes")
        return self._data + begin

    def copy_in(self, data: Any, *, offset: int = 0) -> None:
        """Copies an array into the region. For programs that have no CUDA of their own; blocking."""
        array = np.ascontiguousarray(data)
        with self._handle as region:
            library().call("lossd_region_copy_in", region, integer(offset, "offset"), array.ctypes.data, array.nbytes)

    def copy_out(self, out: np.ndarray[Any, Any], *, offset: int = 0) -> None:
        """Copies from the region into a dense array."""
        if not (out.flags.c_contiguous and out.flags.writeable):
            raise ValueError("out must be a dense array that can be written to")
        with self._handle as region:
            library().call("lossd_region_copy_out", region, integer(offset, "offset"), out.ctypes.data, out.nbytes)

    def close(self) -> None:
        """The server frees the memory once no chunk uses it."""
        self._handle.close()

    def __enter__(self) -> Region:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()
