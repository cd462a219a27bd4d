"""Flushes into a tensor that an error cuts: no row is added twice, and none is forgotten."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from glue_support import batch, weights_of

import lossd
from lossd.torch import linear_cross_entropy
from lossd.torch.contracts import LocalWeight, flush_into
from lossd.torch.head import RemoteHead

VOCAB, HIDDEN = 4096, 512  # 8 MiB, which a server sends in pieces of 2


@pytest.fixture
def head(server: lossd.Server) -> Iterator[RemoteHead]:
    with server.client() as client:
        weights = torch.zeros(VOCAB, HIDDEN)
        yield RemoteHead.create(client, "landing", VOCAB, HIDDEN, dtype=torch.float32, weights=weights)
        client.delete_head("landing", discard_gradient=True)


def backward(head: RemoteHead, seed: int) -> torch.Tensor:
    hidden, target = batch(seed, tokens=40, vocab=VOCAB, hidden=HIDDEN)
    linear_cross_entropy(hidden, target, head).backward()
    weight = weights_of(head).requires_grad_()
    torch.nn.functional.cross_entropy(hidden @ weight.T, target).backward()
    assert weight.grad is not None
    return weight.grad


class Cut:
    """Has the next flush of the head fail once this many pieces have come."""

    def __init__(self, head: RemoteHead, monkeypatch: pytest.MonkeyPatch, error: Exception, blocks: int = 2) -> None:
        self.left: int | None = blocks
        self.rows: list[int] = []
        real = head.head.flush

        def flush(*arguments: Any, sink: Callable[..., None], **options: Any) -> Any:
            def cut(first_row: int, rows: Any, bias: Any) -> None:
                if self.left == 0:
                    self.left = None
                    raise error
                if self.left is not None:
                    self.left -= 1
                sink(first_row, rows, bias)
                self.rows.append(len(rows))

            return real(*arguments, sink=cut, **options)

        monkeypatch.setattr(head.head, "flush", flush)


GONE = lossd.UnavailableError("the server is gone")


@pytest.mark.parametrize("to", ["fresh", "grad", "main_grad"])
def test_a_flush_goes_on_behind_what_has_landed(head: RemoteHead, monkeypatch: pytest.MonkeyPatch, to: str) -> None:
    wanted = backward(head, 0)
    param = torch.nn.Parameter(torch.zeros(VOCAB, HIDDEN))
    if to == "grad":
        param.grad = torch.full((VOCAB, HIDDEN), 0.25)
    elif to == "main_grad":
        param.main_grad = torch.full((VOCAB, HIDDEN), 0.25)  # type: ignore[attr-defined]
    name = "main_grad" if to == "main_grad" else "grad"
    cut = Cut(head, monkeypatch, GONE)
    with pytest.raises(lossd.UnavailableError):
        flush_into(head, param, to=name)
    assert 0 < sum(cut.rows) < VOCAB  # a part of it has landed
    assert head.gradient_stats().window_tokens == 40
    flush_into(head, param, to=name)
    start = 0.0 if to == "fresh" else 0.25
    torch.testing.assert_close(getattr(param, name), wanted + start, rtol=1e-5, atol=1e-7)
    wanted = backward(head, 1)  # the next window begins at the first row
    setattr(param, name, torch.zeros(VOCAB, HIDDEN))
    flush_into(head, param, to=name)
    torch.testing.assert_close(getattr(param, name), wanted, rtol=1e-5, atol=1e-7)


def test_a_delayed_gradient_goes_on_too(head: RemoteHead, monkeypatch: pytest.MonkeyPatch) -> None:
    param = torch.nn.Parameter(torch.zeros(VOCAB, HIDDEN))
    param.main_grad = torch.zeros(VOCAB, HIDDEN)  # type: ignore[attr-defined]
    contract = LocalWeight(head, param, delay_wgrad=True, accumulate_into_main_grad=True)
    hidden, target = batch(0, tokens=40, vocab=VOCAB, hidden=HIDDEN)
    linear_cross_entropy(contract(hidden), target, head).backward()
    wanted = 2 * backward(head, 0)
    Cut(head, monkeypatch, GONE)
    with pytest.raises(lossd.UnavailableError):
        contract.wgrad()
    assert contract.waiting and contract.wgrad() is not None and not contract.waiting
    torch.testing.assert_close(param.main_grad, wanted, rtol=1e-5, atol=1e-7)  # type: ignore[attr-defined]


@pytest.mark.parametrize("done", [False, True])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_commit_without_an_answer_is_repeated(
    head: RemoteHead, monkeypatch: pytest.MonkeyPatch, overwrite: bool, done: bool
) -> None:
    wanted = backward(head, 0)
    param = torch.nn.Parameter(torch.zeros(VOCAB, HIDDEN))
    commit, asked = head.head.commit_flush, []

    def lossy(flush_id: str) -> None:
        asked.append(flush_id)
        if done or len(asked) > 1:
            commit(flush_id)
        if len(asked) == 1:
            raise GONE

    monkeypatch.setattr(head.head, "commit_flush", lossy)
    with pytest.raises(lossd.UnavailableError):
        flush_into(head, param, overwrite=overwrite)
    result = flush_into(head, param, overwrite=overwrite)
    assert result.window_tokens == 40 and asked == [result.flush_id] * 2
    assert param.grad is not None
    torch.testing.assert_close(param.grad, wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("what", ["more", "changed"])
def test_what_cannot_be_gone_on_with_is_refused(head: RemoteHead, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    backward(head, 0)
    param = torch.nn.Parameter(torch.zeros(VOCAB, HIDDEN))
    param.grad = torch.zeros(VOCAB, HIDDEN)
    Cut(head, monkeypatch, GONE)
    with pytest.raises(lossd.UnavailableError):
        flush_into(head, param)
    if what == "more":
        backward(head, 1)
    else:
        param.grad.zero_()
    with pytest.raises(RuntimeError, match=r"rows 0 to \d+ of an earlier flush .* more was|changed since"):
        flush_into(head, param)
    head.zero_grad()  # what the message says: the step anew
    param.grad.zero_()
    wanted = backward(head, 2)
    flush_into(head, param)
    torch.testing.assert_close(param.grad, wanted, rtol=1e-5, atol=1e-7)


def test_another_tensor_gets_all_of_it(head: RemoteHead, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = backward(head, 0)
    param = torch.nn.Parameter(torch.zeros(VOCAB, HIDDEN))
    Cut(head, monkeypatch, GONE)
    with pytest.raises(lossd.UnavailableError):
        flush_into(head, param)
    kept, param.grad = param.grad, None
    flush_into(head, param)
    assert kept is not None and param.grad is not None and param.grad.data_ptr() != kept.data_ptr()
    torch.testing.assert_close(param.grad, wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("error", [lossd.WindowLostError("lost"), lossd.DataLossError("damaged")])
def test_rows_of_what_is_lost_are_not_gone_on_with(
    head: RemoteHead, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    wanted = backward(head, 0)
    param = torch.nn.Parameter(torch.zeros(VOCAB, HIDDEN))
    param.grad = torch.zeros(VOCAB, HIDDEN)
    Cut(head, monkeypatch, error)
    with pytest.raises(type(error)):
        flush_into(head, param)
    param.grad.zero_()
    flush_into(head, param)
    torch.testing.assert_close(param.grad, wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("to", ["grad", "main_grad"])
def test_there_is_no_second_gradient(head: RemoteHead, monkeypatch: pytest.MonkeyPatch, to: str) -> None:
    backward(head, 0)
    param = torch.nn.Parameter(torch.zeros(VOCAB, HIDDEN))
    setattr(param, to, torch.zeros(VOCAB, HIDDEN))
    cut = Cut(head, monkeypatch, GONE, blocks=-1)  # never
    with torch.profiler.profile(profile_memory=True) as profile:
        flush_into(head, param, to=to)
    largest = max((abs(event.self_cpu_memory_usage) for event in profile.events()), default=0)
    assert largest < VOCAB * HIDDEN * 4 / 2
    assert sum(cut.rows) == VOCAB and max(cut.rows) <= VOCAB / 4


def test_a_landing_of_no_row_binds_nobody(head: RemoteHead, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = backward(head, 0)
    param = torch.nn.Parameter(torch.zeros(VOCAB, HIDDEN))
    param.grad = torch.full((VOCAB, HIDDEN), 7.0)
    Cut(head, monkeypatch, GONE, blocks=0)
    with pytest.raises(lossd.UnavailableError):
        flush_into(head, param)
    param.grad.zero_()  # nothing of the flush is in it
    wanted += backward(head, 1)
    flush_into(head, param)
    torch.testing.assert_close(param.grad, wanted, rtol=1e-5, atol=1e-7)
