"""Trainings with Megatron's DistributedDataParallel and optimizer: the head at a server, stepped there or here, against
Megatron's own output layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import nightly
from gpt_models import EXACT, Layout, WithoutCuda, batch, distance, gathered_rows, model_of, objective, parallel, twins
from ranks import Ranks
from test_megatron_model import finish, replaced

import lossd

STEPS, MICROBATCHES = 4, 2
LEARNING = {"lr": 0.05, "min_lr": 0.0, "weight_decay": 0.1, "adam_eps": 1e-4}
RULE = lossd.AdamW(betas=(0.9, 0.999), eps=1e-4, weight_decay=0.1)


class Trainer:
    """What a training loop of Megatron has: wrapped model, optimizer, scheduler."""

    def __init__(self, model: Any, *, clip: float, distributed: bool, overlap: bool = False) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

        self.config = model.config
        self.model = DistributedDataParallel(
            self.config,
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=True, use_distributed_optimizer=distributed, overlap_grad_reduce=overlap
            ),
            model,
        )
        config = OptimizerConfig(
            optimizer="adam",
            clip_grad=clip,
            use_distributed_optimizer=distributed,
            params_dtype=torch.float32,
            **LEARNING,
        )
        self.optimizer = get_megatron_optimizer(config, [self.model])
        self.scheduler_of = lambda optimizer: OptimizerParamScheduler(
            optimizer,
            init_lr=0.0,
            max_lr=LEARNING["lr"],
            min_lr=LEARNING["min_lr"],
            lr_warmup_steps=1,
            lr_decay_steps=6,
            lr_decay_style="cosine",
            start_wd=LEARNING["weight_decay"],
            end_wd=LEARNING["weight_decay"],
            wd_incr_steps=6,
            wd_incr_style="constant",
        )

    def with_head(self, layer: Any) -> None:
        from lossd.megatron import OptimizerWithHead

        self.optimizer = OptimizerWithHead(self.optimizer, layer)

    def train(self, layout: Layout, steps: int, finalize: Any = None) -> tuple[list[float], list[float]]:
        """Losses of rank 0's microbatches, and norms."""
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

        finalize = finalize or finalize_model_grads
        scheduler = self.scheduler_of(self.optimizer)
        losses, norms = [], []
        for step in range(steps):
            self.model.zero_grad_buffer()
            self.optimizer.zero_grad()
            tokens = torch.zeros((), dtype=torch.int)
            per_token = self.config.calculate_per_token_loss
            MTPLossAutoScaler.set_loss_scale(torch.tensor(1.0 if per_token else 1.0 / MICROBATCHES))
            with self.model.no_sync():
                for number in range(MICROBATCHES - 1):
                    tokens += self.backward(layout, step * MICROBATCHES + number, losses)
            tokens += self.backward(layout, step * MICROBATCHES + MICROBATCHES - 1, losses)
            finalize([self.model], tokens if per_token else None)
            scheduler.step(1)
            taken, norm, _ = self.optimizer.step()
            assert taken
            norms.append(float(norm))
        return losses, norms

    def backward(self, layout: Layout, seed: int, losses: list[float]) -> Any:
        given = batch(layout, seed)
        mask = given["loss_mask"]
        output = self.model(**given)
        per_token = self.config.calculate_per_token_loss
        loss = (output * mask).sum() if per_token else objective(output, mask) / MICROBATCHES
        loss.backward()
        losses.append(float(objective(output.detach(), mask)))
        return mask.sum().int()


def rows_of(trainer: Trainer, layout: Layout) -> torch.Tensor:
    rows = gathered_rows(trainer.model.module.state_dict()["output_layer.weight"].detach(), layout)
    return rows if layout.tp == 2 else rows / 2


def same_course(found: Any, wanted: Any) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one == pytest.approx(other, rel=2e-5)


def same_weights(found: Trainer, wanted: Trainer, layout: Layout) -> None:
    assert distance(rows_of(found, layout), rows_of(wanted, layout)) <= 2e-5
    theirs = dict(wanted.model.module.named_parameters())
    for name, parameter in found.model.module.named_parameters():
        assert distance(parameter, theirs[name]) <= 1e-4, name


def stepped_there(
    rank: int, group: dist.ProcessGroup, target: str, layout: Layout, clip: float, distributed: bool, per_token: bool
) -> list[float]:
    from megatron.core.distributed import finalize_model_grads

    with parallel(layout), WithoutCuda():
        local, remote = twins(layout, calculate_per_token_loss=per_token)
        layer = replaced(remote, target, "training", optimizer=RULE)
        assert not any("output_layer" in name for name, _ in remote.named_parameters())
        wanted = Trainer(local, clip=clip, distributed=distributed)
        found = Trainer(remote, clip=clip, distributed=distributed)
        found.with_head(layer)
        course = wanted.train(layout, STEPS)
        finalize = layer.finalizing(finalize_model_grads) if per_token else None
        same_course(found.train(layout, STEPS, finalize), course)
        same_weights(found, wanted, layout)
        assert layer.head.head.info().optimizer_steps == STEPS
        finish(layer)
        return course[1]


@pytest.mark.parametrize("distributed", [False, *nightly(True)])
@pytest.mark.parametrize("clip", [0.5, *nightly(0.0)])
@pytest.mark.parametrize("layout", [Layout(mtp=1), *nightly(Layout(tp=2, sequence=True))], ids=["data", "sequence"])
def test_the_server_steps_the_head(
    ranks: Ranks, server: lossd.Server, layout: Layout, clip: float, distributed: bool
) -> None:
    norms = ranks.run(stepped_there, server.target, layout, clip, distributed, False)[0]
    assert clip == 0 or min(norms) > clip


@pytest.mark.nightly
@pytest.mark.parametrize("layout", [Layout(mtp=1), Layout(tp=2)], ids=["data", "tensor"])
def test_a_mean_over_the_tokens_of_the_step(ranks: Ranks, server: lossd.Server, layout: Layout) -> None:
    ranks.run(stepped_there, server.target, layout, 0.5, False, True)


def stepped_here(
    rank: int,
    group: dist.ProcessGroup,
    target: str,
    layout: Layout,
    distributed: bool,
    delay: bool,
    overlap: bool,
    tied: bool,
) -> None:
    from megatron.core.distributed import finalize_model_grads

    with parallel(layout), WithoutCuda():
        local, remote = twins(layout, tied=tied)
        layer = replaced(remote, target, "training", own_weight=True, delay_wgrad=delay)
        assert dict(remote.named_parameters()).keys() == dict(local.named_parameters()).keys()
        wanted = Trainer(local, clip=0.5, distributed=distributed)
        found = Trainer(remote, clip=0.5, distributed=distributed, overlap=overlap)
        course = wanted.train(layout, STEPS)
        same_course(found.train(layout, STEPS, layer.finalizing(finalize_model_grads)), course)
        if not tied:
            same_weights(found, wanted, layout)
        given = batch(layout)
        with torch.no_grad():  # the weights of the last step are there as soon as they are needed
            assert distance(found.model(**given), wanted.model(**given)) <= 2e-5
        assert layer.head.head.info().window_tokens == 0
        finish(layer)


@pytest.mark.nightly
@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize("layout", [Layout(mtp=1), Layout(tp=2), Layout(tp=2, sequence=True)])
def test_megatron_steps_its_own_weight(
    ranks: Ranks, server: lossd.Server, layout: Layout, distributed: bool, delay: bool
) -> None:
    ranks.run(stepped_here, server.target, layout, distributed, delay, False, False)


@pytest.mark.nightly
def test_gradients_that_are_reduced_while_backward_runs(ranks: Ranks, server: lossd.Server) -> None:
    ranks.run(stepped_here, server.target, Layout(), True, False, True, False)


@pytest.mark.nightly
@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2)])
def test_tied_embeddings(ranks: Ranks, server: lossd.Server, layout: Layout, delay: bool) -> None:
    ranks.run(stepped_here, server.target, layout, False, delay, False, True)


def delayed_and_overlapped(rank: int, group: dist.ProcessGroup, target: str) -> None:
    layout = Layout()
    with parallel(layout), WithoutCuda():
        model = model_of(layout)
        layer = replaced(model, target, "training", own_weight=True, delay_wgrad=True)
        trainer = Trainer(model, clip=0.5, distributed=True, overlap=True)
        given = batch(layout)
        with pytest.raises(AssertionError, match="overlap_grad_reduce"):
            objective(trainer.model(**given), given["loss_mask"]).backward()
        layer.drop_gradient()
        finish(layer)


@pytest.mark.nightly
def test_a_delayed_gradient_would_come_too_late_for_overlapped_reduction(ranks: Ranks, server: lossd.Server) -> None:
    ranks.run(delayed_and_overlapped, server.target)


def pipelined(rank: int, group: dist.ProcessGroup, target: str, clip: float) -> list[float]:
    """Two stages by hand, of which the second has the head."""
    from megatron.core.distributed import finalize_model_grads

    from lossd.megatron import OptimizerWithHead

    layout = Layout(pp=2)
    with parallel(layout), WithoutCuda():
        courses, trainers = [], []
        for remote in (False, True):
            model = model_of(layout)
            layer = replaced(model, target, "training", optimizer=RULE) if remote and rank == 1 else None
            trainer = Trainer(model, clip=clip, distributed=False)
            if remote:
                trainer.optimizer = OptimizerWithHead(trainer.optimizer, layer)
            scheduler, norms = trainer.scheduler_of(trainer.optimizer), []
            for step in range(STEPS):
                trainer.model.zero_grad_buffer()
                trainer.optimizer.zero_grad()
                both_stages(rank, model, trainer.model, batch(layout, step))
                finalize_model_grads([trainer.model])
                scheduler.step(1)
                norms.append(float(trainer.optimizer.step()[1]))
            courses.append(norms)
            trainers.append(trainer)
        same_course(courses[1], courses[0])
        theirs = trainers[0].model.module.state_dict()
        for name, value in trainers[1].model.module.state_dict().items():
            assert value is None or distance(value, theirs[name]) <= 1e-4, name
        if rank == 1:
            layer.head.close()
            layer.head.head.client.delete_head(layer.head.name)
        dist.barrier()
        return courses[0]


def both_stages(rank: int, model: Any, wrapped: Any, given: dict[str, Any]) -> None:
    mask = given["loss_mask"]
    if rank == 0:
        hidden = wrapped(**given)
        dist.send(hidden.detach(), 1)
        gradient = torch.empty_like(hidden)
        dist.recv(gradient, 1)
        hidden.backward(gradient)
        return
    hidden = torch.empty(mask.shape[1], mask.shape[0], 16)
    dist.recv(hidden, 0)
    hidden.requires_grad_()
    model.set_input_tensor(hidden)
    objective(wrapped(**given), mask).backward()
    dist.send(hidden.grad, 0)


@pytest.mark.nightly
@pytest.mark.parametrize("clip", [0.5, 0.0])
def test_norms_are_of_all_pipeline_stages(ranks: Ranks, server: lossd.Server, clip: float) -> None:
    ranks.run(pipelined, server.target, clip)


def spoiled(rank: int, group: dist.ProcessGroup, target: str) -> None:
    layout = Layout(tp=2)
    with parallel(layout), WithoutCuda():
        model = model_of(layout)
        layer = replaced(model, target, "training", optimizer=RULE)
        trainer = Trainer(model, clip=0.5, distributed=False)
        trainer.with_head(layer)
        before, version = layer.read_rows(), layer.head.head.info().weight_version
        given = batch(layout)
        (objective(trainer.model(**given), given["loss_mask"]) * float("inf")).backward()
        assert trainer.optimizer.step() == (False, None, None)
        assert torch.equal(layer.read_rows(), before) and layer.head.head.info().weight_version == version
        assert layer.head.head.info().window_tokens == 0
        finish(layer)


@pytest.mark.nightly
def test_a_gradient_that_is_not_finite_steps_nothing(ranks: Ranks, server: lossd.Server) -> None:
    ranks.run(spoiled, server.target)


def cut(rank: int, group: dist.ProcessGroup, target: str) -> None:
    """A flush that ends in the middle."""
    layout = Layout(tp=2)
    with parallel(layout):
        local, model = twins(layout)
        layer = replaced(model, target, "training", own_weight=True, delay_wgrad=True)
        weight = layer.weight
        weight.main_grad = torch.zeros_like(weight)
        given = batch(layout)
        objective(model(**given), given["loss_mask"]).backward()
        flush = lossd.Head.flush

        def broken(self: Any, *arguments: Any, sink: Any, **options: Any) -> Any:
            def some(first: int, rows: Any, bias: Any) -> None:
                sink(first, rows[:20], bias)
                raise lossd.UnavailableError("cut")

            return flush(self, *arguments, sink=some, **options)

        lossd.Head.flush = broken  # type: ignore[method-assign]
        try:
            with pytest.raises(lossd.UnavailableError):
                layer.wgrad()
        finally:
            lossd.Head.flush = flush  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="drop_gradient"):
            layer.wgrad()
        layer.drop_gradient()
        weight.main_grad.zero_()
        objective(model(**given), given["loss_mask"]).backward()
        layer.wgrad()
        objective(local(**given), given["loss_mask"]).backward()
        assert distance(weight.main_grad, local.output_layer.weight.grad) <= EXACT
        finish(layer)


@pytest.mark.nightly
def test_a_flush_that_was_cut_is_not_added_twice(ranks: Ranks, server: lossd.Server) -> None:
    ranks.run(cut, server.target)
