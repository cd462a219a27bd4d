"""One problem's inputs, its exact answer, and how far a result is from it.

X [N, H] and W [V, H] are bf16, labels [N] are int64; the loss is the mean over rows that are not ignored, dX is [N, H], dW [V, H].
"""
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from peer_config import Shape, Tolerance

IGNORE_INDEX = -100
LOGIT_DEVIATION = 1.5
_SLICE_ELEMENTS = 1 << 26  # of temporaries in comparisons
_REFERENCE_CHUNK_BYTES = 1 << 30  # of one chunk's exact logits


class Outputs(NamedTuple):
    """What every peer delivers."""

    loss: Tensor  # scalar
    dx: Tensor  # [N, H]
    dw: Tensor  # [V, H]


@dataclass(frozen=True)
class Problem:
    """The inputs that all peers share. The two float tensors ask for gradients; nobody writes to any of them."""

    shape: Shape
    hidden_states: Tensor  # [N, H] bf16
    weight: Tensor  # [V, H] bf16
    labels: Tensor  # [N] int64, IGNORE_INDEX where ignored
    valid_tokens: int


def make_problem(shape: Shape, seed: int, ignored_share: float, device: torch.device) -> Problem:
    """Normal X and W whose logits have LOGIT_DEVIATION, uniform labels; at least one row stays valid."""
    generator = torch.Generator(device).manual_seed(seed)
    hidden_states = torch.empty(shape.tokens, shape.hidden, dtype=torch.bfloat16, device=device)
    hidden_states.normal_(0.0, 1.0, generator=generator)
    weight = torch.empty(shape.vocab, shape.hidden, dtype=torch.bfloat16, device=device)
    weight.normal_(0.0, LOGIT_DEVIATION / math.sqrt(shape.hidden), generator=generator)
    labels = torch.randint(0, shape.vocab, (shape.tokens,), generator=generator, device=device)
    ignored = min(int(ignored_share * shape.tokens), shape.tokens - 1)
    order = torch.randperm(shape.tokens, generator=generator, device=device)
    labels[order[:ignored]] = IGNORE_INDEX
    return Problem(shape, hidden_states.requires_grad_(), weight.requires_grad_(), labels, shape.tokens - ignored)


@dataclass(frozen=True)
class Reference:
    """The answer, computed in the wide type and kept in fp32, which is exact enough for errors above 1e-6."""

    loss: float
    dx: Tensor  # [N, H] fp32
    dw: Tensor  # [V, H] fp32
    unlabelled: Tensor  # [V] bool: entries that are no row's label


@torch.no_grad()
def compute_reference(problem: Problem, wide: torch.dtype) -> Reference:
    """Loss, dX and dW with inputs widened to `wide` and every sum taken in it, chunk of rows by chunk of rows."""
    shape, device = problem.shape, problem.weight.device
    weight = problem.weight.detach().to(wide)
    dx = torch.empty(shape.tokens, shape.hidden, dtype=torch.float32, device=device)
    dw = torch.zeros(shape.vocab, shape.hidden, dtype=wide, device=device)
    loss = torch.zeros((), dtype=torch.float64, device=device)
    rows = max(1, min(shape.tokens, _REFERENCE_CHUNK_BYTES // (shape.vocab * weight.element_size())))
    for first in range(0, shape.tokens, rows):
        part = slice(first, min(first + rows, shape.tokens))
        hidden_states = problem.hidden_states.detach()[part].to(wide)
        labels = problem.labels[part]
        valid = labels != IGNORE_INDEX
        target = labels.where(valid, 0)[:, None]
        logits = hidden_states @ weight.T
        log_sum_exp = logits.logsumexp(dim=1, keepdim=True)
        loss += (log_sum_exp - logits.gather(1, target))[valid].double().sum()
        gradient = logits.sub_(log_sum_exp).exp_()
        gradient.scatter_add_(1, target, torch.full_like(log_sum_exp, -1.0))
        gradient.mul_(valid[:, None].to(wide).div_(problem.valid_tokens))
        dx[part] = (gradient @ weight).float()
        dw.addmm_(gradient.T, hidden_states)
    unlabelled = torch.ones(shape.vocab, dtype=torch.bool, device=device)
    unlabelled[problem.labels[problem.labels != IGNORE_INDEX]] = False
    return Reference(loss.item() / problem.valid_tokens, dx, dw.float(), unlabelled)


@torch.no_grad()
def relative_error(value: Tensor, exact: Tensor, rows: Tensor | None = None) -> float | None:
    """Relative Frobenius error of `value` [R, C], or of those rows alone; NaN stays NaN, None if nothing is there to compare."""
    if value.shape != exact.shape:
        raise ValueError(f"a result has the shape {tuple(value.shape)}, not {tuple(exact.shape)}")
    difference, norm = 0.0, 0.0
    step = max(1, _SLICE_ELEMENTS // exact.shape[1])
    for first in range(0, exact.shape[0], step):
        part = slice(first, first + step)
        a, b = value.detach()[part].double(), exact[part].double()
        if rows is not None:
            a, b = a[rows[part]], b[rows[part]]
        difference += (a - b).square().sum().item()
        norm += b.square().sum().item()
    return math.sqrt(difference / norm) if norm > 0 else None


def errors_of(outputs: Outputs, reference: Reference) -> dict[str, float | None]:
    """Relative errors of loss, dX, dW and of dW's rows that no label names."""
    return {
        "loss": abs(outputs.loss.double().item() - reference.loss) / abs(reference.loss),
        "dx": relative_error(outputs.dx, reference.dx),
        "dw": relative_error(outputs.dw, reference.dw),
        "dw_unlabelled": relative_error(outputs.dw, reference.dw, reference.unlabelled),
    }


def rounding_floor(reference: Reference) -> dict[str, float | None]:
    """The errors of the exact answer once its gradients are rounded to bf16: no bf16 result can do much better."""
    rounded = Outputs(torch.tensor(reference.loss), reference.dx.bfloat16(), reference.dw.bfloat16())
    return {**errors_of(rounded, reference), "loss": 0.0}


def violations(errors: dict[str, float | None], tolerance: Tolerance) -> list[str]:
    """What makes a result wrong, one text each. NaN never passes; an error that is None was not measured."""
    problems = []
    for name, allowed in vars(tolerance).items():
        error = errors.get(name)
        if allowed is not None and error is not None and not error <= allowed:
            problems.append(f"error of {name} {error:.1e} over {allowed:.0e}")
    return problems
