"""Two data-parallel ranks that share a head, against two ranks with heads of their own."""

from __future__ import annotations

from typing import Any

import pytest
import trainer_rank
from ranks import Ranks

import lossd

pytestmark = pytest.mark.nightly
TRAINED = ("clipped", "unclipped", "means of means", "smoothed", "accelerate", "out of memory", "interrupted")


@pytest.fixture(scope="module")
def found(ranks: Ranks, server: lossd.Server) -> list[dict[str, Any]]:
    """By rank, what trainer_rank.py saw."""
    return ranks.run(trainer_rank.run, server.target, "ranks-")


@pytest.mark.parametrize("case", [*TRAINED, "frozen", "tied", "uneven", "uneven, tied"])
def test_losses_are_those_of_local_heads(found: list[dict[str, Any]], case: str) -> None:
    for of_rank in found:
        got, want = of_rank[case]["remote"], of_rank[case]["local"]
        assert len(got) == len(want) > trainer_rank.STEPS
        for ours, theirs in zip(got, want, strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-6)
            assert ours.keys() == theirs.keys()
            assert ours.get("grad_norm", 0.0) == pytest.approx(theirs.get("grad_norm", 0.0), rel=1e-5)
    assert abs(want[-1]["loss"] - want[0]["loss"]) > 0.05  # they trained


@pytest.mark.parametrize("case", TRAINED)
def test_the_head_is_stepped_once_for_all_ranks(found: list[dict[str, Any]], case: str) -> None:
    assert {of_rank[case]["steps"] for of_rank in found} == {trainer_rank.STEPS}
    for of_rank in found:
        assert of_rank[case].get("difference", 0.0) < 1e-5


def test_a_frozen_head_stays(found: list[dict[str, Any]]) -> None:
    assert all(of_rank["frozen"]["steps"] == 0 and of_rank["frozen"]["difference"] == 0.0 for of_rank in found)


def test_ranks_copy_a_model_together(found: list[dict[str, Any]]) -> None:
    (first, first_loss), (second, second_loss) = (of_rank["copy"] for of_rank in found)
    assert first == second and first_loss == second_loss == pytest.approx(found[0]["loss"], rel=1e-6)


def test_ranks_of_a_tied_head_generate_each_for_itself(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        got, want = of_rank["tied, sampling"]["remote"], of_rank["tied, sampling"]["local"]
        assert [entry["texts"] for entry in got] == [entry["texts"] for entry in want]
        assert [entry["loss"] for entry in got] == pytest.approx([entry["loss"] for entry in want], rel=1e-5)


def test_a_head_without_the_group_is_refused(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        assert "group=torch.distributed.group.WORLD, average=True) on every rank" in of_rank["no group"]
        assert "group=torch.distributed.group.WORLD) on every rank, without average" in of_rank["tied, average"]


def test_a_gradient_is_dropped_by_all_ranks(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        for tokens, message in of_rank["zeroed"]:  # by the model, and by what wraps it
            assert tokens == 0
            assert "head.zero_grad() on every rank" in message
