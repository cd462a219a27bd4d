"""Tensors of a GPU, against the same reference. Where there is none these tests are left out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from problem import HIDDEN, HeadSpec, Reference, TestHead, check, distance, labels, scalar, tolerance

import lossd
from lossd.torch import linear_cross_entropy

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

HEADS = {
    "fp32": HeadSpec(),
    "bf16": HeadSpec(dtype=torch.bfloat16),
    "fp16": HeadSpec(dtype=torch.float16),
    "classes": HeadSpec(dtype=torch.bfloat16, class_weights=True, bias=True, softcap=5.0),
}


@pytest.fixture(scope="module", params=["cuda:0", "cpu"])
def remote_heads(request: pytest.FixtureRequest) -> Iterator[dict[str, TestHead]]:
    """Heads of a server on the GPU, which shares its memory with this process, and of one on the CPU."""
    with lossd.launch(request.param) as server, server.client() as client:
        yield {name: TestHead(client, name, spec) for name, spec in HEADS.items()}


def on_gpu(*shape: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(*shape, HIDDEN, device="cuda").to(dtype).requires_grad_(), labels(*shape, masked=0.3).cuda()


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none", "declared", "corrected"])
def test_gradients(remote_heads: dict[str, TestHead], name: str, dtype: torch.dtype, reduction: str) -> None:
    hidden, target = on_gpu(3, 11, dtype=dtype)
    options: dict[str, Any] = {"reduction": reduction}
    if reduction in ("declared", "corrected"):
        grad_scale = 2.5 if reduction == "declared" else 1.0
        options = {"grad_scale": grad_scale, "return_lse": False, "return_z_loss": False}
    left = 1.0 if reduction == "corrected" else 0.0
    check(remote_heads[name], hidden, target, lambda o: scalar(o, 2.5), left=left, **options)


@pytest.mark.parametrize("options", [{}, {"lse_square_scale": 0.01, "label_smoothing": 0.1}], ids=["plain", "options"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_all_outputs(remote_heads: dict[str, TestHead], reduction: str, options: dict[str, Any]) -> None:
    weights = torch.randn(3, 11)

    def objective(outputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> torch.Tensor:
        loss, lse, z_loss = outputs
        return (loss * 2).sum() + (lse * weights.to(lse.device)).sum() + z_loss.sum()

    hidden, target = on_gpu(3, 11, dtype=torch.bfloat16)
    check(remote_heads["bf16"], hidden, target, objective, reduction=reduction, **options)


@pytest.mark.parametrize("grad_scale", [None, 1.0])
def test_streams(remote_heads: dict[str, TestHead], grad_scale: float | None) -> None:
    """Hidden states that a busy stream has still to make, and a dX that is used at once and then overwritten."""
    head = remote_heads["bf16"]
    base, target = on_gpu(64, dtype=torch.bfloat16)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            base.grad = None
            torch.cuda._sleep(50_000_000)
            hidden = base * 2
            loss = linear_cross_entropy(hidden, target, head.remote, grad_scale=grad_scale)
            del hidden
            torch.empty(64, HIDDEN, dtype=torch.bfloat16, device="cuda").fill_(torch.nan)
            loss.backward()
            head.remote.zero_grad()
    stream.synchronize()
    reference = Reference(head, base.detach() * 2)
    reference.losses(target)[0].backward()
    assert distance(loss, reference.losses(target)[0]) < 2e-6
    assert distance(base.grad, 2 * reference.x.grad) < tolerance(head, base)


def test_wrong_devices(remote_heads: dict[str, TestHead]) -> None:
    hidden, target = on_gpu(4, dtype=torch.float32)
    with pytest.raises(ValueError, match="target is on cpu and input on cuda:0; want both on one device"):
        linear_cross_entropy(hidden, target.cpu(), remote_heads["fp32"].remote)
    with pytest.raises(lossd.InvalidArgumentError, match="-5"):
        linear_cross_entropy(hidden, target - target - 5, remote_heads["fp32"].remote)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(remote_heads: dict[str, TestHead], dtype: torch.dtype) -> None:
    head = remote_heads["fp32"]
    hidden, target = on_gpu(8, dtype=torch.float32)
    with torch.autocast("cuda", dtype=dtype):
        loss = linear_cross_entropy(hidden, target, head.remote, grad_scale=1.0)
    loss.backward()
    reference = Reference(head, hidden)
    reference.losses(target)[0].backward()
    assert loss.dtype == hidden.grad.dtype == torch.float32
    assert distance(loss, reference.losses(target)[0]) < 1e-2 and distance(hidden.grad, reference.x.grad) < 1e-2
    head.remote.zero_grad()
