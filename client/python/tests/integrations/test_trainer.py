"""transformers' Trainer with a patched model against the Trainer with the same model left alone."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from cases import nightly
from models import VOCABULARY, build, twin

import lossd
from lossd.torch import RemoteHead
from lossd.transformers import patch


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


@pytest.mark.parametrize("max_grad_norm", [0.25, *nightly(0.0)])
@pytest.mark.parametrize("kind", ["llama", *nightly("llama-tied")])
def test_losses_are_those_of_the_local_model(
    client: lossd.Client, name: str, tmp_path: Path, kind: str, max_grad_norm: float
) -> None:
    local = build(kind)
    model = twin(local)
    optimizer = lossd.AdamW() if kind == "llama" else None
    head = patch(model, client=client, name=name, grad_scale=1.0, optimizer=optimizer)
    remote_log, trainer = train(transformers.Trainer, model, tmp_path / "remote", max_grad_norm=max_grad_norm)
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
    info = head.head.info()
    assert info.window_tokens == 0 and info.optimizer_steps == (8 if kind == "llama" else 0)


@pytest.mark.nightly
def test_checkpoints_of_the_trainer_go_on(client: lossd.Client, name: str, tmp_path: Path) -> None:
    model = build("llama")
    patch(model, client=client, name=name, grad_scale=1.0, optimizer=lossd.AdamW())
    _, trainer = train(transformers.Trainer, model, tmp_path)
    trainer.save_model()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        rows = {key: value[None] for key, value in Rows(1)[0].items()}
        torch.testing.assert_close(loaded(**rows).loss, model.eval()(**rows).loss, rtol=1e-4, atol=1e-5)


def scaled(kind: type, model: torch.nn.Module, folder: Path, monkeypatch: pytest.MonkeyPatch) -> transformers.Trainer:
    """A Trainer as fp16=True makes it, on a CPU: with a GradScaler, whose second step finds an infinity in the trunk.
    One batch a step."""
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), use_cpu=True, report_to=[], disable_tqdm=True, logging_steps=1, max_steps=5,
        per_device_train_batch_size=2, learning_rate=1e-2, seed=4, save_strategy="no", max_grad_norm=0.5,
        optim="adamw_torch",
    )  # fmt: skip
    trainer = kind(model=model, args=arguments, train_dataset=Rows(40))
    accelerator = trainer.accelerator
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    monkeypatch.setattr(
        accelerator, "unscale_gradients", lambda *_: accelerator.scaler.unscale_(trainer.optimizer.optimizer)
    )
    calls = []
    bias = model.model.norm.weight
    bias.register_hook(lambda gradient: gradient * (float("inf") if calls.append(1) or len(calls) == 2 else 1.0))
    trainer.train()
    assert len(calls) == 5
    return trainer


@pytest.mark.nightly
def test_a_step_that_the_scaler_skips_leaves_nothing_behind(
    client: lossd.Client, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = build("llama")
    model = twin(local)
    head = patch(model, client=client, name=name, optimizer=lossd.AdamW())
    scaled(transformers.Trainer, local, tmp_path / "local", monkeypatch)
    trainer = scaled(transformers.Trainer, model, tmp_path / "remote", monkeypatch)
    assert trainer.accelerator.scaler.get_scale() == 2.0
    assert head.head.info().optimizer_steps == 4
    torch.testing.assert_close(head.read_weights()[0], local.lm_head.weight.detach(), rtol=1e-3, atol=2e-4)


@pytest.mark.nightly
def test_a_loss_that_is_not_finite_is_forgotten_after_its_step(
    client: lossd.Client, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("llama")
    head = patch(model, client=client, name=name, optimizer=lossd.AdamW())
    calls: list[int] = []

    class Spoiled(transformers.Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            loss = super().compute_loss(*args, **kwargs)
            return loss * (float("nan") if calls.append(1) or len(calls) == 1 else 1.0)

    scaled(Spoiled, model, tmp_path, monkeypatch)
    assert head.head.info().optimizer_steps == 3  # of five: not finite are the first, here, and the second, there


@pytest.mark.nightly
def test_a_trainer_trains_twice(client: lossd.Client, name: str, tmp_path: Path) -> None:
    model = build("llama")
    head = patch(model, client=client, name=name, optimizer=lossd.AdamW())
    _, trainer = train(transformers.Trainer, model, tmp_path)
    trainer.train()
    assert head.head.info().optimizer_steps == 16


class Saves(transformers.TrainerCallback):
    """The callback of docs/transformers.md."""

    def __init__(self, head: RemoteHead) -> None:
        self._head = head

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._head.save_checkpoint(f"step-{state.global_step}")


@pytest.mark.nightly
def test_a_trainer_resumes_with_the_moments_of_the_head(tmp_path: Path) -> None:
    options = {"save_steps": 4, "save_strategy": "steps"}

    def trainer_of(model: torch.nn.Module, folder: Path) -> transformers.Trainer:
        arguments = transformers.TrainingArguments(
            output_dir=str(folder), use_cpu=True, report_to=[], disable_tqdm=True, logging_steps=1, max_steps=8,
            per_device_train_batch_size=2, learning_rate=1e-2, seed=4, **options,
        )  # fmt: skip
        return transformers.Trainer(model=model, args=arguments, train_dataset=Rows(40))

    with lossd.launch("cpu", checkpoint_dir=str(tmp_path / "server")) as server, server.client() as client:
        model = build("llama")
        again = twin(model)
        head = patch(model, client=client, optimizer=lossd.AdamW())
        trainer = trainer_of(model, tmp_path / "trainer")
        trainer.add_callback(Saves(head))
        trainer.train()
        whole = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

        # The server has gone on: that is said.
        resumed = patch(again, client.head("lm_head"))
        checkpoint = str(tmp_path / "trainer" / "checkpoint-4")
        with pytest.warns(UserWarning, match="is of step 4 of head 'lm_head', whose server is at step 8"):
            trainer_of(again, tmp_path / "trainer").train(resume_from_checkpoint=checkpoint)

        resumed.restore_checkpoint("step-4")
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="the state to load")
            trainer = trainer_of(again, tmp_path / "trainer")
            trainer.train(resume_from_checkpoint=checkpoint)
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        assert losses == pytest.approx(whole, rel=1e-5)
        assert resumed.head.info().optimizer_steps == 8
