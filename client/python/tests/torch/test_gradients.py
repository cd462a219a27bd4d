"""Gradients against F.linear + F.cross_entropy in fp64: dtypes, reductions, masks, upstream gradients, options."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import pairwise
from problem import VOCABULARY, check, hidden_states, labels, scalar

import lossd

FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
UPSTREAM = 2.5  # of the loss
REDUCTIONS: dict[str, dict[str, Any]] = {
    "mean": {"reduction": "mean"},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "declared_mean": {"reduction": "mean", "grad_scale": UPSTREAM},
    "declared_sum": {"reduction": "sum", "grad_scale": UPSTREAM},
    "corrected_mean": {"reduction": "mean", "grad_scale": 1.0},
    "global_mean": {"reduction": "mean", "normalizer": 100.0},
    "declared_global_mean": {"reduction": "mean", "normalizer": 100.0, "grad_scale": UPSTREAM},
}
# The head's configuration, and linear_cross_entropy's options.
Choice = tuple[dict[str, Any], dict[str, Any]]


@pairwise(
    reduction=REDUCTIONS,
    used=["loss", "loss and lse", "loss and z", "lse", "z", "loss and lse and z"],
    head_dtype=FLOATS,
    input_dtype=FLOATS | {"fp64": torch.float64},
    softcap={
        "uncapped": ({}, {}),
        "head_softcap": ({"softcap": 5.0}, {}),
        "softcap": ({}, {"softcap": 3.0}),
        "no_softcap": ({"softcap": 5.0}, {"softcap": 0.0}),
    },
    classes={
        "alike": ({}, {}),
        "classes": ({"class_weights": True}, {}),
        "no_classes": ({"class_weights": True}, {"weight": False}),
        "classes_given": ({"class_weights": True}, {"weight": True}),
    },
    smoothing={
        "sharp": ({}, {}),
        "smoothing": ({}, {"label_smoothing": 0.1}),
        "smoothing_1": ({}, {"label_smoothing": 1.0}),
    },
    scale={"unscaled": ({}, {}), "head_scale": ({"logit_scale": 0.5}, {}), "scale": ({}, {"logit_scale": 2.0})},
    bias={"unbiased": ({}, {}), "bias": ({"bias": True}, {}), "no_bias": ({"bias": True}, {"bias": False})},
    z_loss={"no_z_loss": ({}, {}), "z_loss": ({}, {"lse_square_scale": 0.01})},
    masked={"whole": 0.0, "masked": 0.4},
    token_weights=[False, True],
    teacher=[False, True],
    deterministic=[False, True],
    as_tensors=[False, True],
)
def test_gradients(
    heads: Any,
    reduction: dict[str, Any],
    used: str,
    head_dtype: torch.dtype,
    input_dtype: torch.dtype,
    softcap: Choice,
    classes: Choice,
    smoothing: Choice,
    scale: Choice,
    bias: Choice,
    z_loss: Choice,
    masked: float,
    token_weights: bool,
    teacher: bool,
    deterministic: bool,
    as_tensors: bool,
) -> None:
    """Each output that is used has an upstream gradient of its own."""
    config: dict[str, Any] = {"dtype": head_dtype, "deterministic": deterministic}
    options = dict(reduction)
    for of_head, of_call in (softcap, classes, smoothing, scale, bias, z_loss):
        config |= of_head
        options |= of_call
    head = heads(**config)
    declared = options.get("grad_scale", 0.0)
    if "normalizer" in options and "class_weights" in config:
        options["z_normalizer"] = 90.0
    if as_tensors:
        counts = options.keys() & {"normalizer", "z_normalizer", "grad_scale"}
        options |= {name: torch.tensor(options[name]) for name in counts}
    if options.get("weight"):
        options["weight"] = head.class_weights
    if token_weights:
        options["token_weights"] = torch.rand(3, 7) - 0.2
    if teacher:
        options["teacher"] = heads(frozen=True)
        options["distillation"] = lossd.Distillation(
            options["teacher"].remote.name, hidden_states(3, 7), temperature=2.0, weight=0.7, label_weight=0.3
        )
    weights = torch.randn(3, 7)
    by_token = options["reduction"] == "none"

    def objective(outputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> torch.Tensor:
        upstream = {
            "loss": weights if by_token else UPSTREAM,
            "lse": weights.flip(0),
            "z": weights.flip(1) if by_token else 0.7,
        }
        outputs_by_name = dict(zip(upstream, outputs, strict=True))
        return sum((outputs_by_name[name] * upstream[name]).sum() for name in used.split(" and "))

    corrected = declared != UPSTREAM or used != "loss"
    hidden, target = hidden_states(3, 7, dtype=input_dtype), labels(3, 7, masked=masked)
    check(head, hidden, target, objective, left=declared if corrected else 0.0, **options)


@pairwise(
    upstream={"0": 0.0, "1": 1.0, "-2.5": -2.5, "third": 1 / 3, "65536": 65536.0},
    declared=[None, "same", 1.0, 3.0, 65536.0],
    reduction=["mean", "sum"],
    head_dtype={"fp32": torch.float32, "bf16": torch.bfloat16},
)
def test_upstream_scalars(
    heads: Any, head_dtype: torch.dtype, reduction: str, upstream: float, declared: float | str | None
) -> None:
    grad_scale = upstream if declared == "same" else declared
    hidden = hidden_states(9, dtype=head_dtype)
    check(
        heads(dtype=head_dtype),
        hidden,
        labels(9, masked=0.3),
        lambda o: scalar(o, upstream),
        reduction=reduction,
        grad_scale=grad_scale,
        return_lse=False,
        return_z_loss=False,
        left=grad_scale if grad_scale and grad_scale != upstream else 0.0,
    )


@pytest.mark.parametrize("magnitude", [1e-30, 1e-4, 1.0, 1e8])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_magnitudes_of_upstream_gradients(heads: Any, reduction: str, magnitude: float) -> None:
    check(heads(), hidden_states(5), labels(5), lambda o: scalar(o, magnitude), reduction=reduction)


def test_labels_of_the_last_class_and_the_first(heads: Any) -> None:
    check(heads(), hidden_states(4), torch.tensor([0, VOCABULARY - 1, 0, VOCABULARY - 1]), lambda o: scalar(o, 1.0))


@pytest.mark.parametrize("upstream", [1.0, -2.5])
@pytest.mark.parametrize("grad_scale", [1e6, -1e6])
def test_corrections_beyond_fp16(heads: Any, grad_scale: float, upstream: float) -> None:
    """What is missing is large, and so is its dX, where the dX that comes out of it is not."""
    check(
        heads(),
        hidden_states(9, dtype=torch.float16),
        labels(9),
        lambda o: scalar(o, upstream),
        reduction="sum",
        grad_scale=grad_scale,
        left=grad_scale,
        return_lse=False,
        return_z_loss=False,
    )
