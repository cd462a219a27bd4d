"""The weights of a head as a tensor that is not here."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map


class FetchedWeightsWarning(UserWarning):
    """Code of a trainer looked at values of RemoteHead.weight, which came over the wire for it."""


class RemoteTensor(torch.Tensor):
    """Read-only, without storage: shape, dtype and device are known, values are fetched from the server by every
    operation that needs them, which warns of the bytes (FetchedWeightsWarning)."""

    _fetch: Callable[[], torch.Tensor]
    label: str

    @staticmethod
    def __new__(
        cls, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, label: str, fetch: Callable[[], Any]
    ) -> RemoteTensor:
        made: RemoteTensor = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        made._fetch, made.label = fetch, label
        return made

    def __init__(self, *_: Any) -> None:
        pass

    def fetch_for(self, reader: Any) -> torch.Tensor:
        """A new tensor with the values, for the operation `reader`."""
        warnings.warn(
            f"{reader} read {self.label}, which fetched {self.numel() * self.element_size():,} bytes from the server; "
            "RemoteHead.read_weights() does so without this warning",
            FetchedWeightsWarning,
            stacklevel=4,
        )
        return self._fetch()

    def __repr__(self, **_: Any) -> str:
        return f"{self.label}({list(self.shape)}, {self.dtype}, at the server)"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return args[0]
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if isinstance(value, cls) and argument.alias_info is not None and argument.alias_info.is_write:
                raise RuntimeError(f"{value.label} is read-only: write_weights() publishes other weights")
        fetched: dict[int, torch.Tensor] = {}

        def unwrap(value: Any) -> Any:
            if not isinstance(value, cls):
                return value
            if id(value) not in fetched:
                fetched[id(value)] = value.fetch_for(func)
            return fetched[id(value)]

        return func(*tree_map(unwrap, args), **tree_map(unwrap, kwargs or {}))
