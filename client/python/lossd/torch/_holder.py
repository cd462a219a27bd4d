"""What modules have in common that hold a head's parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lossd.torch._moved import KEEP_OUT
from lossd.torch._proxy import GradientProxy


class ProxyHolder(nn.Module):
    """A module with a GradientProxy as `proxy`, which stays what it is: to(), cuda() and half() move its device and
    nothing else, and nobody replaces it."""

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        proxy = self._parameters.get("proxy")
        if not isinstance(proxy, GradientProxy):
            return super()._apply(fn, recurse)
        device = fn(torch.zeros(1, dtype=torch.float32, device=proxy.device)).device
        if device.type == "meta":
            raise RuntimeError(f"head '{proxy.head.name}' cannot go to the meta device: its values are at a server")
        if device != proxy.device:
            proxy.data = proxy.data.to(device)
            proxy.forget()
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "proxy":
            self._keep_proxy(value)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if name == "proxy":  # as FSDP1 does, which puts a view of its flat parameter there
            self._keep_proxy(None)
        super().__delattr__(name)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As of Module; RuntimeError for a `proxy` in the place of that which is there."""
        if name == "proxy":
            self._keep_proxy(param)
        super().register_parameter(name, param)

    def _keep_proxy(self, value: Any) -> None:
        proxy = self._parameters.get("proxy")
        if isinstance(proxy, GradientProxy) and value is not proxy:
            raise RuntimeError(
                f"the parameter of head '{proxy.head.name}' cannot be taken out or replaced: it stands for weights at "
                f"a server. {KEEP_OUT}"
            )
