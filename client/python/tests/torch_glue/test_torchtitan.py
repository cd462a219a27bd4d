"""torchtitan: its checkpoints, optimizers and clipping, of a model with a head, and its trainer's loop around them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import nightly
from glue_support import HIDDEN, VOCAB, Ranks, batch

import lossd
from lossd.torch import RemoteHead


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = torch.nn.Linear(HIDDEN, HIDDEN)
        self.lm_head = torch.nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.trunk(inputs), labels, reduction="sum") / valid


class Run:
    """A training as torchtitan's trainer sets it up: sharded, with its containers and its checkpoints in `folder`."""

    def __init__(self, group: dist.ProcessGroup, server: str, folder: str, lr: float = 0.1, **manager: Any) -> None:
        from torch.distributed.fsdp import fully_shard
        from torchtitan.components.checkpoint import CheckpointManager
        from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, default_adamw

        torch.manual_seed(4)
        mesh = dist.device_mesh.DeviceMesh.from_group(group, "cpu")
        model = Model()
        fully_shard(model.lm_head, mesh=mesh)
        # Local batches' losses are sums over the global count of tokens: gradients are sums over ranks.
        model.lm_head = RemoteHead.from_linear(
            lossd.connect(server),
            model.lm_head,
            "titan",
            optimizer=lossd.AdamW(betas=(0.9, 0.95), weight_decay=0.1),
            group=group,
            reset=True,
        )
        fully_shard(model, mesh=mesh, ignored_params=set(model.lm_head.parameters()))
        model.set_gradient_divide_factor(1.0)
        model.set_force_sum_reduction_for_comms(True)  # gloo has no other
        self.model = model
        optimizers = default_adamw(lr)
        optimizers.implementation = "for-loop"
        self.optimizers: Any = OptimizersContainer(optimizers, model_parts=[model])
        self.schedulers: Any = LRSchedulersContainer.Config(warmup_steps=2).build(
            optimizers=self.optimizers, training_steps=10
        )
        self.checkpoints = CheckpointManager(
            CheckpointManager.Config(
                enable=True, folder="checkpoints", interval=1, keep_latest_k=0, last_save_model_only=False, **manager
            ),
            dataloader=None,
            model_parts=[model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={},
            sd_adapter=None,
            base_folder=folder,
        )

    def step(self, seed: int, max_norm: float = 0.5) -> float:
        """As torchtitan's Trainer.train_step."""
        from torchtitan.distributed.utils import clip_grad_norm_

        self.optimizers.zero_grad()
        inputs, labels = batch(seed)
        valid = torch.tensor(len(labels) * dist.get_world_size())
        loss = self.model(inputs, labels, valid)
        loss.backward()
        self.model.lm_head.refresh_gradient()
        clip_grad_norm_([*self.model.parameters()], max_norm)
        self.optimizers.step()
        self.schedulers.step()
        return loss.item()

    def state(self) -> dict[str, torch.Tensor]:
        found = {key: value.full_tensor().clone() for key, value in self.model.state_dict().items()}
        return found | {
            key: torch.as_tensor(value) for key, value in self.optimizers.state_dict().items() if "lr" in key
        }


def resumed(rank: int, group: dist.ProcessGroup, server: str, folder: str, manager: dict[str, Any]) -> Any:
    """Losses of four steps; and the model as it was after two, once with a checkpoint loaded into the run itself and
    once into another run."""
    run = Run(group, server, folder, **manager)
    rates, losses = [], []
    for seed in range(2):
        rates.append(run.optimizers.optimizers[0].param_groups[0]["lr"])
        losses.append(run.step(10 * rank + seed))
    assert run.checkpoints.save(2)
    saved = run.state()
    for seed in range(2, 4):
        rates.append(run.optimizers.optimizers[0].param_groups[0]["lr"])
        losses.append(run.step(10 * rank + seed))
    run.checkpoints.maybe_wait_for_saving()
    assert run.checkpoints.load(2)
    same = [torch.equal(value, run.state()[key]) for key, value in saved.items()]
    other = Run(group, server, folder, lr=0.7)  # the schedule of the checkpoint counts
    assert not torch.equal(other.state()["lm_head.weight"], saved["lm_head.weight"])
    assert other.checkpoints.load()
    same += [torch.equal(value, other.state()[key]) for key, value in saved.items() if "param_groups" not in key]
    first = other.step(10 * rank + 2)
    steps = other.model.lm_head.head.info().optimizer_steps
    for one in (run, other):
        one.checkpoints.close()
    return losses, rates, same, first, steps


def reference(ranks: int, rates: list[float]) -> list[list[float]]:
    torch.manual_seed(4)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, betas=(0.9, 0.95), weight_decay=0.1)
    losses = []
    for seed, rate in enumerate(rates):
        own = []
        optimizer.param_groups[0]["lr"] = rate
        for rank in range(ranks):
            inputs, labels = batch(10 * rank + seed)
            logits = model.lm_head(model.trunk(inputs))
            own.append(torch.nn.functional.cross_entropy(logits, labels, reduction="sum") / (ranks * len(labels)))
        sum(own).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append([loss.item() for loss in own])
    return losses


@pytest.mark.parametrize("manager", [{}, *nightly({"async_mode": "async"})], ids=str)
def test_a_run_goes_on_from_its_checkpoint(
    ranks: Ranks, server: lossd.Server, client: lossd.Client, tmp_path: Path, manager: dict[str, Any]
) -> None:
    answers = ranks.run(resumed, server.target, str(tmp_path), manager, count=3)
    wanted = reference(3, answers[0][1])
    assert len(set(answers[0][1])) > 1
    for rank, (losses, _, same, first, steps) in enumerate(answers):
        assert all(same)
        assert losses == pytest.approx([step[rank] for step in wanted], rel=1e-5)
        assert first == losses[2] and steps == 1
    client.delete_head("titan", discard_gradient=True)
