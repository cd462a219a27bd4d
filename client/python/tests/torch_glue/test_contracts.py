"""Where the gradient of a local weight lands, and what backward returns for it: the table of LocalWeight, row by
row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from glue_support import batch, weights_of

from lossd.torch import linear_cross_entropy
from lossd.torch.contracts import LocalWeight, flush_into
from lossd.torch.head import RemoteHead

MakeRemote = Callable[..., RemoteHead]


@dataclass(frozen=True)
class Row:
    delay: bool
    accumulate: bool
    flag: bool
    returned: str  # "gradient", "none" or "dummy"


ROWS = {
    "plain": Row(False, False, False, "gradient"),
    "delayed": Row(True, False, False, "none"),
    "accumulate": Row(False, True, False, "none"),
    "accumulate_flag": Row(False, True, True, "dummy"),
    "delayed_accumulate": Row(True, True, False, "none"),
    "delayed_accumulate_flag": Row(True, True, True, "dummy"),
    "plain_flag": Row(False, False, True, "gradient"),  # the attribute means nothing where nothing is accumulated
    "delayed_flag": Row(True, False, True, "none"),
}


class Case:
    """A trunk, a local weight with the head's values, and the gradient that it should get."""

    def __init__(self, head: RemoteHead, row: Row, dtype: torch.dtype = torch.float32) -> None:
        self.head, self.row = head, row
        self.trunk = torch.nn.Linear(6, 6)
        self.weight = torch.nn.Parameter(weights_of(head).to(dtype))
        if row.accumulate:
            self.weight.main_grad = torch.zeros(11, 6)  # type: ignore[attr-defined]
        if row.flag:
            self.weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]
        self.contract = LocalWeight(head, self.weight, delay_wgrad=row.delay, accumulate_into_main_grad=row.accumulate)
        self.returned: list[torch.Tensor | None] = []

    def loss(self, seed: int = 0, **options: Any) -> torch.Tensor:
        hidden, target = batch(seed)
        tied = self.contract(self.trunk(hidden))
        assert tied.grad_fn is not None
        # What the node returns for the weight: its second gradient.
        tied.grad_fn.register_hook(lambda given, _: self.returned.append(given[1]))
        loss: torch.Tensor = linear_cross_entropy(tied, target, self.head, **options)
        return loss

    def wanted(self, *seeds: int) -> torch.Tensor:
        weight = self.weight.detach().float().clone().requires_grad_()
        for seed in seeds:
            hidden, target = batch(seed)
            torch.nn.functional.cross_entropy(self.trunk(hidden).detach() @ weight.T, target).backward()
        assert weight.grad is not None
        return weight.grad

    def landed(self) -> torch.Tensor | None:
        landed: torch.Tensor | None = self.weight.main_grad if self.row.accumulate else self.weight.grad
        return landed


def close(actual: torch.Tensor | None, expected: torch.Tensor) -> None:
    assert actual is not None
    torch.testing.assert_close(actual.float(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("grad_scale", [None, 1.0])
@pytest.mark.parametrize("name", ROWS)
def test_what_backward_returns(make_remote: MakeRemote, name: str, grad_scale: float | None) -> None:
    case = Case(make_remote(), ROWS[name])
    case.loss(grad_scale=grad_scale).backward()
    (returned,) = case.returned
    row = case.row
    if row.returned == "gradient":
        close(returned, case.wanted(0))
    elif row.returned == "dummy":
        assert returned is not None and returned.shape == (11, 6) and not returned.any()
    else:
        assert returned is None
    if row.flag:
        assert case.weight.grad_added_to_main_grad == (row.returned == "dummy")  # type: ignore[attr-defined]
    if row.delay:
        assert case.landed() is None or not case.landed().any()  # type: ignore[union-attr]
        assert case.head.gradient_stats().window_tokens == 8
        result = case.contract.wgrad()
        assert result is not None and result.window_tokens == 8
    close(case.landed(), case.wanted(0))
    assert case.contract.wgrad() is None and case.head.head.info().window_tokens == 0
    if row.accumulate and row.returned == "none":
        assert case.weight.grad is None
    assert case.trunk.weight.grad is not None and case.trunk.weight.grad.any()


@pytest.mark.parametrize("name", ROWS)
def test_hooks_of_the_parameter(make_remote: MakeRemote, name: str) -> None:
    case = Case(make_remote(), ROWS[name])
    row = case.row
    tensors: list[torch.Tensor | None] = []
    after: list[torch.Tensor | None] = []
    delayed: list[str] = []

    def reduce_main_grad(weight: torch.Tensor) -> None:
        # As trainers that own main_grad have it: .grad is added to it, unless the flag says that it is there already.
        after.append(weight.grad)
        if row.accumulate and weight.grad is not None:
            if not getattr(weight, "grad_added_to_main_grad", False):
                weight.main_grad.add_(weight.grad)  # type: ignore[attr-defined]
            weight.grad = None

    case.weight.register_hook(tensors.append)
    case.weight.register_post_accumulate_grad_hook(reduce_main_grad)
    case.contract.register_wgrad_hook(lambda: delayed.append("landed"))
    case.loss().backward()
    # They run in any case; with None there is nothing to see.
    for seen in (tensors, after):
        assert [None if one is None else tuple(one.shape) for one in seen] == [
            None if row.returned == "none" else (11, 6)
        ]
    assert delayed == []
    case.contract.wgrad()
    assert delayed == ["landed"] * row.delay
    close(case.landed(), case.wanted(0))


@pytest.mark.parametrize("name", ROWS)
def test_accumulation_over_batches(make_remote: MakeRemote, name: str) -> None:
    case = Case(make_remote(), ROWS[name])
    for seed in range(3):
        case.loss(seed).backward()
    case.contract.wgrad()
    close(case.landed(), case.wanted(0, 1, 2))


@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("overwrite", [False, True])
def test_overwrite_main_grad(make_remote: MakeRemote, delay: bool, overwrite: bool) -> None:
    case = Case(make_remote(), Row(delay, True, False, "none"))
    case.weight.main_grad.fill_(3.0)  # type: ignore[attr-defined]
    case.weight.overwrite_main_grad = overwrite  # type: ignore[attr-defined]
    case.loss().backward()
    case.contract.wgrad()
    close(case.landed(), case.wanted(0) + (0.0 if overwrite else 3.0))


def test_main_grad_may_be_a_piece_of_a_buffer(make_remote: MakeRemote) -> None:
    case = Case(make_remote(), ROWS["accumulate"])
    buffer = torch.zeros(100)
    case.weight.main_grad = buffer[10:76]  # type: ignore[attr-defined]
    case.loss().backward()
    close(buffer[10:76].view(11, 6), case.wanted(0))
    assert not buffer[:10].any() and not buffer[76:].any()


@pytest.mark.parametrize("name", ["plain", "delayed"])
def test_sixteen_bit_parameters(make_remote: MakeRemote, name: str) -> None:
    case = Case(make_remote(dtype="bfloat16"), ROWS[name], torch.bfloat16)
    case.loss().backward()
    case.contract.wgrad()
    assert case.weight.grad is not None and case.weight.grad.dtype == torch.bfloat16
    torch.testing.assert_close(case.weight.grad.float(), case.wanted(0), rtol=0.02, atol=2e-3)


def test_bias_and_upload(make_remote: MakeRemote) -> None:
    head = make_remote(bias=True)
    linear = torch.nn.Linear(6, 11)
    contract = LocalWeight(head, linear.weight, linear.bias)
    version = contract.upload()
    assert version == head.head.info().weight_version
    hidden, target = batch()
    torch.nn.functional.cross_entropy(linear(hidden), target).backward()
    wanted = [p.grad.clone() for p in linear.parameters()]  # type: ignore[union-attr]
    for parameter in linear.parameters():
        parameter.grad = None
    linear_cross_entropy(contract(hidden), target, head).backward()
    for parameter, gradient in zip(linear.parameters(), wanted, strict=True):
        close(parameter.grad, gradient)


def test_a_weight_that_is_not_trained_fetches_nothing(make_remote: MakeRemote) -> None:
    case = Case(make_remote(), ROWS["plain"])
    case.weight.requires_grad_(False)
    case.loss().backward()
    assert case.returned == [None] and case.head.gradient_stats().window_tokens == 8


@pytest.mark.parametrize("to", ["grad", "main_grad"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_flush_into(make_remote: MakeRemote, to: str, overwrite: bool) -> None:
    case = Case(make_remote(), ROWS["accumulate"])
    target = torch.full((11, 6), 2.0)
    setattr(case.weight, to, target)
    hidden, labels = batch()
    linear_cross_entropy(case.trunk(hidden), labels, case.head).backward()
    result = flush_into(case.head, case.weight, to=to, overwrite=overwrite)
    close(target, case.wanted(0) + (0.0 if overwrite else 2.0))
    assert result.window_tokens == 8 and not case.head.dirty and getattr(case.weight, to) is target


def test_what_does_not_fit_names_it(make_remote: MakeRemote) -> None:
    head, weight = make_remote(), torch.nn.Parameter(torch.zeros(11, 6))
    for call, message in (
        (lambda: flush_into(head, weight, to="main_grad"), "has no main_grad"),
        (lambda: flush_into(head, weight, to="gard"), "must be 'grad' or 'main_grad'"),
        (lambda: flush_into(head, torch.zeros(6, 11)), r"param is \[6, 11\]; the head's is \[11, 6\]"),
        (lambda: flush_into(head, weight, bias=torch.zeros(11)), "has none"),
        (lambda: LocalWeight(head, torch.nn.Parameter(torch.zeros(3, 6))), r"weight is \[3, 6\]"),
        (lambda: LocalWeight(head, weight, weight), "no bias: leave out bias"),
        (lambda: LocalWeight(make_remote(frozen=True), weight), "frozen"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    weight.main_grad = torch.zeros(5)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"main_grad is \[5\]"):
        flush_into(head, weight, to="main_grad")
