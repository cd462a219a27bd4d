"""Options of transformers' Trainer that want logits: label smoothing, and metrics of an evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from models import batch, build, twin
from test_trainer import Rows

import lossd
from lossd.transformers import RemoteHeadTrainer, patch


def trainer_of(kind: type, model: torch.nn.Module, folder: Path, **more: Any) -> transformers.Trainer:
    special = {key: more.pop(key) for key in ("compute_metrics", "preprocess_logits_for_metrics") if key in more}
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), use_cpu=True, report_to=[], disable_tqdm=True, logging_steps=1, max_steps=4,
        per_device_train_batch_size=2, per_device_eval_batch_size=2, gradient_accumulation_steps=2,
        learning_rate=0.05, optim="sgd", seed=4, save_strategy="no", **more,
    )  # fmt: skip
    return kind(model=model, args=arguments, train_dataset=Rows(40), eval_dataset=Rows(5), **special)


def losses(trainer: transformers.Trainer) -> list[float]:
    trainer.train()
    found = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return [*found, trainer.evaluate()["eval_loss"]]


# A mixture of experts, whose auxiliary loss transformers leaves out of a smoothed one.
@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["llama", "gemma2", "llama-tied", "mixtral"])
def test_label_smoothing_is_the_trainers(client: lossd.Client, name: str, tmp_path: Path, kind: str) -> None:
    local = build(kind)
    model = twin(local)
    optimizer = None if kind.endswith("tied") else lossd.SGD()
    patch(model, client=client, name=name, optimizer=optimizer, grad_scale=1.0)
    got = losses(trainer_of(RemoteHeadTrainer, model, tmp_path, label_smoothing_factor=0.2))
    want = losses(trainer_of(transformers.Trainer, local, tmp_path, label_smoothing_factor=0.2))
    assert got == pytest.approx(want, rel=1e-6)
    assert want[3] < want[0]


@pytest.mark.parametrize("items", [None, 7])
def test_models_smooth_labels_as_transformers_does(client: lossd.Client, name: str, items: int | None) -> None:
    local = build("llama").eval()
    model = twin(local)
    patch(model, client=client, name=name)
    smoother = transformers.trainer_pt_utils.LabelSmoother(epsilon=0.3)
    with torch.no_grad():
        want = smoother(local(batch()["input_ids"]), batch()["labels"], shift_labels=True, num_items_in_batch=items)
        got = model(**batch(), num_items_in_batch=items, label_smoothing=0.3).loss
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)


def test_label_smoothing_of_a_plain_trainer_is_refused(client: lossd.Client, name: str, tmp_path: Path) -> None:
    model = build("llama")
    patch(model, client=client, name=name, optimizer=lossd.SGD())
    with pytest.raises(RuntimeError, match="label_smoothing_factor: use RemoteHeadTrainer"):
        trainer_of(transformers.Trainer, model, tmp_path, label_smoothing_factor=0.2).train()


class Accuracy:
    """compute_metrics, with what it was given."""

    def __call__(self, evaluation: transformers.EvalPrediction) -> dict[str, float]:
        predicted, labels = self.predictions, self.labels = evaluation.predictions, evaluation.label_ids
        if predicted.ndim == 3:
            predicted = predicted.argmax(-1)
        predicted, labels = predicted[:, :-1], labels[:, 1:]
        return {"accuracy": float((predicted == labels)[labels != -100].mean())}


@pytest.mark.nightly
@pytest.mark.parametrize("trainer", [transformers.Trainer, RemoteHeadTrainer])
def test_metrics_are_of_the_servers_predictions(client: lossd.Client, name: str, tmp_path: Path, trainer: type) -> None:
    local = build("llama")
    model = twin(local)
    patch(model, client=client, name=name, optimizer=lossd.SGD())
    accuracies, found = [], []
    for kind, each in ((transformers.Trainer, local), (trainer, model)):
        accuracies.append(Accuracy())
        one = trainer_of(kind, each, tmp_path, compute_metrics=accuracies[-1])
        one.train()
        found.append(one.evaluate())
    assert found[1]["eval_accuracy"] == found[0]["eval_accuracy"] > 0
    assert found[1]["eval_loss"] == pytest.approx(found[0]["eval_loss"], rel=1e-6)
    want, got = (accuracy.predictions for accuracy in accuracies)
    assert got.dtype == np.int64 and got.shape == want.shape[:2] == (5, 10)
    counted = accuracies[0].labels[:, 1:] != -100
    assert (got[:, :-1] == want.argmax(-1)[:, :-1])[counted].all()
    assert (got[:, :-1][~counted] == -100).all() and (got[:, -1] == -100).all()


@pytest.mark.nightly
def test_predictions_may_be_processed_before_they_are_gathered(client: lossd.Client, name: str, tmp_path: Path) -> None:
    model = build("llama")
    patch(model, client=client, name=name, optimizer=lossd.SGD())
    seen = []

    def process(predictions: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        seen.append((predictions.dtype, predictions.shape == labels.shape))
        return predictions[:, :-1] == labels[:, 1:]

    accuracy = Accuracy()
    trainer = trainer_of(
        transformers.Trainer, model, tmp_path, preprocess_logits_for_metrics=process,
        compute_metrics=lambda evaluation: {"right": float(evaluation.predictions.sum())},
    )  # fmt: skip
    right = trainer.evaluate()["eval_right"]
    trainer = trainer_of(transformers.Trainer, model, tmp_path, compute_metrics=accuracy)
    trainer.evaluate()
    assert right == (accuracy.predictions[:, :-1] == accuracy.labels[:, 1:]).sum()
    assert set(seen) == {(torch.int64, True)}


@pytest.mark.nightly
def test_evaluation_of_the_loss_alone_keeps_no_predictions(client: lossd.Client, name: str, tmp_path: Path) -> None:
    model = build("llama")
    patch(model, client=client, name=name, optimizer=lossd.SGD())
    trainer = trainer_of(transformers.Trainer, model, tmp_path, prediction_loss_only=True)
    output = trainer.predict(Rows(5))
    assert output.predictions is None and output.metrics["test_loss"] > 0
    assert trainer_of(transformers.Trainer, model, tmp_path).predict(Rows(5)).predictions.shape == (5, 10)


@pytest.mark.nightly
def test_metrics_of_experts_are_in_their_places(client: lossd.Client, name: str, tmp_path: Path) -> None:
    local = build("mixtral")
    model = twin(local)
    patch(model, client=client, name=name, optimizer=lossd.SGD())
    got, want = (trainer_of(transformers.Trainer, each, tmp_path).predict(Rows(5)).predictions
                 for each in (model, local))  # fmt: skip
    assert len(got) == len(want) == 3
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)  # the auxiliary loss
    assert got[1].shape == want[1].shape[:2] and got[1].dtype == np.int64
    assert np.asarray(got[2]).shape == np.asarray(want[2]).shape  # logits of the routers
