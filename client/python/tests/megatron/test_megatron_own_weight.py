"""Weights that stay Megatron's: which parameter it is, and when its gradient and its values travel."""

from __future__ import annotations

from typing import Any

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
    assert_same,
    batch,
    distance,
    gradients,
    model_of,
    objective,
    parallel,
    twins,
)
from ranks import Ranks
from test_megatron_model import finish, replaced
from test_megatron_training import RULE, Trainer

import lossd

pytestmark = pytest.mark.nightly


def tied_to_an_embedding_of_its_own(rank: int, group: dist.ProcessGroup, target: str) -> None:
    """A last stage with layers for more tokens has a copy of the embedding, and an output layer whose weight nobody
    uses."""
    with parallel(Layout(pp=2, mtp=1)), WithoutCuda():
        models = [model_of(Layout(pp=2, mtp=1), tied=True) for _ in range(2)]
        if rank == 1:
            local, remote = models
            layer = replaced(remote, target, "gpt", own_weight=True)
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


def step(trainer: Trainer, layout: Layout, finalize: Any, microbatches: int = 1) -> None:
    trainer.model.zero_grad_buffer()
    trainer.optimizer.zero_grad()
    tokens = torch.zeros((), dtype=torch.int)
    for number in range(microbatches):
        given = batch(layout, number)
        objective(trainer.model(**given), given["loss_mask"]).backward()
        tokens += given["loss_mask"].sum().int()
    finalize([trainer.model], tokens if trainer.config.calculate_per_token_loss else None)
    trainer.optimizer.step()


def overwritten(rank: int, group: dist.ProcessGroup, target: str) -> None:
    """What Megatron-LM's train() makes of config.finalize_model_grads_func."""
    from megatron.core.distributed import finalize_model_grads

    layout = Layout(tp=2)
    with parallel(layout), WithoutCuda():
        model = model_of(layout)
        layer = replaced(model, target, "training", own_weight=True, delay_wgrad=True)
        trainer = Trainer(model, clip=0.5, distributed=False)
        step(trainer, layout, layer.finalizing(finalize_model_grads), 2)
        step(trainer, layout, finalize_model_grads, 2)
        with pytest.raises(RuntimeError, match="finalizing.*train.*training.finalize_model_grads"):
            trainer.model(**batch(layout))
        layer.drop_gradient()
        step(trainer, layout, layer.finalizing(finalize_model_grads))
        finish(layer)


def test_a_delayed_gradient_that_nobody_fetched_is_an_error(ranks: Ranks, server: lossd.Server) -> None:
    ranks.run(overwritten, server.target)


def uncounted(rank: int, group: dist.ProcessGroup, target: str) -> None:
    from megatron.core.distributed import finalize_model_grads

    layout = Layout(tp=2)
    with parallel(layout), WithoutCuda():
        model = model_of(layout, calculate_per_token_loss=True)
        layer = replaced(model, target, "training", optimizer=RULE)
        trainer = Trainer(model, clip=0.5, distributed=False)
        trainer.with_head(layer)
        with pytest.raises(RuntimeError, match="finalizing.*train.*training.finalize_model_grads"):
            step(trainer, layout, finalize_model_grads)
        layer.drop_gradient()
        finish(layer)


def test_tokens_that_nobody_counted_are_an_error(ranks: Ranks, server: lossd.Server) -> None:
    ranks.run(uncounted, server.target)


def frozen_for_a_while(rank: int, group: dist.ProcessGroup, target: str, trunk: bool) -> None:
    """trunk: it is frozen as well, so that no gradient is needed at all."""
    layout = Layout(tp=2)
    with parallel(layout):
        local, remote = twins(layout)
        layer = replaced(remote, target, "gpt", own_weight=True)
        for one in remote.parameters() if trunk else [layer.weight]:
            one.requires_grad_(False)
        for number in range(2):
            given = batch(layout, number)
            loss = objective(remote(**given), given["loss_mask"])
            assert loss.requires_grad == (not trunk)
            if loss.requires_grad:
                loss.backward()
            assert layer.head.head.info().window_tokens == 0
        for one in remote.parameters():
            one.requires_grad_()
            one.grad = None
        given = batch(layout)
        for model in (local, remote):
            objective(model(**given), given["loss_mask"]).backward()
        assert_same(gradients(remote), gradients(local))
        finish(layer)


@pytest.mark.parametrize("trunk", [False, True])
def test_a_weight_that_is_frozen_gathers_no_gradient(ranks: Ranks, server: lossd.Server, trunk: bool) -> None:
    ranks.run(frozen_for_a_while, server.target, trunk)


def frozen_from_the_start(rank: int, group: dist.ProcessGroup, target: str) -> None:
    from lossd.megatron import OptimizerWithHead

    layout = Layout(tp=2)
    with parallel(layout), WithoutCuda():
        local, remote = twins(layout)
        for model in (local, remote):
            model.output_layer.weight.requires_grad_(False)
        with pytest.raises(ValueError, match="frozen=True"):
            replaced(remote, target, "gpt", own_weight=True)
        with pytest.raises(ValueError, match="one of them"):
            replaced(remote, target, "gpt", own_weight=True, frozen=True)
        layer = replaced(remote, target, "gpt", optimizer=None, frozen=True)
        given = batch(layout)
        for model in (local, remote):
            objective(model(**given), given["loss_mask"]).backward()
        assert_same(gradients(remote), gradients(local))
        assert remote.state_dict().keys() == local.state_dict().keys()
        with pytest.raises(ValueError, match="frozen"):
            OptimizerWithHead(Trainer(remote, clip=0.0, distributed=False).optimizer, layer)
        finish(layer)


def test_a_weight_that_nobody_trains_is_a_frozen_head(ranks: Ranks, server: lossd.Server) -> None:
    ranks.run(frozen_from_the_start, server.target)


def uploaded(rank: int, group: dist.ProcessGroup, target: str, distributed: bool) -> None:
    from megatron.core.distributed import finalize_model_grads

    layout = Layout(tp=2) if not distributed else Layout()
    with parallel(layout), WithoutCuda():
        model = model_of(layout)
        layer = replaced(model, target, "training", own_weight=True)
        trainer = Trainer(model, clip=0.0, distributed=distributed)

        def version() -> int:
            return int(layer.head.head.info().weight_version)

        first = version()
        for number in range(3):
            step(trainer, layout, finalize_model_grads, microbatches=3)
            assert version() == first + number
        given = batch(layout)
        with torch.no_grad():
            for _ in range(2):
                trainer.model(**given)
        assert version() == first + 3 and torch.equal(layer.read_rows(), layer.weight)
        # Forward passes of other microbatches come between a forward pass and its backward pass.
        waiting = [objective(trainer.model(**given), given["loss_mask"]) for _ in range(2)]
        waiting.pop(0).backward()
        waiting.append(objective(trainer.model(**given), given["loss_mask"]))
        for loss in waiting:
            loss.backward()
        assert version() == first + 3
        with torch.no_grad():
            layer.weight.zero_()
            trainer.model(**given)
        assert version() == first + 4 and not layer.read_rows().any()
        model.load_state_dict(model.state_dict())
        with torch.no_grad():
            trainer.model(**given)
        assert version() == first + 5
        finish(layer)


@pytest.mark.parametrize("distributed", [False, True])
def test_a_weight_is_written_once_a_step(ranks: Ranks, server: lossd.Server, distributed: bool) -> None:
    ranks.run(uploaded, server.target, distributed)


def gathered_late(rank: int, group: dist.ProcessGroup, target: str) -> None:
    layout = Layout()
    with parallel(layout), WithoutCuda():
        model = model_of(layout)
        layer = replaced(model, target, "training", own_weight=True)
        trainer = Trainer(model, clip=0.0, distributed=True)
        called: list[Any] = []
        finalize = layer.finalizing(lambda models, *_: called.append(models))
        finalize([trainer.model])
        trainer.model.ddp_config.overlap_param_gather = True
        with pytest.raises(ValueError, match="overlap_param_gather"):
            finalize([trainer.model])
        assert len(called) == 1
        finish(layer)


def test_a_weight_that_is_gathered_during_the_forward_pass_is_refused(ranks: Ranks, server: lossd.Server) -> None:
    ranks.run(gathered_late, server.target)
