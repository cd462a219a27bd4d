"""The three lines of the README, against the formula."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

import lossd


def softmax_reference(hidden: np.ndarray, labels: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, ...]:
    """Losses, dX and dW of the sum over tokens that are not ignored, in fp64."""
    x, w = hidden.reshape(-1, hidden.shape[-1]).astype(np.float64), weights.astype(np.float64)
    y = labels.reshape(-1)
    logits = x @ w.T
    logits -= logits.max(axis=1, keepdims=True)
    p = np.exp(logits)
    lse = np.log(p.sum(axis=1))
    p /= p.sum(axis=1, keepdims=True)
    valid = y != -100
    rows = np.arange(len(y))[valid]
    losses = np.where(valid, lse - logits[np.arange(len(y)), np.where(valid, y, 0)], 0)
    p[rows, y[valid]] -= 1
    p[~valid] = 0
    return losses.reshape(labels.shape), (p @ w).reshape(hidden.shape), p.T @ x


def test_losses_and_gradients(make_head: Callable[..., lossd.Head]) -> None:
    random = np.random.default_rng(0)
    weights = random.standard_normal((32, 16), np.float32)
    head = make_head(32, 16, weights=weights)
    assert np.array_equal(head.read_weights(), weights)
    hidden = random.standard_normal((3, 5, 16), np.float32)
    labels = random.integers(0, 32, (3, 5))
    labels[1, 2] = -100
    with head.open_session() as session:
        result = session.compute(hidden, labels)
    losses, dx, dw = softmax_reference(hidden, labels, weights)
    np.testing.assert_allclose(result.losses, losses, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(result.dx, dx, rtol=1e-4, atol=1e-5)
    assert result.loss == result.loss_sum and abs(result.loss - losses.sum()) < 1e-4
    assert result.valid_tokens == 14
    flushed = head.flush()
    np.testing.assert_allclose(flushed.gradient, dw, rtol=1e-4, atol=1e-5)
    assert flushed.window_tokens == 14 and flushed.rows == 32 and flushed.columns == 16
    assert not np.any(head.flush().gradient)  # the next window is empty
