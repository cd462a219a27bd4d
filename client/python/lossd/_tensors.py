"""Tensors of the caller as pointers: NumPy arrays, PyTorch CPU tensors, and whatever NumPy can look at.

Nothing is copied that is dense already. PyTorch is never imported here: who has a tensor of it has imported it.
"""

from __future__ import annotations

import ctypes as c
import math
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

import lossd._structs as s

DTYPES = {"float32": s.LOSSD_FLOAT32, "bfloat16": s.LOSSD_BFLOAT16, "float16": s.LOSSD_FLOAT16}
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int32": 4, "int64": 8}
_NUMPY = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16, "int32": np.int32, "int64": np.int64}


def torch_of(value: object) -> Any:
    """The module torch if `value` is a tensor of it, else None."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and isinstance(value, torch.Tensor) else None


def is_on_device(value: object) -> bool:
    """Whether it is a tensor on a GPU."""
    return torch_of(value) is not None and value.device.type == "cuda"  # type: ignore[attr-defined]


def output_dtype(out: Any, field: str) -> str:
    """The dtype of an array that is written to; an array of uint16 is bfloat16."""
    name = _name_of_object(getattr(out, "dtype", None))
    return dtype_name("bfloat16" if name == "uint16" else name, field)


def dtype_name(dtype: object, field: str) -> str:
    """ "float32", "bfloat16" or "float16", of these names, torch.bfloat16, numpy.float16 and the like."""
    name = dtype if isinstance(dtype, str) else _name_of_object(dtype)
    if name not in DTYPES:
        raise ValueError(f"{field} is {dtype!r}; want one of {', '.join(DTYPES)}")
    return name


def _name_of_object(dtype: object) -> str:
    text = str(dtype)
    if text.startswith("torch."):
        return text.removeprefix("torch.")
    try:
        return np.dtype(dtype).name  # type: ignore[call-overload, no-any-return]
    except TypeError:
        return text


# Where empty tensors lie: a null pointer would stand for "not wanted".
_NOTHING = np.zeros(16, np.uint8)


@dataclass(frozen=True)
class View:
    """Dense memory in this process's address space; `array`, which owns it, must live as long as it is used."""

    pointer: int
    dtype: str
    shape: tuple[int, ...]
    array: Any

    @property
    def number(self) -> int:
        return DTYPES[self.dtype]


@dataclass(frozen=True)
class Kind:
    """What arrays are made as: like those that the caller gave."""

    torch: Any = None  # the module, or None for NumPy
    bfloat16: Any = np.uint16  # NumPy's type for it
    device: Any = None  # of torch; None: the CPU

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        if self.torch is not None:
            return self.torch.empty(shape, dtype=getattr(self.torch, dtype), device=self.device or "cpu")
        return np.empty(shape, self.bfloat16 if dtype == "bfloat16" else _NUMPY[dtype])


def kind_of(value: object) -> Kind:
    torch = torch_of(value)
    if torch is not None:
        return Kind(torch=torch, device=value.device)  # type: ignore[attr-defined]
    dtype = getattr(value, "dtype", None)
    return Kind(bfloat16=dtype if getattr(dtype, "name", "") == "bfloat16" else np.uint16)


def as_numpy(value: Any, field: str) -> np.ndarray[Any, Any]:
    """`value` as an array that shares its memory where that can be."""
    if isinstance(value, np.ndarray):
        return value
    try:
        if (
            hasattr(value, "__dlpack__")
            and not hasattr(value, "__array__")
            and not hasattr(value, "__array_interface__")
        ):
            return np.from_dlpack(value)
        array = np.asarray(value)
    except Exception as error:
        raise TypeError(f"{field} is a {type(value).__name__} that NumPy cannot look at: {error}") from error
    if array.dtype == object:
        raise TypeError(f"{field} is a {type(value).__name__}; want an array or a tensor")
    return array


def _torch_dense(value: Any, field: str, torch: Any) -> Any:
    if value.device.type != "cpu":
        raise ValueError(f"{field} is on {value.device}; want a tensor on the CPU here")
    if value.layout != torch.strided or value.is_nested:
        kind = "is a nested tensor" if value.is_nested else f"has layout {value.layout}"
        raise TypeError(f"{field} {kind}; want a dense tensor")
    return value.detach()


def torch_name(value: Any) -> str:
    return str(value.dtype).removeprefix("torch.")


def _view_of_torch(tensor: Any, field: str) -> View:
    """Its memory, or that of a dense copy: a negated view (torch's negative bit) has other numbers in memory, and a
    tensor that is known to be 0 (torch._efficientzerotensor) has none."""
    dense = tensor.resolve_neg().contiguous()
    known = dense._is_zerotensor()  # noqa: SLF001  (there is no public way)
    return _memory_of_torch(dense.clone() if known else dense, field)


def _memory_of_torch(tensor: Any, field: str) -> View:
    if tensor.numel() > 0 and (tensor.untyped_storage().device.type == "meta" or tensor.data_ptr() == 0):
        raise TypeError(f"{field} is a {type(tensor).__name__} without memory of its own; want a plain tensor")
    return View(tensor.data_ptr() or _NOTHING.ctypes.data, torch_name(tensor), tuple(tensor.shape), tensor)


def _view_of_numpy(array: np.ndarray[Any, Any], dtype: str) -> View:
    return View(array.ctypes.data if array.size else _NOTHING.ctypes.data, dtype, array.shape, array)


def require_float(name: str, field: str) -> None:
    if name not in DTYPES:
        raise TypeError(f"{field} has dtype {name}; want one of {', '.join(DTYPES)}")


def float_view(value: Any, field: str, dtype: object = None) -> View:
    """Dense floating-point memory of `value`, copied only if it is not dense. `dtype`: what an array of uint16 is of
    ("bfloat16"), otherwise what it has to be."""
    wanted = None if dtype is None else dtype_name(dtype, f"{field}'s dtype")
    torch = torch_of(value)
    if torch is not None:
        require_float(torch_name(value), field)
        view = _view_of_torch(_torch_dense(value, field, torch), field)
    else:
        array = np.ascontiguousarray(as_numpy(value, field))
        if not array.dtype.isnative:
            array = array.astype(array.dtype.newbyteorder("="))
        name = array.dtype.name
        if name == "uint16" and wanted == "bfloat16":
            name = "bfloat16"
        elif name == "uint16":
            raise TypeError(f'{field} has dtype uint16: say dtype "bfloat16" if these are its bits')
        require_float(name, field)
        shape = np.shape(as_numpy(value, field))
        view = _view_of_numpy(array.reshape(shape), name)
    if wanted is not None and view.dtype != wanted:
        raise TypeError(f"{field} has dtype {view.dtype}; want {wanted}")
    return view


def float32_view(value: Any, field: str, shape: tuple[int, ...]) -> View:
    """Numbers of the caller as dense fp32, converted if they are of another floating-point type or of integers."""
    torch = torch_of(value)
    if torch is not None:
        if value.is_complex():
            raise TypeError(f"{field} has dtype {value.dtype}; want real numbers")
        view = _view_of_torch(value.detach().to("cpu", torch.float32), field)
    else:
        array = as_numpy(value, field)
        if array.dtype.kind not in "fiu" and array.dtype.name != "bfloat16":
            raise TypeError(f"{field} has dtype {array.dtype}; want float32")
        view = _view_of_numpy(np.ascontiguousarray(array, np.float32).reshape(array.shape), "float32")
    require_shape(view, field, shape)
    return view


def label_view(value: Any, field: str = "labels") -> View:
    """Labels as dense int64; other integers that fit are converted."""
    torch = torch_of(value)
    if torch is not None:
        if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
            raise TypeError(f"{field} has dtype {value.dtype}; want integers (torch.int64)")
        wide = value.detach().to("cpu", torch.int64)
        if value.dtype == torch.uint64 and bool((wide < 0).any()):
            raise ValueError(f"{field} has values beyond int64")
        return _view_of_torch(wide, field)
    array = as_numpy(value, field)
    if array.size == 0 and not isinstance(value, np.ndarray):
        array = array.astype(np.int64)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{field} has dtype {array.dtype}; want integers (int64)")
    if array.dtype == np.uint64 and array.size and int(array.max()) > np.iinfo(np.int64).max:
        raise ValueError(f"{field} has the value {int(array.max())}, which is beyond int64")
    return _view_of_numpy(np.ascontiguousarray(array, np.int64).reshape(array.shape), "int64")


def token_view(value: Any, field: str) -> View:
    """Tokens of the vocabulary as dense int32; other integers that fit are converted."""
    wide = label_view(value, field)
    array = np.asarray(wide.array)
    limits = np.iinfo(np.int32)
    if array.size and (int(array.min()) < limits.min or int(array.max()) > limits.max):
        raise ValueError(f"{field} has values from {int(array.min())} to {int(array.max())}, which are beyond int32")
    return _view_of_numpy(array.astype(np.int32), "int32")


def output_view(value: Any, field: str, shape: tuple[int, ...], dtype: str) -> View:
    """Memory of the caller that is written to: dense, writable, of this shape and dtype."""
    torch = torch_of(value)
    if torch is not None:
        if value.device.type != "cpu" or value.layout != torch.strided:
            raise ValueError(f"{field} is on {value.device} with layout {value.layout}; want a dense tensor on the CPU")
        if value.is_neg():
            raise ValueError(f"{field} is a negated view (is_neg()); want memory of its own, as {field}.clone() has")
        dense, view = value.is_contiguous(), _memory_of_torch(value.detach(), field)
    elif isinstance(value, np.ndarray):
        if not value.flags.writeable:
            raise ValueError(f"{field} cannot be written to: the array is read-only")
        name = value.dtype.name if value.dtype.isnative else str(value.dtype)
        if name == "uint16" and dtype == "bfloat16":
            name = "bfloat16"
        dense, view = value.flags.c_contiguous, _view_of_numpy(value, name)
    else:
        raise TypeError(f"{field} is a {type(value).__name__}; want a NumPy array or a tensor to write to")
    if view.dtype != dtype:
        raise TypeError(f"{field} has dtype {view.dtype}; want {dtype}")
    require_shape(view, field, shape)
    if not dense:
        raise ValueError(f"{field} is not dense: what is written to must be contiguous (strides of shape {shape})")
    return view


def array_at(pointer: int, shape: tuple[int, ...], dtype: str, owner: object = None) -> Any:
    """The memory at `pointer` as an array, which keeps `owner` alive; bfloat16 as uint16."""
    memory: Any = (c.c_char * (token_count(shape) * ITEM_BYTES[dtype])).from_address(pointer)
    memory.owner = owner
    return np.frombuffer(memory, _NUMPY[dtype]).reshape(shape)


def require_shape(view: View, field: str, shape: tuple[int, ...]) -> None:
    if view.shape != shape:
        raise ValueError(f"{field} has shape {view.shape}; want {shape}")


def token_count(shape: tuple[int, ...]) -> int:
    return math.prod(shape)
