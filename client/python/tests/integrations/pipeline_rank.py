"""One rank of test_pipelining.py's pipelines."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import lossd
from lossd.torch import RemoteHead
from lossd.torch.pipelining import PipelineLoss

VOCABULARY, HIDDEN, ROWS, LENGTH, MICROBATCHES = 37, 12, 8, 5, 4
SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
# What the last stage has of the trunk: a layer, or nothing but the head.
TAILS = ("layer", "none")


def stages_of(tail: str) -> list[torch.nn.Module]:
    torch.manual_seed(2)
    embedding = torch.nn.Embedding(VOCABULARY, HIDDEN)
    layers = [torch.nn.Sequential(torch.nn.Linear(HIDDEN, HIDDEN), torch.nn.Tanh()) for _ in range(2)]
    if tail == "none":
        return [torch.nn.Sequential(embedding, *layers), torch.nn.Identity()]
    return [torch.nn.Sequential(embedding, layers[0]), layers[1]]


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels; microbatches have different numbers of labels, the second of step 1 none."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator)
    labels = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator)
    labels[0, 1:] = -100
    if step == 1:
        labels[2:4] = -100
    return tokens, labels


def run(rank: int, remote: RemoteHead | None, schedule_name: str, tail: str) -> dict[str, list]:
    module = stages_of(tail)[rank]
    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    loss = PipelineLoss(remote, stage) if remote else None
    schedule = SCHEDULES[schedule_name](
        stage, MICROBATCHES, loss_fn=loss or torch.nn.functional.mse_loss, scale_grads=False
    )
    record = {"losses": [], "gradients": []}
    for step in range(2):
        tokens, labels = batch(step)
        module.zero_grad()
        if remote is None:
            schedule.step(tokens)
        else:
            losses = []
            loss.begin_step(labels, schedule)
            schedule.step(target=labels, losses=losses)
            record["losses"].append(sum(losses).item())
            remote.step(lr=0.5)
        record["gradients"].append({name: value.grad.clone() for name, value in module.named_parameters()})
    return record


def run_all(rank: int, group: dist.ProcessGroup, target: str, head_name: str) -> dict[str, dict[str, list]]:
    """What this rank recorded of every schedule and tail."""
    records = {}
    with lossd.connect(target) as client:
        for schedule_name in SCHEDULES:
            for tail in TAILS:
                key = f"{schedule_name}-{tail}"
                remote = RemoteHead(client.head(f"{head_name}-{key}")) if rank == 1 else None
                records[key] = run(rank, remote, schedule_name, tail)
                if remote:
                    records[key]["weights"] = torch.as_tensor(remote.head.read_weights())
    return records
