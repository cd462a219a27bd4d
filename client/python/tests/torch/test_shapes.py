"""Shapes, strides, kinds of labels, shifts, and batches of which little or nothing counts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import pairwise
from problem import HIDDEN, VOCABULARY, check, distance, hidden_states, labels, scalar

from lossd.torch import linear_cross_entropy, shift_labels

REDUCTIONS = ["mean", "sum", "none", "declared"]


def options_of(reduction: str) -> dict[str, Any]:
    if reduction == "declared":
        return {"reduction": "mean", "grad_scale": 1.0, "return_lse": False, "return_z_loss": False}
    return {"reduction": reduction}


def without_lse(reduction: str) -> dict[str, Any]:
    return options_of(reduction) | {"return_lse": False}


class Layout:
    """Hidden states as a view of a leaf, whose gradient the view's has to be in."""

    NAMES = [
        "rows",
        "columns",
        "every_other",
        "transposed",
        "expanded",
        "sequence_first",
        "four_dimensions",
        "one_token",
    ]

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        base, view = {
            "rows": ((12, HIDDEN), lambda x: x),
            "columns": ((HIDDEN, 12), lambda x: x.t()),
            "every_other": ((24, 2 * HIDDEN), lambda x: x[::2, ::2]),
            "transposed": ((3, HIDDEN, 4), lambda x: x.transpose(1, 2)),
            "expanded": ((1, HIDDEN), lambda x: x.expand(5, HIDDEN)),
            "sequence_first": ((4, 3, HIDDEN), lambda x: x.transpose(0, 1)),
            "four_dimensions": ((2, 3, 2, HIDDEN), lambda x: x),
            "one_token": ((HIDDEN,), lambda x: x),
        }[name]
        self.leaf = torch.randn(base).to(dtype).requires_grad_()
        self.view = view
        self.hidden = view(self.leaf)


@pairwise(name=Layout.NAMES, reduction=REDUCTIONS, dtype={"fp32": torch.float32, "bf16": torch.bfloat16})
def test_layouts(heads: Any, name: str, reduction: str, dtype: torch.dtype) -> None:
    layout = Layout(name, dtype)
    target = labels(*layout.hidden.shape[:-1], masked=0.2)
    twin = layout.hidden.detach().clone().requires_grad_()
    check(heads(), twin, target, lambda o: scalar(o, 1.0), **options_of(reduction))
    loss = linear_cross_entropy(layout.hidden, target, heads().remote, **options_of(reduction) | {"return_lse": True})[
        0
    ]
    loss.sum().backward()
    wanted = torch.autograd.grad(layout.view(layout.leaf), layout.leaf, twin.grad)[0]
    assert layout.leaf.grad.shape == layout.leaf.shape
    assert torch.equal(layout.leaf.grad, wanted)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 4)], ids=str)
def test_no_tokens(heads: Any, shape: tuple[int, ...], reduction: str) -> None:
    head, hidden = heads(), hidden_states(*shape)
    loss = linear_cross_entropy(hidden, labels(*shape), head.remote, **without_lse(reduction))
    empty = F.cross_entropy(torch.zeros(0, 3), torch.zeros(0, dtype=torch.long), reduction=loss_reduction(reduction))
    assert loss.shape == (shape if reduction == "none" else ())
    assert torch.equal(loss.flatten().nan_to_num(-1), empty.flatten().nan_to_num(-1))
    loss.sum().backward()
    assert hidden.grad.shape == hidden.shape
    assert not head.gradients()[0].any()


def loss_reduction(reduction: str) -> str:
    return "mean" if reduction == "declared" else reduction


@pairwise(reduction=REDUCTIONS, torch_compat=[False, True], config={"plain": {}, "classes": {"class_weights": True}})
def test_all_ignored(heads: Any, config: dict[str, Any], reduction: str, torch_compat: bool) -> None:
    head, hidden = heads(**config), hidden_states(3, 4)
    loss = linear_cross_entropy(
        hidden, labels(3, 4, masked=1), head.remote, torch_compat=torch_compat, **without_lse(reduction)
    )
    if loss_reduction(reduction) == "mean":
        assert loss.isnan() if torch_compat else loss == 0
    else:
        assert not loss.any()
    loss.sum().backward()
    assert torch.equal(hidden.grad, torch.zeros_like(hidden))
    assert not head.gradients()[0].any()


def test_a_mean_with_a_normalizer_is_zero_where_nothing_counts(heads: Any) -> None:
    loss = linear_cross_entropy(hidden_states(3), labels(3, masked=1), heads().remote, normalizer=10)
    assert loss == 0


@pytest.mark.parametrize("grad_scale", [None, 1.0])
@pytest.mark.parametrize("given", [False, True])
def test_class_weights_of_zero(heads: Any, given: bool, grad_scale: float | None) -> None:
    """All labels are of class 0, whose weight is 0."""
    head, hidden = heads(class_weights=True), hidden_states(4)
    target = torch.zeros(4, dtype=torch.long)
    loss = linear_cross_entropy(
        hidden, target, head.remote, grad_scale=grad_scale, weight=head.class_weights if given else None
    )
    loss.backward()
    assert loss.isnan() and torch.equal(hidden.grad, torch.zeros_like(hidden))
    assert not head.gradients()[0].any()


@pytest.mark.parametrize(
    ("dtype", "ignore_index"),
    [
        (torch.int64, -100),
        (torch.int64, 1000),
        (torch.int32, -1),
        (torch.int16, 0),
        (torch.int8, 7),
        (torch.uint8, 60),
    ],
    ids=str,
)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_label_types(heads: Any, dtype: torch.dtype, ignore_index: int, reduction: str) -> None:
    target = labels(11, masked=0.4, ignore_index=ignore_index).to(dtype)
    check(
        heads(), hidden_states(11), target, lambda o: scalar(o, 1.0), ignore_index=ignore_index, **options_of(reduction)
    )


def test_labels_with_strides(heads: Any) -> None:
    target = labels(4, 6)[:, ::2].t()
    check(heads(), hidden_states(3, 4), target, lambda o: scalar(o, 1.0))


@pairwise(shift=[True, 1, 2, 4, 9], reduction=REDUCTIONS, shape=[(3, 5), (6,), (2, 2, 4)])
def test_shift(heads: Any, shape: tuple[int, ...], shift: int, reduction: str) -> None:
    """As transformers do it: logits[..., :-1, :] meet labels[..., 1:]."""
    places = int(shift)
    head, hidden, target = heads(), hidden_states(*shape), labels(*shape, masked=0.2)
    loss = linear_cross_entropy(hidden, target, head.remote, shift=shift, torch_compat=False, **without_lse(reduction))
    twin = hidden.detach().double().requires_grad_()
    logits = F.linear(twin, head.weight.double())
    kept, wanted_labels = logits[..., : max(shape[-1] - places, 0), :], target[..., places:]
    tokens = F.cross_entropy(kept.reshape(-1, VOCABULARY), wanted_labels.reshape(-1), reduction="none")
    count = max(int((wanted_labels != -100).sum()), 1)
    wanted = tokens.sum() / (count if loss_reduction(reduction) == "mean" else 1)
    if reduction == "none":
        assert loss.shape == target.shape and not loss[..., max(shape[-1] - places, 0) :].any()
    assert distance(loss.sum(), wanted) < 2e-6
    loss.sum().backward()
    wanted.backward()
    assert distance(hidden.grad, twin.grad) < 3e-6


def test_shift_of_narrow_labels() -> None:
    """-100 is no uint8."""
    assert shift_labels(torch.tensor([1, 2, 3], dtype=torch.uint8), 1).tolist() == [2, 3, -100]


@pytest.mark.parametrize("upstream", ["sum", "mean", "expanded_rows", "permuted", "sparse", "every_other"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_strides_of_upstream_gradients(heads: Any, upstream: str, dtype: torch.dtype) -> None:
    weights = torch.randn(3, 4)
    objectives = {
        "sum": lambda o: o[0].sum(),
        "mean": lambda o: o[0].mean(),
        "expanded_rows": lambda o: (o[0].sum(1) * weights[:, 0]).sum(),
        "permuted": lambda o: (o[0].t() * weights.flatten().view(4, 3)).sum(),
        "sparse": lambda o: o[0][1, 2] * 3,
        "every_other": lambda o: (o[0][:, ::2] * weights[:, :2]).sum(),
    }
    target = labels(3, 4, masked=0.2)
    check(heads(), hidden_states(3, 4, dtype=dtype), target, objectives[upstream], reduction="none")


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_masks_of_the_losses_divide_by_zero_only_where_nothing_counts(heads: Any, reduction: str) -> None:
    """(losses * mask).sum() / mask.sum() of a batch without tokens: upstream gradients of ignored ones are NaN."""
    head, hidden, target = heads(), hidden_states(4), labels(4, masked=1)
    losses = linear_cross_entropy(hidden, target, head.remote, reduction=reduction)
    (losses * (target != -100)).sum().div((target != -100).sum()).backward()
    assert torch.equal(hidden.grad, torch.zeros_like(hidden))
    assert not head.gradients()[0].any()
    assert math.isfinite(float(head.remote.proxy.marker or 0))


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("gradients", [True, False])
def test_values_of_tokens(heads: Any, passes: list[Any], reduction: str, gradients: bool) -> None:
    head = heads()
    hidden, target = hidden_states(2, 5), labels(2, 5, masked=0.3)
    logits = head.remote.logits(hidden, dtype="float32")
    with torch.set_grad_enabled(gradients):
        loss, values = linear_cross_entropy(
            hidden, target, head.remote, return_values=("predictions", "entropies", "log_probabilities"),
            **without_lse(reduction) | {"return_z_loss": False},
        )  # fmt: skip
    assert len(passes) == 1 and loss.requires_grad == gradients
    assert list(values) == ["entropies", "log_probabilities", "predictions"]
    assert not any(value.requires_grad for value in values.values())
    counted, log_probabilities = target != -100, logits.log_softmax(-1)
    wanted = {
        "entropies": -(log_probabilities.exp() * log_probabilities).sum(-1),
        "log_probabilities": log_probabilities.gather(-1, target.clamp(min=0)[..., None])[..., 0],
        "predictions": logits.argmax(-1).int(),
    }
    for name, value in wanted.items():
        assert values[name].shape == target.shape
        torch.testing.assert_close(values[name][counted], value[counted], rtol=1e-5, atol=1e-5)
    if gradients:
        loss.sum().backward()
        assert hidden.grad is not None and hidden.grad.isfinite().all()


@pytest.mark.parametrize(
    ("names", "error", "message"),
    [
        ("entropies", TypeError, "return_values is 'entropies'; want a collection of names"),
        (["entropies", "temperature"], ValueError, "return_values names 'temperature'; there are entropies, log_prob"),
    ],
)
def test_values_that_there_are_not(heads: Any, names: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        linear_cross_entropy(hidden_states(3), labels(3), heads().remote, return_values=names)
