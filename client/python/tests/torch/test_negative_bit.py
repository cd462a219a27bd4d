"""Tensors whose memory has not the numbers that they stand for are read as their clones are, or refused.

Negated views have the other sign in memory (torch's negative bit); fake tensors, and those that are known to be 0, have
no memory at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import lossd
from lossd.torch import RemoteHead, linear_cross_entropy

ROWS, VOCABULARY, HIDDEN = 12, 50, 16
MakeHead = Callable[..., lossd.Head]


def negated(values: torch.Tensor) -> torch.Tensor:
    """The same numbers, as what `z.conj().imag` is."""
    view = torch._neg_view(-values)
    assert view.is_neg() and torch.equal(view, values)
    return view


@pytest.fixture
def head(make_head: MakeHead) -> lossd.Head:
    return make_head(VOCABULARY, HIDDEN, bias=True)


def losses_of(head: lossd.Head, hidden: torch.Tensor, labels: torch.Tensor, **options: Any) -> torch.Tensor:
    with head.open_session() as session:
        losses = session.compute(hidden, labels, **options).losses
    head.discard()
    return losses


def written(head: lossd.Head, weights: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    head.write_weights(weights, bias)
    found = torch.empty_like(weights, memory_format=torch.contiguous_format).clone()
    found_bias = torch.empty(VOCABULARY)
    head.read_weights(out=found, dtype=str(weights.dtype).removeprefix("torch."), bias_out=found_bias)
    return torch.cat([found.flatten().float(), found_bias])


def adopted(head: lossd.Head, weights: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    linear = torch.nn.Linear(HIDDEN, VOCABULARY, dtype=weights.dtype)
    linear.weight.data, linear.bias.data = weights, bias.to(weights.dtype)
    client = head.client
    try:
        state = RemoteHead.from_linear(client, linear, "negated-linear", optimizer=lossd.SGD()).state_dict()
        return torch.cat([state["weight"].flatten().float(), state["bias"].float()])
    finally:
        client.delete_head("negated-linear", discard_gradient=True)


def gradient(head: lossd.Head, hidden: torch.Tensor, labels: torch.Tensor, upstream: torch.Tensor) -> torch.Tensor:
    remote = RemoteHead(head)
    given = hidden.clone().requires_grad_()
    linear_cross_entropy(given, labels, remote, reduction="none").backward(upstream)
    remote.zero_grad()
    return given.grad


def class_weighted(head: lossd.Head, hidden: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> Any:
    weighted = head.client.create_head("negated-classes", VOCABULARY, HIDDEN, class_weights=weights)
    try:
        weighted.write_weights(torch.ones(VOCABULARY, HIDDEN))
        return losses_of(weighted, hidden.float(), labels)
    finally:
        head.client.delete_head("negated-classes", discard_gradient=True)


READS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "compute": (losses_of, ("hidden", "labels")),
    "token_weights": (
        lambda head, hidden, labels, weights: losses_of(head, hidden, labels, token_weights=weights),
        ("hidden", "labels", "token"),
    ),
    "class weights": (class_weighted, ("hidden", "labels", "class")),
    "logits": (lambda head, hidden: head.logits(hidden), ("hidden",)),
    "top logits": (lambda head, hidden: head.logits(hidden, top_k=4).logits, ("hidden",)),
    "write_weights": (written, ("weights", "class")),
    "from_linear": (adopted, ("weights", "class")),
    "linear_cross_entropy": (
        lambda head, hidden, labels: linear_cross_entropy(hidden, labels, RemoteHead(head)).detach(),
        ("hidden", "labels"),
    ),
    "upstream gradient": (gradient, ("hidden", "labels", "token")),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("what", READS)
def test_memory_without_the_numbers(make_head: MakeHead, what: str, dtype: str) -> None:
    """Nothing beside the tensors is read, or sent to a server."""
    torch.manual_seed(1)
    head = make_head(VOCABULARY, HIDDEN, dtype, bias=True)
    read, names = READS[what]
    of_head = getattr(torch, dtype)
    values = {
        "hidden": torch.randn(ROWS, HIDDEN).to(of_head),
        "weights": torch.randn(VOCABULARY, HIDDEN).to(of_head),
        "token": torch.rand(ROWS),
        "class": torch.rand(VOCABULARY),
        "labels": torch.randint(0, VOCABULARY, (ROWS,)),
    }
    given = [values[name] for name in names]
    negative = [negated(one) for one in given]
    torch.testing.assert_close(read(head, *negative), read(head, *given), rtol=0, atol=0)
    zeros = [one if name == "labels" else torch.zeros_like(one) for name, one in zip(names, given, strict=True)]
    if what != "class weights":  # which must not be 0
        known = [one if one.any() else torch._efficientzerotensor(one.shape, dtype=one.dtype) for one in zeros]
        torch.testing.assert_close(read(head, *known), read(head, *zeros), rtol=0, atol=0)
    if what != "from_linear":  # a Linear takes no fake data
        fake = FakeTensorMode(allow_non_fake_inputs=True).from_tensor
        with pytest.raises((TypeError, ValueError), match="memory|FakeTensor"):
            read(head, *(fake(one) for one in zeros))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_fake_and_nested_tensors_are_named(head: lossd.Head) -> None:
    out = FakeTensorMode().from_tensor(torch.zeros(VOCABULARY, HIDDEN))
    with pytest.raises(TypeError, match="out is a FakeTensor without memory"):
        head.read_weights(out=out, dtype="float32")
    nested = torch.nested.nested_tensor([torch.zeros(ROWS, HIDDEN)])
    with pytest.raises(TypeError, match="hidden is a nested tensor"):
        head.logits(nested)
    with pytest.raises(ValueError, match="input is a nested tensor"):
        linear_cross_entropy(nested, torch.zeros(1, ROWS, dtype=torch.int64), RemoteHead(head))
    with pytest.raises(ValueError, match="beyond int64"):
        losses_of(head, torch.zeros(1, HIDDEN), torch.tensor([2**64 - 100], dtype=torch.uint64))
    RemoteHead(head).write_weights(torch.ones(VOCABULARY, HIDDEN, dtype=torch.float64), torch.zeros(VOCABULARY))
    assert bool((RemoteHead(head).read_weights()[0] == 1).all())


def test_negated_views_are_not_written_to(head: lossd.Head) -> None:
    out = torch._neg_view(torch.zeros(VOCABULARY, HIDDEN))
    with pytest.raises(ValueError, match="is a negated view"):
        head.read_weights(out=out, dtype="float32")
