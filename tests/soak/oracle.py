"""What lossd has to answer, computed with NumPy in double precision."""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np

TOLERANCE = 2e-4  # of the largest element: far below what one batch more or less would change


@dataclass(frozen=True)
class Batch:
    hidden: np.ndarray  # [N, H] fp32
    labels: np.ndarray  # [N]


def random_batch(rng: np.random.Generator, tokens: int, vocab: int, hidden_size: int) -> Batch:
    labels = rng.integers(0, vocab, tokens)
    labels[rng.random(tokens) < 0.1] = -100
    return Batch(rng.standard_normal((tokens, hidden_size), dtype=np.float32), labels)


def random_weights(rng: np.random.Generator, vocab: int, hidden_size: int) -> np.ndarray:
    return rng.standard_normal((vocab, hidden_size), dtype=np.float32) * np.float32(hidden_size**-0.5)


def valid_tokens(batches: list[Batch]) -> int:
    return sum(int((batch.labels >= 0).sum()) for batch in batches)


class Oracle:
    def __init__(self, weights: np.ndarray) -> None:
        self.weights = weights.astype(np.float64)

    def logits(self, hidden: np.ndarray) -> np.ndarray:
        return hidden.astype(np.float64) @ self.weights.T

    def _parts(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """Losses [N], and the gradient [N, V] of their sum with respect to the logits."""
        logits = self.logits(batch.hidden)
        top = logits.max(axis=1, keepdims=True)
        exps = np.exp(logits - top)
        sums = exps.sum(axis=1, keepdims=True)
        valid = batch.labels >= 0
        rows, labels = np.arange(len(batch.labels)), np.where(valid, batch.labels, 0)
        losses = np.where(valid, (top + np.log(sums))[:, 0] - logits[rows, labels], 0)
        gradient = exps / sums
        gradient[rows, labels] -= 1
        gradient[~valid] = 0
        return losses, gradient

    def losses_and_dx(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        losses, gradient = self._parts(batch)
        return losses, gradient @ self.weights

    def weight_gradient(self, batches: list[Batch]) -> np.ndarray:
        total = np.zeros_like(self.weights)
        for batch in batches:
            total += self._parts(batch)[1].T @ batch.hidden.astype(np.float64)
        return total


# Numbers of which every sum is exact, whatever its order: hidden states are small integers in the first half of their
# columns, weights in the second, so that all logits are 0, every token of the vocabulary has the probability 1 / vocab
# (a power of two), and dX, dW and steps of it with a learning rate that is a power of two are multiples of a power of two. A
# chunk that is missing or counted twice is in them to the last bit.


def exact_weights(rng: np.random.Generator, vocab: int, hidden_size: int) -> np.ndarray:
    weights = np.zeros((vocab, hidden_size), np.float32)
    weights[:, hidden_size // 2:] = rng.integers(-4, 5, (vocab, hidden_size // 2))
    return weights


def exact_batch(rng: np.random.Generator, tokens: int, vocab: int, hidden_size: int, columns: slice) -> Batch:
    """`columns`: of the first half, those that are not 0; the weights of these have to be."""
    hidden = np.zeros((tokens, hidden_size), np.float32)
    hidden[:, columns] = rng.integers(1, 9, hidden[:, columns].shape)
    labels = rng.integers(0, vocab, tokens)
    labels[rng.random(tokens) < 0.1] = -100
    return Batch(hidden, labels)


def check_exact(what: str, got: np.ndarray, expected: np.ndarray) -> None:
    differ = np.asarray(got, np.float64) != expected
    if differ.any():
        at = tuple(int(index) for index in np.argwhere(differ)[0])
        raise AssertionError(f"{what} is wrong at {int(differ.sum())} of {differ.size} places: at {at} it is {got[at]!r}; it "
                             f"must be {expected[at]!r}")


def check_close(what: str, got: np.ndarray, expected: np.ndarray) -> None:
    scale = max(float(np.abs(expected).max(initial=0)), 1e-6)
    off = float(np.abs(np.asarray(got, np.float64) - expected).max(initial=0))
    if not off <= TOLERANCE * scale:
        raise AssertionError(f"{what} is wrong: off by {off:g} where the largest element is {scale:g}")


def check_equal(what: str, got: object, expected: object) -> None:
    if got != expected:
        raise AssertionError(f"{what} is {got}; it must be {expected}")
