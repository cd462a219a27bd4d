"""Tensors whose memory has not the numbers that they stand for are read as their clones are, or refused.

Negated views have the other sign in memory (torch's negative bit); fake tensors, and those that are known to be 0, have
no memory at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import lossd
from lossd.torch import RemoteHead, linear_cross_entropy

ROWS, VOCABULARY, HIDDEN = 12, 50, 16
DTYPES = {dtype: getattr(torch, dtype) for dtype in ("float32", "bfloat16", "float16")}


def negated(values: torch.Tensor) -> torch.Tensor:
    """The same numbers, as what `z.conj().imag` is."""
    view = torch._neg_view(-values)
    assert view.is_neg() and torch.equal(view, values)
    return view


@pytest.fixture(params=DTYPES)
def head(request: pytest.FixtureRequest, client: lossd.Client) -> Iterator[lossd.Head]:
    torch.manual_seed(1)
    head = client.create_head(f"negated-{request.param}", VOCABULARY, HIDDEN, request.param, bias=True)
    head.write_weights(torch.randn(VOCABULARY, HIDDEN).to(DTYPES[request.param]), torch.randn(VOCABULARY))
    yield head
    client.delete_head(head.name, discard_gradient=True)


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


@pytest.mark.parametrize("what", READS)
def test_negated_views_are_read_as_their_clones(head: lossd.Head, what: str) -> None:
    read, names = READS[what]
    dtype = DTYPES[head.dtype] if isinstance(head.dtype, str) else head.dtype
    values = {
        "hidden": torch.randn(ROWS, HIDDEN).to(dtype),
        "weights": torch.randn(VOCABULARY, HIDDEN).to(dtype),
        "token": torch.rand(ROWS),
        "class": torch.rand(VOCABULARY),
        "labels": torch.randint(0, VOCABULARY, (ROWS,)),
    }
    expected = read(head, *(values[name].clone() for name in names))
    found = read(head, *(negated(values[name]) for name in names))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("what", READS)
def test_tensors_without_memory_are_read_as_zeros_or_refused(head: lossd.Head, what: str) -> None:
    """Nothing beside the tensors is read, or sent to a server."""
    read, names = READS[what]
    dtype = DTYPES[head.dtype] if isinstance(head.dtype, str) else head.dtype
    shapes = {"hidden": (ROWS, HIDDEN), "weights": (VOCABULARY, HIDDEN), "token": (ROWS,), "class": (VOCABULARY,)}
    zeros: list[Any] = []
    known: list[Any] = []
    for name in names:
        if name == "labels":
            zeros.append(torch.arange(ROWS))
            known.append(torch.arange(ROWS))
            continue
        of = torch.float32 if name in ("token", "class") else dtype
        zeros.append(torch.zeros(shapes[name], dtype=of))
        known.append(torch._efficientzerotensor(shapes[name], dtype=of))
    if what != "class weights":  # which must not be 0
        expected = read(head, *zeros)
        torch.testing.assert_close(read(head, *known), expected, rtol=0, atol=0)
    if what == "from_linear":  # a Linear takes no such data
        return
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
