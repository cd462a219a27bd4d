"""A default dtype or device of torch's changes nothing of a head: each tensor that lossd makes has its own."""

from __future__ import annotations

import contextlib
import copy
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from glue_support import Ranks, batch

import lossd
from lossd.torch import (
    LocalWeight,
    RemoteOptimizer,
    clip_grad_norm_,
    linear_cross_entropy,
    multi_token_cross_entropy,
    objectives,
    token_log_probs,
)
from lossd.torch.head import RemoteHead

MakeRemote = Callable[..., RemoteHead]
DEFAULTS = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64, "meta": "meta"}


@contextlib.contextmanager
def defaults(default: torch.dtype | str) -> Iterator[None]:
    before = torch.get_default_dtype()
    if isinstance(default, str):
        with torch.device(default):
            yield
        return
    torch.set_default_dtype(default)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def steep() -> tuple[torch.Tensor, torch.Tensor]:
    """A batch whose gradient has a norm that half precision does not hold."""
    hidden, labels = batch(1)
    return hidden * 3e5, labels


def torch_clip(make: MakeRemote, data: Any) -> Any:
    head = make(optimizer=lossd.SGD())
    optimizer = torch.optim.SGD(head.parameters(), lr=1.0)
    head(*data).backward()
    norm = torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
    optimizer.step()
    return norm, head.read_weights()[0], optimizer.state_dict()["state"][0]["step"]


def own_clip(make: MakeRemote, data: Any) -> Any:
    answers = []
    trunk = torch.nn.Parameter(torch.ones(2, dtype=torch.float16, device="cpu"))
    for norm_type in (2, math.inf):
        for local in ([], [trunk]):  # a half-precision trunk has no room for the head's norm either
            head, frozen = make(optimizer=lossd.SGD()), make(frozen=True)
            trunk.grad = torch.ones_like(trunk)
            idle = make(optimizer=lossd.SGD())
            head(*data).backward()
            norm = clip_grad_norm_(local, 1.0, norm_type, heads=[head, frozen, idle])
            RemoteOptimizer(head, lr=1.0).step()
            answers += [norm, head.read_weights()[0]]
    return answers


def state(make: MakeRemote, data: Any) -> Any:
    head, empty = make(bias=True), make(weights=None, bias=True)
    found = head.state_dict()
    head.load_state_dict(found)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        read = [head.bias + 0, head.weight + 0]
        copied = copy.deepcopy(head)
    copied_state = copied.state_dict()
    copied.delete_copy()
    return [*found.values(), *read, *empty.state_dict().values(), *copied_state.values()]


def local_weight(make: MakeRemote, data: Any) -> Any:
    head = make(bias=True)
    weight, bias = (torch.nn.Parameter(one) for one in head.read_weights())
    contract = LocalWeight(head, weight, bias)
    hidden, labels = data
    linear_cross_entropy(contract(hidden.requires_grad_()), labels, head).backward()
    return weight.grad, bias.grad, head.flush().gradient


def several_depths(make: MakeRemote, data: Any) -> Any:
    head = make()
    hidden, labels = data
    states = torch.stack([hidden, -hidden])
    for options in ({}, {"grad_scale": 1.0}, {"reduction": "sum", "grad_scale": 1.0}):
        loss, by_depth = multi_token_cross_entropy(states, labels, head, weights=[0.3, 0.7], **options)
        loss.backward()
    return loss, by_depth, head.flush().gradient


def values(make: MakeRemote, data: Any) -> Any:
    head = make()
    hidden, labels = data
    log_probs, entropy, more = token_log_probs(hidden, labels, head, entropy=True, return_values={"accuracy"})
    mask = torch.ones_like(labels[None], dtype=torch.bool)
    loss = objectives.grpo_loss(log_probs[None], None, torch.ones_like(log_probs[None]), mask)
    (loss + entropy.mean()).backward()
    return loss, entropy, more["accuracy"], head.flush().gradient, head.logits(hidden)


WORK = [torch_clip, own_clip, state, local_weight, several_depths, values]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("default", DEFAULTS)
@pytest.mark.parametrize("work", WORK, ids=lambda work: work.__name__)
def test_defaults_of_torch_change_nothing(make_remote: MakeRemote, work: Callable[..., Any], default: str) -> None:
    wanted = work(make_remote, steep())
    data = steep()
    with defaults(DEFAULTS[default]):
        found = work(make_remote, data)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)  # the dtypes, too


def test_more_steps_than_bfloat16_can_count(make_remote: MakeRemote) -> None:
    head = make_remote(optimizer=lossd.SGD())
    optimizer, data = torch.optim.SGD(head.parameters(), lr=1e-9), batch()
    with defaults(torch.bfloat16):
        for _ in range(257):
            head(*data, grad_scale=1.0).backward()
            optimizer.step()
        assert optimizer.state_dict()["state"][0]["step"] == 257


def on_rank(rank: int, group: Any, server: str, name: str, default: str) -> Any:
    head = RemoteHead(lossd.connect(server).head(name), group=group, average=True)
    optimizer = torch.optim.SGD(head.parameters(), lr=1.0)
    data = steep()
    with defaults(DEFAULTS[default]):
        head(*data).backward()
        norm = clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        weights = head.state_dict()["weight"]
    head.close()
    return norm, weights


@pytest.mark.parametrize("default", DEFAULTS)
def test_ranks_under_defaults_of_torch(
    ranks: Ranks, server: lossd.Server, make_remote: MakeRemote, default: str
) -> None:
    wanted = torch_clip(make_remote, steep())[:2]
    head = make_remote(optimizer=lossd.SGD())
    for found in ranks.run(on_rank, server.target, head.name, default):
        torch.testing.assert_close(found, wanted)
