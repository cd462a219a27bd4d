"""Wrappers that step copies of parameters: with a head among them they are refused before anything is stepped."""

from __future__ import annotations

import copy
import itertools
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import lossd
from lossd.torch import (
    MovedGradientError,
    RemoteHead,
    RemoteOptimizer,
    UndeclaredGradientWarning,
    UnsteppedHeadWarning,
)

H, V, N = 16, 50, 40
_numbers = itertools.count()


def unique_name() -> str:
    return f"moved-{next(_numbers)}"


class Problem:
    """A trunk and a head, with a backward pass done; `masters()` makes a step elsewhere."""

    def __init__(self, client: lossd.Client, **config: Any) -> None:
        torch.manual_seed(0)
        self.trunk = torch.nn.Linear(H, H)
        self.head = RemoteHead.from_linear(
            client,
            torch.nn.Linear(H, V, bias=False),
            unique_name(),
            optimizer=lossd.SGD(),
            dtype=torch.float32,
            **config,
        )
        self.parameters = [*self.trunk.parameters(), *self.head.parameters()]
        self.logged: list[torch.Tensor] = []
        self.hidden, self.labels = torch.randn(N, H), torch.randint(0, V, (N,))

    def backward(self) -> None:
        self.head(self.trunk(self.hidden), self.labels).backward()


def flat_copy(problem: Problem) -> None:
    flat = torch.nn.Parameter(torch.cat([one.detach().flatten() for one in problem.parameters]))
    flat.grad = torch.cat([one.grad.flatten() for one in problem.parameters])
    for one in problem.parameters:
        one.grad = None
    torch.optim.SGD([flat], lr=0.1).step()


def flat_copy_kept(problem: Problem) -> None:
    """The gradients stay where they are until the step is done."""
    flat = torch.nn.Parameter(torch.cat([one.detach().flatten() for one in problem.parameters]))
    flat.grad = torch.cat([one.grad.flatten() for one in problem.parameters])
    torch.optim.SGD([flat], lr=0.1).step()


def masters_of(convert: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Problem], None]:
    def step(problem: Problem) -> None:
        masters = [torch.nn.Parameter(one.detach().clone().double()) for one in problem.parameters]
        for master, one in zip(masters, problem.parameters, strict=True):
            master.grad_dtype = None
            master.grad = convert(one.grad)
        torch.optim.SGD(masters, lr=0.1).step()

    return step


def masters_that_share(problem: Problem) -> None:
    masters = [torch.nn.Parameter(one.detach().clone()) for one in problem.parameters]
    for master, one in zip(masters, problem.parameters, strict=True):
        master.grad, one.grad = one.grad.float(), None
    torch.optim.SGD(masters, lr=0.1).step()


def copied_into(problem: Problem) -> None:
    masters = [torch.nn.Parameter(one.detach().clone()) for one in problem.parameters]
    for master, one in zip(masters, problem.parameters, strict=True):
        master.grad = torch.zeros_like(master)
        master.grad.copy_(one.grad)
    torch.optim.SGD(masters, lr=0.1).step()


def foreach_copied(problem: Problem) -> None:
    masters = [torch.nn.Parameter(one.detach().clone()) for one in problem.parameters]
    buffers = [torch.zeros_like(master) for master in masters]
    torch._foreach_copy_(buffers, [one.grad for one in problem.parameters])
    for master, buffer in zip(masters, buffers, strict=True):
        master.grad = buffer
    torch.optim.SGD(masters, lr=0.1).step()


def offloaded(problem: Problem) -> None:
    kept = [one.grad.clone() for one in problem.parameters]
    for one in problem.parameters:
        one.grad = None
    for one, gradient in zip(problem.parameters, kept, strict=True):
        one.grad = gradient


def offloaded_by_reference(problem: Problem) -> None:
    kept = [one.grad for one in problem.parameters]
    for one in problem.parameters:
        one.grad = None
    for one, gradient in zip(problem.parameters, kept, strict=True):
        one.grad = gradient


def flat_storage(problem: Problem) -> None:
    """As ZeRO 1 and 2 leave parameters: views of one buffer."""
    vector = torch.nn.utils.parameters_to_vector(problem.parameters).detach().clone()
    torch.nn.utils.vector_to_parameters(vector, problem.parameters)
    problem.backward()


def emptied_storage(problem: Problem) -> None:
    """As ZeRO 3 leaves them between uses."""
    problem.head.proxy.data = torch.empty(0)
    problem.backward()


WRAPPERS = [
    flat_copy,
    flat_copy_kept,
    masters_of(torch.Tensor.clone),
    masters_of(torch.Tensor.double),
    masters_of(lambda gradient: gradient.to(torch.bfloat16, copy=True)),
    masters_that_share,
    copied_into,
    foreach_copied,
    offloaded,
    offloaded_by_reference,
    flat_storage,
    emptied_storage,
]


@pytest.fixture(scope="module")
def moved_server() -> Iterator[lossd.Server]:
    with lossd.launch("cpu") as server:
        yield server


@pytest.fixture
def client(moved_server: lossd.Server) -> Iterator[lossd.Client]:
    with moved_server.client() as one:
        yield one
        for info in one.heads():
            one.delete_head(info.config.name, discard_gradient=True)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapper_that_steps_copies_is_refused_before_it_steps(client: lossd.Client, wrapper: Any) -> None:
    problem = Problem(client)
    before = [one.detach().clone() for one in problem.trunk.parameters()]
    problem.backward()
    with pytest.raises(MovedGradientError, match="head"):
        wrapper(problem)
    for one, old in zip(problem.trunk.parameters(), before, strict=True):
        assert torch.equal(one, old)


def changed_in_place(problem: Problem) -> None:
    """As initialisations of all parameters, SAM, LOMO and optimizers that are none of torch.optim do."""
    with torch.no_grad():
        for one in problem.parameters:
            one.data.add_(one.grad, alpha=-0.1)
    problem.backward()


def perturbed_without_gradients(problem: Problem) -> None:
    with torch.no_grad():
        for one in problem.parameters:
            one.add_(torch.randn_like(one))
        problem.head(problem.hidden, problem.labels)


def masters_through_a_chain(problem: Problem) -> None:
    """Nothing tells whose gradient is stepped until the head's is dropped."""
    masters = [torch.nn.Parameter(one.detach().clone()) for one in problem.parameters]
    for master, one in zip(masters, problem.parameters, strict=True):
        master.grad = one.grad.clone().double().div(2).float()
    torch.optim.SGD(masters, lr=0.1).step()
    problem.trunk.zero_grad()
    problem.head.zero_grad()


def stepped_by_autograd_grad(problem: Problem) -> None:
    loss = problem.head(problem.trunk(problem.hidden), problem.labels)
    for one, gradient in zip(problem.parameters, torch.autograd.grad(loss, problem.parameters), strict=True):
        with torch.no_grad():
            one.sub_(gradient, alpha=0.1)


def stepped_at_once(problem: Problem) -> None:
    loss = problem.head(problem.trunk(problem.hidden), problem.labels)
    torch._foreach_mul(torch.autograd.grad(loss, problem.parameters), 0.1)


def scaled_by_a_hook(problem: Problem) -> None:
    problem.head.proxy.register_hook(lambda gradient: gradient * 0.5)
    problem.backward()


def data_of_the_gradient(problem: Problem) -> None:
    for one in problem.parameters:
        one.grad.data = one.grad.data * 0.5


def functional_call(problem: Problem) -> None:
    given = {name: one.detach().clone().requires_grad_() for name, one in problem.head.named_parameters()}
    torch.func.functional_call(problem.head, given, (problem.hidden, problem.labels))


def made_anew(problem: Problem) -> None:
    """As accelerate's cpu_offload does."""
    for one in problem.parameters:
        type(one)(torch.empty(one.shape, device="meta"), requires_grad=one.requires_grad)


CHANGES = [
    (changed_in_place, "changed in place"),
    (perturbed_without_gradients, "changed in place"),
    (masters_through_a_chain, "dropped unused"),
    (stepped_by_autograd_grad, "torch.autograd.grad get"),
    (stepped_at_once, "foreach_mul cannot be done"),
    (scaled_by_a_hook, "hooks and"),
    (data_of_the_gradient, r"setting \.data"),
    (functional_call, "functional_call"),
    (made_anew, "cpu_offload"),
]


@pytest.mark.parametrize(("change", "words"), CHANGES)
def test_what_would_not_reach_the_server_is_refused(client: lossd.Client, change: Any, words: str) -> None:
    problem = Problem(client)
    problem.backward()
    with pytest.raises((RuntimeError, TypeError), match=words):
        change(problem)


def test_fsdp1_is_refused_where_it_takes_the_parameter(client: lossd.Client) -> None:
    head = Problem(client).head
    with pytest.raises(RuntimeError, match=r"ignored_modules=\[model.lm_head\]"):
        del head.proxy


def log(problem: Problem) -> None:
    torch.cat([one.grad.flatten() for one in problem.parameters]).norm()
    problem.logged = [one.grad.clone() for one in problem.parameters]
    assert int(problem.head.proxy.grad) == int(problem.logged[-1])
    for one in problem.parameters:
        one.grad = one.grad.detach()


def clip(problem: Problem) -> None:
    torch.nn.utils.clip_grad_norm_(problem.parameters, 0.01, foreach=True)


def skip(problem: Problem) -> None:
    """As of gradients that are not finite."""
    clip(problem)
    for one in problem.parameters:
        one.grad = None


def by_hooks(problem: Problem) -> None:
    """What wandb.watch does."""

    def look(gradient: torch.Tensor) -> None:
        flat = gradient.data.reshape(-1)
        flat = flat[~torch.isnan(flat)]
        assert float(flat.min()) == 0.0 == float(gradient.abs().mean()) == float(gradient.norm())
        torch.histc(copy.deepcopy(gradient).detach().cpu().clone(), 4)
        (gradient * gradient).mean(dim=0, keepdim=True)
        torch.zeros_like(gradient).copy_(gradient.norm(dim=1, keepdim=True) + gradient.amax(0, keepdim=True))
        gradient.abs().log10() + gradient.sign()
        torch.nn.utils.get_total_norm([gradient])

    handle = problem.head.proxy.register_hook(look)
    problem.backward()
    handle.remove()


def step_in_backward(parameter: torch.nn.Parameter) -> None:
    optimizer = torch.optim.SGD([parameter], lr=0.1)

    def step(_: torch.Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()

    parameter.register_post_accumulate_grad_hook(step)


@pytest.mark.parametrize("step", ["optimizer", "head.step", "RemoteOptimizer", "in backward"])
@pytest.mark.parametrize("what", [log, clip, skip, by_hooks])
def test_what_trainers_do_is_no_wrapper(client: lossd.Client, what: Callable[[Problem], None], step: str) -> None:
    """From the first step on, whoever steps the head; and other heads of the process do not matter."""
    other, problem = Problem(client), Problem(client)
    other.backward()
    log(other)
    local = torch.optim.SGD(problem.parameters if step == "optimizer" else problem.trunk.parameters(), lr=0.1)
    remote = RemoteOptimizer(problem.head, lr=0.1) if step == "RemoteOptimizer" else None
    if step == "in backward":
        step_in_backward(problem.head.proxy)
    steps = 0
    for index in range(3):
        problem.backward()
        if step != "in backward" and (what is not skip or index != 1):
            what(problem)
        if what is not skip or index == 1 or step == "in backward":
            local.step()
            if step == "head.step":
                problem.head.step(0.1)
            if remote is not None:
                remote.step()
            steps += 1
        for one in problem.parameters:
            one.grad = None
    assert problem.head.head.info().optimizer_steps == steps


def squares(problem: Problem) -> None:
    for one in problem.parameters:
        (one.grad.detach() ** 2).sum() + (one.grad * one.grad).mean(dim=0, keepdim=True).sum()


def cancelled(problem: Problem) -> None:
    """As DINO does to its last layer in the first epoch."""
    clip(problem)
    problem.head.proxy.grad = None


def skipped_and_filled(problem: Problem) -> None:
    problem.logged = [one.grad.clone() for one in problem.parameters]
    for module in (problem.trunk, problem.head):
        module.zero_grad()
    for one in problem.parameters:
        one.grad = torch.zeros_like(one)


@pytest.mark.parametrize("what", [squares, cancelled, skip, skipped_and_filled])
def test_other_optimizers_may_step_before_the_head_has(client: lossd.Client, what: Callable[[Problem], None]) -> None:
    """Those of another model, as a GAN has two, and that of the trunk."""
    problem, other = Problem(client), torch.nn.Linear(1, 1)
    problem.backward()
    what(problem)
    other(torch.ones(1)).backward()
    for parameters in (other.parameters(), problem.trunk.parameters()):
        torch.optim.SGD(parameters, lr=0.1).step()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnsteppedHeadWarning)
        problem.head.zero_grad()
    assert problem.head.head.info().window_tokens == 0


@pytest.mark.parametrize("grad_scale", [None, 1.0])
def test_a_gradient_that_reaches_no_parameter_is_told_once(client: lossd.Client, grad_scale: float | None) -> None:
    problem = Problem(client)
    problem.head.grad_scale = grad_scale

    def losses(count: int = 2) -> torch.Tensor:
        return sum(problem.head(problem.trunk(problem.hidden), problem.labels) for _ in range(count))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):  # accumulated
            losses().backward()
        problem.head.step(0.1)
        for _ in range(2):
            torch.autograd.grad(losses(1), problem.parameters)
            problem.head.step(0.1)
        torch.autograd.grad(losses(), problem.parameters)
    with pytest.warns(UnsteppedHeadWarning, match="as torch.autograd.grad does"):
        torch.autograd.grad(losses(), problem.parameters)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.autograd.grad(losses(), problem.parameters)


def test_a_parameter_that_was_moved_once_gets_memory_of_its_own(client: lossd.Client) -> None:
    problem = Problem(client)
    with pytest.raises(MovedGradientError, match=r"head.proxy.data = head.proxy.data.clone\(\)"):
        flat_storage(problem)
    problem.head.proxy.data = problem.head.proxy.data.clone()
    problem.backward()
    torch.optim.SGD(problem.parameters, lr=0.1).step()


def test_a_head_with_steps_is_told_of_wrappers_by_warnings(client: lossd.Client) -> None:
    problem = Problem(client)
    problem.backward()
    problem.head.step(0.1)
    problem.backward()
    with pytest.warns(UserWarning, match="taken from its parameter"):
        flat_copy(problem)
    with torch.no_grad():
        problem.head.proxy.copy_(torch.zeros(1, 1))
    with pytest.warns(UserWarning, match="Lookahead"):
        problem.backward()


def test_a_declared_gradient_is_the_head_s_own_unless_a_call_says_another(
    client: lossd.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = Problem(client)
    linear = torch.nn.Linear(H, V, bias=False)
    with pytest.raises(ValueError, match="finite"):
        RemoteHead.from_linear(client, linear, unique_name(), grad_scale=float("nan"))
    head = RemoteHead.from_linear(
        client, linear, unique_name(), optimizer=lossd.SGD(), dtype=torch.float32, grad_scale=1.0
    )
    modes: list[str] = []
    compute = type(head.session).compute

    def watched(self: Any, *args: Any, **options: Any) -> Any:
        modes.append(options["mode"])
        return compute(self, *args, **options)

    monkeypatch.setattr(type(head.session), "compute", watched)
    table = [  # training, options of the call, upstream gradient, passes
        (True, {}, 1.0, ["gradients"]),
        (True, {}, 0.5, ["gradients", "gradients"]),
        (True, {"grad_scale": 0.5}, 0.5, ["gradients"]),
        (True, {"grad_scale": None}, 1.0, ["loss", "gradients"]),
        (True, {"reduction": "none"}, 1.0, ["loss", "gradients"]),
        (False, {}, 1.0, ["loss", "gradients"]),
    ]
    for training, options, upstream, passes in table:
        modes.clear()
        problem.trunk.zero_grad()
        loss = head.train(training)(problem.trunk(problem.hidden), problem.labels, **options)
        loss.backward(torch.full_like(loss, upstream))
        assert modes == passes, (training, options, upstream)
        weight = linear.weight.detach().clone().requires_grad_()
        reduction = options.get("reduction", "mean")
        want = torch.nn.functional.cross_entropy(
            problem.trunk(problem.hidden).detach() @ weight.T, problem.labels, reduction=reduction
        )
        want.backward(torch.full_like(want, upstream))
        torch.testing.assert_close(head.flush().gradient, weight.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("training", "options", "config", "told_at"),
    [
        (True, {}, {}, 100),
        (True, {"grad_scale": None}, {}, math.inf),
        (False, {}, {}, math.inf),
        (True, {}, {"class_weights": torch.ones(V)}, math.inf),  # two passes in any case
    ],
)
def test_a_hundred_undeclared_gradients_of_one_are_told_once(
    client: lossd.Client, training: bool, options: Any, config: Any, told_at: float
) -> None:
    problem = Problem(client, **config)
    problem.head.train(training)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for count in range(1, 202):
            problem.head(problem.hidden, problem.labels, **options).backward()
            told = [one for one in caught if one.category is UndeclaredGradientWarning]
            assert len(told) == (count >= told_at)
    assert not told or "grad_scale=1.0" in str(told[0].message)
