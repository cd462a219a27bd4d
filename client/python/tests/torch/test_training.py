"""Models around a remote loss: checkpoints, autocast, GradScaler, the module."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from cases import pairwise
from problem import HIDDEN, VOCABULARY, TestHead, distance, labels
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lossd
from lossd.torch import RemoteHead, linear_cross_entropy


class Trunk(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, HIDDEN), nn.LayerNorm(HIDDEN))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)


class Twin(nn.Module):
    """The same trunk with the head and its loss here."""

    def __init__(self, trunk: Trunk, head: TestHead) -> None:
        super().__init__()
        self.trunk = copy.deepcopy(trunk)
        self.weight = nn.Parameter(head.weight.float())

    def forward(self, inputs: Tensor, target: Tensor) -> Tensor:
        logits = F.linear(self.trunk(inputs), self.weight)
        return F.cross_entropy(logits.flatten(0, -2), target.flatten())


class Model(nn.Module):
    def __init__(self, trunk: Trunk, head: TestHead, **options: Any) -> None:
        super().__init__()
        self.trunk = trunk
        self.lm_head = head.remote
        self.options = options

    def forward(self, inputs: Tensor, target: Tensor) -> Tensor:
        return self.lm_head(self.trunk(inputs), target, **self.options)


def compare(
    head: TestHead, trunk: Trunk, run: Callable[[Tensor, Tensor], Tensor], *, upstream: float = 1.0, close: float = 1e-5
) -> None:
    """Loss and all gradients of one step of run(inputs, labels) with those of the twin."""
    twin = Twin(trunk, head)
    inputs, target = torch.randn(2, 5, 8), labels(2, 5, masked=0.2)
    loss, wanted = run(inputs, target), twin(inputs, target)
    assert distance(loss, wanted) < close
    (loss * upstream).backward()
    (wanted * upstream).backward()
    for found, want in zip(trunk.parameters(), twin.trunk.parameters(), strict=True):
        assert found.grad is not None and distance(found.grad, want.grad) < close
    assert distance(head.gradients()[0], twin.weight.grad) < close


# Checkpoints


@pairwise(around=["trunk", "loss", "all"], grad_scale=[1.0, 2.0, None], upstream=[1.0, 3.0], reentrant=[False, True])
def test_checkpoints(
    heads: Any, passes: list[Any], around: str, reentrant: bool, grad_scale: float | None, upstream: float
) -> None:
    """Whatever is recomputed, every token counts once."""
    head, trunk = heads(), Trunk()

    def run_loss(hidden: Tensor, target: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, target, head.remote, grad_scale=grad_scale)

    def run_all(inputs: Tensor, target: Tensor) -> Tensor:
        return run_loss(trunk(inputs), target)

    def again(work: Callable[..., Tensor], *arguments: Tensor) -> Tensor:
        return checkpoint(work, *arguments, use_reentrant=reentrant)

    def run(inputs: Tensor, target: Tensor) -> Tensor:
        inputs.requires_grad_()
        if around == "trunk":
            return run_loss(again(trunk, inputs), target)
        return again(run_all, inputs, target) if around == "all" else again(run_loss, trunk(inputs), target)

    compare(head, trunk, run, upstream=upstream)
    if around == "trunk" and grad_scale == upstream:
        assert len(passes) == 1


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_checkpoints_of_losses_with_other_outputs(heads: Any, reduction: str) -> None:
    head = heads()
    hidden, target = torch.randn(6, HIDDEN, requires_grad=True), labels(6)
    twin = hidden.detach().clone().requires_grad_()
    gradients = []

    def run(x: Tensor) -> Tensor:
        loss, lse, z_loss = linear_cross_entropy(
            x, target, head.remote, reduction=reduction, return_lse=True, return_z_loss=True, lse_square_scale=0.1
        )
        return (loss * 2).sum() + lse.sum() + (z_loss * 3).sum()

    checkpoint(run, hidden, use_reentrant=False).backward()
    gradients.append(head.gradients()[0])
    run(twin).backward()
    gradients.append(head.gradients()[0])
    assert torch.equal(hidden.grad, twin.grad) and distance(*gradients) < 1e-6


# Mixed precision


@pairwise(
    grad_scale=[None, 1.0, 2.0],
    dtype={"bf16": torch.bfloat16, "fp16": torch.float16},
    head_dtype={"fp32_head": torch.float32, "bf16_head": torch.bfloat16},
)
def test_autocast(heads: Any, dtype: torch.dtype, head_dtype: torch.dtype, grad_scale: float | None) -> None:
    """Weights of the trunk are fp32: so are the loss and the gradients of the weights."""
    head, trunk = heads(dtype=head_dtype), Trunk()

    def run(inputs: Tensor, target: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=dtype):
            hidden = trunk(inputs)
            loss = linear_cross_entropy(hidden, target, head.remote, grad_scale=grad_scale)
        assert loss.dtype == torch.float32
        return loss

    compare(head, trunk, run, close=3e-2)


def test_backward_inside_of_autocast(heads: Any) -> None:
    """As it should not be called, and is."""
    head, hidden, target = heads(), torch.randn(6, HIDDEN, requires_grad=True), labels(6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        linear_cross_entropy(hidden, target, head.remote, reduction="none").mean().backward()
    assert hidden.grad.dtype == torch.float32 and hidden.grad.any()


@pytest.mark.parametrize("head_dtype", [torch.float32, torch.bfloat16], ids=["fp32_head", "bf16_head"])
@pytest.mark.parametrize("input_dtype", [torch.float32, torch.float16], ids=["fp32_input", "fp16_input"])
def test_what_hidden_states_are_sent_as(
    heads: Any, monkeypatch: pytest.MonkeyPatch, head_dtype: torch.dtype, input_dtype: torch.dtype
) -> None:
    """In the head's dtype, or autocast's, if that is narrower; dX is as precise as the input in any case."""
    head = heads(dtype=head_dtype)
    seen = []
    compute = type(head.remote.session).compute
    monkeypatch.setattr(
        type(head.remote.session),
        "compute",
        lambda self, hidden, *args, **options: seen.append(hidden.dtype) or compute(self, hidden, *args, **options),
    )
    hidden = torch.randn(6, HIDDEN).to(input_dtype).requires_grad_()
    linear_cross_entropy(hidden, labels(6), head.remote, grad_scale=1.0).backward()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        linear_cross_entropy(hidden, labels(6), head.remote, grad_scale=1.0).backward()
    plain = torch.float16 if input_dtype is torch.float16 else head_dtype
    cast = torch.float16 if input_dtype is torch.float16 else torch.bfloat16
    assert seen == [plain, cast] and hidden.grad.dtype == input_dtype


def test_wide_hidden_states_lose_nothing_on_the_way_to_a_narrow_head(heads: Any) -> None:
    """What is rounded here would be rounded there."""
    head, hidden, target = heads(dtype=torch.bfloat16), torch.randn(6, HIDDEN), labels(6)
    with torch.no_grad():
        loss = linear_cross_entropy(hidden, target, head.remote, reduction="none")
    assert torch.equal(loss, head.remote.session.compute(hidden, target, mode="loss").losses)


@pytest.mark.parametrize("declared", [False, True])
def test_grad_scaler(heads: Any, passes: list[Any], declared: bool) -> None:
    """A flush divided by the scale is the gradient, and a step with an overflow is skipped."""
    head, trunk = heads(), Trunk()
    optimizer = torch.optim.SGD(trunk.parameters(), lr=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    twin = Twin(trunk, head)
    inputs, target = torch.randn(2, 5, 8), labels(2, 5)
    scale = scaler.get_scale()
    loss = linear_cross_entropy(trunk(inputs), target, head.remote, grad_scale=scale if declared else None)
    scaler.scale(loss).backward()
    assert len(passes) == (1 if declared else 2)
    twin(inputs, target).backward()
    assert distance(head.remote.flush(gradient_scale=1 / scale).gradient, twin.weight.grad) < 1e-5
    scaler.step(optimizer)
    scaler.update()
    torch.optim.SGD(twin.trunk.parameters(), lr=0.5).step()
    for found, want in zip(trunk.parameters(), twin.trunk.parameters(), strict=True):
        assert distance(found, want) < 1e-5

    before = copy.deepcopy(trunk.state_dict())
    optimizer.zero_grad()
    loss = linear_cross_entropy(trunk(inputs), target, head.remote)
    (scaler.scale(loss) * torch.inf).backward()
    scaler.step(optimizer)
    scaler.update()
    assert all(torch.equal(trunk.state_dict()[name], value) for name, value in before.items())
    assert scaler.get_scale() == scale / 2
    assert head.remote.proxy.marker.isnan()


# The module


def test_module_in_training_and_in_evaluation(heads: Any, passes: list[Any]) -> None:
    """In evaluation a declared gradient does not hold: nothing is added until backward."""
    head, trunk = heads(), Trunk()
    model = Model(trunk, head, grad_scale=1.0)
    compare(head, trunk, model)
    assert [one.mode for one in passes] == ["gradients"]
    model.eval()
    loss = model(torch.randn(2, 5, 8), labels(2, 5))
    assert [one.mode for one in passes] == ["gradients", "loss"] and not head.remote.dirty
    loss.backward()
    assert head.remote.dirty


def test_state_of_the_module_is_the_heads(heads: Any) -> None:
    head = heads()
    model = Model(Trunk(), head)
    state = model.state_dict()
    assert torch.equal(state["lm_head.weight"], head.weight) and "lm_head.proxy" not in state
    assert len(list(model.parameters())) == len(list(model.trunk.parameters())) + 1
    version = head.remote.head.info().weight_version
    model.load_state_dict(state)
    assert head.remote.head.info().weight_version == version + 1


# What docs/pytorch.md begins with


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_three_lines(client: lossd.Client, dtype: torch.dtype) -> None:
    """Three steps with AdamW at the server are those of AdamW here."""
    lm_head = nn.Linear(HIDDEN, VOCABULARY, bias=False, dtype=dtype)
    name = f"three-lines-{dtype}"
    head = RemoteHead.from_linear(client, lm_head, name, optimizer=lossd.AdamW())
    twin = nn.Parameter(lm_head.weight.detach().clone())
    optimizer = torch.optim.AdamW([twin], lr=1e-2)
    for _ in range(3):
        hidden, target = torch.randn(2, 5, HIDDEN, dtype=dtype), labels(2, 5)
        linear_cross_entropy(hidden, target, head).backward()
        head.step(lr=1e-2)
        F.cross_entropy(F.linear(hidden, twin).float().flatten(0, 1), target.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    found, _ = head.read_weights()
    assert distance(found, lm_head.weight) > 1e-2 and distance(found, twin) < (1e-6 if dtype is torch.float32 else 1e-2)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_results_of_collectives_are_waited_for(heads: Any, tmp_path: Path) -> None:
    """Hidden states as an all-gather of sequence-parallel ranks leaves them."""
    head, hidden, target = heads(), torch.randn(6, HIDDEN), labels(6)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        gathered = collectives.all_gather_tensor(hidden, 0, dist.group.WORLD)
        assert hasattr(gathered, "trigger_wait")
        loss = linear_cross_entropy(gathered, target, head.remote)
        loss.backward()
    finally:
        dist.destroy_process_group()
    assert distance(loss, linear_cross_entropy(hidden, target, head.remote)) < 1e-6
