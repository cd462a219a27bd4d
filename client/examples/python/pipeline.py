#!/usr/bin/env python3
"""Pipelines of two processes with torch.distributed.pipelining; the last stages' head lives in lossd.

    python pipeline.py                                    # both ranks and a private server on this host
    python pipeline.py --schedule gpipe --server host:50051
    torchrun --nproc-per-node 2 pipeline.py --server host:50051
    torchrun --nproc-per-node 4 pipeline.py --server host-a:50051,host-b:50051

The first rank of a pipeline has the embedding and the first half of the layers, the second one the rest. That one sends
what comes out to lossd, microbatch by microbatch, and gets the loss and the gradient that the pipeline carries back.
Four ranks are two pipelines, each with its own part of every batch: equal stages add up their gradients, and the server
does so with the head's. Where it has replicas, the two sessions are at different ones, and a step is of all. The data
are sequences that count up in steps; a model of a few thousand weights learns them in seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import lossd
from lossd.torch import RemoteHead
from lossd.torch.distributed import first_rank_does, gather_objects
from lossd.torch.pipelining import PipelineLoss

VOCABULARY, HIDDEN, LENGTH = 64, 32, 16
SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


class Layer(torch.nn.Module):
    """A causal layer: each position sees the mean of those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(HIDDEN)
        self.inner = torch.nn.Linear(2 * HIDDEN, 4 * HIDDEN)
        self.outer = torch.nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        normal = self.norm(hidden)
        past = normal.cumsum(1) / torch.arange(1, hidden.shape[1] + 1)[:, None]
        return hidden + self.outer(torch.nn.functional.gelu(self.inner(torch.cat([normal, past], -1))))


def stage_module(rank: int) -> torch.nn.Module:
    torch.manual_seed(rank)
    if rank == 0:
        return torch.nn.Sequential(torch.nn.Embedding(VOCABULARY, HIDDEN), Layer())
    return torch.nn.Sequential(Layer(), torch.nn.LayerNorm(HIDDEN))


def sequences(step: int, rows: int) -> torch.Tensor:
    """[rows, LENGTH + 1] tokens: start, start + stride, start + 2 stride, ..."""
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(0, VOCABULARY, (rows, 1), generator=generator)
    stride = torch.randint(1, 4, (rows, 1), generator=generator)
    return (start + stride * torch.arange(LENGTH + 1)) % VOCABULARY


class Place:
    """Which stage of which pipeline a rank has, and whom it talks to. Every rank makes one."""

    def __init__(self, rank: int, world_size: int) -> None:
        pipelines = world_size // 2
        self.pipeline, self.stage = divmod(rank, 2)
        # Every rank has a part in making every group.
        alike = [dist.new_group(list(range(stage, world_size, 2))) for stage in range(2)]
        pairs = [dist.new_group([2 * pipeline, 2 * pipeline + 1]) for pipeline in range(pipelines)]
        self.alike = alike[self.stage]
        """The same stage of all pipelines."""
        self.pair = pairs[self.pipeline]

    def part_of(self, rows: torch.Tensor) -> torch.Tensor:
        """This one's share of a batch of all pipelines."""
        return rows.chunk(dist.get_world_size(self.alike))[self.pipeline]


def train(place: Place, options: argparse.Namespace) -> list[float]:
    """Trains this rank's stage. Returns the losses of all steps on last stages, nothing on first ones."""
    module = stage_module(place.stage)
    optimizer = torch.optim.AdamW(module.parameters(), lr=options.lr)
    stage = PipelineStage(module, place.stage, 2, torch.device("cpu"), group=place.pair)
    with contextlib.ExitStack() as stack:
        head = loss_fn = None
        if place.stage == 1:
            client = stack.enter_context(lossd.connect(options.server))
            weights = 0.02 * torch.randn(VOCABULARY, HIDDEN)
            # The first of them creates and writes it.
            name = first_rank_does(lambda: f"pipeline-{os.getpid()}", place.alike)
            head = RemoteHead.create(
                client, name, VOCABULARY, HIDDEN, dtype=torch.float32, optimizer=lossd.AdamW(), weights=weights,
                rank=place.pipeline, group=place.alike,
            )  # fmt: skip
            stack.callback(first_rank_does, lambda: client.delete_head(head.name, discard_gradient=True), place.alike)
            loss_fn = PipelineLoss(head, stage)
        schedule = SCHEDULES[options.schedule](
            # The first rank has no loss, but has to tell that there is a backward pass.
            stage, options.microbatches, loss_fn=loss_fn or torch.nn.functional.mse_loss, scale_grads=False
        )  # fmt: skip
        history = []
        for step in range(options.steps):
            tokens = place.part_of(sequences(step, 4 * options.microbatches * dist.get_world_size(place.alike)))
            optimizer.zero_grad()
            if place.stage == 0:
                schedule.step(tokens[:, :-1].contiguous())
            else:
                losses: list[torch.Tensor] = []
                # The mean is over the tokens of all pipelines, so gradients are added up, here and at the server.
                loss_fn.begin_step(tokens[:, 1:], schedule, group=place.alike)
                schedule.step(target=tokens[:, 1:].contiguous(), losses=losses)
                head.step(lr=options.lr)
                history.append(sum(gather_objects(sum(losses).item(), place.alike)))
                if place.pipeline == 0:
                    print(f"step {step + 1:3d}/{options.steps}: loss {history[-1]:.4f}", flush=True)
            for parameter in module.parameters():
                dist.all_reduce(parameter.grad, group=place.alike)
            optimizer.step()
    return history


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--server",
        help="a running lossd, as host:port or unix:PATH, or its replicas with commas between them; without it a "
        "private one is started",
    )
    parser.add_argument(
        "--pipelines", type=int, default=1, help="without torchrun: how many, of two processes each (%(default)s)"
    )
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b", help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps (%(default)s)")
    parser.add_argument("--microbatches", type=int, default=4, help="of 4 sequences each, per step (%(default)s)")
    parser.add_argument(
        "--lr", type=float, default=1e-2, help="learning rate, of both ranks and the head (%(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the losses there")
    options = parser.parse_args(arguments)
    for name in ("steps", "microbatches", "pipelines"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1")
    return options


@contextlib.contextmanager
def server_of(options: argparse.Namespace) -> Iterator[str]:
    if options.server:
        yield options.server
    else:
        with lossd.launch(device="cpu") as server:
            yield server.target


def start_ranks(options: argparse.Namespace) -> int:
    """All ranks as processes of this program, with what torchrun would have set."""
    size = 2 * options.pipelines
    with server_of(options) as target, tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, *sys.argv[1:], "--server", target]
        shared = {**os.environ, "WORLD_SIZE": str(size), "LOSSD_EXAMPLE_RENDEZVOUS": f"file://{folder}/rendezvous"}
        ranks = [subprocess.Popen(command, env={**shared, "RANK": str(rank)}) for rank in range(size)]
        while any(rank.poll() is None for rank in ranks):
            if any(rank.poll() for rank in ranks):
                for rank in ranks:
                    rank.terminate()  # It would wait for the one that has failed for ever.
            time.sleep(0.05)
        return int(any(rank.returncode for rank in ranks))


def main() -> int:
    options = parse(sys.argv[1:])
    if "RANK" not in os.environ:
        return start_ranks(options)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if size % 2 or not options.server:
        print("pipeline.py: under torchrun, give --nproc-per-node 2, or 4, and --server", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=os.environ.get("LOSSD_EXAMPLE_RENDEZVOUS", "env://"), rank=rank, world_size=size
    )
    try:
        history = train(Place(rank, size), options)
    except lossd.LossdError as error:
        print(f"pipeline.py: rank {rank}: {error}", file=sys.stderr)
        return 1
    if rank == 1 and options.json:
        options.json.write_text(json.dumps({"schedule": options.schedule, "losses": history}) + "\n")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
