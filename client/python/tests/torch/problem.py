"""What a head's loss and gradients are, written out in PyTorch in fp64, and how close a server's have to be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import lossd
from lossd.torch import RemoteHead, linear_cross_entropy

VOCABULARY, HIDDEN = 61, 24
# The relative error of one rounding to nearest.
ROUNDING = {torch.float64: 0.0, torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}


@dataclass(frozen=True)
class HeadSpec:
    dtype: torch.dtype = torch.float32
    bias: bool = False
    softcap: float = 0.0
    logit_scale: float = 1.0
    class_weights: bool = False
    frozen: bool = False
    deterministic: bool = False
    held_bytes: int = 0
    held_hidden_bytes: int = 0


class TestHead:
    """A head of the server with random weights, and the same weights here, rounded as they are there."""

    __test__ = False  # not for pytest to collect

    def __init__(self, client: lossd.Client, name: str, spec: HeadSpec) -> None:
        generator = torch.Generator().manual_seed(3)
        self.spec = spec
        self.on_gpu = client.status().device != "cpu"
        weight = (0.4 * torch.randn(VOCABULARY, HIDDEN, generator=generator)).to(spec.dtype)
        bias = torch.randn(VOCABULARY, generator=generator) if spec.bias else None
        weights = 0.2 + 1.8 * torch.rand(VOCABULARY, generator=generator) if spec.class_weights else None
        if weights is not None:
            weights[0] = 0.0
        self.weight, self.bias, self.class_weights = weight, bias, weights
        self.remote = RemoteHead.create(
            client,
            name,
            VOCABULARY,
            HIDDEN,
            dtype=spec.dtype,
            weights=weight,
            bias=bias,
            softcap=spec.softcap,
            logit_scale=spec.logit_scale,
            frozen=spec.frozen,
            held_bytes=spec.held_bytes,
            class_weights=None if weights is None else weights.numpy(),
            session_options={"deterministic": spec.deterministic, "held_hidden_bytes": spec.held_hidden_bytes},
        )

    def gradients(self) -> tuple[Tensor, Tensor | None]:
        """dW and db since the last call."""
        bias = torch.empty(VOCABULARY) if self.spec.bias else None
        return self.remote.flush(bias_out=bias).gradient, bias


@dataclass
class Reference:
    """The local twin of a batch, on the CPU: leaves in fp64 with the very values that the server works with."""

    head: TestHead
    hidden: Tensor
    weight: Tensor = field(init=False)
    bias: Tensor | None = field(init=False)
    x: Tensor = field(init=False)

    def __post_init__(self) -> None:
        # The server rounds hidden states to the head's dtype.
        self.x = self.hidden.detach().cpu().to(self.head.spec.dtype).double().requires_grad_()
        self.weight = self.head.weight.double().requires_grad_()
        self.bias = None if self.head.bias is None else self.head.bias.double().requires_grad_()

    def losses(
        self,
        target: Tensor,
        *,
        reduction: str = "mean",
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        lse_square_scale: float = 0.0,
        softcap: float | None = None,
        logit_scale: float | None = None,
        weight: Any = None,
        bias: bool | None = None,
        token_weights: Tensor | None = None,
        normalizer: float | None = None,
        z_normalizer: float | None = None,
        distillation: lossd.Distillation | None = None,
        teacher: TestHead | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The loss, the log-sum-exps, the z-loss, by the options of linear_cross_entropy."""
        spec = self.head.spec
        scale = spec.logit_scale if logit_scale is None else logit_scale
        cap = spec.softcap if softcap is None else softcap
        logits = F.linear(self.x, self.weight, None if bias is False else self.bias) * scale
        logits = cap * torch.tanh(logits / cap) if cap else logits
        classes = None if weight is False or self.head.class_weights is None else self.head.class_weights.double()
        target = target.cpu().long()
        valid = target != ignore_index
        flat, labels = logits.reshape(-1, VOCABULARY), target.reshape(-1)
        tokens = F.cross_entropy(
            flat, labels, classes, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="none"
        ).reshape(target.shape)
        if distillation is not None:
            assert teacher is not None
            kl = self._divergence(logits, target, distillation, teacher)
            tokens = distillation.label_weight * tokens + distillation.weight * kl
        lse = logits.logsumexp(-1).masked_fill(~valid, 0.0)
        z_losses = lse_square_scale * lse.square()
        if token_weights is not None:
            tokens, z_losses = tokens * token_weights.cpu().double(), z_losses * token_weights.cpu().double()
        if reduction == "none":
            return tokens + z_losses, lse, z_losses
        count: Any = 1.0
        z_count: Any = 1.0
        if reduction == "mean":
            z_count = valid.sum()
            count = z_count if classes is None else classes[target[valid]].sum()
            count = count if normalizer is None else normalizer
            z_count = z_normalizer if z_normalizer is not None else z_count if normalizer is None else normalizer
        z_loss = z_losses.sum() / z_count
        return tokens.sum() / count + z_loss, lse, z_loss

    @staticmethod
    def _divergence(logits: Tensor, target: Tensor, soft: lossd.Distillation, teacher: TestHead) -> Tensor:
        """KL(teacher, head) of each token."""
        theirs = F.linear(soft.hidden.detach().to(teacher.spec.dtype).double(), teacher.weight.double())
        wanted = (theirs / soft.temperature).log_softmax(-1)
        found = (logits / soft.temperature).log_softmax(-1)
        divergence = (wanted.exp() * (wanted - found)).sum(-1)
        return divergence.masked_fill(target == -100, 0.0)


def distance(found: Tensor, wanted: Tensor) -> float:
    """Relative, in the Frobenius norm; absolute where nothing is wanted."""
    found, wanted = found.detach().cpu().double(), wanted.detach().cpu().double()
    difference = (found - wanted).norm()
    return float(difference / wanted.norm()) if bool(wanted.any()) else float(difference)


def tolerance(head: TestHead, hidden: Tensor) -> float:
    """How far off a gradient may be that leaves as `hidden`'s dtype, from a head that may compute in bf16, on a GPU in
    fp16, too (docs/numerics.md)."""
    rounded = head.spec.dtype is torch.bfloat16 or (head.spec.dtype is torch.float16 and head.on_gpu)
    arithmetic = 4 * ROUNDING[head.spec.dtype] if rounded else 3e-6
    return arithmetic + 1.5 * ROUNDING[hidden.dtype]


def hidden_states(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, HIDDEN).to(dtype).requires_grad_()


def labels(*shape: int, masked: float = 0.0, ignore_index: int = -100) -> Tensor:
    """With about so many of them ignored, and never all unless masked is 1."""
    target = torch.randint(0, VOCABULARY, shape)
    if masked >= 1:
        return torch.full(shape, ignore_index)
    target[torch.rand(shape) < masked] = ignore_index
    if target.numel():
        target.view(-1)[0] = 5
    return target


def scalar(outputs: Any, upstream: float) -> Tensor:
    loss = outputs[0] if isinstance(outputs, tuple) else outputs
    return loss.sum() * upstream


def check(
    head: TestHead,
    hidden: Tensor,
    target: Tensor,
    objective: Callable[[tuple[Tensor, Tensor, Tensor]], Tensor],
    *,
    left: float = 0.0,
    **options: Any,
) -> None:
    """Loss, dX, dW and db of objective(loss, lse, z_loss) are those of the reference. All three are asked for unless
    return_lse or return_z_loss says otherwise; what is not asked for is None. `left`: times the loss's gradient, what
    was added to dW and taken out again, whose rounding stays."""
    options = {"return_lse": True, "return_z_loss": True} | options
    asked = {name: value for name, value in options.items() if name != "teacher"}
    found = linear_cross_entropy(hidden, target, head.remote, **asked)
    parts = list(found) if isinstance(found, tuple) else [found]
    outputs = [parts.pop(0)] + [parts.pop(0) if options[name] else None for name in ("return_lse", "return_z_loss")]
    reference = Reference(head, hidden)
    wanted = reference.losses(target, **options)
    for output, want in zip(outputs, wanted, strict=True):
        assert output is None or distance(output, want) < 2e-6, (output, want)
        assert output is None or output.dtype == torch.float32 and output.shape == want.shape
    slack = 0.0
    if left:
        (once,) = torch.autograd.grad(wanted[0], reference.weight, retain_graph=True)
        slack = 4 * ROUNDING[torch.float32] * abs(left) * float(once.norm())
    if hidden.requires_grad or not head.spec.frozen:
        objective(tuple(outputs)).backward()  # type: ignore[arg-type]
        objective(wanted).backward()
    if hidden.requires_grad:
        assert hidden.grad is not None and hidden.grad.dtype == hidden.dtype
        assert distance(hidden.grad, reference.x.grad) < tolerance(head, hidden)
    if head.spec.frozen:
        return
    found_weight, found_bias = head.gradients()
    check_weight_gradient(head, found_weight, reference.weight.grad, slack)
    if found_bias is not None:
        wanted_bias = torch.zeros_like(reference.bias) if reference.bias.grad is None else reference.bias.grad
        check_weight_gradient(head, found_bias, wanted_bias, slack)


def check_weight_gradient(head: TestHead, found: Tensor, wanted: Tensor, slack: float = 0.0) -> None:
    error = float((found.double() - wanted).norm())
    assert error <= tolerance(head, found) * float(wanted.norm()) + slack, (error, float(wanted.norm()), slack)


# A head, and the options of a call with lists of tokens.
LIST_CONFIGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "temperature": ({}, {"logit_scale": 0.5}),
    "softcap": ({"softcap": 3.0}, {}),
    "bias": ({"bias": True}, {}),
    "bf16": ({"dtype": torch.bfloat16}, {}),
    "fp16": ({"dtype": torch.float16, "bias": True, "softcap": 5.0, "logit_scale": 0.5}, {}),
}


def weight_gradient_in_any_cut(
    head: TestHead, hidden: Tensor, target: Tensor, options: Callable[[int, int], dict[str, Any]]
) -> Tensor:
    """dW of all tokens, which has the same bits as one batch, in batches of seven and one by one. `options`: of the
    tokens from the first number up to the second."""
    gradients = []
    for size in (len(hidden), 7, 1):
        for first in range(0, len(hidden), size):
            last = min(first + size, len(hidden))
            linear_cross_entropy(
                hidden[first:last],
                target[first:last],
                head.remote,
                reduction="sum",
                grad_scale=1.0,
                **options(first, last),
            ).backward()
        gradients.append(head.gradients()[0])
    assert torch.equal(gradients[0], gradients[1]) and torch.equal(gradients[0], gradients[2])
    return gradients[0]
