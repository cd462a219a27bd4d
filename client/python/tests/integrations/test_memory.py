"""The trainer's process has neither logits nor anything of the size of the head's weight."""

from __future__ import annotations

from collections.abc import Iterator

import memory_trainer
import memory_trl
import pytest
from memory_trainer import HIDDEN, LOGITS_BYTES, TOKENS, WEIGHT_BYTES
from ranks import in_a_process

import lossd

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def outcomes(server: lossd.Server, client: lossd.Client) -> Iterator[dict[str, dict]]:
    """What each kind of trainer needed."""
    found = {}
    for kind in memory_trainer.KINDS:
        found[kind] = in_a_process(memory_trainer.train, kind, server.target, f"memory-{kind}")
        if kind != "local":
            client.delete_head(f"memory-{kind}", discard_gradient=True)
    yield found


@pytest.mark.parametrize("kind", ["declared", "undeclared"])
def test_trainers_of_remote_heads_have_no_logits_and_no_weight(outcomes: dict[str, dict], kind: str) -> None:
    # All that is there is hidden states, their gradient, and parts of 1 MiB of the first weights.
    assert outcomes[kind]["largest_tensor"] <= max(TOKENS * HIDDEN * 4, 1 << 20)
    assert outcomes[kind]["growth"] < WEIGHT_BYTES / 2


def test_local_heads_have_both(outcomes: dict[str, dict]) -> None:
    assert outcomes["local"]["largest_tensor"] == LOGITS_BYTES
    assert outcomes["local"]["growth"] > LOGITS_BYTES + 2 * WEIGHT_BYTES


def test_they_do_the_same(outcomes: dict[str, dict]) -> None:
    local = outcomes["local"]["losses"]
    assert local[-1] < local[0]
    for kind in ("declared", "undeclared"):
        assert outcomes[kind]["losses"] == pytest.approx(local, rel=1e-5)


@pytest.fixture(scope="module")
def trl_outcomes(server: lossd.Server, client: lossd.Client) -> dict[str, list[dict[str, int]]]:
    found = in_a_process(memory_trl.train, server.target)
    for method in memory_trl.METHODS:
        client.delete_head(method, discard_gradient=True)
    return found


@pytest.mark.parametrize("method", memory_trl.METHODS)
def test_trls_trainers_of_remote_heads_have_no_logits(
    trl_outcomes: dict[str, list[dict[str, int]]], method: str
) -> None:
    remote, local = trl_outcomes[method]
    logits = memory_trl.logits_bytes(method)
    assert local["largest_tensor"] >= logits > 2 * remote["largest_tensor"]
    assert local["growth"] > 2 * logits > logits > remote["growth"]
