"""A torch.optim.Optimizer whose step the server takes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from lossd.errors import DeadlineExceededError, UnavailableError
from lossd.torch._proxy import GradientProxy
from lossd.torch._stepping import SteppedByItself, hyperparameters, learning_rate, step_options
from lossd.torch.head import RemoteHead

if TYPE_CHECKING:
    from lossd.results import StepResult


class RemoteOptimizer(SteppedByItself, torch.optim.Optimizer):
    """Steps heads alone, beside the trainer's optimizer of the local parameters. (An optimizer of torch.optim that
    holds a head's parameter steps it, too: this one is for heads that need a schedule, or skipping, of their own.)

    heads: one RemoteHead or several, or groups {"params": [heads], "lr": ...}. lr: the learning rate. weight_decay,
    betas, momentum: what steps use instead of what the heads were created with; schedulers that change a group's lr,
    betas, momentum or weight_decay work. What else the rule has (dampening, eps, nesterov, maximize) is the head's for
    good. skip_non_finite: a gradient with NaN or infinite elements changes nothing, without a GradScaler too. If
    clipping by a norm that is not finite left a factor that is not, step() skips, or raises FloatingPointError before
    any head is stepped.

    - param_groups hold the heads' proxies: GradScaler.unscale_ and step, and torch.nn.utils.clip_grad_norm_ with
      `head.proxy` among the parameters, do what they say.
    - step() after UnavailableError or DeadlineExceededError is the same step again, and counts once: heads that have
      taken it already, and got nothing since, are left alone. zero_grad(), and any other error, gives it up.
    - Moments and step counts are at the server: RemoteHead.save_checkpoint keeps them. state_dict() has what the
      trainer's side has (lr and the rest of the groups), and the steps taken, for comparison.
    - Of heads with a process group every rank calls step() and zero_grad()."""

    def __init__(
        self,
        heads: RemoteHead | GradientProxy | Iterable[Any],
        lr: float = 1e-3,
        *,
        weight_decay: float | None = None,
        betas: tuple[float, float] | None = None,
        momentum: float | None = None,
        skip_non_finite: bool = False,
    ) -> None:
        if isinstance(heads, (RemoteHead, GradientProxy)):
            heads = [heads]
        given = [_with_proxies(item) for item in heads]
        first = next((proxy.head for item in given for proxy in _proxies(item)), None)
        if first is None:
            raise ValueError("heads is empty: give a RemoteHead, or several")
        defaults: dict[str, Any] = {"lr": lr, **hyperparameters(first.head.config.optimizer)}
        for name, value in (("weight_decay", weight_decay), ("betas", betas), ("momentum", momentum)):
            if value is None:
                continue
            if name not in defaults:
                raise ValueError(
                    f"{name} is no parameter of head '{first.name}''s optimizer, which has {sorted(defaults)}"
                )
            defaults[name] = value
        self.skip_non_finite = skip_non_finite
        self.last_results: dict[str, StepResult] = {}
        """By the heads' names, of the last step()."""
        self._stepped: dict[GradientProxy, int] = {}  # by a step that failed later on, and their windows then
        super().__init__(given, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """One more group of heads; its weight_decay, betas and momentum are those of its first head unless given."""
        group = _with_proxies(param_group)
        proxies = _proxies(group)
        for proxy in proxies:
            proxy.held = True
            if proxy.head.head.config.optimizer is None:
                raise ValueError(
                    f"head '{proxy.head.name}' has no optimizer: create it with optimizer=lossd.AdamW(...), or flush "
                    f"its gradient into a local parameter (flush_into)"
                )
        if self.param_groups:  # of the first one the defaults say it
            group = {**hyperparameters(proxies[0].head.head.config.optimizer), **group}
        super().add_param_group(group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, gradient_scale: float = 1.0) -> Any:
        """One step of every head that has a gradient. gradient_scale: a further factor of the gradients. Returns what
        `closure` returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        waiting = [
            (proxy, group)
            for group in self.param_groups
            for proxy in group["params"]
            if not self._took(proxy) and proxy.window.touched_anywhere()
        ]
        if len(waiting) > 1 and not self.skip_non_finite:  # of a single one the step itself says it
            for proxy, _ in waiting:
                proxy.window.check_factor(gradient_scale)
        try:
            for proxy, group in waiting:
                self._step_head(proxy.head, group, gradient_scale)
                self._stepped[proxy] = proxy.window.windows_ended
        except (UnavailableError, DeadlineExceededError):
            raise  # the same step may be tried again
        except BaseException:
            self._stepped.clear()
            raise
        self._stepped.clear()
        return loss

    def _took(self, proxy: GradientProxy) -> bool:
        """Whether the head has taken the step that is tried again, and nothing happened to its window since."""
        if self._stepped.get(proxy) != proxy.window.windows_ended:
            return False
        return not proxy.window.dirty_anywhere()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops what waits in the heads' windows (RemoteHead.zero_grad); sends nothing if nothing was added."""
        self._stepped.clear()
        for group in self.param_groups:
            for proxy in group["params"]:
                proxy.head.zero_grad()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the groups' values, and warns of a head whose server has taken another number of steps: its moments
        are not those of this state."""
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            for proxy in group["params"]:
                head, step = proxy.head, self.state[proxy].get("step")
                taken = head.head.info().optimizer_steps
                if step is not None and step != taken:
                    warnings.warn(
                        f"the state to load is of step {step} of head '{head.name}', whose server is at step {taken}: "
                        "its moments are others; RemoteHead.save_checkpoint and restore_checkpoint keep both together",
                        stacklevel=2,
                    )

    def _step_head(self, head: RemoteHead, group: dict[str, Any], gradient_scale: float) -> None:
        result = head.step(
            learning_rate(group),
            gradient_scale=gradient_scale,
            skip_non_finite=self.skip_non_finite,
            **step_options(head, group),
        )
        self.last_results[head.name] = result
        self.state[head.proxy] = {"step": result.step}

    def __reduce__(self) -> Any:
        raise TypeError("a RemoteOptimizer cannot be pickled: save its state_dict() and the heads' checkpoints")


def _with_proxies(item: Any) -> Any:
    if isinstance(item, RemoteHead):
        return item.proxy
    if isinstance(item, GradientProxy):
        return item
    if isinstance(item, dict):
        members = item["params"]
        members = [members] if isinstance(members, (RemoteHead, torch.Tensor)) else list(members)
        return {**item, "params": [_with_proxies(member) for member in members]}
    raise TypeError(f"RemoteOptimizer takes RemoteHeads, or groups of them, not a {type(item).__name__}")


def _proxies(item: Any) -> list[GradientProxy]:
    return item["params"] if isinstance(item, dict) else [item]
