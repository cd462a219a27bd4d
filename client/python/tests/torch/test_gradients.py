"""Gradients against F.linear + F.cross_entropy in fp64: dtypes, reductions, masks, upstream gradients, options."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from problem import VOCABULARY, check, hidden_states, labels, scalar

import lossd

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
REDUCTIONS = ["mean", "sum", "none"]
NAME = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # name: (the head's configuration, linear_cross_entropy's options)
    "smoothing": ({}, {"label_smoothing": 0.1}),
    "smoothing_1": ({}, {"label_smoothing": 1.0}),
    "z_loss": ({}, {"lse_square_scale": 0.01}),
    "head_softcap": ({"softcap": 5.0}, {}),
    "softcap": ({}, {"softcap": 3.0}),
    "no_softcap": ({"softcap": 5.0}, {"softcap": 0.0}),
    "head_scale": ({"logit_scale": 0.5}, {}),
    "scale": ({}, {"logit_scale": 2.0}),
    "bias": ({"bias": True}, {}),
    "no_bias": ({"bias": True}, {"bias": False}),
    "classes": ({"class_weights": True}, {}),
    "no_classes": ({"class_weights": True}, {"weight": False}),
    "classes_smoothing_z": ({"class_weights": True}, {"label_smoothing": 0.2, "lse_square_scale": 0.02}),
    "all": (
        {"class_weights": True, "bias": True, "softcap": 5.0, "logit_scale": 0.5},
        {"label_smoothing": 0.1, "lse_square_scale": 0.01},
    ),
}


@pytest.mark.parametrize("masked", [0.0, 0.4], ids=["whole", "masked"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("input_dtype", [*FLOATS, torch.float64], ids=NAME.get)
@pytest.mark.parametrize("head_dtype", FLOATS, ids=NAME.get)
def test_dtypes(heads: Any, head_dtype: torch.dtype, input_dtype: torch.dtype, reduction: str, masked: float) -> None:
    hidden = hidden_states(13, dtype=input_dtype)
    check(heads(dtype=head_dtype), hidden, labels(13, masked=masked), lambda o: scalar(o, 1.0), reduction=reduction)


@pytest.mark.parametrize("declared", [None, "same", 1.0, 3.0, 65536.0])
@pytest.mark.parametrize("upstream", [0.0, 1.0, -2.5, 1 / 3, 65536.0])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("head_dtype", [torch.float32, torch.bfloat16], ids=NAME.get)
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


@pytest.mark.parametrize("reduction", ["mean", "sum", "none", "declared_mean", "declared_sum", "corrected_mean"])
@pytest.mark.parametrize("name", OPTIONS)
def test_options(heads: Any, name: str, reduction: str) -> None:
    config, options = OPTIONS[name]
    kind, _, rest = reduction.rpartition("_")
    grad_scale = {"": None, "declared": 2.5, "corrected": 1.0}[kind]
    check(
        heads(**config),
        hidden_states(3, 4),
        labels(3, 4, masked=0.3),
        lambda o: scalar(o, 2.5),
        reduction=rest,
        grad_scale=grad_scale,
        left=1.0 if kind == "corrected" else 0.0,
        **options,
    )


@pytest.mark.parametrize("name", ["plain", "smoothing", "z_loss", "classes", "classes_smoothing_z", "all"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("returned", ["loss_lse", "loss_z", "loss_lse_z", "lse", "lse_z"])
def test_gradients_of_all_outputs(heads: Any, name: str, reduction: str, returned: str) -> None:
    """Each output with an upstream gradient of its own."""
    config, options = ({}, {}) if name == "plain" else OPTIONS[name]
    weights = torch.randn(3, 7)

    def objective(outputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> torch.Tensor:
        loss, lse, z_loss = outputs
        total = torch.zeros(())
        if "loss" in returned:
            total = total + (loss * (weights if reduction == "none" else -1.5)).sum()
        if "lse" in returned:
            total = total + (lse * weights.flip(0)).sum()
        if "z" in returned:
            total = total + (z_loss * (weights.flip(1) if reduction == "none" else 0.7)).sum()
        return total

    check(heads(**config), hidden_states(3, 7), labels(3, 7, masked=0.3), objective, reduction=reduction, **options)


@pytest.mark.parametrize("declared", [None, 1.0, 2.0])
@pytest.mark.parametrize("name", ["plain", "z_loss", "all"])
@pytest.mark.parametrize("outputs", ["z", "lse", "both"])
def test_declared_losses_with_other_outputs(heads: Any, outputs: str, name: str, declared: float | None) -> None:
    """What is declared is that of the loss alone; what the other outputs get is corrected."""
    config, options = ({}, {}) if name == "plain" else OPTIONS[name]
    weights = torch.randn(8)

    def objective(found: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> torch.Tensor:
        loss, lse, z_loss = found
        total = loss * 1.0
        total = total if outputs == "lse" else total + 0.5 * z_loss
        return total if outputs == "z" else total + (lse * weights).sum()

    check(heads(**config), hidden_states(8), labels(8), objective, grad_scale=declared, left=declared or 0.0, **options)


@pytest.mark.parametrize("head_dtype", [torch.float32, torch.bfloat16], ids=NAME.get)
@pytest.mark.parametrize(
    ("reduction", "grad_scale"), [("mean", None), ("mean", 1.0), ("sum", None), ("sum", 1.0), ("none", None)]
)
@pytest.mark.parametrize("options", [{}, {"lse_square_scale": 0.01, "label_smoothing": 0.1}], ids=["plain", "options"])
def test_token_weights(
    heads: Any, head_dtype: torch.dtype, reduction: str, grad_scale: float | None, options: dict[str, Any]
) -> None:
    check(
        heads(dtype=head_dtype),
        hidden_states(2, 6, dtype=head_dtype),
        labels(2, 6, masked=0.2),
        lambda o: scalar(o, 1.0),
        reduction=reduction,
        grad_scale=grad_scale,
        token_weights=torch.rand(2, 6) - 0.2,
        **options,
    )


@pytest.mark.parametrize("declared", [False, True])
@pytest.mark.parametrize("name", ["plain", "z_loss", "classes", "classes_smoothing_z"])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_global_normalizer(heads: Any, name: str, as_tensor: bool, declared: bool) -> None:
    config, options = ({}, {}) if name == "plain" else OPTIONS[name]
    counts: dict[str, Any] = {"normalizer": 100.0}
    if "class_weights" in config:
        counts["z_normalizer"] = 90.0
    given = {key: torch.tensor(value) if as_tensor else value for key, value in counts.items()}
    check(
        heads(**config),
        hidden_states(10),
        labels(10, masked=0.3),
        lambda o: scalar(o, 1.0),
        grad_scale=1.0 if declared else None,
        **given,
        **options,
    )


@pytest.mark.parametrize("name", ["classes", "classes_smoothing_z"])
@pytest.mark.parametrize("declared", [None, 1.0, 3.0])
def test_class_weights_given_as_a_tensor(heads: Any, name: str, declared: float | None) -> None:
    config, options = OPTIONS[name]
    head = heads(**config)
    check(
        head,
        hidden_states(10),
        labels(10, masked=0.3),
        lambda o: scalar(o, 3.0),
        weight=head.class_weights,
        grad_scale=declared,
        **options,
    )


@pytest.mark.parametrize("name", ["z_loss", "classes_smoothing_z"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_gradients_of_the_z_loss_alone(heads: Any, reduction: str, name: str) -> None:
    config, options = OPTIONS[name]
    check(
        heads(**config), hidden_states(8), labels(8, masked=0.3), lambda o: o[2].sum(), reduction=reduction, **options
    )


@pytest.mark.parametrize("reduction", ["mean", "sum", "none", "declared", "corrected"])
@pytest.mark.parametrize("options", [{}, {"lse_square_scale": 0.01, "label_smoothing": 0.1}], ids=["plain", "options"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_soft_targets(heads: Any, deterministic: bool, reduction: str, options: dict[str, Any]) -> None:
    teacher = heads(frozen=True)
    soft = lossd.Distillation(teacher.remote.name, hidden_states(9), temperature=2.0, weight=0.7, label_weight=0.3)
    grad_scale = {"declared": 2.5, "corrected": 1.0}.get(reduction)
    check(
        heads(deterministic=deterministic),
        hidden_states(9),
        labels(9, masked=0.3),
        lambda o: scalar(o, 2.5),
        distillation=soft,
        teacher=teacher,
        reduction="mean" if grad_scale else reduction,
        grad_scale=grad_scale,
        left=1.0 if reduction == "corrected" else 0.0,
        **options,
    )


@pytest.mark.parametrize("magnitude", [1e-30, 1e-4, 1.0, 1e8])
@pytest.mark.parametrize("reduction", REDUCTIONS)
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
