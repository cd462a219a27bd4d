"""Adapters of peft in models whose head is at a server, against the same models with the head left alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from cases import nightly
from models import batch, build, twin
from test_trainer import Rows

import lossd
from lossd.transformers import patch, patched_head, unpatch


def with_adapters(model: torch.nn.Module, **options: Any) -> peft.PeftModel:
    """The same ones for every model."""
    torch.manual_seed(1)
    settings = {
        "target_modules": "all-linear",
        "init_lora_weights": False,
        "lora_alpha": 1,
        "task_type": "CAUSAL_LM",
        **options,
    }
    return peft.get_peft_model(model, peft.LoraConfig(r=2, **settings))


def train(model: torch.nn.Module, folder: Path) -> list[dict[str, float]]:
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), use_cpu=True, report_to=[], disable_tqdm=True, logging_steps=1, max_steps=4,
        per_device_train_batch_size=2, gradient_accumulation_steps=2, learning_rate=0.05, optim="sgd", seed=4,
        save_strategy="no", max_grad_norm=1.0,
    )  # fmt: skip
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=Rows(40))
    trainer.train()
    return [entry for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("kind", ["llama", *nightly("gemma2", "llama-tied")])
def test_adapters_train_as_with_the_local_head(client: lossd.Client, name: str, tmp_path: Path, kind: str) -> None:
    local = build(kind)
    model = twin(local)
    # Not a frozen one: it is get_peft_model() that takes the gradient from the base model, later.
    head = patch(model, client=client, name=name, optimizer=None if kind.endswith("tied") else lossd.SGD())
    written = head.head.info().weight_version
    want = train(with_adapters(local), tmp_path)
    got = train(with_adapters(model), tmp_path)
    for ours, theirs in zip(got, want, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-6)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
    assert want[-1]["loss"] < want[0]["loss"]
    info = head.head.info()
    assert (info.optimizer_steps, info.weight_version, info.window_tokens) == (0, written, 0)


def test_a_base_that_is_thawed_again_trains_its_head(client: lossd.Client, name: str) -> None:
    model = build("llama").train()
    head = patch(model, client=client, name=name, optimizer=lossd.SGD())
    adapted = with_adapters(model)
    adapted(**batch()).loss.backward()
    assert head.head.gradient_stats().norm == 0.0
    adapted.requires_grad_(True)
    adapted(**batch()).loss.backward()
    assert head.head.gradient_stats().norm > 0.0


@pytest.mark.parametrize("adapters_first", [True, False])
def test_frozen_heads_take_adapters(client: lossd.Client, name: str, adapters_first: bool) -> None:
    local = build("llama").train()
    model = twin(local)
    expected = with_adapters(local)
    if adapters_first:
        adapted = with_adapters(model)
        with pytest.raises(TypeError, match=r"got PeftModelForCausalLM, want .* patch\(model.get_base_model\(\)"):
            patch(adapted, client=client, name=name)
        head = patch(adapted.get_base_model(), client=client, name=name)
    else:
        head = patch(model, client=client, name=name, frozen=True)
        adapted = with_adapters(model)
    assert head.frozen
    for each in (adapted, expected):
        each(**batch()).loss.backward()
    gradients = [
        {key: value.grad for key, value in each.named_parameters() if value.grad is not None}
        for each in (adapted, expected)
    ]
    assert gradients[0].keys() == gradients[1].keys()
    for key, gradient in gradients[1].items():
        torch.testing.assert_close(gradients[0][key], gradient, rtol=2e-5, atol=2e-6)
    unpatch(adapted)
    torch.testing.assert_close(adapted(**batch()).logits, expected(**batch()).logits, rtol=2e-5, atol=2e-6)


def test_adapters_of_all_linear_layers_leave_the_head_alone(client: lossd.Client, name: str, tmp_path: Path) -> None:
    model = build("llama")
    head = patch(model, client=client, name=name, optimizer=lossd.SGD())
    adapted = with_adapters(model)
    assert patched_head(adapted.get_base_model()) is head
    adapted.save_pretrained(tmp_path)
    saved = peft.utils.load_peft_weights(str(tmp_path))
    assert saved and all("lora_" in key and "lm_head" not in key for key in saved)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"target_modules": ["q_proj", "lm_head"]}, ValueError),
        ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, TypeError),
    ],
)
def test_adapters_of_the_head_are_refused(
    client: lossd.Client, name: str, options: dict[str, Any], error: type[Exception]
) -> None:
    model = build("llama")
    patch(model, client=client, name=name, optimizer=lossd.SGD())
    with pytest.raises(
        error, match="head '.*' of a lossd server(.|\n)*leave 'lm_head' out of(.|\n)*target_modules"
    ) as raised:
        with_adapters(model, **options)
    assert "ensure_weight_tying" not in str(raised.value)
    assert [each.config.name for each in client.heads() if each.config.name.startswith(name)] == [name]
    model(**batch()).loss.backward()


def test_merged_adapters_are_the_bases(client: lossd.Client, name: str) -> None:
    local = build("llama").eval()
    model = twin(local)
    patch(model, client=client, name=name)
    merged, expected = (with_adapters(each).merge_and_unload() for each in (model, local))
    with torch.no_grad():
        torch.testing.assert_close(merged(**batch()).loss, expected(**batch()).loss, rtol=2e-5, atol=2e-6)


def test_a_head_of_other_weights_has_one_frozen_copy_at_a_time(
    client: lossd.Client, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = build("llama").train()
    model = twin(local)
    patch(model, client=client, name=name, optimizer=lossd.SGD())
    heads: list[int] = []
    create = client.create_head

    def counted(*args: Any, **options: Any) -> lossd.Head:
        made = create(*args, **options)
        heads.append(sum(each.config.name.startswith(name) for each in client.heads()))
        return made

    monkeypatch.setattr(client, "create_head", counted)
    other = build("llama", seed=8)
    model.requires_grad_(False).get_input_embeddings().weight.requires_grad_(True)
    for each in (model, local):
        for weights in (other.state_dict(), build("llama").state_dict()):
            each.zero_grad()
            each(**batch()).loss.backward()
            each.load_state_dict(weights)
        each.zero_grad()
        each(**batch()).loss.backward()
    torch.testing.assert_close(
        model.get_input_embeddings().weight.grad, local.get_input_embeddings().weight.grad, rtol=2e-5, atol=2e-6
    )
    assert len(heads) > 2 and max(heads) == 2  # and the head itself


@pytest.mark.parametrize("kind", ["llama", "llama-tied"])
def test_a_head_that_was_made_frozen_is_not_thawed(client: lossd.Client, name: str, kind: str) -> None:
    model = build(kind)
    patch(model, client=client, name=name, frozen=True)
    merged = with_adapters(model).merge_and_unload()
    merged.train()(**batch())
    merged.requires_grad_(True)
    with pytest.raises(RuntimeError, match=rf"head '{name}' was made frozen.*unpatch\(model\) and patch\(model"):
        merged(**batch())
    merged.eval()(**batch())  # with gradients, of which nobody said that they are wanted
    unpatch(model)
    head = patch(model, client=client, name=name + "thawed", optimizer=None if "tied" in kind else lossd.SGD())
    model.train()(**batch()).loss.backward()
    if kind == "llama":
        assert head.gradient_stats().norm > 0.0


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True}, ValueError),
        ({"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, TypeError),
        ({"target_modules": ["q_proj"], "trainable_token_indices": [5, 6]}, TypeError),
    ],
)
def test_adapters_of_a_tied_head_are_refused(
    client: lossd.Client, name: str, options: dict[str, Any], error: type[Exception]
) -> None:
    model = build("llama-tied")
    patch(model, client=client, name=name)
    with pytest.raises(error, match="head '.*' of a lossd server(.|\n)*ensure_weight_tying and trainable_token_ind"):
        with_adapters(model, **options)
