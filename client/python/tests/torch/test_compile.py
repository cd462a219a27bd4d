"""torch.compile with fullgraph=True: a loss in the middle of a graph is the loss that it is without one."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cases import nightly
from problem import HIDDEN, VOCABULARY, distance, hidden_states, labels
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lossd
from lossd.torch import RemoteHead, linear_cross_entropy

LOSS, BOTH = ("loss", False), ("gradients", True)
DECLARED = pytest.mark.parametrize("grad_scale", [None, 1.0])


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Graphs:
    def __init__(self) -> None:
        self._before = self._count()

    def made(self) -> int:
        """Since the test began."""
        return self._count() - self._before

    @staticmethod
    def _count() -> int:
        return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@pytest.fixture
def graphs() -> Graphs:
    return Graphs()


class Model(nn.Module):
    """Inputs [..., 8] and labels to a loss, with the head where a model has it."""

    def __init__(self, head: RemoteHead, **options: Any) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(8, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, HIDDEN))
        self.lm_head = head
        self.options = options

    def forward(self, inputs: Tensor, target: Tensor, **options: Any) -> Any:
        return self.lm_head(self.trunk(inputs) * 1.5, target, **self.options, **options)


def whole(model: Any, backend: str = "aot_eager", **options: Any) -> Any:
    return torch.compile(model, backend=backend, fullgraph=True, **options)


def gradients(head: Any, model: nn.Module) -> list[Tensor]:
    """Those of the trunk, and dW; and they are gone then."""
    found = [one.grad.clone() for name, one in model.named_parameters() if one.grad is not None and "proxy" not in name]
    weight, bias = head.gradients()
    for name, parameter in model.named_parameters():
        if "proxy" not in name:
            parameter.grad = None
    return [*found, weight] if bias is None else [*found, weight, bias]


def assert_same(head: Any, model: nn.Module, compiled: Any, run: Any, close: float = 2e-6) -> list[Tensor]:
    """run(model or its compiled self) -> a scalar, which is given to backward."""
    results = []
    for each in (model, compiled):
        loss = run(each)
        loss.backward()
        results.append([loss.detach(), *gradients(head, model)])
    assert len(results[0]) == len(results[1])
    for want, found in zip(*results, strict=True):
        assert distance(found, want) < close, (found, want)
    return results[0]


@pytest.mark.parametrize(
    ("backend", "grad_scale"),
    [("aot_eager", None), ("aot_eager", 1.0), ("inductor", 1.0), *nightly(("inductor", None), ("eager", 1.0))],
)
def test_one_graph(heads: Any, passes: list[Any], backend: str, grad_scale: float | None) -> None:
    head = heads()
    model = Model(head.remote, grad_scale=grad_scale)
    inputs, target = torch.randn(2, 5, 8), labels(2, 5)
    compiled = whole(model, backend)
    assert_same(head, model, compiled, lambda each: each(inputs, target) * 2.0 / 2.0)
    once = [BOTH] if grad_scale else [LOSS, BOTH]
    assert [(one.mode, one.dx) for one in passes] == once * 2


@pytest.mark.parametrize(
    "options",
    [
        {"reduction": "sum"},
        {"reduction": "none"},
        {"shift": True, "ignore_index": 3},
        {"label_smoothing": 0.1, "softcap": 5.0, "logit_scale": 0.7},
        {"lse_square_scale": 0.01, "return_lse": True, "return_z_loss": True},
        {"lse_square_scale": 0.01, "return_z_loss": True, "reduction": "none"},
        {"return_lse": True, "grad_scale": 1.0},
        {"lse_square_scale": 0.01, "return_z_loss": True, "grad_scale": 1.0},
        {"grad_scale": 3.0},
        {"normalizer": 7, "grad_scale": torch.tensor(1.0)},
        {"bias": False},
    ],
    ids=str,
)
def test_options(heads: Any, options: dict[str, Any]) -> None:
    head = heads(bias=True)
    model = Model(head.remote, **options)
    inputs, target, weights = torch.randn(2, 5, 8), labels(2, 5), torch.rand(2, 5)

    def run(each: Any) -> Tensor:
        outputs = each(inputs, target, token_weights=weights)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        assert all(one.dtype == torch.float32 for one in outputs)
        return sum(one.sum() * (number + 1) for number, one in enumerate(outputs))

    assert_same(head, model, whole(model), run)


@pytest.mark.parametrize("given", [None, "tensor", False])
@DECLARED
def test_class_weights(heads: Any, given: Any, grad_scale: float | None) -> None:
    head = heads(class_weights=True)
    model = Model(head.remote, grad_scale=grad_scale, weight=head.class_weights if given == "tensor" else given)
    inputs, target = torch.randn(10, 8), labels(10)
    assert_same(head, model, whole(model), lambda each: each(inputs, target))


def test_distillation(heads: Any) -> None:
    head, teacher = heads(), heads(frozen=True)
    model = Model(head.remote)
    inputs, target = torch.randn(10, 8), labels(10)

    def run(each: Any) -> Tensor:
        soft = lossd.Distillation(teacher.remote.name, inputs.repeat(1, 3), temperature=2.0, label_weight=0.5)
        return each(inputs, target, distillation=soft)

    def call(each: Any) -> Tensor:
        return run(each)

    assert_same(head, model, whole(model), call)


def test_a_frozen_head(heads: Any) -> None:
    head, hidden, target = heads(frozen=True), hidden_states(6), labels(6)

    def run(hidden: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, target, head.remote)

    (want,) = torch.autograd.grad(run(hidden), hidden)
    (found,) = torch.autograd.grad(whole(run)(hidden), hidden)
    assert distance(found, want) < 1e-6


@DECLARED
def test_a_frozen_trunk(heads: Any, passes: list[Any], grad_scale: float | None) -> None:
    """Backward reaches the loss by the head's parameter alone, and no pass asks for dX."""
    head = heads()
    model = Model(head.remote, grad_scale=grad_scale)
    model.trunk.requires_grad_(False)
    inputs, target = torch.randn(10, 8), labels(10)
    assert_same(head, model, whole(model), lambda each: each(inputs, target))
    assert not any(one.dx for one in passes)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(heads: Any, passes: list[Any], mode: Any) -> None:
    head = heads()
    model = Model(head.remote, grad_scale=1.0)
    inputs, target = torch.randn(10, 8), labels(10)
    with mode():
        want, found = model(inputs, target), whole(model)(inputs, target)
    assert torch.equal(found, want) and not found.requires_grad
    assert {one.mode for one in passes} == {"loss"} and not head.remote.dirty


@DECLARED
def test_equal_calls_are_not_merged(heads: Any, passes: list[Any], grad_scale: float | None) -> None:
    """One input for two losses of one graph is twice in dW."""
    head = heads()
    model = Model(head.remote, grad_scale=grad_scale)
    inputs, target = torch.randn(10, 8), labels(10)
    twice = lambda each: each(inputs, target) + each(inputs, target)  # noqa: E731

    def both(inputs: Tensor, target: Tensor) -> Tensor:
        return model(inputs, target) + model(inputs, target)

    twice(model).backward()
    want = gradients(head, model)
    passes.clear()
    whole(both)(inputs, target).backward()
    assert len(passes) == (2 if grad_scale else 4)
    for found, wanted in zip(gradients(head, model), want, strict=True):
        assert distance(found, wanted) < 2e-6


@pytest.mark.parametrize(
    ("where", "reentrant", "backend"),
    [
        ("inside", False, "aot_eager"),
        *nightly(("inside", False, "inductor")),
        ("outside", False, "aot_eager"),
        ("outside", True, "aot_eager"),
    ],
)
@DECLARED
def test_checkpoints_count_once(
    heads: Any, where: str, reentrant: bool, backend: str, grad_scale: float | None
) -> None:
    """torch.utils.checkpoint in the graph, and around it."""
    head = heads()
    model = Model(head.remote, grad_scale=grad_scale)
    inputs, target = torch.randn(10, 8), labels(10)
    inputs.requires_grad_()

    def part(inputs: Tensor) -> Tensor:
        return model(inputs, target)

    model(inputs, target).backward()
    want = gradients(head, model)
    if where == "inside":
        run = whole(lambda inputs: checkpoint(part, inputs, use_reentrant=reentrant), backend)
    else:
        compiled = whole(part, backend)
        run = lambda inputs: checkpoint(compiled, inputs, use_reentrant=reentrant)  # noqa: E731
    run(inputs).backward()
    for found, wanted in zip(gradients(head, model), want, strict=True):
        assert distance(found, wanted) < 2e-6


def test_two_backward_passes_of_one_graph(heads: Any) -> None:
    """The second is another gradient: what was declared is in dW once."""
    head = heads()
    model = Model(head.remote, grad_scale=1.0)
    inputs, target = torch.randn(10, 8), labels(10)

    def twice(each: Any) -> Tensor:
        loss = each(inputs, target)
        loss.backward(retain_graph=True)
        return loss

    with torch._functorch.config.patch(donated_buffer=False):
        assert_same(head, model, whole(model), twice)


@DECLARED
def test_sizes_that_change(heads: Any, graphs: Graphs, grad_scale: float | None) -> None:
    """One graph is for all of them."""
    head = heads()
    model = Model(head.remote, grad_scale=grad_scale)
    compiled = whole(model)
    for tokens in (5, 9, 2, 0):
        inputs, target = torch.randn(2, tokens, 8), labels(2, tokens)
        if tokens > 1:
            torch._dynamo.mark_dynamic(inputs, 1)
            torch._dynamo.mark_dynamic(target, 1)
        assert_same(head, model, compiled, lambda each: each(inputs, target).nan_to_num())  # noqa: B023
    assert graphs.made() <= 2  # another is for no tokens at all


@pytest.mark.parametrize("kind", [float, torch.tensor, lambda one: round(8 * one)], ids=["float", "tensor", "int"])
def test_numbers_that_change(heads: Any, graphs: Graphs, kind: Any) -> None:
    """A normalizer and a scale of each step need no graph of their own."""
    head = heads()
    model = Model(head.remote)
    inputs, target = torch.randn(10, 8), labels(10)
    compiled = whole(model)
    for number in range(2, 7):
        count, scale = kind(number + 0.5), kind(number / 8)

        def run(each: Any) -> Tensor:
            return each(inputs, target, normalizer=count, grad_scale=scale) * float(scale)  # noqa: B023

        assert_same(head, model, compiled, run)
    assert graphs.made() == (1 if kind is torch.tensor else 2)


def test_autocast(heads: Any) -> None:
    head = heads()
    model = Model(head.remote, grad_scale=1.0)
    inputs, target = torch.randn(10, 8), labels(10)

    def run(each: Any) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return each(inputs, target)

    assert_same(head, model, whole(model), run, close=1e-2)


def test_a_gradient_that_is_not_finite_marks_the_head(heads: Any) -> None:
    head = heads()
    model = Model(head.remote)
    (whole(model)(torch.randn(10, 8), labels(10)) * float("inf")).backward()
    assert head.remote.proxy.grad.isnan().all()
    assert not head.remote._window.losses_finite()


def test_two_heads_of_one_code(heads: Any) -> None:
    """Each graph keeps to the head that it was made for."""
    first, second = heads(), heads(softcap=3.0)
    inputs, target = torch.randn(10, 8), labels(10)
    models = [Model(first.remote), Model(second.remote)]
    for head, model in zip((first, second), models, strict=True):
        assert_same(head, model, whole(model), lambda each: each(inputs, target))
    compiled = whole(models[0])
    compiled(inputs, target).backward()
    models[0].lm_head = second.remote
    loss = compiled(inputs, target)
    assert torch.equal(loss, models[0](inputs, target))
    first.remote.zero_grad()


def test_heads_are_not_kept_alive_by_graphs(heads: Any) -> None:
    head = RemoteHead(heads().remote.head)
    model = Model(head)
    whole(model)(torch.randn(10, 8), labels(10)).backward()
    head.zero_grad()
    before = len(lossd.torch._compiled._heads)
    del head, model
    torch._dynamo.reset()
    gc.collect()
    assert len(lossd.torch._compiled._heads) < before


def test_the_gradient_is_not_asked_for_while_a_graph_is_made(heads: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo looks at .grad of every parameter; of a head that is the server's."""
    head = heads()
    asked: list[None] = []
    stats = lossd.Head.gradient_stats
    monkeypatch.setattr(lossd.Head, "gradient_stats", lambda *a, **k: asked.append(None) or stats(*a, **k))
    model = Model(head.remote)
    inputs, target = torch.randn(10, 8), labels(10)
    model(inputs, target).backward()
    compiled = whole(model)
    for _ in range(2):
        compiled(inputs, target).backward()
    assert not asked
    head.gradients()


def test_labels_out_of_range_are_errors_of_a_graph_too(heads: Any) -> None:
    compiled = whole(Model(heads().remote))
    with pytest.raises(lossd.InvalidArgumentError, match="label"):
        compiled(torch.randn(4, 8), torch.full((4,), VOCABULARY))


def test_wrong_arguments_are_named(heads: Any) -> None:
    model = whole(Model(heads().remote))
    with pytest.raises(Exception, match=r"target has shape \[5\]"):
        model(torch.randn(4, 8), labels(5))


def test_training_steps(heads: Any, client: lossd.Client, graphs: Graphs) -> None:
    """A compiled model trains as it does otherwise, by one graph."""
    losses = []
    for compiles in (False, True):
        torch.manual_seed(1)
        weight = torch.randn(VOCABULARY, HIDDEN)
        head = RemoteHead.create(
            client, "compiled", VOCABULARY, HIDDEN, dtype=torch.float32, optimizer=lossd.AdamW(), weights=weight
        )
        model = Model(head, grad_scale=1.0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        run = whole(model) if compiles else model
        generator = torch.Generator().manual_seed(2)
        inputs, target = torch.randn(10, 8, generator=generator), torch.randint(VOCABULARY, (10,), generator=generator)
        found = []
        for _ in range(4):
            loss = run(inputs, target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        losses.append(found)
        head.close()
        client.delete_head("compiled", discard_gradient=True)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and losses[0][-1] < losses[0][0]
    assert graphs.made() == 1


def test_copies_of_a_model_are_graphs_of_their_own(heads: Any) -> None:
    head = heads()
    model = Model(head.remote)
    copied = copy.deepcopy(model.trunk)
    inputs, target = torch.randn(10, 8), labels(10)

    def run(inputs: Tensor) -> Tensor:
        return linear_cross_entropy(copied(inputs), target, head.remote)

    assert torch.equal(whole(run)(inputs), run(inputs))


def test_where_effects_are_not_known_the_graph_breaks(heads: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in older versions of PyTorch."""
    monkeypatch.setattr(lossd.torch._compiled, "SUPPORTED", False)
    head = heads()
    model = Model(head.remote, grad_scale=1.0)
    inputs, target = torch.randn(10, 8), labels(10)
    assert_same(head, model, torch.compile(model, backend="aot_eager"), lambda each: each(inputs, target))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        whole(model)(inputs, target)
