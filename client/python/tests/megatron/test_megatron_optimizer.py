"""What OptimizerWithHead does besides stepping: other optimizers, loss scales, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpt_models import Layout, WithoutCuda, batch, distance, model_of, objective, parallel
from ranks import Ranks
from test_megatron_model import finish, replaced
from test_megatron_training import RULE, Trainer, both_stages, same_course

import lossd

pytestmark = pytest.mark.nightly


def reduced(trainer: Trainer, layout: Layout, step: int = 0) -> None:
    """The gradient of one batch."""
    from megatron.core.distributed import finalize_model_grads

    trainer.model.zero_grad_buffer()
    trainer.optimizer.zero_grad()
    given = batch(layout, step)
    loss = objective(trainer.model(**given), given["loss_mask"])
    trainer.optimizer.scale_loss(loss).backward()
    finalize_model_grads([trainer.model])


def layer_wise(rank: int, group: dist.ProcessGroup, target: str) -> None:
    from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
    from megatron.core.process_groups_config import ProcessGroupCollection

    layout = Layout()
    with parallel(layout), WithoutCuda():
        models = []
        for remote in (False, True):
            model = model_of(layout)
            layer = replaced(model, target, "training", optimizer=RULE) if remote else None
            trainer = Trainer(model, clip=0.5, distributed=False)
            chained, groups = trainer.optimizer.chained_optimizers, ProcessGroupCollection.use_mpu_process_groups()
            trainer.optimizer = LayerWiseDistributedOptimizer(chained, chained[0].config, groups)
            # As gloo gathers no pieces that differ in size; Megatron keeps it for its tests.
            trainer.optimizer.allgather_params = trainer.optimizer.broadcast_params
            if layer is not None:
                trainer.with_head(layer)
            for step in range(2):
                reduced(trainer, layout, step)
                assert trainer.optimizer.step()[0]
            models.append(dict(model.named_parameters()))
        wanted, found = models
        for name, one in found.items():
            both = [torch.empty_like(one) for _ in range(2)]
            dist.all_gather(both, one.detach())
            assert torch.equal(*both), name
            assert distance(one, wanted[name]) <= 1e-4, name
        finish(layer)


def test_parameters_that_ranks_share_out_layer_by_layer(ranks: Ranks, server: lossd.Server) -> None:
    ranks.run(layer_wise, server.target)


def unknown(rank: int, group: dist.ProcessGroup, target: str) -> None:
    from megatron.core.optimizer.optimizer import ChainedOptimizer

    class Twice(ChainedOptimizer):
        def step(self) -> Any:
            return [super().step(), super().step()]

    with parallel(Layout()), WithoutCuda():
        model = model_of(Layout())
        layer = replaced(model, target, "training", optimizer=RULE)
        trainer = Trainer(model, clip=0.5, distributed=False)
        for other in (Twice(trainer.optimizer.chained_optimizers), torch.optim.SGD(model.parameters(), 0.1)):
            trainer.optimizer = other
            with pytest.raises(TypeError, match="step.. of its own.* ChainedOptimizer or"):
                trainer.with_head(layer)
        finish(layer)


def test_an_optimizer_that_steps_otherwise_is_refused(ranks: Ranks, server: lossd.Server) -> None:
    ranks.run(unknown, server.target)


def scaled(rank: int, group: dist.ProcessGroup, target: str) -> list[tuple[bool, float]]:
    """Steps of a loss scale that grows every two of them; in some the head's gradient alone is not finite."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    layout = Layout(tp=2)
    with parallel(layout), WithoutCuda():
        model = model_of(layout)
        layer = replaced(model, target, "training", optimizer=RULE)
        trainer = Trainer(model, clip=0.5, distributed=False)
        config = OptimizerConfig(
            optimizer="adam",
            lr=0.01,
            min_lr=0.0,
            fp16=True,
            params_dtype=torch.float16,
            initial_loss_scale=1024.0,
            loss_scale_window=2,
            hysteresis=1,
        )
        trainer.optimizer = get_megatron_optimizer(config, [trainer.model])
        trainer.with_head(layer)
        course = []
        for finite in (True, False, True, False, False, True, True):
            layer.head.refresh_gradient = (
                type(layer.head).refresh_gradient.__get__(layer.head)
                if finite
                else lambda: torch.full((1, 1), float("inf"))
            )
            reduced(trainer, layout)
            course.append((trainer.optimizer.step()[0], float(trainer.optimizer.get_loss_scale())))
            assert layer.head.head.info().window_tokens == 0
        assert layer.head.head.info().optimizer_steps == 4
        finish(layer)
        return course


def test_a_gradient_of_the_head_that_is_not_finite_lowers_the_loss_scale(ranks: Ranks, server: lossd.Server) -> None:
    for course in ranks.run(scaled, server.target):
        assert [taken for taken, _ in course] == [True, False, True, False, False, True, True]
        assert [scale for _, scale in course] == [1024, 512, 512, 256, 128, 128, 256]


def decoupled(rank: int, group: dist.ProcessGroup, target: str, rates: dict[str, float]) -> None:
    """The learning rates of a course, of Megatron's group with the output layer and of the head's."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    layout = Layout()
    with parallel(layout), WithoutCuda():
        courses = []
        for remote in (False, True):
            model = model_of(layout)
            layer = replaced(model, target, "training", optimizer=RULE) if remote else None
            trainer = Trainer(model, clip=0.5, distributed=False)
            config = OptimizerConfig(optimizer="adam", **{"lr": 0.05, "min_lr": 0.002, **rates})
            optimizer = get_megatron_optimizer(config, [trainer.model])
            if layer is not None:
                trainer.optimizer = optimizer
                trainer.with_head(layer)
                optimizer, owner = trainer.optimizer, trainer.optimizer.head_group
            else:
                weight = model.output_layer.weight
                owner = next(one for one in optimizer.param_groups if any(p is weight for p in one["params"]))
            scheduler = trainer.scheduler_of(optimizer)
            courses.append([])
            for _ in range(8):
                scheduler.step(1)
                courses[-1].append(owner["lr"])
        assert courses[0] == courses[1] and len(set(courses[0])) > 3
        finish(layer)


@pytest.mark.parametrize("rates", [{}, {"decoupled_lr": 0.01}, {"decoupled_lr": 0.01, "decoupled_min_lr": 0.004}])
def test_the_head_has_the_learning_rate_of_an_output_layer(
    ranks: Ranks, server: lossd.Server, rates: dict[str, float]
) -> None:
    ranks.run(decoupled, server.target, rates)


def failing(layer: Any, method: str) -> None:
    """The next call of this method of the head fails on every rank that has it."""

    def fail(*_: Any, **__: Any) -> None:
        delattr(layer.head, method)
        raise lossd.UnavailableError("the server is gone")

    setattr(layer.head, method, fail)


def interrupted(rank: int, group: dist.ProcessGroup, target: str, layout: Layout) -> None:
    """The first step fails when it asks for the norm, the second one when the head is to be stepped, the third one when
    a gradient that is not finite is to be dropped; each is repeated."""
    from megatron.core.distributed import finalize_model_grads

    from lossd.megatron import OptimizerWithHead

    with parallel(layout), WithoutCuda():
        models, courses, layer = [], [], None
        for remote in (False, True):
            model = model_of(layout)
            if remote and model.post_process:
                layer = replaced(model, target, "training", optimizer=RULE)
            trainer = Trainer(model, clip=0.05, distributed=False)
            if remote:
                trainer.optimizer = OptimizerWithHead(trainer.optimizer, layer)
            course = []
            for number in range(2):
                trainer.model.zero_grad_buffer()
                trainer.optimizer.zero_grad()
                given = batch(layout, number)
                if layout.pp == 1:
                    objective(trainer.model(**given), given["loss_mask"]).backward()
                else:
                    both_stages(rank, model, trainer.model, given)
                finalize_model_grads([trainer.model])
                if remote:
                    before = [one.detach().clone() for one in model.parameters()]
                    if layer is not None:
                        failing(layer, ("refresh_gradient", "step")[number])
                    with pytest.raises(lossd.UnavailableError, match="gone"):
                        trainer.optimizer.step()
                    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
                course.append(float(trainer.optimizer.step()[1]))
            courses.append(course)
            models.append(model.state_dict())
        same_course(courses[1], courses[0])
        for name, value in models[1].items():
            assert value is None or distance(value, models[0][name]) <= 1e-4, name
        if layer is not None:
            assert layer.head.head.info().optimizer_steps == 2
            layer.head.refresh_gradient = lambda: torch.full((1, 1), float("nan"))
            failing(layer, "zero_grad")
        with pytest.raises(lossd.UnavailableError, match="gone"):
            trainer.optimizer.step()
        assert trainer.optimizer.step() == (False, None, None)
        if layer is not None:
            layer.head.close()
        dist.barrier()
        if layer is not None and rank == dist.get_world_size() - 1:
            layer.head.head.client.delete_head("training", discard_gradient=True)
        dist.barrier()


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(pp=2)], ids=["tensor", "pipeline"])
def test_an_error_is_raised_on_all_stages_and_the_step_can_be_repeated(
    ranks: Ranks, server: lossd.Server, layout: Layout
) -> None:
    ranks.run(interrupted, server.target, layout)
