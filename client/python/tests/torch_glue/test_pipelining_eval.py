"""PipelineLoss in schedules that send nothing back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from glue_support import HIDDEN, VOCAB, Ranks, batch, weights_of
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import lossd
from lossd.torch import RemoteHead
from lossd.torch.pipelining import PipelineLoss


def evaluated(rank: int, group: dist.ProcessGroup, target: str, name: str, kind: str) -> None:
    head = RemoteHead(lossd.connect(target).head(name))
    trunk = torch.nn.Linear(HIDDEN, HIDDEN)
    stage = PipelineStage(trunk, 0, 1, torch.device("cpu"), group=group)
    loss = PipelineLoss(head, stage)
    schedule = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[kind](stage, 2, loss_fn=loss, scale_grads=False)
    hidden, labels = batch()
    weights = weights_of(head)
    for _ in range(2):
        losses: list[torch.Tensor] = []
        loss.begin_step(labels, schedule)
        schedule.eval(hidden, target=labels, losses=losses)
        wanted = F.cross_entropy(F.linear(trunk(hidden), weights), labels)
        torch.testing.assert_close(sum(losses), wanted.detach(), rtol=1e-5, atol=1e-6)
        assert not head.dirty and head.gradient_stats().window_tokens == 0
        schedule.step(hidden, target=labels)  # and a step between evaluations trains
        assert head.gradient_stats().window_tokens == len(labels)
        head.zero_grad()
    head.close()


@pytest.mark.parametrize("kind", ["gpipe", "1f1b"])
def test_an_evaluation_adds_nothing(
    ranks: Ranks, server: lossd.Server, make_remote: Callable[..., RemoteHead], kind: str
) -> None:
    head = make_remote(vocab=VOCAB, hidden=HIDDEN)
    ranks.run(evaluated, server.target, head.name, kind, count=1)
