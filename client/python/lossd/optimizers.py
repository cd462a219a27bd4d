"""What a server steps a head with: torch.optim's SGD, Adam and AdamW by their names and defaults. `lr` is kept by the
client that creates the head: what step() takes where none is given."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import lossd._structs as s
from lossd._library import library


@dataclass(frozen=True)
class SGD:
    """torch.optim.SGD, whose weight_decay goes into the gradient. lr: of steps that are given none (Head.step()); None:
    every step names one."""

    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    maximize: bool = False
    lr: float | None = field(default=None, kw_only=True, compare=False)


@dataclass(frozen=True)
class Adam:
    """torch.optim.Adam, whose weight_decay goes into the gradient. lr: as of SGD."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    maximize: bool = False
    lr: float | None = field(default=None, kw_only=True, compare=False)


@dataclass(frozen=True)
class AdamW:
    """torch.optim.AdamW, whose weight_decay times lr is taken off the weights. lr: as of SGD."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    maximize: bool = False
    lr: float | None = field(default=None, kw_only=True, compare=False)


Optimizer = SGD | Adam | AdamW


def optimizer_of(data: dict[str, Any]) -> Optimizer | None:
    """What the server tells of a head's optimizer."""
    kinds: dict[str, type[Optimizer]] = {"sgd": SGD, "adam": Adam, "adamw": AdamW}
    kind = kinds.get(str(data.get("kind")))
    if kind is None:
        return None
    values = {one.name: data[one.name] for one in dataclasses.fields(kind) if one.name in data}
    if kind is not SGD:
        values["betas"] = (data["beta1"], data["beta2"])
    return kind(**values)


def struct_of(optimizer: Optimizer) -> s.OptimizerConfig:
    if not isinstance(optimizer, (SGD, Adam, AdamW)):
        raise TypeError(f"optimizer is a {type(optimizer).__name__}; want lossd.SGD, lossd.Adam, lossd.AdamW or None")
    config = library().make(s.OptimizerConfig)
    config.weight_decay = optimizer.weight_decay
    config.maximize = optimizer.maximize
    if isinstance(optimizer, SGD):
        config.kind = s.LOSSD_OPTIMIZER_SGD
        config.momentum, config.dampening = optimizer.momentum, optimizer.dampening
        config.nesterov = optimizer.nesterov
    else:
        config.kind = s.LOSSD_OPTIMIZER_ADAM if isinstance(optimizer, Adam) else s.LOSSD_OPTIMIZER_ADAMW
        config.beta1, config.beta2 = optimizer.betas
        config.eps = optimizer.eps
    return config
