"""Optimizers of PyTorch that hold a head's parameter step the head, at its server.

A model whose `lm_head` is a RemoteHead gives its optimizer one parameter for it, the head's proxy. When that optimizer
steps, the hooks below ask the server for a step with the same learning rate, before the local parameters are stepped,
so that they are as they were where the head cannot be. The rule is the head's own (`RemoteHead.create(optimizer=...)`):
what a server keeps moments for was decided when it was made."""

from __future__ import annotations

import functools
import math
import sys
import warnings
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lossd.optimizers import SGD
from lossd.torch._moved import refuse_moved
from lossd.torch._proxy import GradientProxy

if TYPE_CHECKING:
    from lossd.optimizers import Optimizer
    from lossd.torch.head import RemoteHead


class UnsteppedHeadWarning(UserWarning):
    """A trainer steps its optimizer, and a head whose gradient waits is in none."""


class OtherRuleWarning(UserWarning):
    """An optimizer of PyTorch steps a head whose rule, at the server, is another one."""


class UntiedHeadWarning(UserWarning):
    """An optimizer steps a head, and also the weight that it was made from: an embedding was tied to it."""


# What PyTorch makes of every optimizer's step(): it runs the hooks.
_STEP = torch.optim.Optimizer.profile_hook_step(lambda: None).__code__
_hooks: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()

_steps = 0
_warned: set[tuple[str, str]] = set()


def optimizer_steps() -> int:
    """How many steps optimizers of local parameters have taken in this process."""
    return _steps


class SteppedByItself:
    """A mixin of optimizers that step heads themselves: the hooks leave them alone."""


def hyperparameters(rule: Optimizer | None) -> dict[str, Any]:
    """What ApplyStep can be told beside the learning rate, by torch.optim's names, as the head was created with it."""
    if rule is None:
        return {}
    if isinstance(rule, SGD):
        return {"weight_decay": rule.weight_decay, "momentum": rule.momentum}
    return {"weight_decay": rule.weight_decay, "betas": tuple(rule.betas)}


def step_options(head: RemoteHead, group: dict[str, Any]) -> dict[str, Any]:
    """The keywords of RemoteHead.step that a group of torch.optim stands for. Only what differs from the head's own is
    said, so that the two cannot contradict each other by a rounding."""
    configured = hyperparameters(head.head.config.optimizer)
    options = {name: group[name] for name in configured if group.get(name) not in (None, configured[name])}
    return {name: _number(value) for name, value in options.items()}


def learning_rate(group: dict[str, Any]) -> float | None:
    """None of a group that has none, such as Adafactor's with relative_step: the head's own."""
    return None if group["lr"] is None else float(_number(group["lr"]))


def _number(value: Any) -> Any:
    """Floats of what torch.optim lets be a tensor."""
    return tuple(float(part) for part in value) if isinstance(value, (tuple, list)) else float(value)


def _heads_of(optimizer: torch.optim.Optimizer) -> list[tuple[GradientProxy, dict[str, Any]]]:
    """The parameters of heads that are trained, and their groups. A group without a learning rate is of a container of
    optimizers, such as torchtitan's: those inside of it step."""
    groups = [group for group in optimizer.param_groups if "lr" in group]
    proxies = [(p, group) for group in groups for p in group["params"] if isinstance(p, GradientProxy)]
    return [(proxy, group) for proxy, group in proxies if not proxy.head.frozen]


def _own_heads_of(optimizer: torch.optim.Optimizer) -> list[tuple[GradientProxy, dict[str, Any]]]:
    """Without those that an optimizer around this one has and steps: of ranks that share parameters
    (ZeroRedundancyOptimizer) only one would come here, and the others would not step with it."""
    heads = _heads_of(optimizer)
    for outer in outer_optimizers(optimizer) if heads else ():
        theirs = [proxy for proxy, _ in _heads_of(outer)]
        heads = [(proxy, group) for proxy, group in heads if all(proxy is not one for one in theirs)]
    return heads


def outer_optimizers(optimizer: torch.optim.Optimizer) -> Iterator[torch.optim.Optimizer]:
    """Those whose step() has called the step() of `optimizer` that is under way."""
    frame: FrameType | None = sys._getframe()  # noqa: SLF001  (there is no public way)
    while frame is not None:
        outer = frame.f_locals.get("self") if frame.f_code is _STEP else None
        if isinstance(outer, torch.optim.Optimizer) and outer is not optimizer:
            yield outer
        frame = frame.f_back


def _step_heads(optimizer: torch.optim.Optimizer) -> None:
    scale, skipped = _of_grad_scaler(optimizer)
    for proxy, group in _own_heads_of(optimizer):
        if not proxy.window.dirty_anywhere():  # as torch.optim leaves a parameter alone that has no gradient
            if proxy.marker is not None:  # of losses that added nothing: it is not for the optimizer
                proxy.window.end()
            continue
        _check_rule(optimizer, group, proxy.head)
        _check_tie(optimizer, proxy)
        if skipped:
            proxy.head.zero_grad()
            continue
        taken = optimizer.state[proxy]["step"]
        _check_state(int(taken), proxy)
        options = step_options(proxy.head, group)
        if _kind(optimizer, group) != "SGD":  # whose momentum, as Muon's, is another thing
            options.pop("momentum", None)
        result = proxy.head.step(learning_rate(group), gradient_scale=scale, **options)
        proxy.steps = result.step
        taken.fill_(float(result.step))


def _check_tie(optimizer: torch.optim.Optimizer, proxy: GradientProxy) -> None:
    """Warns once if the optimizer also steps the weight that the head was made from."""
    source = proxy.window.source_weight
    weight = source() if source is not None else None
    proxy.window.source_weight = None
    if weight is not None and any(one is weight for group in optimizer.param_groups for one in group["params"]):
        warnings.warn(
            f"the weight that head '{proxy.head.name}' was made from is trained here, too, by the same optimizer, as "
            "an embedding that was tied to it would be: the two go apart from now on. To keep them one, take "
            "lossd.transformers.patch or lossd.torch.LocalWeight; to have two, give the embedding a copy "
            "(embedding.weight = nn.Parameter(embedding.weight.detach().clone()), before the optimizer is made)",
            UntiedHeadWarning,
            stacklevel=5,
        )


def _make_states(optimizer: torch.optim.Optimizer) -> None:
    """Heads' parameters have a state from the first step on, as others do, even one that only makes states, of no
    gradient: torch.distributed.checkpoint wants those of all parameters. `step` is the head's, as of the last step by
    this optimizer, and -1 before."""
    for proxy, _ in _heads_of(optimizer):
        state = optimizer.state[proxy]
        if any(isinstance(value, torch.Tensor) and value.numel() > 1 for value in state.values()):
            state.clear()
            warnings.warn(
                f"the optimizer's state has moments of a weight that is at head '{proxy.head.name}' now: they are "
                "dropped, and the head's own count, which start with it",
                stacklevel=4,
            )
        if "step" not in state:
            state["step"] = torch.tensor(-1.0, dtype=torch.float32, device="cpu")


def _check_state(said: int, proxy: GradientProxy) -> None:
    """Warns once of a state_dict that was loaded and is of another time than the head's moments are."""
    if said in (-1, proxy.steps):
        return
    proxy.steps = proxy.head.head.info().optimizer_steps
    if said != proxy.steps:
        warnings.warn(
            f"the optimizer's state is of step {said} of head '{proxy.head.name}', whose server is at step "
            f"{proxy.steps}: its moments are others; RemoteHead.save_checkpoint and restore_checkpoint keep both "
            "together",
            stacklevel=4,
        )


def _of_grad_scaler(optimizer: torch.optim.Optimizer) -> tuple[float, bool]:
    """The factor of gradients, and whether the step is skipped, as a GradScaler tells fused optimizers, which look at
    it themselves."""
    scale, found = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
    return 1.0 if scale is None else 1.0 / float(scale), found is not None and bool(found)


def _check_rule(optimizer: torch.optim.Optimizer, group: dict[str, Any], head: RemoteHead) -> None:
    """ValueError if the head has no rule to be stepped by; a warning, once, if it has another than the optimizer."""
    rule = head.head.config.optimizer
    mine, theirs = type(optimizer).__name__, type(rule).__name__
    kind = _kind(optimizer, group)
    if rule is None:
        raise ValueError(
            f"{mine} has the parameter of head '{head.name}', which has no optimizer at its server: create it with "
            "optimizer=lossd.AdamW(...), or flush its gradient into a parameter of your own (lossd.torch.LocalWeight)"
        )
    if kind == "SGD" and isinstance(rule, SGD) and rule.momentum == 0.0 and float(group.get("momentum", 0.0)) != 0.0:
        raise ValueError(
            f"{mine} has momentum={float(group['momentum'])}, and head '{head.name}' was created without, so that it "
            f"has no buffer for it: create it with optimizer=lossd.SGD(momentum={float(group['momentum'])})"
        )
    problem = _difference(rule, group) if kind == theirs else f"steps by {theirs}"
    if problem and (head.name, mine) not in _warned:
        _warned.add((head.name, mine))
        warnings.warn(
            f"{mine} steps head '{head.name}', which {problem}: the head keeps its own rule, and takes the "
            "optimizer's lr, weight_decay and betas, and SGD's momentum. A head that is to have a rate of its own "
            "stays out of this optimizer, and has lossd.torch.RemoteOptimizer(head, lr=...)",
            OtherRuleWarning,
            stacklevel=4,
        )


def _kind(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> str:
    """The name of the rule that it steps by."""
    names = [one.__name__ for one in type(optimizer).__mro__]
    kind = next((name for name in names if name in ("SGD", "Adam", "AdamW")), names[0])
    return "AdamW" if kind == "Adam" and group.get("decoupled_weight_decay") else kind


def _difference(rule: Optimizer, group: dict[str, Any]) -> str:
    """What of the group the head cannot take."""
    if group.get("amsgrad"):
        return "does not know amsgrad"
    for name in ("eps", "maximize", "nesterov", "dampening"):
        own = getattr(rule, name, None)
        if own is not None and name in group and not math.isclose(group[name], own, rel_tol=1e-6):
            return f"has {name}={own}, and the optimizer {group[name]}"
    return ""


@torch._disable_dynamo  # not torch.compiler.disable, which imports Dynamo there and then
def _before(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Sees to it that _last_before comes behind the optimizer's own hooks, which may clip."""
    if isinstance(optimizer, SteppedByItself):
        return
    refuse_moved(optimizer)
    if not _heads_of(optimizer):
        return
    for proxy, _ in _heads_of(optimizer):
        proxy.held = True
    _make_states(optimizer)
    if optimizer not in _hooks:
        _hooks[optimizer] = optimizer.register_step_pre_hook(_last_before).id
    optimizer._optimizer_step_pre_hooks.move_to_end(_hooks[optimizer])


@torch._disable_dynamo
def _last_before(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if isinstance(optimizer, torch.optim.LBFGS):
        names = ", ".join(f"'{proxy.head.name}'" for proxy, _ in _heads_of(optimizer))
        raise ValueError(
            f"LBFGS asks for the loss several times a step, and head {names} steps by a rule of its own: leave its "
            "parameter out, and call head.step(lr)"
        )
    if closure is None:
        return _step_heads(optimizer)

    @functools.wraps(closure)
    def closure_and_heads() -> Any:  # the gradients are there when it returns, and heads come first
        loss = closure()
        _step_heads(optimizer)
        return loss

    if len(args) > 1:
        return (args[0], closure_and_heads, *args[2:]), kwargs
    return args, {**kwargs, "closure": closure_and_heads}


@torch._disable_dynamo
def _after(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    global _steps
    if isinstance(optimizer, SteppedByItself):
        return
    if any(not isinstance(p, GradientProxy) for group in optimizer.param_groups for p in group["params"]):
        _steps += 1


register_optimizer_step_pre_hook(_before)
register_optimizer_step_post_hook(_after)
