"""Head.logits against NumPy's products of the rounded operands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import lossd

MakeHead = Callable[..., lossd.Head]
V, H = 37, 16


def arrays(rows: int = 6, seed: int = 3) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    return random.standard_normal((V, H), np.float32), random.standard_normal((rows, H), np.float32)


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """To bfloat16 or float16 and back."""
    if dtype == "float16":
        return values.astype(np.float16).astype(np.float32)
    if dtype == "bfloat16":
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
    return values


@pytest.mark.parametrize("head_dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_of_every_dtype(make_head: MakeHead, head_dtype: str, dtype: str) -> None:
    weights, hidden = arrays()
    head = make_head(V, H, head_dtype, weights=weights)
    logits = head.logits(hidden.reshape(2, 3, H), dtype=dtype)
    assert logits.shape == (2, 3, V)
    exact = rounded(hidden, head_dtype).astype(np.float64) @ rounded(weights, head_dtype).astype(np.float64).T
    if dtype == "bfloat16":
        assert logits.dtype == np.uint16
        logits = (logits.astype(np.uint32) << 16).view(np.float32)
    tolerance = {"float32": 1e-5, "bfloat16": 8e-3, "float16": 1e-3}[dtype]
    np.testing.assert_allclose(logits.reshape(6, V), exact, rtol=tolerance, atol=1e-5)


def test_options_of_the_head_and_of_the_call(make_head: MakeHead) -> None:
    weights, hidden = arrays()
    bias = np.linspace(-1, 1, V, dtype=np.float32)
    head = make_head(V, H, weights=None, bias=True, logit_scale=0.5, softcap=2.0)
    head.write_weights(weights, bias)
    products = hidden.astype(np.float64) @ weights.astype(np.float64).T
    np.testing.assert_allclose(head.logits(hidden), 2 * np.tanh(0.5 * (products + bias) / 2), rtol=1e-5, atol=1e-5)
    plain = head.logits(hidden, logit_scale=1.0, softcap=0.0, bias="ignore")
    np.testing.assert_allclose(plain, products, rtol=1e-5, atol=1e-5)
    # They are those that the loss is of.
    labels = np.argmin(plain, axis=1)
    with head.open_session() as session:
        losses = session.compute(hidden, labels, mode="loss").losses
    logits = head.logits(hidden).astype(np.float64)
    lse = np.log(np.exp(logits).sum(axis=1))
    np.testing.assert_allclose(losses, lse - logits[np.arange(6), labels], rtol=1e-5)


def test_the_largest_and_the_log_sum_exp(make_head: MakeHead) -> None:
    weights, hidden = arrays()
    head = make_head(V, H, weights=weights)
    all_logits = head.logits(hidden)
    top = head.logits(hidden.reshape(3, 2, H), top_k=5)
    assert top.tokens.shape == top.logits.shape == (3, 2, 5) and top.log_sum_exp.shape == (3, 2)
    assert top.weight_version == 1
    order = np.argsort(-all_logits, axis=1, kind="stable")[:, :5]
    np.testing.assert_array_equal(top.tokens.reshape(6, 5), order)
    np.testing.assert_array_equal(top.logits.reshape(6, 5), np.take_along_axis(all_logits, order, axis=1))
    lse = np.log(np.exp(all_logits.astype(np.float64)).sum(axis=1))
    np.testing.assert_allclose(top.log_sum_exp.reshape(6), lse, rtol=1e-6)


def test_more_rows_than_one_call_takes(make_head: MakeHead) -> None:
    """16 MiB of one answer are 2048 rows of 2048 logits."""
    random = np.random.default_rng(0)
    weights = random.standard_normal((2048, 8), np.float32)
    hidden = random.standard_normal((5000, 8), np.float32)
    head = make_head(2048, 8, weights=weights)
    logits = head.logits(hidden)
    np.testing.assert_allclose(logits, hidden.astype(np.float64) @ weights.T.astype(np.float64), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(logits[4321], head.logits(hidden[4321]))


def test_shapes_and_strides(make_head: MakeHead) -> None:
    weights, hidden = arrays(12)
    head = make_head(V, H, weights=weights)
    expected = head.logits(hidden)
    np.testing.assert_array_equal(head.logits(hidden[::2]), expected[::2])
    np.testing.assert_array_equal(head.logits(np.asfortranarray(hidden)), expected)
    np.testing.assert_array_equal(head.logits(hidden[7]), expected[7])
    assert head.logits(hidden[:0]).shape == (0, V)
    assert head.logits(hidden[:0].reshape(2, 0, H), top_k=3).logits.shape == (2, 0, 3)


def test_torch_in_and_out(make_head: MakeHead) -> None:
    torch = pytest.importorskip("torch")
    weights, hidden = arrays()
    head = make_head(V, H, "bfloat16", weights=weights)
    x = torch.from_numpy(hidden).to(torch.bfloat16).requires_grad_()
    logits = head.logits(x.unsqueeze(1), dtype=torch.bfloat16)
    assert logits.shape == (6, 1, V) and logits.dtype == torch.bfloat16 and not logits.requires_grad
    exact = x.detach().double() @ torch.from_numpy(weights).to(torch.bfloat16).double().T
    torch.testing.assert_close(logits[:, 0].double(), exact, rtol=8e-3, atol=1e-5)
    assert head.logits(x, top_k=2).tokens.dtype == torch.int32


def test_nothing_of_the_window_moves_and_a_frozen_head_answers(make_head: MakeHead) -> None:
    weights, hidden = arrays()
    head = make_head(V, H, weights=weights)
    with head.open_session() as session:
        session.compute(hidden, np.zeros(6, np.int64))
        while (before := head.info()).window_tokens < 6:  # its answer may come before it is in dW
            pass
        head.logits(hidden)
        after = head.info()
    assert before.window_tokens == after.window_tokens == 6 and before.generation == after.generation
    frozen = make_head(V, H, weights=weights, frozen=True)
    np.testing.assert_array_equal(frozen.logits(hidden), head.logits(hidden))


def bad(call: Callable[[], Any], error: type[Exception], *parts: str) -> None:
    with pytest.raises(error) as raised:
        call()
    for part in parts:
        assert part in str(raised.value)


def test_what_cannot_be(make_head: MakeHead) -> None:
    weights, hidden = arrays()
    head = make_head(V, H, weights=weights)
    bad(lambda: head.logits(hidden[:, :8]), ValueError, "hidden has shape (6, 8)", "[..., 16]")
    bad(lambda: head.logits(hidden.astype(np.float64)), TypeError, "float64")
    bad(lambda: head.logits(hidden, dtype="int8"), ValueError, "dtype is 'int8'")
    bad(lambda: head.logits(hidden, top_k=0), ValueError, "top_k is 0")
    bad(lambda: head.logits(hidden, top_k=38), lossd.InvalidArgumentError, "top_k is 38")
    bad(lambda: head.logits(hidden, top_k=2, dtype="float16"), ValueError, "with top_k logits are float32")
    bad(lambda: head.logits(hidden, softcap=-1.0), lossd.InvalidArgumentError, "softcap is -1")
    bad(lambda: head.logits(hidden, bias="use"), lossd.InvalidArgumentError, "without a bias")
    bad(lambda: head.logits(hidden, bias="none"), ValueError, "bias is 'none'")
    bad(lambda: head.logits(hidden, weight_version=9), lossd.FailedPreconditionError, "is 9", "version 1")
    spoiled = hidden.copy()
    spoiled[2, 3] = np.nan
    bad(lambda: head.logits(spoiled), lossd.InvalidArgumentError, "1 non-finite values of 96")
    bad(lambda: make_head(V, H, weights=None).logits(hidden), lossd.FailedPreconditionError, "no weights")
    np.testing.assert_array_equal(head.logits(hidden).shape, (6, V))  # the server goes on


def test_a_head_that_is_gone(client: lossd.Client) -> None:
    head = client.create_head("logits-gone", V, H, "float32")
    client.delete_head("logits-gone")
    bad(lambda: head.logits(np.zeros((1, H), np.float32)), lossd.NotFoundError, "logits-gone")
