"""Weights that stay Megatron's: which parameter it is, and when its gradient and its values travel."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from gpt_models import (
    EXACT,
    HIDDEN,
    LENGTH,
    SAMPLES,
    Layout,
    WithoutCuda,
    batch,
    distance,
    model_of,
    objective,
    parallel,
)
from ranks import Ranks
from test_megatron_model import replaced

import lossd


def tied_to_an_embedding_of_its_own(rank: int, group: dist.ProcessGroup, target: str) -> None:
    """A last stage with layers for more tokens has a copy of the embedding, and an output layer whose weight nobody
    uses."""
    with parallel(Layout(pp=2, mtp=1)), WithoutCuda():
        models = [model_of(Layout(pp=2, mtp=1), tied=True) for _ in range(2)]
        if rank == 1:
            local, remote = models
            alone = dist.new_group([1], use_local_synchronization=True)
            layer = replaced(remote, target, "gpt", own_weight=True, group=alone)
            embedding = remote.embedding.word_embeddings.weight
            assert not torch.equal(embedding, layer.weight)
            hidden = torch.randn(LENGTH, SAMPLES, HIDDEN)
            given = batch(Layout(mtp=1))
            for model in models:
                model.set_input_tensor(hidden.clone().requires_grad_())
                objective(model(**given), given["loss_mask"]).backward()
            assert layer.weight.grad is None
            assert distance(embedding.grad, local.embedding.word_embeddings.weight.grad) <= EXACT
            with torch.no_grad():
                embedding.add_(1.0)
            layer.upload()
            assert torch.equal(layer.read_rows(), embedding)
            assert remote.state_dict().keys() == local.state_dict().keys()
            layer.head.close()
            layer.head.head.client.delete_head("gpt")
        dist.barrier()


def test_an_embedding_of_the_last_stage_is_the_weight(ranks: Ranks, server: lossd.Server) -> None:
    ranks.run(tied_to_an_embedding_of_its_own, server.target)
