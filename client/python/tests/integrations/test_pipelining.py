"""Pipelines of two processes whose last stage has a remote head, against one process with a local one."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pipeline_rank
import pytest
import torch
import torch.nn.functional as F
from cases import nightly
from ranks import Ranks

import lossd
from lossd.torch import RemoteHead
from lossd.torch.pipelining import PipelineLoss

ROOT = Path(__file__).parents[4]
sys.path[:0] = [
    str(ROOT / folder) for folder in ("client/examples/python", "tests/integration/replicas", "tests/support")
]

import pipeline  # noqa: E402
from replica_servers import ReplicaServers  # noqa: E402

CASES = [f"{schedule}-{tail}" for schedule in pipeline_rank.SCHEDULES for tail in pipeline_rank.TAILS]
WEIGHTS = np.random.default_rng(6).standard_normal((pipeline_rank.VOCABULARY, pipeline_rank.HIDDEN), np.float32)


@pytest.fixture(scope="module")
def pipelines(ranks: Ranks, server: lossd.Server, client: lossd.Client) -> list[dict]:
    """What both ranks recorded of every case."""
    for case in CASES:
        head = client.create_head(f"pipeline-{case}", *WEIGHTS.shape, "float32", optimizer=lossd.SGD(momentum=0.9))
        head.write_weights(WEIGHTS)
    records = ranks.run(pipeline_rank.run_all, server.target, "pipeline")
    for case in CASES:
        client.delete_head(f"pipeline-{case}")
    return records


@pytest.mark.parametrize("case", CASES)
def test_pipelines_train_as_one_process_does(pipelines: list[dict], case: str) -> None:
    stages = pipeline_rank.stages_of(case.split("-")[1])
    weight = torch.nn.Parameter(torch.from_numpy(WEIGHTS.copy()))
    optimizer = torch.optim.SGD([weight], lr=0.5, momentum=0.9)
    for step in range(2):
        tokens, labels = pipeline_rank.batch(step)
        for stage in stages:
            stage.zero_grad()
        optimizer.zero_grad()
        hidden = stages[1](stages[0](tokens))
        loss = F.cross_entropy(F.linear(hidden, weight).flatten(0, 1), labels.flatten())
        loss.backward()
        optimizer.step()
        assert pipelines[1][case]["losses"][step] == pytest.approx(loss.item(), rel=1e-6)
        for rank, stage in enumerate(stages):
            got = pipelines[rank][case]["gradients"][step]
            assert got.keys() == dict(stage.named_parameters()).keys()
            for name, parameter in stage.named_parameters():
                torch.testing.assert_close(got[name], parameter.grad, rtol=1e-4, atol=1e-6)
    # Shapes were inferred by calling the loss with uninitialised memory: nothing of that is in these.
    torch.testing.assert_close(pipelines[1][case]["weights"], weight.detach(), rtol=1e-5, atol=1e-6)


def stage(**options: object) -> SimpleNamespace:
    return SimpleNamespace(**{"is_last": True, "stage_index": 1, "num_stages": 2, **options})


def test_losses_need_the_last_stage_and_the_count(client: lossd.Client, name: str) -> None:
    head = RemoteHead(client.create_head(name, 5, 3, "float32"))
    with pytest.raises(ValueError, match="stage: got stage 0 of 2, want the last"):
        PipelineLoss(head, stage(is_last=False, stage_index=0))
    loss = PipelineLoss(head, stage())
    with pytest.raises(RuntimeError, match="call begin_step"):
        loss(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match="scale_grads=False"):
        loss.begin_step(torch.zeros(2), SimpleNamespace(scale_grads=True))
    assert loss.begin_step(torch.tensor([1, -100, 3]), SimpleNamespace(scale_grads=False)) == 2


def run_example(target: str, pipelines: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    output = folder / "result.json"
    arguments = ["--server", target, "--steps", "12", "--json", str(output), "--pipelines", str(pipelines)]
    monkeypatch.setattr(sys, "argv", [pipeline.__file__, *arguments])
    assert pipeline.main() == 0
    losses: list[float] = json.loads(output.read_text())["losses"]
    return losses


@pytest.mark.parametrize("pipelines", [1, *nightly(2)])
def test_example_learns(server: lossd.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pipelines: int) -> None:
    losses = run_example(server.target, pipelines, tmp_path, monkeypatch)
    assert len(losses) == 12
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.nightly
def test_example_of_two_pipelines_learns_the_same_over_two_replicas(
    server: lossd.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = run_example(server.target, 2, tmp_path, monkeypatch)
    with ReplicaServers(str(lossd.server.find_program()), tmp_path / "servers", 2) as replicas:
        over_two = run_example(",".join(replicas.targets), 2, tmp_path, monkeypatch)
        for target in replicas.targets:  # a session at each
            with lossd.connect(target) as client:
                assert client.status().tokens_applied > 0
    assert over_two == pytest.approx(alone, rel=1e-5)


def split_losses(loss: PipelineLoss, hidden: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """As a schedule of two microbatches does."""
    losses = [loss(*part) for part in zip(hidden.chunk(2), target.chunk(2), strict=True)]
    for one in losses:
        one.backward()
    return sum(losses).detach()


def make_problem(
    client: lossd.Client, name: str, **options: object
) -> tuple[RemoteHead, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A head, its weights [5, 3], hidden states [4, 6, 3] and labels [4, 6], some ignored, at different places."""
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(5, 3, generator=generator).requires_grad_()
    hidden = torch.randn(4, 6, 3, generator=generator)
    target = torch.randint(0, 5, (4, 6), generator=generator)
    target[0, 0] = target[2, 3:] = -100
    head = RemoteHead(client.create_head(name, 5, 3, "float32", **options))
    head.write_weights(weights)
    return head, weights, hidden, target


@pytest.mark.parametrize("shift", [True, 2])
def test_shifted_labels_are_counted_as_they_are_used(client: lossd.Client, name: str, shift: int) -> None:
    head, weights, hidden, target = make_problem(client, name)
    loss = PipelineLoss(head, stage(), shift=shift)
    counted = target[:, shift:]
    assert loss.begin_step(target) == int((counted != -100).sum())
    expected = F.cross_entropy(F.linear(hidden[:, :-shift], weights).flatten(0, 1), counted.flatten())
    torch.testing.assert_close(split_losses(loss, hidden, target), expected.detach(), rtol=1e-5, atol=1e-6)
    expected.backward()
    torch.testing.assert_close(head.flush().gradient, weights.grad, rtol=1e-4, atol=1e-6)
    with pytest.raises(ValueError, match=r"shift .* target has the shape \[24\]"):
        loss.begin_step(target.flatten())


@pytest.mark.parametrize("how", ["weight", "count"])
def test_class_weights_are_what_a_mean_is_over(client: lossd.Client, name: str, how: str) -> None:
    classes = torch.tensor([0.5, 2.0, 1.0, 0.0, 3.0])
    head, weights, hidden, target = make_problem(client, name, class_weights=classes.numpy())
    with pytest.raises(ValueError, match="class weights.*give the sum .* as count"):
        PipelineLoss(head, stage()).begin_step(target)
    PipelineLoss(head, stage(), weight=False).begin_step(target)
    total = float(classes[target[target != -100]].sum())
    loss = PipelineLoss(head, stage(), lse_square_scale=0.01, **({"weight": classes} if how == "weight" else {}))
    loss.begin_step(target, count=total if how == "count" else None)
    logits = F.linear(hidden, weights).flatten(0, 1)
    z_loss = 0.01 * logits.logsumexp(-1)[target.flatten() != -100].square().mean()
    expected = F.cross_entropy(logits, target.flatten(), classes) + z_loss
    torch.testing.assert_close(split_losses(loss, hidden, target), expected.detach(), rtol=1e-5, atol=1e-6)
