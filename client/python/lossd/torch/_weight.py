"""The weights of a head as a tensor that is not here."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map


class FetchedWeightsWarning(UserWarning):
    """Code of a trainer looked at values of RemoteHead.weight, which came over the wire for it."""


class RemoteTensor(torch.Tensor):
    """Read-only, without storage: shape, dtype and device are known, values are fetched from the server by every
    operation that needs them, which warns of the bytes (FetchedWeightsWarning). No gradient goes through it: an
    operation together with something that needs one is a RuntimeError, and so is every way of writing to it.

    An autograd.Function computes where gradients are off, so that nothing shows there whether one is wanted: with
    `in_training` every operation that needs values is such a RuntimeError, until detach()."""

    _fetch: Callable[[], torch.Tensor]
    label: str
    in_training = False

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
        if self.in_training:
            self.refuse_gradient()
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
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.is_grad_enabled():
            for one in tree_leaves((args, kwargs)):
                if isinstance(one, torch.Tensor) and not isinstance(one, cls) and one.requires_grad:
                    _first(cls, args, kwargs).refuse_gradient()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0].without_gradient()
        if func is torch.ops.aten.alias.default:
            return args[0]
        given = {**dict(zip((one.name for one in func._schema.arguments), args, strict=False)), **(kwargs or {})}
        for argument in func._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                for one in tree_leaves(given.get(argument.name)):
                    if isinstance(one, cls):
                        one.refuse()
        fetched: dict[int, torch.Tensor] = {}

        def unwrap(value: Any) -> Any:
            if not isinstance(value, cls):
                return value
            if id(value) not in fetched:
                fetched[id(value)] = value.fetch_for(func)
            return fetched[id(value)]

        return func(*tree_map(unwrap, args), **tree_map(unwrap, kwargs or {}))

    def refuse(self, *_: Any) -> Any:
        """RuntimeError, of whatever would write."""
        raise RuntimeError(f"{self.label} is read-only: write_weights() publishes other weights")

    def refuse_gradient(self) -> None:
        """RuntimeError, of whatever a gradient should go through."""
        raise RuntimeError(
            f"{self.label} is at a server, and a gradient through it would be lost: model.lm_head(hidden, labels) is "
            "the loss (a model of transformers: model(..., labels=labels).loss), and detach() says that no gradient is "
            "wanted"
        )

    def without_gradient(self) -> RemoteTensor:
        """The same tensor, of which nobody wants a gradient."""
        return RemoteTensor(tuple(self.shape), self.dtype, self.device, self.label, self._fetch)

    __setitem__ = refuse
    data = property(lambda self: self, refuse)
    grad = property(lambda self: None, refuse)

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        """RuntimeError: the head's parameter is another one."""
        raise RuntimeError(
            f"{self.label} is only a view: model.lm_head.requires_grad_({requires_grad}) is about the head's "
            "parameter, and frozen=True makes a head that is never trained"
        )

    requires_grad = property(lambda self: False, requires_grad_)


def _first(cls: type, args: Any, kwargs: Any) -> Any:
    return next(one for one in tree_leaves((args, kwargs)) if isinstance(one, cls))
