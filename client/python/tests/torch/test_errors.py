"""Bad input."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from problem import (
    HIDDEN,
    VOCABULARY,
    Reference,
    check_weight_gradient,
    distance,
    hidden_states,
    labels,
)

import lossd
from lossd.torch import linear_cross_entropy


class Wrapped(torch.Tensor):
    """As a DTensor is."""

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        return function(*arguments, **(options or {}))

    def __new__(cls, plain: torch.Tensor) -> Wrapped:
        return torch.Tensor._make_wrapper_subclass(cls, plain.shape, dtype=plain.dtype, device=plain.device)

    def __repr__(self) -> str:
        return "Wrapped()"


GOOD = torch.zeros(4, HIDDEN)
TARGET = torch.zeros(4, dtype=torch.long)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        (([1.0], TARGET), {}, TypeError, "input is a list; want a torch.Tensor"),
        ((GOOD, [1]), {}, TypeError, "target is a list; want a torch.Tensor"),
        ((GOOD.long(), TARGET), {}, TypeError, "input is torch.int64; want one of torch.float32"),
        ((GOOD.to(torch.complex64), TARGET), {}, TypeError, "input is torch.complex64"),
        ((GOOD, TARGET.float()), {}, TypeError, "target is torch.float32; want integers"),
        ((GOOD, TARGET.bool()), {}, TypeError, "target is torch.bool; want integers"),
        ((GOOD[:, :5], TARGET), {}, ValueError, r"input has shape \[4, 5\]; want \[..., 24\]"),
        ((torch.tensor(1.0), TARGET), {}, ValueError, r"input has shape \[\]"),
        ((GOOD, TARGET[:3]), {}, ValueError, r"target has shape \[3\]; want \[4\]"),
        ((GOOD.view(2, 2, HIDDEN), TARGET), {}, ValueError, r"target has shape \[4\]; want \[2, 2\]"),
        ((GOOD.to_sparse(), TARGET), {}, ValueError, "torch.sparse_coo tensor on cpu; want a dense one"),
        ((GOOD.to("meta"), TARGET.to("meta")), {}, ValueError, "on meta; want a dense one on a CPU or CUDA device"),
        ((GOOD, TARGET.to("meta")), {}, ValueError, "target is a torch.strided tensor on meta"),
        ((Wrapped(GOOD), TARGET), {}, ValueError, "input is a Wrapped; want a plain tensor, such as its to_local()"),
        ((GOOD, Wrapped(TARGET)), {}, ValueError, "target is a Wrapped; want a plain tensor"),
        (
            (GOOD, TARGET),
            {"reduction": "average"},
            ValueError,
            "reduction is 'average'; want one of 'none', 'mean', 'sum'",
        ),
        ((GOOD, TARGET), {"label_smoothing": 1.5}, ValueError, "label_smoothing is 1.5"),
        ((GOOD, TARGET), {"label_smoothing": math.nan}, ValueError, "label_smoothing is nan"),
        ((GOOD, TARGET), {"lse_square_scale": -1.0}, ValueError, "lse_square_scale is -1.0"),
        ((GOOD, TARGET), {"softcap": math.inf}, ValueError, "softcap is inf"),
        ((GOOD, TARGET), {"logit_scale": 0.0}, ValueError, "logit_scale is 0.0"),
        ((GOOD, TARGET), {"normalizer": -1}, ValueError, "normalizer is -1.0; want a finite number above 0"),
        ((GOOD, TARGET), {"normalizer": 0}, ValueError, "normalizer is 0, but 4 tokens of this batch count"),
        (
            (GOOD, TARGET),
            {"normalizer": 3, "reduction": "sum"},
            ValueError,
            "normalizer is 3.0, but reduction is 'sum'",
        ),
        ((GOOD, TARGET), {"z_normalizer": 3}, ValueError, "z_normalizer is 3.0 and normalizer is None"),
        ((GOOD, TARGET), {"grad_scale": math.inf}, ValueError, "grad_scale is inf; want a finite number"),
        (
            (GOOD, TARGET),
            {"grad_scale": 1, "reduction": "none"},
            ValueError,
            "grad_scale is 1.0, but reduction is 'none'",
        ),
        ((GOOD, TARGET), {"shift": -1}, ValueError, "shift is -1"),
        ((GOOD[0], TARGET[0]), {"shift": 1}, ValueError, "shift is 1, but target has no sequence"),
        ((GOOD, TARGET), {"token_weights": torch.ones(3)}, ValueError, r"token_weights has shape \[3\]; want \[4\]"),
        ((GOOD, TARGET), {"token_weights": TARGET}, TypeError, "token_weights is torch.int64"),
        ((GOOD, TARGET), {"token_weights": 2.0}, TypeError, "token_weights is a float"),
        (
            (GOOD, TARGET),
            {"token_weights": torch.ones(4, requires_grad=True)},
            ValueError,
            "token_weights needs a gradient",
        ),
        ((GOOD, TARGET), {"weight": torch.ones(3)}, ValueError, r"weight has shape \[3\]; want \[61\]"),
        ((GOOD, TARGET), {"weight": True}, lossd.InvalidArgumentError, "class_weights"),
        ((GOOD, TARGET), {"bias": True}, lossd.InvalidArgumentError, "bias"),
        ((GOOD, TARGET + VOCABULARY), {}, lossd.InvalidArgumentError, "61"),
        ((GOOD, TARGET - 1), {}, lossd.InvalidArgumentError, "-1"),
        ((GOOD / 0, TARGET), {}, lossd.InvalidArgumentError, "non-finite"),
        ((GOOD, TARGET), {"token_weights": torch.full((4,), math.inf)}, lossd.InvalidArgumentError, "token_weights"),
    ],
)
def test_bad_arguments(
    heads: Any, arguments: tuple[Any, Any], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    """The message names the field, and a right call is right afterwards."""
    head = heads()
    with pytest.raises(error, match=message):
        linear_cross_entropy(*arguments, head.remote, **options)
    hidden, target = hidden_states(4), labels(4)
    linear_cross_entropy(hidden, target, head.remote).backward()
    reference = Reference(head, hidden)
    reference.losses(target)[0].backward()
    assert distance(hidden.grad, reference.x.grad) < 3e-6
    check_weight_gradient(head, head.gradients()[0], reference.weight.grad)


def test_a_head_that_is_none_of_torch(heads: Any) -> None:
    with pytest.raises(TypeError, match="head is a Head; want a lossd.torch.RemoteHead"):
        linear_cross_entropy(GOOD, TARGET, heads().remote.head)


def test_labels_out_of_range_beside_class_weights(heads: Any) -> None:
    head = heads(class_weights=True)
    with pytest.raises(ValueError, match="target holds labels from 0 to 61; want 0 to 60"):
        linear_cross_entropy(GOOD, torch.tensor([0, 1, 2, 61]), head.remote, weight=head.class_weights)


def test_class_weights_that_are_not_the_heads(heads: Any) -> None:
    head = heads(class_weights=True)
    with pytest.raises(ValueError, match="give what head 'torch-.*' was created with, or weight=None"):
        linear_cross_entropy(GOOD, TARGET, head.remote, weight=head.class_weights + 1)


def test_function_transforms_are_refused(heads: Any) -> None:
    with pytest.raises(RuntimeError, match="functorch transforms"):
        torch.func.grad(lambda x: linear_cross_entropy(x, TARGET, heads().remote))(GOOD)


def test_class_weights_and_z_loss_have_two_counts(heads: Any) -> None:
    with pytest.raises(ValueError, match="z_normalizer is None, but with class weights the z-loss has another count"):
        linear_cross_entropy(GOOD, TARGET, heads(class_weights=True).remote, normalizer=3, lse_square_scale=0.1)
