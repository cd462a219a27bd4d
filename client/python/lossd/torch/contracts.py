"""A head whose weight is a parameter of the trainer: where its gradient lands, and how autograd sees it.

The trainer's own optimizer steps the parameter, and upload() writes it to the server. Until then dW waits at the
server; it comes row by row and is put, or added, straight into `.grad` or `.main_grad`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lossd.errors import DataLossError, WindowLostError
from lossd.results import FlushResult
from lossd.torch._stepping import optimizer_steps
from lossd.torch._window import HeadWindow, window_of
from lossd.torch.distributed import active_wrapper, first_rank_does, gather_marks
from lossd.torch.head import RemoteHead


@dataclass
class Landing:
    """A flush that an error ended: how far its rows are in the tensor already. The head's window keeps it until it, or
    the window, ends."""

    address: int
    version: int
    """The tensor's version, as this flush left it."""
    contributions: object
    overwrite: bool
    overwrite_bias: bool
    rows: int = 0
    read: FlushResult | None = None
    """Every row has landed; the commit is not confirmed."""


def flush_into(
    head: RemoteHead,
    param: torch.Tensor,
    *,
    to: str = "grad",
    overwrite: bool = False,
    bias: torch.Tensor | None = None,
    gradient_scale: float = 1.0,
) -> FlushResult:
    """Flushes the head's window into param.grad or param.main_grad (`to`), adding to what is there or overwriting it.

    Rows are put in place as they arrive, in fp32, rounded once to the tensor's dtype: there is no second [V, H], and
    autograd has no part in it. `.grad` is made (and overwritten) if there is none; `.main_grad` [V, H], or anything
    that views as that, must be there. bias: the parameter of the head's bias, treated likewise; without it db is
    dropped. Collective of a head with a group: the gradient of all ranks lands on the first one; on the others
    `overwrite` zeroes the tensor, and nothing else happens.

    After UnavailableError or DeadlineExceededError the same call again goes on behind the rows that have landed, so
    that none is added twice: leave the tensor, and the window, as they are. After WindowLostError or DataLossError the
    tensor holds a part of what is lost: zero it, and compute the window again."""
    if head.group is None:
        return _land(head, param, to, overwrite, bias, gradient_scale, None)
    marks = gather_marks(head, head.group)
    result = first_rank_does(lambda: _land(head, param, to, overwrite, bias, gradient_scale, marks), head.group)
    window = window_of(head)
    if window.rank_in_group != 0:
        _nothing_lands(param, bias, to, overwrite)
        window.end(flushed=True)
    return result


def _nothing_lands(param: torch.Tensor, bias: torch.Tensor | None, to: str, overwrite: bool) -> None:
    for one in (param, bias):
        if one is None:
            continue
        tensor, fresh = _target(one, to, tuple(one.shape), "param")
        if overwrite and not fresh:
            with torch.no_grad():
                tensor.zero_()


def _land(
    head: RemoteHead,
    param: torch.Tensor,
    to: str,
    overwrite: bool,
    bias: torch.Tensor | None,
    gradient_scale: float,
    marks: list[str] | None,
) -> FlushResult:
    window = window_of(head)
    targets = [_target(param, to, (head.vocab_size, head.hidden_size), "param")]
    if bias is not None:
        if not head.has_bias:
            raise ValueError(f"bias is given, and head '{head.name}' has none")
        targets.append(_target(bias, to, (head.vocab_size,), "bias"))
    weight_target = targets[0][0]
    landing = _landing_of(window, weight_target, to)
    if landing is None:
        begin_over = [overwrite or fresh for _, fresh in targets]
        landing = Landing(0, 0, window.contributions(), begin_over[0], begin_over[-1])
    window.landing = landing
    if landing.read is None:
        try:
            landing.read = head.head.flush(
                dtype="float32",
                gradient_scale=gradient_scale * window.scale,
                sink=_sink(landing, [tensor for tensor, _ in targets]),
                commit=False,
                marks=marks,
            )
        except (WindowLostError, DataLossError):
            window.landing = None
            raise
        finally:
            landing.address, landing.version = weight_target.data_ptr(), weight_target._version
            if landing.rows == 0 and landing.read is None:
                window.landing = None  # nothing of it is anywhere
    result = landing.read
    head.head.commit_flush(result.flush_id)
    window.end(flushed=True)
    return result


def _landing_of(window: HeadWindow, target: torch.Tensor, to: str) -> Landing | None:
    """The landing that this flush goes on with, if there is one. RuntimeError if it cannot be told what the tensor
    holds."""
    landing: Landing | None = window.landing
    if landing is None or landing.address != target.data_ptr():
        return None
    if landing.version == target._version and (
        landing.read is not None or landing.contributions == window.contributions()
    ):
        return landing
    changed = f"param.{to} was changed" if landing.version != target._version else "more was added to the window"
    raise RuntimeError(
        f"rows 0 to {landing.rows - 1} of an earlier flush of head '{window.head.name}' are in param.{to}, and "
        f"{changed} since: call zero_grad() of the head, zero param.{to}, and compute the step again"
    )


def _sink(landing: Landing, targets: list[torch.Tensor]) -> Callable[[int, Any, Any], None]:
    def put(first_row: int, rows: Any, bias_rows: Any) -> None:
        skip = max(0, landing.rows - first_row)  # of a flush that began again: these have landed
        if skip >= len(rows):
            return
        with torch.no_grad():
            _put(targets[0], first_row + skip, rows[skip:], landing.overwrite)
            if len(targets) == 2:
                _put(targets[1], first_row + skip, bias_rows[skip:], landing.overwrite_bias)
        landing.rows = first_row + len(rows)

    return put


def _put(target: torch.Tensor, first_row: int, rows: Any, overwrite: bool) -> None:
    # Not from_numpy, which warns of arrays that are not to be written to.
    memory = (ctypes.c_char * rows.nbytes).from_address(rows.ctypes.data)
    values = torch.frombuffer(memory, dtype=torch.float32).view(rows.shape)
    place = target[first_row : first_row + len(rows)]
    if overwrite:
        place.copy_(values)
    else:
        place.add_(values.to(place.device))


def _target(param: torch.Tensor, to: str, shape: tuple[int, ...], what: str) -> tuple[torch.Tensor, bool]:
    """Where the rows go, as [V, H] or [V], and whether it was made for them."""
    if to not in ("grad", "main_grad"):
        raise ValueError(f"to is {to!r}; it must be 'grad' or 'main_grad'")
    if tuple(param.shape) != shape:
        raise ValueError(f"{what} is {list(param.shape)}; the head's is {list(shape)}")
    tensor = getattr(param, to, None)
    if tensor is None and to == "main_grad":
        raise ValueError(
            f"{what} has no main_grad: whoever owns the gradient buffers sets it before the first backward"
        )
    if tensor is None:
        param.grad = torch.zeros_like(param, memory_format=torch.contiguous_format)
        return param.grad, True
    if tuple(tensor.shape) != shape:
        if tensor.numel() != param.numel() or not tensor.is_contiguous():
            raise ValueError(f"{what}.{to} is {list(tensor.shape)} and cannot be viewed as {list(shape)}")
        tensor = tensor.view(shape)
    return tensor, False


class LocalWeight:
    """Ties a local parameter to a head, so that a backward pass gives it a gradient as that of a local lm_head would.

        contract = LocalWeight(head, lm_head.weight)
        loss = linear_cross_entropy(contract(hidden), target, head)
        loss.backward()            # weight.grad is there
        optimizer.step()
        contract.upload()          # the server has the new weights

    head: RemoteHead. weight: [V, H] parameter, bias: [V] or None. delay_wgrad: backward leaves the gradient at the
    server, and wgrad() fetches it, once for as many backward passes as there were. accumulate_into_main_grad: it lands
    in weight.main_grad (fp32), added, or overwriting if the attribute weight.overwrite_main_grad is true, and not in
    `.grad`. What backward returns for the weight:

      plain                                                         the gradient
      delayed                                                       None
      accumulated, weight has no attribute grad_added_to_main_grad  None
      accumulated, weight has it                                    zeros, and the attribute is set to True
      delayed and accumulated                                       likewise: None, or zeros and the attribute is set

    The zeros are for trainers that reduce `main_grad` in a hook which expects a `.grad`. They are a new tensor each
    time.

    If the head has a group, each backward pass, or wgrad(), is collective: the first rank gets the gradient of all
    ranks and the others zeros, so that a reduction which sums them is right, and one which averages them averages;
    leave RemoteHead's `average` off. Within DistributedDataParallel.no_sync() backward leaves the gradient at the
    server, and the first pass outside of it fetches all: ranks may differ in the passes before.

    gradient_scale multiplies what lands."""

    def __init__(
        self,
        head: RemoteHead,
        weight: torch.nn.Parameter,
        bias: torch.nn.Parameter | None = None,
        *,
        delay_wgrad: bool = False,
        accumulate_into_main_grad: bool = False,
        gradient_scale: float = 1.0,
    ) -> None:
        if head.frozen:
            raise ValueError(f"head '{head.name}' is frozen: it has no gradient")
        if tuple(weight.shape) != (head.vocab_size, head.hidden_size):
            raise ValueError(
                f"weight is {list(weight.shape)}; head '{head.name}' is {[head.vocab_size, head.hidden_size]}"
            )
        if (bias is not None) != head.has_bias:
            raise ValueError(
                f"head '{head.name}' has {'a' if head.has_bias else 'no'} bias: "
                f"{'give' if head.has_bias else 'leave out'} bias"
            )
        self.head = head
        self.weight = weight
        self.bias = bias
        self.delay_wgrad = delay_wgrad
        self.accumulate_into_main_grad = accumulate_into_main_grad
        self.gradient_scale = gradient_scale
        self.waiting = False
        """A gradient is to be fetched by wgrad()."""
        self._synchronized = True
        self._uploaded = self._state()
        self._hooks: list[Callable[[], None]] = []

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """`hidden` as it is, for linear_cross_entropy; its backward is where the weight gets its gradient."""
        if self.head.group is not None and torch.is_grad_enabled():
            wrapper = active_wrapper()
            self._synchronized = wrapper is None or wrapper.require_backward_grad_sync
        tied: torch.Tensor = _Tie.apply(hidden, self.weight, self.bias, self)
        return tied

    def wgrad(self) -> FlushResult | None:
        """Fetches what delayed backward passes left at the server; None if there is nothing. After UnavailableError:
        call it again."""
        if not self.waiting:
            return None
        result = self._land()
        self.waiting = False
        for hook in self._hooks:
            hook()
        return result

    def register_wgrad_hook(self, hook: Callable[[], None]) -> None:
        """hook() is called at the end of each wgrad() that landed: where delayed gradients are reduced."""
        self._hooks.append(hook)

    def upload(self) -> int:
        """Writes the parameters to the server; returns the version of the weights. RuntimeError if they were stepped
        without the gradient of passes in no_sync()."""
        if self.waiting and not self._synchronized and not self.delay_wgrad and self._uploaded != self._state():
            raise RuntimeError(
                f"a gradient of head '{self.head.name}' waits at the server, of backward passes that were all in "
                "DistributedDataParallel.no_sync(): make the last one of a step outside of it, or call wgrad() before "
                "the optimizer steps"
            )
        version = self.head.write_weights(self.weight, self.bias)
        self._uploaded = self._state()
        return version

    def _state(self) -> tuple[int, ...]:
        """Another one once the parameters were stepped. Fused optimizers leave versions as they are."""
        return optimizer_steps(), *(one._version for one in (self.weight, self.bias) if one is not None)

    def _land(self) -> FlushResult:
        return flush_into(
            self.head,
            self.weight,
            to="main_grad" if self.accumulate_into_main_grad else "grad",
            overwrite=self.accumulate_into_main_grad and bool(getattr(self.weight, "overwrite_main_grad", False)),
            bias=self.bias,
            gradient_scale=self.gradient_scale,
        )

    def gradients(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """What backward returns for weight and bias."""
        if self.delay_wgrad or not self._synchronized:
            self.waiting = True
        elif self.accumulate_into_main_grad:
            self.waiting = True  # until it has landed: after an error wgrad() goes on with it
            self._land()
            self.waiting = False
        else:
            fetched = self._fetch()
            self.waiting = False
            return fetched
        return self._dummy(self.weight), self._dummy(self.bias)

    def _dummy(self, parameter: torch.nn.Parameter | None) -> torch.Tensor | None:
        if parameter is None or not self.accumulate_into_main_grad or not hasattr(parameter, "grad_added_to_main_grad"):
            return None
        parameter.grad_added_to_main_grad = True
        return torch.zeros_like(parameter)

    def _fetch(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The gradient of the window in new tensors of the parameters' dtypes; zeros on all ranks but the first."""
        dtype = (
            self.weight.dtype if self.weight.dtype in (torch.float32, torch.bfloat16, torch.float16) else torch.float32
        )
        weight = torch.zeros(self.weight.shape, dtype=dtype, device=self.weight.device)
        bias = None if self.bias is None else torch.zeros(self.bias.shape, dtype=torch.float32, device="cpu")
        first = window_of(self.head).rank_in_group == 0
        self.head.flush(weight if first else None, gradient_scale=self.gradient_scale, bias_out=bias if first else None)
        return weight, None if bias is None or self.bias is None else bias.to(self.bias)


class _Tie(torch.autograd.Function):
    """The identity, which stands between the trunk and the loss: its backward runs once the loss's has, and all of dW
    is at the server."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, contract: LocalWeight
    ) -> torch.Tensor:
        ctx.contract = contract
        return hidden.view_as(hidden)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, None]:
        if not ctx.needs_input_grad[1]:
            return grad, None, None, None
        weight, bias = ctx.contract.gradients()
        return grad, weight, bias, None
