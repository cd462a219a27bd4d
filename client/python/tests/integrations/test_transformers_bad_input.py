"""What patch() and patched models refuse, and that they leave the model as it was."""

from __future__ import annotations

import models
import pytest
import torch
import transformers
from models import batch, build

import lossd
from lossd.torch import RemoteHead
from lossd.transformers import flush_tied, patch, patched_head, unpatch


def head_of(client: lossd.Client, name: str, rows: int = models.VOCABULARY) -> lossd.Head:
    return client.create_head(name, rows, models.HIDDEN, "float32")


def test_needs_a_causal_model(client: lossd.Client) -> None:
    with pytest.raises(TypeError, match="want a causal language model"):
        patch(torch.nn.Linear(2, 2), client=client)
    config = transformers.T5Config(
        vocab_size=40, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    with pytest.raises(ValueError, match="encoder-decoder"):
        patch(transformers.T5ForConditionalGeneration(config), client=client)
    model = build("llama")
    model.lm_head = torch.nn.Sequential(model.lm_head)
    with pytest.raises(TypeError, match="Sequential, want an nn.Linear"):
        patch(model, client=client)


def test_needs_one_head(client: lossd.Client, name: str) -> None:
    model = build("llama")
    with pytest.raises(ValueError, match="either head=... or client="):
        patch(model)
    head = head_of(client, name)
    with pytest.raises(ValueError, match="either head=... or client="):
        patch(model, head, client=client)
    with pytest.raises(ValueError, match="dtype, double_buffer: only for heads that patch"):
        patch(model, head, dtype="float32", double_buffer=True)
    with pytest.raises(ValueError, match="flush_tied: got 'never'"):
        patch(model, head, flush_tied="never")
    assert isinstance(model.lm_head, torch.nn.Linear) and "forward" not in model.__dict__


def test_heads_of_other_sizes_are_refused(client: lossd.Client, name: str) -> None:
    with pytest.raises(ValueError, match="head: 60 x 16, but the model's lm_head is 61 x 16"):
        patch(build("llama"), head_of(client, name, 60))


def test_what_the_server_refuses_leaves_the_model_alone(client: lossd.Client, name: str) -> None:
    model = build("llama")
    head_of(client, name, 5)
    with pytest.raises(lossd.LossdError, match=name):
        patch(model, client=client, name=name)
    assert isinstance(model.lm_head, torch.nn.Linear)
    assert model(**batch()).logits is not None


def test_patches_once(client: lossd.Client, name: str) -> None:
    model = build("llama")
    with pytest.raises(ValueError, match="not patched"):
        patched_head(model)
    patch(model, client=client, name=name)
    with pytest.raises(ValueError, match="patched already"):
        patch(model, client=client, name=name)
    with pytest.raises(ValueError, match="not tied"):
        flush_tied(model)


def test_tied_weights_have_the_local_optimizer(client: lossd.Client, name: str) -> None:
    with pytest.raises(ValueError, match="optimizer: the weight is tied"):
        patch(build("llama-tied"), client=client, name=name, optimizer=lossd.AdamW())


def test_logits_for_a_loss_of_the_callers_are_refused(client: lossd.Client, name: str) -> None:
    model = build("llama").train()
    patch(model, client=client, name=name)
    with pytest.raises(RuntimeError, match="logits of a remote head have no gradient"):
        model(batch()["input_ids"])
    model.model.requires_grad_(False)  # then hidden states need no gradient, but the head is trained
    with pytest.raises(RuntimeError, match="logits of a remote head have no gradient"):
        model(batch()["input_ids"])
    assert model.eval()(batch()["input_ids"]).logits.shape == (3, 11, models.VOCABULARY)


def test_other_losses_are_refused(client: lossd.Client, name: str) -> None:
    model = build("llama")
    model.loss_function = lambda logits, labels, **_: logits.sum()
    with pytest.raises(ValueError, match="loss_function is <lambda>"):
        patch(model, client=client, name=name)
    model = build("llama")
    function = model.loss_function
    patch(model, client=client, name=name)
    with pytest.raises(ValueError, match="loss_function is <lambda>"):
        model.loss_function = lambda logits, labels, **_: logits.sum()
    model.loss_function = function
    unpatch(model)
    model.loss_function = lambda logits, labels, **_: logits.sum()


def test_softcaps_that_the_configuration_hides_are_seen(client: lossd.Client, name: str) -> None:
    model = build("gemma2")
    patch(model, client=client, name=name)
    model.config.final_logit_softcapping = 30.0
    with pytest.raises(ValueError, match="softcap=1.5"):
        model(**batch())


def test_forwards_that_others_have_wrapped_meet_the_local_head_again(client: lossd.Client, name: str) -> None:
    model = build("llama")
    patch(model, client=client, name=name)
    ours = model.forward
    model.forward = lambda *args, **kwargs: ours(*args, **kwargs)
    assert model(**batch()).logits is None
    unpatch(model)
    assert model(**batch()).logits.shape[-1] == models.VOCABULARY
    with pytest.raises(ValueError, match="something has replaced the forward .*del model.forward"):
        patch(model, client=client, name=name + "-2")
    del model.forward
    patch(model, client=client, name=name + "-2")
    assert model(**batch()).logits is None


def test_labels_beyond_the_vocabulary_reach_the_caller(client: lossd.Client, name: str) -> None:
    model = build("llama").train()
    patch(model, client=client, name=name)
    tokens, labels = batch().values()
    labels[1, 3] = models.VOCABULARY
    with pytest.raises(lossd.InvalidArgumentError, match=str(models.VOCABULARY)):
        model(tokens, labels=labels).loss.backward()
    model(**batch()).loss.backward()


def test_given_heads_may_be_of_either_kind(client: lossd.Client, name: str) -> None:
    model = build("llama")
    plain = head_of(client, name)
    assert patch(model, plain).head is plain
    unpatch(model)
    remote = RemoteHead(plain)
    assert patch(model, remote, upload=False) is remote
    assert model(**batch()).logits is None


def test_other_numbers_of_tokens_are_refused(client: lossd.Client, name: str) -> None:
    model = build("llama")
    patch(model, client=client, name=name)
    embedding, vocabulary = model.get_input_embeddings(), model.config.vocab_size
    for arguments, options in (((70,), {}), ((), {"new_num_tokens": 8}), ((), {"pad_to_multiple_of": 16})):
        with pytest.raises(ValueError, match=r"resize_token_embeddings: .*unpatch\(model\), resize, and patch"):
            model.resize_token_embeddings(*arguments, **options)
    assert model.get_input_embeddings() is embedding and model.config.vocab_size == vocabulary
    assert model.resize_token_embeddings() is embedding  # which only asks for it
    model(**batch()).loss.backward()
    unpatch(model)
    model.resize_token_embeddings(70)
    patch(model, client=client, name=name + "-70")
    assert patched_head(model).vocab_size == 70
    assert model.eval()(**batch()).loss > 0


def test_another_head_is_refused(client: lossd.Client, name: str) -> None:
    model = build("llama")
    patch(model, client=client, name=name)
    head = model.lm_head
    with pytest.raises(TypeError, match=r"cannot be replaced by a Linear: .*unpatch\(model\)"):
        model.set_output_embeddings(torch.nn.Linear(models.HIDDEN, models.VOCABULARY))
    assert model.lm_head is head
    model(**batch()).loss.backward()


def test_ligers_loss_is_refused(client: lossd.Client, name: str) -> None:
    model = build("llama")
    patch(model, client=client, name=name)

    def lce_forward(self: torch.nn.Module, **_: object) -> None:
        raise AssertionError

    lce_forward.__module__ = "liger_kernel.transformers.model.llama"
    with pytest.raises(ValueError, match='liger_kernel_config={"fused_linear_cross_entropy": False}'):
        model.forward = lce_forward.__get__(model)
    model(**batch()).loss.backward()


def test_weights_for_a_loss_of_the_callers_are_refused(client: lossd.Client, name: str) -> None:
    class Product(torch.autograd.Function):  # which computes where gradients are off, as TRL's losses do
        @staticmethod
        def forward(ctx: object, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return hidden @ weight.t()

    model = build("phi-bias").train()
    patch(model, client=client, name=name, optimizer=lossd.SGD())
    hidden = torch.zeros(2, models.HIDDEN, requires_grad=True)
    with pytest.raises(RuntimeError, match="gradient through it would be lost: .*labels=labels"):
        Product.apply(hidden, model.lm_head.weight)
    with pytest.raises(RuntimeError, match="gradient through it would be lost: .*labels=labels"):
        model.lm_head.bias.sum()
    assert model.lm_head.weight.shape == (models.VOCABULARY, models.HIDDEN)
    assert model.state_dict()["lm_head.weight"].abs().sum() > 0
    with pytest.warns(lossd.torch.FetchedWeightsWarning):
        assert Product.apply(hidden, model.lm_head.weight.detach()).shape == (2, models.VOCABULARY)
    with torch.no_grad(), pytest.warns(lossd.torch.FetchedWeightsWarning):
        model.lm_head.weight.sum()
    model.lm_head.requires_grad_(False)  # as PEFT does: then it is not trained
    with pytest.warns(lossd.torch.FetchedWeightsWarning):
        assert Product.apply(hidden, model.lm_head.weight).shape == (2, models.VOCABULARY)
