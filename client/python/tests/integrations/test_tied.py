"""Weights that head and embedding share, where others than a plain loop of forward, backward and step touch them."""

from __future__ import annotations

import copy
from typing import Any

import peft
import pytest
import torch
from accelerate.state import GradientState
from models import batch, build, twin

import lossd
from lossd.transformers import patch

EXACT = {"rtol": 2e-5, "atol": 2e-6}


def pair(client: lossd.Client, name: str) -> tuple[torch.nn.Module, torch.nn.Module, lossd.torch.RemoteHead]:
    """Patched, and left alone."""
    local = build("llama-tied").train()
    model = twin(local)
    return model, local, patch(model, client=client, name=name)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, seed: int = 5) -> None:
    optimizer.zero_grad()
    model(**batch(seed=seed)).loss.backward()
    optimizer.step()


def assert_same_loss(model: torch.nn.Module, local: torch.nn.Module) -> None:
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(**batch()).loss, local.eval()(**batch()).loss, **EXACT)


def assert_same_gradient(model: torch.nn.Module, local: torch.nn.Module) -> None:
    got, want = (each.get_input_embeddings().weight.grad for each in (model, local))
    torch.testing.assert_close(got, want, **EXACT)


@pytest.fixture
def accumulating() -> GradientState:
    """What accelerate says before the last backward of a step, and for good once a run was interrupted there."""
    state = GradientState()
    state._set_sync_gradients(False)
    return state


def test_a_copy_has_the_weights_of_the_last_step(client: lossd.Client, name: str) -> None:
    model, local, head = pair(client, name)
    for each in (model, local):
        step(each, torch.optim.SGD(each.parameters(), lr=0.5))
    written = head.weight_version
    copies = [copy.deepcopy(each) for each in (model, local)]
    assert_same_loss(*copies)
    assert head.head.info().weight_version == written  # on which a loss may depend
    for each in (model, local):
        step(each, torch.optim.SGD(each.parameters(), lr=0.5), seed=6)
    assert_same_loss(*copies)
    assert_same_loss(model, local)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_step_that_was_given_up_leaves_nothing(
    client: lossd.Client, name: str, accumulating: GradientState, set_to_none: bool
) -> None:
    model, local, _ = pair(client, name)
    for each in (model, local):
        accumulating._set_sync_gradients(False)
        each(**batch(seed=1)).loss.backward()
        each.zero_grad(set_to_none)
        for seed in (2, 3):
            accumulating._set_sync_gradients(seed == 3)
            each(**batch(seed=seed)).loss.backward()
    assert_same_gradient(model, local)


def test_a_step_that_was_not_given_up_keeps_everything(
    client: lossd.Client, name: str, accumulating: GradientState
) -> None:
    model, local, _ = pair(client, name)
    for each in (model, local):
        accumulating._set_sync_gradients(False)
        each(**batch(seed=1)).loss.backward()
        each.get_input_embeddings().weight.grad.mul_(1.0)  # as whoever unscales or averages it
        with torch.no_grad():
            each(**batch(seed=2))
        accumulating._set_sync_gradients(True)
        each(**batch(seed=3)).loss.backward()
    assert_same_gradient(model, local)


def test_an_optimizer_does_not_step_without_the_heads_gradient(
    client: lossd.Client, name: str, accumulating: GradientState
) -> None:
    model, local, _ = pair(client, name)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (model, local)]
    with pytest.raises(RuntimeError, match="an optimizer steps the weight that head .* is tied to.*flush_tied"):
        step(model, optimizers[0])
    for each, optimizer in zip((model, local), optimizers, strict=True):
        for seed in (6, 7):
            step(each, optimizer, seed)
    assert_same_gradient(model, local)
    assert_same_loss(model, local)
    # Others that do not have the weight may step meanwhile.
    model.train()(**batch()).loss.backward()
    torch.optim.SGD(model.get_decoder().layers.parameters(), lr=0.5).step()


def test_weights_that_are_written_through_data_are_seen(client: lossd.Client, name: str) -> None:
    model, local, head = pair(client, name)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (model, local)]

    def change(rows: slice, factor: float) -> None:
        for each in (model, local):
            each.get_input_embeddings().weight.data[rows].mul_(factor)

    change(slice(None), 1.5)  # before anything has gone to the server
    assert_same_loss(model, local)
    change(slice(7, 8), 3.0)
    assert_same_loss(model, local)
    for each, optimizer in zip((model, local), optimizers, strict=True):
        step(each.train(), optimizer)
    assert_same_loss(model, local)
    change(slice(None), 0.5)  # as averages of weights are put in place for an evaluation
    assert_same_loss(model, local)
    change(slice(None), 2.0)
    assert_same_loss(model, local)
    written = head.weight_version
    for _ in range(2):
        assert_same_loss(model, local)
    assert head.head.info().weight_version == written


def test_adapters_of_the_embedding_are_merged_into_the_head(client: lossd.Client, name: str) -> None:
    merged = []
    for each in pair(client, name)[:2]:
        torch.manual_seed(1)
        config = peft.LoraConfig(
            r=2, target_modules=["q_proj", "embed_tokens"], init_lora_weights=False, task_type="CAUSAL_LM"
        )
        adapted = peft.get_peft_model(each, config)
        trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
        step(adapted, torch.optim.SGD(trained, lr=0.1))
        merged.append(adapted.merge_and_unload())
    assert_same_loss(*merged)


def functional_call(model: torch.nn.Module) -> None:
    given = {name: one.detach().clone().requires_grad_() for name, one in model.named_parameters()}
    torch.func.functional_call(model, given, (), batch())


def gradients_of_autograd(model: torch.nn.Module) -> None:
    torch.autograd.grad(model(**batch()).loss, list(model.parameters()))


@pytest.mark.parametrize("use", [functional_call, gradients_of_autograd])
def test_gradients_that_would_lack_the_head_s_are_refused(client: lossd.Client, name: str, use: Any) -> None:
    model, local, _ = pair(client, name)
    use(local)
    with pytest.raises((RuntimeError, TypeError), match="tied to"):
        use(model)
    model.zero_grad()
    local.zero_grad()
    for each in (model, local):
        step(each, torch.optim.SGD(each.parameters(), lr=0.5))
    assert_same_gradient(model, local)
