"""RemoteHead in the place of a model's lm_head: what modules, optimizers and state see of it."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from glue_support import HIDDEN, VOCAB, batch, weights_of

import lossd
from lossd.torch import FetchedWeightsWarning, OtherRuleWarning
from lossd.torch.head import RemoteHead

MakeRemote = Callable[..., RemoteHead]


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = torch.nn.Linear(HIDDEN, HIDDEN)
        self.lm_head: torch.nn.Module = torch.nn.Linear(HIDDEN, VOCAB, bias=False)

    def loss(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.trunk(hidden)
        if isinstance(self.lm_head, RemoteHead):
            return self.lm_head(hidden, labels)
        return torch.nn.functional.cross_entropy(self.lm_head(hidden), labels)


@pytest.fixture
def models(client: lossd.Client, request: pytest.FixtureRequest) -> Iterator[Callable[..., tuple[Model, Model]]]:
    """models(optimizer=...): one whose head is at the server, and its local twin."""
    names = []

    def make(**options: Any) -> tuple[Model, Model]:
        torch.manual_seed(1)
        local = Model()
        remote = copy.deepcopy(local)
        names.append(f"module-{len(names)}-{request.node.name[:60].replace('[', '-').rstrip(']')}")
        remote.lm_head = RemoteHead.from_linear(client, remote.lm_head, names[-1], **options)
        return remote, local

    yield make
    for name in names:
        client.delete_head(name, discard_gradient=True)


def compare(remote: Model, local: Model, *, rtol: float = 1e-6, atol: float = 1e-7) -> None:
    ours, theirs = remote.state_dict(), local.state_dict()
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=rtol, atol=atol)


RULES = {
    "sgd": (lossd.SGD(momentum=0.9, nesterov=True), torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "adam": (lossd.Adam(), torch.optim.Adam, {"weight_decay": 0.1}),
    "adamw": (lossd.AdamW(), torch.optim.AdamW, {"betas": (0.8, 0.99)}),
    "adamw-fused": (lossd.AdamW(), torch.optim.AdamW, {"fused": True}),
    "adamw-foreach": (lossd.AdamW(), torch.optim.AdamW, {"foreach": True}),
}


@pytest.mark.parametrize("rule", list(RULES))
def test_an_optimizer_of_all_parameters_steps_the_head(models: Any, rule: str) -> None:
    """With a schedule, clipping, and accumulation: as the local model is stepped."""
    its, kind, options = RULES[rule]
    remote, local = models(optimizer=its)
    optimizers = [kind(model.parameters(), lr=0.05, **options) for model in (remote, local)]
    schedules = [torch.optim.lr_scheduler.ExponentialLR(one, 0.8) for one in optimizers]
    for step in range(4):
        norms = []
        for model, optimizer, schedule in zip((remote, local), optimizers, schedules, strict=True):
            for part in range(2):
                (model.loss(*batch(2 * step + part)) / 2).backward()
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3))
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        torch.testing.assert_close(*norms, rtol=1e-5, atol=0)
    assert remote.lm_head.head.info().optimizer_steps == 4
    compare(remote, local, rtol=2e-5, atol=1e-6)


def test_a_closure_steps_the_head_as_well(models: Any) -> None:
    remote, local = models(optimizer=lossd.SGD())
    for model in (remote, local):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def closure(model: Model = model, optimizer: Any = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model.loss(*batch())
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure)
    compare(remote, local)


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_the_scaler_skips_leaves_nothing_behind(models: Any, fused: bool) -> None:
    remote, local = models(optimizer=lossd.AdamW())
    for model in (remote, local):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        for seed, spoiled in enumerate([1.0, float("inf"), 1.0]):
            scaler.scale(model.loss(*batch(seed)) * spoiled).backward()
            scaler.step(optimizer)
            scaler.update()
            model.zero_grad()
    assert remote.lm_head.head.info().optimizer_steps == 2
    compare(remote, local, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("to_none", [True, False])
def test_zero_grad_of_the_model_drops_what_waits(models: Any, to_none: bool) -> None:
    remote, local = models(optimizer=lossd.SGD())
    for model in (remote, local):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.loss(*batch(1)).backward()
        model.zero_grad(set_to_none=to_none)
        model.loss(*batch(2)).backward()
        optimizer.step()
    compare(remote, local)


def test_a_step_without_a_gradient_is_none(models: Any) -> None:
    """torch.optim leaves parameters alone that have no gradient, weight decay included."""
    remote, local = models(optimizer=lossd.AdamW(weight_decay=0.5))
    for model in (remote, local):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
        optimizer.step()
        model.loss(*batch()).detach()
        optimizer.step()
    assert remote.lm_head.head.info().optimizer_steps == 0
    compare(remote, local)


def test_a_step_called_again_after_an_error_goes_on_where_it_failed(
    models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote, local = models(optimizer=lossd.AdamW())
    optimizer = torch.optim.AdamW(remote.parameters(), lr=0.05)
    remote.loss(*batch()).backward()
    before = remote.trunk.weight.detach().clone()

    def gone(*_: Any, **__: Any) -> Any:
        raise lossd.UnavailableError("gone")

    with monkeypatch.context() as away:
        away.setattr(remote.lm_head.head, "step", gone)
        with pytest.raises(lossd.UnavailableError):
            optimizer.step()
    assert torch.equal(remote.trunk.weight, before)  # nothing was stepped: neither here nor there
    optimizer.step()
    twin = torch.optim.AdamW(local.parameters(), lr=0.05)
    local.loss(*batch()).backward()
    twin.step()
    compare(remote, local)


def optimizers() -> dict[str, tuple[Any, dict[str, Any]]]:
    """All of torch's and transformers' that step by another rule than a head."""
    found = {
        name: (kind, {})
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    }
    for name in ("SGD", "SparseAdam", "LBFGS"):  # a head's rule, of sparse gradients, refused below
        del found[name]
    adafactor = pytest.importorskip("transformers").Adafactor
    found["RMSprop, momentum"] = torch.optim.RMSprop, {"momentum": 0.9}
    found["transformers.Adafactor"] = adafactor, {}
    found["transformers.Adafactor, lr"] = adafactor, {"lr": 1e-3, "relative_step": False}
    return found


@pytest.mark.parametrize("lr", [None, 0.25])
def test_any_optimizer_steps_a_head_by_its_own_rule(client: lossd.Client, lr: float | None) -> None:
    weight = torch.randn(11, 6)
    hidden, labels = batch()
    leaf = weight.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(torch.nn.functional.cross_entropy(hidden @ leaf.T, labels), leaf)
    for number, (name, (kind, options)) in enumerate(optimizers().items()):
        own = f"rule-{number}-{lr}"
        head = RemoteHead.create(client, own, 11, 6, dtype=torch.float32, weights=weight, optimizer=lossd.SGD(lr=lr))
        optimizer = kind([torch.nn.Parameter(torch.ones(6, 6)), *head.parameters()], **options)
        if "weight_decay" in optimizer.param_groups[0]:
            optimizer.param_groups[0]["weight_decay"] = 0.0
        head(hidden, labels).backward()
        rate = optimizer.param_groups[0]["lr"]
        with pytest.warns(OtherRuleWarning, match=f"{kind.__name__} steps head '{own}', which steps by SGD"):
            if rate is None and lr is None:
                with pytest.raises(ValueError, match=r"lossd.AdamW\(lr=1e-3\), which optimizers with lr=None"):
                    optimizer.step()
            else:
                optimizer.step()
                wanted = weight - (lr if rate is None else float(rate)) * gradient
                torch.testing.assert_close(
                    head.read_weights()[0], wanted, msg=lambda text, name=name: f"{name}: {text}"
                )
        client.delete_head(own, discard_gradient=True)


def test_another_rule_than_the_optimizers_is_said(models: Any) -> None:
    remote, _ = models(optimizer=lossd.SGD())
    remote.loss(*batch()).backward()
    with pytest.raises(ValueError, match=r"momentum=0.9, and head .*lossd.SGD\(momentum=0.9\)"):
        torch.optim.SGD(remote.parameters(), lr=0.05, momentum=0.9).step()
    remote, _ = models(optimizer=lossd.SGD())
    optimizer = torch.optim.AdamW(remote.parameters(), lr=0.05)
    remote.loss(*batch()).backward()
    with pytest.warns(OtherRuleWarning, match="AdamW steps head 'module-.*', which steps by SGD"):
        optimizer.step()
    remote, _ = models(optimizer=lossd.AdamW(eps=1e-6))
    optimizer = torch.optim.AdamW(remote.parameters(), lr=0.05)
    remote.loss(*batch()).backward()
    with pytest.warns(OtherRuleWarning, match="has eps=1e-06, and the optimizer 1e-08"):
        optimizer.step()


def test_a_head_without_a_rule_is_not_left_out_silently(models: Any) -> None:
    remote, _ = models()
    optimizer = torch.optim.SGD(remote.parameters(), lr=0.05)
    remote.loss(*batch()).backward()
    with pytest.raises(ValueError, match="has no optimizer at its server: create it with optimizer="):
        optimizer.step()


def test_a_loaded_state_of_another_time_than_the_moments_is_said(models: Any) -> None:
    remote, _ = models(optimizer=lossd.AdamW())
    optimizer = torch.optim.AdamW(remote.parameters(), lr=0.05)
    states = []
    for _ in range(2):
        remote.loss(*batch()).backward()
        optimizer.step()
        states.append(copy.deepcopy(optimizer.state_dict()))
    remote.loss(*batch()).backward()
    other = torch.optim.AdamW(remote.parameters(), lr=0.05)
    other.load_state_dict(states[1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other.step()
    remote.loss(*batch()).backward()
    other.load_state_dict(states[0])
    with pytest.warns(UserWarning, match="state is of step 1 of head 'module-.*', whose server is at step 3"):
        other.step()


def test_steps_without_arguments_take_the_rate_of_the_rule(models: Any) -> None:
    remote, local = models(optimizer=lossd.AdamW(lr=0.05))
    twin = torch.optim.AdamW(local.lm_head.parameters(), lr=0.05)
    for model in (remote, local):
        model.loss(*batch()).backward()
    remote.lm_head.step()
    twin.step()
    compare(remote, local)
    other = RemoteHead(remote.lm_head.head.client.head(remote.lm_head.name))
    with pytest.raises(ValueError, match=r"needs a learning rate: step\(lr=1e-3\), or create the head with"):
        other.step()


def test_logits_and_what_has_no_gradient(models: Any) -> None:
    remote, local = models()
    hidden, _ = batch()
    with torch.no_grad():
        torch.testing.assert_close(remote.lm_head(hidden), local.lm_head(hidden), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(remote.lm_head.logits(hidden), local.lm_head(hidden), rtol=1e-5, atol=1e-6)
    with pytest.raises(RuntimeError, match="have no gradient.* give it the labels"):
        remote.lm_head(hidden)
    remote.eval()
    assert not remote.lm_head(hidden).requires_grad


def test_the_weight_is_a_view_that_fetches_and_says_so(make_remote: MakeRemote) -> None:
    head = make_remote(bias=True, dtype="bfloat16")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        weight = head.weight
        assert (weight.shape, weight.dtype, weight.device.type) == ((VOCAB, HIDDEN), torch.bfloat16, "cpu")
        assert "at the server" in repr(weight) and head.bias is not None and head.bias.shape == (VOCAB,)
        assert weight.detach().numel() == VOCAB * HIDDEN and not weight.requires_grad
    with pytest.warns(FetchedWeightsWarning, match=rf"fetched {VOCAB * HIDDEN * 2} bytes"):
        total = weight.float().sum()
    torch.testing.assert_close(total, head.read_weights()[0].float().sum())
    with pytest.warns(FetchedWeightsWarning, match="the bias of head"):
        assert torch.equal(head.bias + 0, torch.zeros(VOCAB))
    for change in (
        lambda: weight.zero_(),
        lambda: weight.add_(1.0),
        lambda: torch.nn.init.normal_(weight),
        lambda: weight.__setitem__(0, 1.0),
        lambda: weight.data.fill_(1.0),
        lambda: setattr(weight, "data", torch.zeros(VOCAB, HIDDEN)),
        lambda: setattr(weight, "grad", torch.zeros(VOCAB, HIDDEN)),
        lambda: torch.add(torch.ones(VOCAB, HIDDEN), 1.0, out=weight),
        lambda: torch._foreach_mul_([weight], 2.0),
    ):
        with pytest.raises(RuntimeError, match="is read-only: write_weights"):
            change()
    for freeze in (lambda: weight.requires_grad_(False), lambda: setattr(weight, "requires_grad", False)):
        with pytest.raises(RuntimeError, match=r"only a view: model.lm_head.requires_grad_\(False\)"):
            freeze()
    with pytest.raises(RuntimeError, match="a gradient through it would be lost: model.lm_head"):
        torch.nn.functional.linear(torch.ones(2, HIDDEN, dtype=torch.bfloat16, requires_grad=True), weight)
    with pytest.raises(AttributeError, match="is at its server: write_weights"):
        head.weight = torch.nn.Parameter(torch.zeros(VOCAB, HIDDEN))
    assert make_remote().bias is None


def test_to_and_half_leave_the_weights_and_the_norm_alone(models: Any) -> None:
    remote, _ = models(optimizer=lossd.SGD())
    remote.lm_head.to(torch.bfloat16).half().to("cpu")
    assert remote.lm_head.proxy.dtype == torch.float32 and remote.lm_head.weight.dtype == torch.float32
    assert list(remote.lm_head.parameters()) == [remote.lm_head.proxy]
    assert (remote.lm_head.in_features, remote.lm_head.out_features) == (HIDDEN, VOCAB)
    with pytest.raises(RuntimeError, match="cannot go to the meta device"):
        remote.to("meta")


def test_its_parameter_cannot_be_replaced(make_remote: MakeRemote) -> None:
    with pytest.raises(RuntimeError, match="ignored_params="):
        make_remote().proxy = torch.nn.Parameter(torch.zeros(1))


def test_it_is_not_pickled(make_remote: MakeRemote) -> None:
    head = make_remote()
    for one in (head, head.proxy):
        with pytest.raises(TypeError, match="cannot be pickled"):
            pickle.dumps(one)


def test_a_frozen_heads_parameter_is_not_trained(make_remote: MakeRemote) -> None:
    head = make_remote(frozen=True)
    assert not head.proxy.requires_grad
    hidden, labels = batch()
    hidden.requires_grad_()
    head(hidden, labels).backward()
    torch.optim.SGD(head.parameters(), lr=0.1).step()
    assert hidden.grad is not None and hidden.grad.any() and not head.dirty


def test_a_parameter_frozen_later_on_is_refused_where_a_gradient_would_be(make_remote: MakeRemote) -> None:
    head = make_remote()
    head.requires_grad_(False)
    hidden, labels = batch()
    assert not head(hidden, labels).requires_grad
    with pytest.raises(ValueError, match="the head's parameter was frozen.*create the head with frozen=True"):
        head(hidden.requires_grad_(), labels)


def test_weights_of_the_state_are_the_servers(models: Any) -> None:
    remote, local = models()
    compare(remote, local)
    with torch.no_grad():
        local.lm_head.weight.mul_(2.0)
    remote.load_state_dict(local.state_dict())
    assert torch.equal(weights_of(remote.lm_head), local.lm_head.weight)


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_a_declared_loss_survives_a_zero_grad_before_its_backward(models: Any, scale: float) -> None:
    """The order of many loops: forward, zero_grad, backward, step."""
    remote, local = models(optimizer=lossd.SGD())
    for model in (remote, local):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for seed in range(3):
            hidden, labels = batch(seed)
            if model is remote:
                loss = model.lm_head(model.trunk(hidden), labels, grad_scale=1.0)
            else:
                loss = model.loss(hidden, labels)
            optimizer.zero_grad()
            (loss * scale).backward()
            optimizer.step()
    assert remote.lm_head.head.info().optimizer_steps == 3
    compare(remote, local, rtol=1e-5)


def test_a_declared_loss_whose_gradient_was_stepped_away_is_an_error(models: Any) -> None:
    remote, _ = models(optimizer=lossd.SGD())
    optimizer = torch.optim.SGD(remote.parameters(), lr=0.1)
    hidden, labels = batch()
    loss = remote.lm_head(remote.trunk(hidden), labels, grad_scale=1.0)
    optimizer.step()
    with pytest.raises(lossd.FailedPreconditionError):
        loss.backward()


def test_a_hook_of_the_optimizer_that_clips_reaches_the_head(models: Any) -> None:
    remote, local = models(optimizer=lossd.SGD())
    for model in (remote, local):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.register_step_pre_hook(
            lambda *_, model=model: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1) and None
        )
        for seed in range(2):
            model.loss(*batch(seed)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if seed == 0:  # one that comes later
                optimizer.register_step_pre_hook(
                    lambda *_, model=model: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05) and None
                )
    compare(remote, local, rtol=1e-5, atol=1e-6)


def test_a_compiled_step_steps_the_head(models: Any) -> None:
    remote, local = models(optimizer=lossd.SGD())
    for model in (remote, local):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = torch.compile(optimizer.step, backend="eager")
        for seed in range(2):
            model.loss(*batch(seed)).backward()
            step()
            optimizer.zero_grad()
    assert remote.lm_head.head.info().optimizer_steps == 2
    compare(remote, local, rtol=1e-5, atol=1e-6)


def test_subclasses_and_decoupled_decay_are_known_rules(models: Any) -> None:
    class Mine(torch.optim.AdamW):
        pass

    for rule, optimizer_of in (
        (lossd.AdamW(weight_decay=0.3), lambda p: Mine(p, lr=0.1, weight_decay=0.3)),
        (
            lossd.AdamW(weight_decay=0.3),
            lambda p: torch.optim.Adam(p, 0.1, weight_decay=0.3, decoupled_weight_decay=True),
        ),
    ):
        remote, local = models(optimizer=rule)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for model in (remote, local):
                optimizer = optimizer_of(model.parameters())
                model.loss(*batch()).backward()
                optimizer.step()
        compare(remote, local, rtol=1e-5, atol=1e-6)
    remote, _ = models(optimizer=lossd.Adam())
    remote.loss(*batch()).backward()
    with pytest.warns(OtherRuleWarning, match="which steps by Adam"):
        torch.optim.AdamW(remote.parameters(), lr=0.1).step()


def test_moments_of_a_local_head_are_not_taken_for_the_heads(models: Any) -> None:
    remote, local = models(optimizer=lossd.AdamW())
    twin = torch.optim.AdamW(local.parameters(), lr=0.1)
    local.loss(*batch()).backward()
    twin.step()
    optimizer = torch.optim.AdamW(remote.parameters(), lr=0.1)
    optimizer.load_state_dict(twin.state_dict())
    remote.loss(*batch()).backward()
    with pytest.warns(UserWarning, match="moments of a weight that is at head 'module-.* now: they are dropped"):
        optimizer.step()
    assert all(value.numel() == 1 for value in optimizer.state[remote.lm_head.proxy].values())


def test_lbfgs_is_refused(models: Any) -> None:
    remote, _ = models(optimizer=lossd.SGD())
    optimizer = torch.optim.LBFGS(remote.parameters())
    with pytest.raises(ValueError, match="LBFGS asks for the loss several times a step"):
        optimizer.step(lambda: remote.loss(*batch()))
