"""Wrappers that step copies of parameters: with a head among them they are refused before anything is stepped."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import lossd
from lossd.torch import MovedGradientError, RemoteHead, RemoteOptimizer, UndeclaredGradientWarning

H, V, N = 16, 50, 40
_numbers = itertools.count()


def unique_name() -> str:
    return f"moved-{next(_numbers)}"


class Problem:
    """A trunk and a head, with a backward pass done; `masters()` makes a step elsewhere."""

    def __init__(self, client: lossd.Client) -> None:
        torch.manual_seed(0)
        self.trunk = torch.nn.Linear(H, H)
        self.head = RemoteHead.from_linear(
            client, torch.nn.Linear(H, V, bias=False), unique_name(), optimizer=lossd.SGD(), dtype=torch.float32
        )
        self.parameters = [*self.trunk.parameters(), *self.head.parameters()]
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
    flat = torch.cat([one.detach().flatten() for one in problem.parameters])
    first = 0
    for one in problem.parameters:
        one.data = flat[first : first + one.numel()].view(one.shape)
        first += one.numel()
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
def client() -> Iterator[lossd.Client]:
    with lossd.launch("cpu") as server, server.client() as one:
        yield one


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapper_that_steps_copies_is_refused_before_it_steps(client: lossd.Client, wrapper: Any) -> None:
    problem = Problem(client)
    before = [one.detach().clone() for one in problem.trunk.parameters()]
    problem.backward()
    with pytest.raises(MovedGradientError, match="head"):
        wrapper(problem)
    for one, old in zip(problem.trunk.parameters(), before, strict=True):
        assert torch.equal(one, old)


def test_fsdp1_is_refused_where_it_takes_the_parameter(client: lossd.Client) -> None:
    head = Problem(client).head
    with pytest.raises(RuntimeError, match=r"ignored_modules=\[model.lm_head\]"):
        del head.proxy


def test_what_trainers_do_is_no_wrapper(client: lossd.Client) -> None:
    """Clipping, logging, skipped steps and a head with an optimizer of its own step as before."""
    problem = Problem(client)
    local = torch.optim.SGD(problem.trunk.parameters(), lr=0.1)
    remote = RemoteOptimizer(problem.head, lr=0.1)
    for step in range(3):
        problem.backward()
        torch.nn.utils.clip_grad_norm_(problem.parameters, 0.01, foreach=step == 1)
        if step < 2:
            logged = [one.grad.clone() for one in problem.head.parameters()]
            assert float(logged[0]) > 0
        if step == 2:
            for one in problem.parameters:
                one.grad = None
            problem.head.proxy.held = False  # as if head.step() had made the steps before: a warning
            with pytest.warns(UserWarning, match="taken from its parameter"):
                local.step()
            continue
        local.step()
        remote.step()
    assert problem.head.head.info().optimizer_steps == 2


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


def test_a_hundred_undeclared_gradients_of_one_are_told_once(client: lossd.Client) -> None:
    problem = Problem(client)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for count in range(1, 202):
            problem.backward()
            told = [one for one in caught if one.category is UndeclaredGradientWarning]
            assert len(told) == (count >= 100)
    assert "grad_scale=1.0" in str(told[0].message)
