"""transformers' Trainer with a patched model against the Trainer with the same model left alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from models import VOCABULARY, build, twin

import lossd
from lossd.transformers import JointOptimizer, RemoteHeadTrainer, patch


class Rows(torch.utils.data.Dataset):
    """Rows with different numbers of labels, so that a mean of means would be another loss."""

    def __init__(self, rows: int) -> None:
        self._tokens = 3 + (7 * torch.arange(rows)[:, None] + 5 * torch.arange(10)) % (VOCABULARY - 3)

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        labels = self._tokens[row].clone()
        labels[: row % 7] = -100
        return {"input_ids": self._tokens[row], "labels": labels}


def train(kind: type, model: torch.nn.Module, folder: Path, **options: Any) -> tuple[list[dict], transformers.Trainer]:
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), use_cpu=True, report_to=[], disable_tqdm=True, logging_steps=1, max_steps=8,
        per_device_train_batch_size=2, gradient_accumulation_steps=2, learning_rate=1e-2, weight_decay=0.1,
        warmup_steps=2, lr_scheduler_type="linear", seed=4, save_strategy="no", **options,
    )  # fmt: skip
    trainer = kind(model=model, args=arguments, train_dataset=Rows(40), eval_dataset=Rows(6))
    trainer.train()
    return [entry for entry in trainer.state.log_history if "loss" in entry], trainer


@pytest.mark.parametrize("max_grad_norm", [0.25, 0.0])
@pytest.mark.parametrize("kind", ["llama", "llama-tied"])
def test_losses_are_those_of_the_local_model(
    client: lossd.Client, name: str, tmp_path: Path, kind: str, max_grad_norm: float
) -> None:
    local = build(kind)
    model = twin(local)
    optimizer = lossd.AdamW() if kind == "llama" else None
    head = patch(model, client=client, name=name, grad_scale=1.0, optimizer=optimizer)
    remote_log, trainer = train(RemoteHeadTrainer, model, tmp_path / "remote", max_grad_norm=max_grad_norm)
    local_log, local_trainer = train(transformers.Trainer, local, tmp_path / "local", max_grad_norm=max_grad_norm)
    assert len(remote_log) == len(local_log) == 8
    for got, want in zip(remote_log, local_log, strict=True):
        assert got["loss"] == pytest.approx(want["loss"], rel=2e-4)
        assert got["learning_rate"] == want["learning_rate"]
        if max_grad_norm:
            assert got["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-3)
    # They did learn, so that the weights matter.
    assert local_log[-1]["loss"] < 0.95 * local_log[0]["loss"]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(local_trainer.evaluate()["eval_loss"], rel=2e-4)
    assert head.head.gradient_stats().norm == 0.0


def test_checkpoints_of_the_trainer_go_on(client: lossd.Client, name: str, tmp_path: Path) -> None:
    model = build("llama")
    patch(model, client=client, name=name, grad_scale=1.0, optimizer=lossd.AdamW())
    _, trainer = train(RemoteHeadTrainer, model, tmp_path)
    trainer.save_model()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        rows = {key: value[None] for key, value in Rows(1)[0].items()}
        torch.testing.assert_close(loaded(**rows).loss, model.eval()(**rows).loss, rtol=1e-4, atol=1e-5)


def test_one_schedule_drives_several_optimizers() -> None:
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    sgd = torch.optim.SGD([parameters[0]], lr=0.5)
    adam = torch.optim.AdamW([parameters[1]], lr=0.25)
    joint = JointOptimizer(sgd, adam)
    schedule = torch.optim.lr_scheduler.LambdaLR(joint, lambda step: 0.5**step)
    sum((parameter**2).sum() for parameter in parameters).backward()
    calls = []
    assert joint.step(lambda: calls.append(1) or 3.0) == 3.0 and calls == [1]
    schedule.step()
    assert (sgd.param_groups[0]["lr"], adam.param_groups[0]["lr"]) == (0.25, 0.125)
    assert parameters[0].tolist() == [0.0, 0.0] and parameters[1][0] < 1
    joint.zero_grad()
    assert all(parameter.grad is None for parameter in parameters)

    other = JointOptimizer(torch.optim.SGD([parameters[0]], lr=9.0), torch.optim.AdamW([parameters[1]], lr=9.0))
    other.load_state_dict(joint.state_dict())
    assert [group["lr"] for group in other.param_groups] == [0.25, 0.125]
    assert other.optimizers[1].state[parameters[1]]["step"] == 1
    other.param_groups[0]["lr"] = 7.0
    assert other.optimizers[0].param_groups[0]["lr"] == 7.0
    with pytest.raises(ValueError, match="not that of a JointOptimizer of 2 optimizers"):
        joint.load_state_dict(adam.state_dict())
    with pytest.raises(ValueError, match="at least one"):
        JointOptimizer()
