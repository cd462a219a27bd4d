"""TRL's trainers with a patched model against the same trainers with the same model left alone."""

from __future__ import annotations

import contextlib
import copy
import json
import re
import urllib.request
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
import trl
from cases import nightly
from models import VOCABULARY, batch, build, twin
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from trl_trainers import STEPS, dpo, grpo, options, rloo, rows, sft, words_tokenizer

import lossd
from lossd.transformers import RemoteHeadTrainerMixin, patch, unpatch

# Trainer's own numbers of a run, those of time, and one of which rounding decides where rewards are 0.
NOT_COMPARED = {"epoch", "step", "step_time", "learning_rate", "rewards/accuracies"}


@pytest.fixture(scope="module")
def tokenizer() -> transformers.PreTrainedTokenizerFast:
    return words_tokenizer()


def log_of(trainer: transformers.Trainer) -> list[dict[str, float]]:
    trainer.train()
    return [
        {key: value for key, value in entry.items() if key not in NOT_COMPARED}
        for entry in trainer.state.log_history
        if "loss" in entry
    ]


def assert_same(got: list[dict[str, float]], want: list[dict[str, float]], steps: int = STEPS) -> None:
    assert len(got) == len(want) == steps
    for ours, theirs in zip(got, want, strict=True):
        assert ours.keys() == theirs.keys()
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-6, abs=1e-6)
        for key, value in theirs.items():
            assert ours[key] == pytest.approx(value, rel=1e-5, abs=1e-5), key


class NoLogits(TorchDispatchMode):
    """Logits of more than `rows` tokens are an error, wherever PyTorch makes them."""

    def __init__(self, rows: int = 0) -> None:
        super().__init__()
        self._elements = rows * VOCABULARY

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for value in tree_iter(result):
            if isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[-1] == VOCABULARY:
                assert value.numel() <= self._elements, f"{function} made {list(value.shape)}"
        return result


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Neither the head's weight nor its gradient may be asked for."""
    for method in ("read_weights", "flush"):
        monkeypatch.setattr(
            lossd.Head, method, lambda *_, method=method, **__: pytest.fail(f"{method} brings [V, H] here")
        )
    return monkeypatch


@pytest.mark.parametrize("kind", ["llama", *nightly("gemma2")])
def test_sft_trains_as_with_the_local_head(
    client: lossd.Client, name: str, tmp_path: Path, tokenizer: Any, no_weights: Any, kind: str
) -> None:
    local = build(kind)
    model = twin(local)
    head = patch(model, client=client, name=name, optimizer=lossd.SGD())
    with NoLogits():
        got = log_of(sft(model, tokenizer, tmp_path))
    want = log_of(sft(local, tokenizer, tmp_path))
    assert_same(got, want)
    assert got[-1]["loss"] < got[0]["loss"] and {"entropy", "mean_token_accuracy"} <= got[0].keys()
    assert head.head.info().optimizer_steps == STEPS
    no_weights.undo()
    torch.testing.assert_close(head.read_weights()[0], local.lm_head.weight.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.nightly
@pytest.mark.parametrize(("kind", "weighting"), [("llama", False), ("granite", True)])
def test_dpo_trains_as_with_the_local_head(
    client: lossd.Client, name: str, tmp_path: Path, tokenizer: Any, no_weights: Any, kind: str, weighting: bool
) -> None:
    local = build(kind)
    model = twin(local)
    head = patch(model, client=client, name=name, optimizer=lossd.SGD())
    with NoLogits():
        got = log_of(dpo(model, tokenizer, tmp_path, ref_model=copy.deepcopy(model), use_weighting=weighting))
    want = log_of(dpo(local, tokenizer, tmp_path, ref_model=twin(local), use_weighting=weighting))
    assert_same(got, want)
    # The reference has stayed where it was: against the model as it is now every reward would be 0.
    assert got[0]["rewards/margins"] == pytest.approx(0.0, abs=1e-5)
    assert weighting or abs(got[-1]["rewards/margins"]) > 0.01
    assert head.head.info().optimizer_steps == STEPS


@pytest.mark.nightly
@pytest.mark.parametrize("bf16", [False, True])
def test_a_copy_made_after_a_trainer_is_a_reference(
    client: lossd.Client, name: str, tmp_path: Path, tokenizer: Any, bf16: bool
) -> None:
    local = build("llama")
    model = twin(local)
    patch(model, client=client, name=name, optimizer=lossd.SGD())
    logs, distances = [], []
    for each in (model, local):
        sft(each, tokenizer, tmp_path, bf16=bf16, max_steps=1).train()
        reference = copy.deepcopy(each)
        logs.append(log_of(dpo(each, tokenizer, tmp_path, ref_model=reference, learning_rate=0.5, bf16=bf16)))
        with torch.no_grad():
            values = [one.eval()(**batch(), fused_lm_head=True).log_probs for one in (each, reference)]
            distances.append((values[0] - values[1]).abs().max().item())
            losses = [one(**batch()).loss.item() for one in (model, reference)]
        assert each is local or abs(losses[0] - losses[1]) > 0.1
    got, want = logs
    if not bf16:  # TRL's head takes part in autocast, and the server does not
        assert_same(got, want)
    for ours, theirs in zip(got, want, strict=True):
        assert ours["rewards/margins"] == pytest.approx(theirs["rewards/margins"], abs=0.1 if bf16 else 1e-5)
    assert abs(got[-1]["rewards/margins"]) > 0.5
    assert distances[0] > 1.0 and distances[0] == pytest.approx(distances[1], rel=0.1 if bf16 else 1e-4)


@pytest.mark.nightly
def test_a_copy_that_is_unpatched_computes_with_its_own_weights(
    client: lossd.Client, name: str, tmp_path: Path, tokenizer: Any
) -> None:
    model = build("llama")
    patch(model, client=client, name=name, optimizer=lossd.SGD())
    sft(model, tokenizer, tmp_path, max_steps=1).train()
    copied = copy.deepcopy(model)
    unpatch(copied)
    with torch.no_grad():
        want = model.eval()(**batch()).loss.item()
        for parameter in model.model.parameters():
            parameter.zero_()
        assert copied.eval()(**batch()).loss.item() == pytest.approx(want, rel=1e-5)


@pytest.mark.nightly
def test_dpo_computes_log_probabilities_of_the_reference_beforehand(
    client: lossd.Client, name: str, tmp_path: Path, tokenizer: Any
) -> None:
    local = build("llama")
    model = twin(local)
    patch(model, client=client, name=name, optimizer=lossd.SGD())
    logs = [log_of(dpo(each, tokenizer, tmp_path, precompute_ref_log_probs=True)) for each in (model, local)]
    assert_same(*logs)


@pytest.mark.nightly
def test_grpo_trains_as_with_the_local_head(
    client: lossd.Client, name: str, tmp_path: Path, tokenizer: Any, no_weights: Any
) -> None:
    local = build("llama")
    model = twin(local)
    head = patch(model, client=client, name=name, optimizer=lossd.SGD())
    # Two iterations over the same completions, so that ratios to old log-probabilities are not all 1.
    with NoLogits(rows=8):  # that many completions are generated at once
        got = log_of(grpo(model, tokenizer, tmp_path, num_iterations=2))
    want = log_of(grpo(local, tokenizer, tmp_path, num_iterations=2))
    assert_same(got, want)
    assert any(abs(entry["loss"]) > 1e-3 for entry in got)
    assert head.head.info().optimizer_steps == STEPS


class CountingServer:
    """A server that tells what its clients have sent it."""

    def __init__(self) -> None:
        self._server = lossd.launch("cpu", memory_limit_bytes=1 << 30, args=["--metrics_listen=127.0.0.1:0"])

    def __enter__(self) -> CountingServer:
        self._server.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.__exit__(None, None, None)

    def client(self) -> lossd.Client:
        return self._server.client()

    def counts(self, metric: str) -> dict[str, int]:
        """By the metric's only label."""
        ports = Path(self._server.target.removeprefix("unix:")).with_name("ports.json")
        port = json.loads(ports.read_text())["metrics"]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as response:
            text = response.read().decode()
        found = re.findall(rf'^{metric}{{\w+="(\w+)"}} (\d+)', text, re.MULTILINE)
        return {label: int(count) for label, count in found}


@pytest.mark.nightly
@pytest.mark.parametrize("method", ["dpo", "grpo"])
def test_fifty_steps_stay_those_of_the_local_head(name: str, tmp_path: Path, tokenizer: Any, method: str) -> None:
    """Rounding does not add up: nor do the completions that are drawn become others. And hidden states travel once."""

    def trainer_of(model: Any) -> transformers.Trainer:
        if method == "dpo":
            return dpo(model, tokenizer, tmp_path, ref_model=copy.deepcopy(model), max_steps=50)
        return grpo(model, tokenizer, tmp_path, num_iterations=2, max_steps=50)

    local = build("llama")
    model = twin(local)
    with CountingServer() as server, server.client() as client:
        held = {"held_hidden_bytes": 1 << 20}
        head = patch(model, client=client, name=name, optimizer=lossd.SGD(), session_options=held)
        got, want = (log_of(trainer_of(each)) for each in (model, local))
        assert head.head.info().optimizer_steps == 50
        tokens = server.counts("lossd_held_hidden_states_total")
        assert tokens["taken"] == tokens["held"] > 0
        assert tokens["gone"] == tokens["not_held"] == 0
    assert_same(got, want, steps=50)
    assert method == "grpo" or got[-1]["loss"] < 0.1 * got[0]["loss"]


EVERYTHING = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


@pytest.mark.parametrize("kind", ["llama", *nightly("gemma2", "gemma2-tied", "granite", "mixtral", "phi-bias")])
@pytest.mark.parametrize("items", [None, 17])
def test_everything_that_trl_may_ask_for(client: lossd.Client, name: str, kind: str, items: int | None) -> None:
    local = build(kind).train()
    model = twin(local)
    patch(model, client=client, name=name)
    for each in (model, local):
        trl.trainer.utils.add_fused_lm_head(each, temperature=0.7, outputs=EVERYTHING)
    shifted = {**batch(), "shift_labels": batch()["labels"].roll(1, 1)}
    for inputs in (batch(), shifted):
        got, want = (each(**inputs, num_items_in_batch=items, fused_lm_head=True) for each in (model, local))
        assert got.keys() == want.keys()
        for key, value in want.items():
            assert got[key].dtype == value.dtype and got[key].shape == value.shape, key
            torch.testing.assert_close(
                got[key], value, rtol=1e-5, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}"
            )
        for outputs in (got, want):
            (outputs.loss + outputs.log_probs[0].square().sum() - 0.1 * outputs.entropy.sum()).backward()
    theirs = dict(local.named_parameters())
    for key, ours in model.named_parameters():
        if not key.startswith("lm_head."):
            assert (ours.grad - theirs[key].grad).norm() <= 1e-5 * theirs[key].grad.norm() + 1e-6, key
    # And without it, the forward is what it was.
    assert model(**batch(), num_items_in_batch=items).logits is None
    prompt = batch()["input_ids"][:, :5]
    generated = [each.eval().generate(prompt, max_new_tokens=3, do_sample=False) for each in (model, local)]
    assert generated[0].equal(generated[1])


@pytest.mark.nightly
def test_an_entropy_bonus_trains_as_with_the_local_head(
    client: lossd.Client, name: str, tmp_path: Path, tokenizer: Any
) -> None:
    local = build("llama")
    model = twin(local)
    patch(model, client=client, name=name, optimizer=lossd.SGD())
    got, want = (log_of(grpo(each, tokenizer, tmp_path, entropy_coef=0.1)) for each in (model, local))
    assert_same(got, want)


@pytest.mark.nightly
@pytest.mark.parametrize("make", [sft, dpo])
def test_lora_trains_as_with_the_local_head(
    client: lossd.Client, name: str, tmp_path: Path, tokenizer: Any, make: Any
) -> None:
    local = build("llama")
    model = twin(local)
    head = patch(model, client=client, name=name, optimizer=lossd.SGD())
    config = peft.LoraConfig(
        r=2, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False, lora_alpha=1
    )
    logs = []
    for each in (model, local):
        torch.manual_seed(1)  # adapters are random
        trainer = make(each, tokenizer, tmp_path, peft_config=config)
        assert isinstance(trainer.model, peft.PeftModel)
        with NoLogits() if each is model else contextlib.nullcontext():
            logs.append(log_of(trainer))
    assert_same(*logs)
    assert logs[0][-1]["loss"] != logs[0][0]["loss"]
    info = head.head.info()
    assert (info.optimizer_steps, info.weight_version, info.window_tokens) == (0, 1, 0)


@pytest.mark.nightly
def test_the_trainer_of_an_unpatched_model_goes_on(
    client: lossd.Client, name: str, tmp_path: Path, tokenizer: Any
) -> None:
    local = build("llama")
    model = twin(local)
    patch(model, client=client, name=name, optimizer=lossd.SGD())
    trainers = [sft(each, tokenizer, tmp_path, eval_dataset=rows("prompt", "completion")) for each in (model, local)]
    for trainer in trainers:
        trainer.train()
    unpatch(model)
    assert type(model) is type(local)
    got, want = (trainer.evaluate()["eval_loss"] for trainer in trainers)
    assert got == pytest.approx(want, rel=1e-6)


@pytest.mark.nightly
def test_metrics_of_an_evaluation_are_of_the_servers_logits(
    client: lossd.Client, name: str, tmp_path: Path, tokenizer: Any
) -> None:
    local = build("llama")
    model = twin(local)
    patch(model, client=client, name=name, optimizer=lossd.SGD())
    held_out = rows("prompt", "completion")

    def accuracy(evaluation: transformers.EvalPrediction) -> dict[str, float]:
        predicted, labels = evaluation.predictions.argmax(-1)[:, :-1], evaluation.label_ids[:, 1:]
        return {"accuracy": float((predicted == labels)[labels != -100].mean())}

    trainers = [sft(each, tokenizer, tmp_path, eval_dataset=held_out, compute_metrics=accuracy)
                for each in (model, local)]  # fmt: skip
    for trainer in trainers:
        trainer.train()
    got, want = (trainer.evaluate() for trainer in trainers)
    assert got["eval_accuracy"] == want["eval_accuracy"] > 0
    assert got["eval_loss"] == pytest.approx(want["eval_loss"], rel=1e-6)


class SmoothingTrainer(RemoteHeadTrainerMixin, trl.SFTTrainer):
    pass


# A mixture of experts, whose auxiliary loss TRL leaves out of a smoothed one, and tells all the same.
@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_label_smoothing_of_sft_is_the_servers(
    client: lossd.Client, name: str, tmp_path: Path, tokenizer: Any, no_weights: Any, kind: str
) -> None:
    local = build(kind)
    model = twin(local)
    patch(model, client=client, name=name, optimizer=lossd.SGD())
    with NoLogits(), pytest.warns(FutureWarning, match="label_smoothing_factor"):
        got = log_of(sft(model, tokenizer, tmp_path, SmoothingTrainer, label_smoothing_factor=0.2))
    with pytest.warns(FutureWarning, match="label_smoothing_factor"):
        want = log_of(sft(local, tokenizer, tmp_path, label_smoothing_factor=0.2))
    assert_same(got, want)


@pytest.mark.nightly
def test_other_losses_of_sft_are_not_smoothed(client: lossd.Client, name: str, tmp_path: Path, tokenizer: Any) -> None:
    local = build("llama")
    model = twin(local)
    patch(model, client=client, name=name, optimizer=lossd.SGD())
    got, want = (
        log_of(sft(each, tokenizer, tmp_path, SmoothingTrainer, loss_type="dft", label_smoothing_factor=0.3))
        for each in (model, local)
    )
    assert_same(got, want)


@pytest.mark.nightly
def test_label_smoothing_of_sft_without_the_mixin_is_refused(
    client: lossd.Client, name: str, tmp_path: Path, tokenizer: Any
) -> None:
    model = build("llama")
    patch(model, client=client, name=name, optimizer=lossd.SGD())
    trainer = sft(model, tokenizer, tmp_path, label_smoothing_factor=0.2)
    with pytest.raises(RuntimeError, match="logits of a remote head have no gradient.*RemoteHeadTrainerMixin"):
        trainer.train()


def test_a_fused_head_that_is_not_known_is_refused(client: lossd.Client, name: str) -> None:
    model = build("llama")
    patch(model, client=client, name=name)

    def forward(self: Any, fused_lm_head: bool = False, **_: Any) -> None:
        pass

    with pytest.raises(RuntimeError, match="this version of TRL .*use trl 1.16"):
        model.forward = forward.__get__(model)
    assert "forward" not in model.__dict__


def test_fp32_logits_of_a_head_in_bfloat16_are_refused(
    client: lossd.Client, name: str, tmp_path: Path, tokenizer: Any
) -> None:
    model = build("llama").bfloat16()
    patch(model, client=client, name=name)
    with pytest.raises(ValueError, match='cast_lm_head_to_fp32: head .* is torch.bfloat16.*dtype="float32"'):
        grpo(model, tokenizer, tmp_path, cast_lm_head_to_fp32=True)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["llama", "llama-tied"])
def test_fp32_logits_are_those_of_a_head_in_fp32(
    client: lossd.Client, name: str, tmp_path: Path, tokenizer: Any, kind: str, dtype: torch.dtype
) -> None:
    local = build(kind).to(dtype)
    model = twin(local)
    patch(model, client=client, name=name, dtype="float32", optimizer=None if "tied" in kind else lossd.SGD())
    logs = [log_of(grpo(each, tokenizer, tmp_path, cast_lm_head_to_fp32=True)) for each in (model, local)]
    if dtype is torch.float32:
        assert_same(*logs)
    prompt = batch()["input_ids"]
    with torch.no_grad():
        ours, theirs = (each.eval()(prompt).logits for each in (model, local))
    assert ours.dtype == theirs.dtype == torch.float32
    tolerance = 1e-4 if dtype is torch.float32 else 0.1  # after three steps of a trunk in bfloat16
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.nightly
def test_distillation_is_refused(client: lossd.Client, name: str, tmp_path: Path, tokenizer: Any) -> None:
    model = build("llama")
    patch(model, client=client, name=name, optimizer=lossd.SGD())
    trainer = trl.DistillationTrainer(
        model=model, teacher_model=build("llama", seed=9), processing_class=tokenizer, train_dataset=rows("prompt"),
        args=trl.DistillationConfig(**options(tmp_path, max_completion_length=5, beta=0.5)),
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="the weight of head .* a gradient through it would be lost"):
        trainer.train()


@pytest.mark.nightly
@pytest.mark.parametrize("method", ["kto", "rloo"])
def test_kto_and_rloo_train_as_with_the_local_head(
    client: lossd.Client, name: str, tmp_path: Path, tokenizer: Any, method: str
) -> None:
    def trainer_of(model: Any) -> transformers.Trainer:
        if method == "kto":
            return trl.KTOTrainer(
                model=model, ref_model=copy.deepcopy(model), args=trl.KTOConfig(**options(tmp_path)),
                train_dataset=rows("prompt", "completion").add_column("label", [row % 2 == 0 for row in range(16)]),
                processing_class=tokenizer,
            )  # fmt: skip
        return rloo(model, tokenizer, tmp_path)

    local = build("llama")
    model = twin(local)
    head = patch(model, client=client, name=name, optimizer=lossd.SGD())
    assert_same(*(log_of(trainer_of(each)) for each in (model, local)))
    assert head.head.info().optimizer_steps == STEPS


@pytest.mark.parametrize("make", [grpo, rloo])
def test_generation_by_vllm_is_refused(
    client: lossd.Client, name: str, tmp_path: Path, tokenizer: Any, make: Any
) -> None:
    model = build("llama")
    patch(model, client=client, name=name, optimizer=lossd.SGD())
    with pytest.raises(ValueError, match=f"use_vllm: .* the weights of head '{name}' are at a lossd server"):
        make(model, tokenizer, tmp_path, use_vllm=True)


@pytest.mark.parametrize("kind", ["llama", "llama-tied"])
def test_a_reference_that_follows_is_refused(
    client: lossd.Client, name: str, tmp_path: Path, tokenizer: Any, kind: str
) -> None:
    model = build(kind)
    patch(model, client=client, name=name)
    with pytest.raises(ValueError, match="sync_ref_model: .*, and not its head"):
        dpo(model, tokenizer, tmp_path, ref_model=twin(model), sync_ref_model=True)
