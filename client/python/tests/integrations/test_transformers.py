"""Patched models against the same models left alone."""

from __future__ import annotations

import contextlib
import inspect
import os

import models
import pytest
import torch
import transformers
from models import CONFIGS, VOCABULARY, batch, build, twin

import lossd
from lossd.transformers import _tied, flush_tied, patch, patched_head, unpatch

KINDS = sorted(CONFIGS)
UNTIED = [kind for kind in KINDS if not kind.endswith("-tied")]
TIED = [kind for kind in KINDS if kind.endswith("-tied")]
# A GPU sums in another order.
ON_GPU = os.environ.get("LOSSD_TEST_DEVICE", "cpu") != "cpu"
EXACT = {"rtol": 1e-4, "atol": 1e-5} if ON_GPU else {"rtol": 2e-5, "atol": 2e-6}


def trunk_gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and not name.startswith("lm_head.")
    }


def assert_same_gradients(remote: torch.nn.Module, local: torch.nn.Module) -> None:
    got, want = trunk_gradients(remote), trunk_gradients(local)
    assert got.keys() == want.keys()
    for name in want:
        torch.testing.assert_close(got[name], want[name], **EXACT, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("grad_scale", [None, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_training_step_is_that_of_the_local_head(
    client: lossd.Client, name: str, kind: str, grad_scale: float | None
) -> None:
    local = build(kind).train()
    model = twin(local)
    head = patch(model, client=client, name=name, grad_scale=grad_scale)
    expected = local(**batch())
    outputs = model(**batch())
    assert outputs.logits is None
    torch.testing.assert_close(outputs.loss, expected.loss, **EXACT)
    expected.loss.backward()
    outputs.loss.backward()
    assert_same_gradients(model, local)
    if kind in UNTIED:
        linear = local.get_output_embeddings()
        gradient = head.head.flush(bias_out=None if linear.bias is None else (bias := torch.empty(VOCABULARY))).gradient
        torch.testing.assert_close(torch.as_tensor(gradient), linear.weight.grad, **EXACT)
        if linear.bias is not None:
            torch.testing.assert_close(bias, linear.bias.grad, **EXACT)


@pytest.mark.parametrize("kind", KINDS)
def test_generates_what_the_local_head_does(client: lossd.Client, name: str, kind: str) -> None:
    local = build(kind).eval()
    model = twin(local)
    patch(model, client=client, name=name)
    prompt = batch(2, 5)["input_ids"]
    for one in (local, model):
        one.config.output_router_logits = False  # of no use here, and transformers 5.17 fails over their loss
    for options in ({"do_sample": False}, {"num_beams": 3, "do_sample": False}):
        settings = {"max_new_tokens": 8, "pad_token_id": 0, "eos_token_id": None, **options}
        assert model.generate(prompt, **settings).equal(local.generate(prompt, **settings)), options
    with torch.no_grad():
        torch.testing.assert_close(
            model(prompt, logits_to_keep=2).logits, local(prompt, logits_to_keep=2).logits, rtol=1e-4, atol=1e-4
        )


def test_generation_asks_for_the_last_position_only(
    client: lossd.Client, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("llama").eval()
    head = patch(model, client=client, name=name)
    asked = []
    logits = type(head.head).logits
    monkeypatch.setattr(
        type(head.head),
        "logits",
        lambda self, hidden, **options: asked.append(hidden.shape) or logits(self, hidden, **options),
    )
    model.generate(batch(2, 5)["input_ids"], max_new_tokens=3, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert [tuple(shape) for shape in asked] == [(2, 1, models.HIDDEN)] * 3


@pytest.mark.parametrize("training", [False, True])
def test_loss_under_no_grad_leaves_the_window_empty(client: lossd.Client, name: str, training: bool) -> None:
    local = build("gemma2").train(training)
    model = twin(local)
    head = patch(model, client=client, name=name, grad_scale=1.0)
    with torch.no_grad():
        outputs = model(**batch())
        torch.testing.assert_close(outputs.loss, local(**batch()).loss, **EXACT)
    assert outputs.logits is None and not outputs.loss.requires_grad
    assert head.head.gradient_stats().norm == 0.0


@pytest.mark.parametrize("items", [7, torch.tensor(37)])
def test_losses_are_divided_by_num_items_in_batch(client: lossd.Client, name: str, items: int | torch.Tensor) -> None:
    local = build("llama").train()
    model = twin(local)
    patch(model, client=client, name=name)
    got, want = (each(**batch(), num_items_in_batch=items).loss for each in (model, local))
    torch.testing.assert_close(got, want, **EXACT)
    got.backward()
    want.backward()
    assert_same_gradients(model, local)


def test_takes_arguments_as_the_model_does(client: lossd.Client, name: str) -> None:
    local = build("llama").train()
    model = twin(local)
    patch(model, client=client, name=name)
    tokens, labels = batch().values()
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    for arguments, options in (
        ((tokens, mask), {"labels": labels}),
        ((tokens, mask, None, None, None, labels), {}),
        ((), {"input_ids": tokens, "labels": tokens, "ignore_index": int(tokens[1, 1])}),
        ((), {"input_ids": tokens, "labels": labels, "shift_labels": labels}),
        ((), {"inputs_embeds": local.get_input_embeddings()(tokens).detach(), "labels": labels}),
    ):
        torch.testing.assert_close(model(*arguments, **options).loss, local(*arguments, **options).loss, **EXACT)
    loss, *rest = model(tokens, labels=labels, return_dict=False, use_cache=True)
    torch.testing.assert_close(loss, local(tokens, labels=labels).loss, **EXACT)
    assert not any(isinstance(value, torch.Tensor) and value.shape[-1] in (0, 5, VOCABULARY) for value in rest)
    outputs = model(tokens, labels=labels, output_hidden_states=True)
    assert len(outputs.hidden_states) == 3 and "logits" not in outputs
    assert next(iter(outputs)) == "loss"
    assert inspect.signature(model.forward) == inspect.signature(local.forward)


def test_gives_up_the_local_weight_and_takes_it_back(client: lossd.Client, name: str) -> None:
    local = build("phi-bias").train()
    model = twin(local)
    weight = model.lm_head.weight
    head = patch(model, client=client, name=name, optimizer=lossd.SGD())
    assert weight.untyped_storage().nbytes() == 0
    assert list(model.lm_head.parameters()) == [head.proxy]
    assert patched_head(model) is head
    model(**batch()).loss.backward()
    head.step(lr=0.5)
    unpatch(model)
    local(**batch()).loss.backward()
    with torch.no_grad():
        for parameter in local.lm_head.parameters():
            parameter -= 0.5 * parameter.grad
    assert model.lm_head.weight is weight
    torch.testing.assert_close(model.lm_head.weight, local.lm_head.weight, **EXACT)
    torch.testing.assert_close(model.lm_head.bias, local.lm_head.bias, **EXACT)
    torch.testing.assert_close(model(**batch()).logits, local(**batch()).logits, **EXACT)
    with pytest.raises(ValueError, match="not patched"):
        unpatch(model)
    patch(model, client=client, name=name + "-again")
    assert model(**batch()).logits is None


def test_checkpoints_have_the_head(client: lossd.Client, name: str, tmp_path) -> None:
    local = build("llama")
    model = twin(local)
    patch(model, client=client, name=name)
    assert model.state_dict().keys() == local.state_dict().keys()
    model.save_pretrained(tmp_path)
    loaded = type(local).from_pretrained(tmp_path)
    for key, value in local.state_dict().items():
        assert loaded.state_dict()[key].equal(value), key
    other = build("llama", seed=8)
    model.load_state_dict(other.state_dict())
    torch.testing.assert_close(model.eval()(**batch()).loss, other.eval()(**batch()).loss, **EXACT)


@pytest.mark.parametrize("kind", TIED)
def test_tied_training_is_that_of_the_local_model(client: lossd.Client, name: str, kind: str) -> None:
    local = build(kind).train()
    model = twin(local)
    head = patch(model, client=client, name=name)
    assert model.state_dict().keys() == local.state_dict().keys()
    steppers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, local)]
    for step in range(4):
        losses = []
        for each, optimizer in zip((model, local), steppers, strict=True):
            optimizer.zero_grad()
            for part in range(2):
                loss = each(**batch(seed=10 * step + part)).loss / 2
                loss.backward()
                losses.append(loss.detach())
            torch.nn.utils.clip_grad_norm_(each.parameters(), 0.3)
            optimizer.step()
        torch.testing.assert_close(torch.stack(losses[:2]), torch.stack(losses[2:]), rtol=1e-4, atol=1e-5)
    embedding = model.get_input_embeddings().weight
    torch.testing.assert_close(embedding, local.get_input_embeddings().weight, rtol=1e-3, atol=1e-4)
    assert head.head.gradient_stats().norm == 0.0
    unpatch(model)
    assert model.get_output_embeddings().weight is embedding


def test_tied_gradients_are_flushed_by_hand_where_asked(client: lossd.Client, name: str) -> None:
    local = build("llama-tied").train()
    model = twin(local)
    patch(model, client=client, name=name, flush_tied="manual")
    for part in range(3):
        for each in (model, local):
            each(**batch(seed=part)).loss.backward()
    flush_tied(model)
    assert_same_gradients(model, local)


def test_optimizers_that_write_through_data_are_seen(client: lossd.Client, name: str) -> None:
    local = build("llama-tied").train()
    model = twin(local)
    patch(model, client=client, name=name)
    for each in (model, local):
        each(**batch()).loss.backward()
        weight = each.get_input_embeddings().weight
        weight.data.sub_(0.1 * weight.grad)
    torch.testing.assert_close(model(**batch()).loss, local(**batch()).loss, **EXACT)


def test_frozen_heads_train_the_trunk(client: lossd.Client, name: str) -> None:
    local = build("llama").train()
    local.lm_head.weight.requires_grad_(False)
    model = twin(local)
    head = patch(model, client=client, name=name)
    for each in (model, local):
        each(**batch()).loss.backward()
    assert_same_gradients(model, local)
    assert head.head.info().config.frozen


def test_bfloat16_models_have_bfloat16_heads(client: lossd.Client, name: str) -> None:
    local = build("llama").bfloat16().train()
    model = twin(local)
    head = patch(model, client=client, name=name)
    assert head.head.dtype == "bfloat16"
    got, want = model(**batch()).loss, local(**batch()).loss
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, want.float(), rtol=1e-2, atol=0)
    got.backward()
    assert all(gradient.dtype == torch.bfloat16 for gradient in trunk_gradients(model).values())


@pytest.mark.nightly
def test_compiled_models_train(client: lossd.Client, name: str) -> None:
    local = build("llama").train()
    model = twin(local)
    patch(model, client=client, name=name)
    compiled = torch.compile(model, backend="aot_eager")
    for _ in range(2):
        model.zero_grad()
        compiled(**batch()).loss.backward()
    local(**batch()).loss.backward()
    assert_same_gradients(model, local)


def test_evaluation_where_gradients_are_on_leaves_the_window_empty(client: lossd.Client, name: str) -> None:
    local = build("llama").eval()
    model = twin(local)
    head = patch(model, client=client, name=name, grad_scale=1.0)
    loss, expected = model(**batch()).loss, local(**batch()).loss
    torch.testing.assert_close(loss, expected, **EXACT)
    assert head.head.gradient_stats().norm == 0.0
    loss.backward()
    expected.backward()
    assert_same_gradients(model, local)
    torch.testing.assert_close(head.flush().gradient, local.lm_head.weight.grad, **EXACT)


@pytest.mark.parametrize("grad_scale", [None, 1.0])
@pytest.mark.parametrize("items", [None, 0, torch.tensor(0)])
def test_a_step_without_labels_is_what_it_is_locally(
    client: lossd.Client, name: str, items: int | torch.Tensor | None, grad_scale: float | None
) -> None:
    local = build("llama").train()
    model = twin(local)
    head = patch(model, client=client, name=name, grad_scale=grad_scale)
    nothing = {**batch(), "labels": torch.full_like(batch()["labels"], -100)}
    losses = [each(**nothing, num_items_in_batch=items).loss for each in (model, local)]
    assert all(loss.isnan() for loss in losses)
    losses[0].backward()
    assert all(not gradient.any() for gradient in trunk_gradients(model).values())
    assert head.head.gradient_stats().norm == 0.0
    with pytest.raises(ValueError, match="normalizer is 0, but 25 tokens"):
        model(**batch(), num_items_in_batch=0)


@pytest.mark.parametrize("grad_scale", [None, 1.0])
def test_tied_weights_are_written_only_when_they_have_changed(
    client: lossd.Client, name: str, monkeypatch: pytest.MonkeyPatch, grad_scale: float | None
) -> None:
    local = build("llama-tied").train()
    model = twin(local)
    head = patch(model, client=client, name=name, grad_scale=grad_scale)
    writes = []
    write = head.write_weights
    monkeypatch.setattr(head, "write_weights", lambda *values: writes.append(1) or write(*values))
    for each in (model, local):
        first, second = (each(**batch(seed=seed)).loss for seed in (1, 2))
        first.backward()
        with torch.no_grad():
            each(**batch(seed=3))
        second.backward()
    assert_same_gradients(model, local)
    assert writes == []
    # One element, by as little as it can.
    weight = model.get_input_embeddings().weight
    weight.data[60, 15] = torch.nextafter(weight.data[60, 15], torch.tensor(9.0))
    for _ in range(2):
        model(**batch())
    assert writes == [1]


@pytest.mark.parametrize("columns", [8, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_change_of_a_weight_is_seen(dtype: torch.dtype, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_tied, "_DIGEST_VALUES", 8 * 3)
    weight = torch.randn(11, columns, generator=torch.Generator().manual_seed(1)).to(dtype)
    digest = _tied._digest(weight)
    assert _tied._digest(weight.clone()) == digest
    transposed = weight.t().contiguous().t()
    assert _tied._digest(transposed) == _tied._digest(transposed.clone())
    _tied._digest(torch.cat([weight.flatten()[:1], weight.flatten()])[1:].view_as(weight))  # at an odd place
    for change in (
        lambda changed: changed[10, 6].copy_(torch.nextafter(changed[10, 6], torch.tensor(9.0, dtype=dtype))),
        lambda changed: changed[0, 0].neg_(),
        lambda changed: changed.copy_(changed.roll(1, 0)),
        lambda changed: changed.copy_(changed.roll(1, 1)),
        lambda changed: changed.neg_(),
    ):
        changed = weight.clone()
        change(changed)
        assert _tied._digest(changed) != digest


def test_logits_of_more_positions_than_one_answer_holds(client: lossd.Client, name: str) -> None:
    """2048 positions of 4096 logits in fp32 are twice 16 MiB, which is what one answer may have."""
    config = models.CONFIGS["llama"]()
    config.vocab_size = 4096
    local = type(build("llama"))(config).eval()
    model = twin(local)
    patch(model, client=client, name=name)
    tokens = torch.randint(3, 4096, (32, 64))
    with torch.no_grad():
        got, want = (each(tokens, logits_to_keep=0).logits for each in (model, local))
    assert got.shape == (32, 64, 4096)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("config", "logit_scale"),
    [
        (  # which divides hidden states by what Granite divides logits by
            models._config(
                "MiniCPM3Config", dim_model_base=8, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8,
                kv_lora_rank=8, q_lora_rank=8, num_key_value_heads=2,
            ),
            1.0,
        ),
        (models._config("HyperCLOVAXConfig", logits_scaling=0.5), 0.5),  # which multiplies by it
    ],
    ids=["minicpm3", "hyperclovax"],
)  # fmt: skip
def test_patch_is_told_the_scale(
    client: lossd.Client, name: str, config: transformers.PretrainedConfig, logit_scale: float
) -> None:
    local = transformers.AutoModelForCausalLM.from_config(config).float().train()
    model, refused = twin(local), twin(local)
    patch(refused, client=client, name=name + "untold")
    with pytest.raises(ValueError, match=r"give patch\(\) the logit_scale and softcap"):
        refused(**batch())
    patch(model, client=client, name=name, logit_scale=logit_scale)
    losses = [each(**batch()).loss for each in (model, local)]
    torch.testing.assert_close(*losses, **EXACT)
    for loss in losses:
        loss.backward()
    assert_same_gradients(model, local)


def test_patch_is_told_the_softcap(client: lossd.Client, name: str) -> None:
    local = build("gemma2").train()
    model = twin(local)
    model.config.final_logit_softcapping = None
    patch(model, client=client, name=name, softcap=1.5)
    model.config.final_logit_softcapping = 1.5
    torch.testing.assert_close(model(**batch()).loss, local(**batch()).loss, **EXACT)


def test_a_softcap_under_another_name(client: lossd.Client, name: str) -> None:
    config = models._config("RecurrentGemmaConfig", logits_soft_cap=1.5, num_hidden_layers=3, head_dim=4)
    config.use_cache = False
    local = transformers.AutoModelForCausalLM.from_config(config).float().train()
    model = twin(local)
    patch(model, client=client, name=name)
    torch.testing.assert_close(model(**batch()).loss, local(**batch()).loss, **EXACT)


def test_auxiliary_losses_under_another_name(client: lossd.Client, name: str) -> None:
    config = models._config("JetMoeConfig", kv_channels=8, num_local_experts=4, output_router_logits=True)
    config.aux_loss_coef = 0.5
    local = transformers.AutoModelForCausalLM.from_config(config).float().train()
    model = twin(local)
    patch(model, client=client, name=name)
    outputs = [each(**batch()) for each in (model, local)]
    torch.testing.assert_close(outputs[0].loss, outputs[1].loss, **EXACT)
    assert outputs[1].aux_loss > 0.1


@pytest.mark.parametrize("default", [torch.float16, "meta"])
@pytest.mark.parametrize("kind", ["phi-bias", "llama-tied"])
def test_defaults_of_torch_do_not_matter_to_patch(
    client: lossd.Client, name: str, kind: str, default: torch.dtype | str
) -> None:
    local = build(kind)
    model = twin(local)
    with contextlib.ExitStack() as undo:
        if isinstance(default, str):
            undo.enter_context(torch.device(default))
        else:
            undo.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(default)
        patch(model, client=client, name=name)
        unpatch(model)
    torch.testing.assert_close(model.state_dict(), local.state_dict(), rtol=0, atol=0)
