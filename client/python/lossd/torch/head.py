"""RemoteHead: a lossd head as a trainer holds it."""

from __future__ import annotations

import dataclasses
import json
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import torch

from lossd.errors import AlreadyExistsError
from lossd.results import StepResult
from lossd.torch._dtypes import dtype_of, name_of
from lossd.torch._proxy import GradientProxy
from lossd.torch.distributed import all_do, first_rank_does, gather_objects, world_size

if TYPE_CHECKING:
    import torch.distributed as dist

    import lossd
    from lossd.results import FlushResult, GradientStats
    from lossd.torch.contracts import Landing


class RemoteHead:
    """A head of a server together with this process's session of it, and what a trainer does with them between
    batches.

    head: the lossd.Head. session: one of it; opened when first needed, as `rank`, unless given. device: of the tensors
    that it makes ([1] each). group: the process group whose ranks all have a session of this head, each with its own
    `rank` (default: its rank in the group). With a group step(), flush(), gradient_stats(), refresh_gradient() and
    zero_grad() are collective: the marks of all ranks are gathered, the first rank asks the server once, and every
    rank gets its answer or its error. average: the gradient is divided by the number of ranks, as
    DistributedDataParallel divides that of its parameters; without it what the ranks added is a sum. session_options:
    further arguments of Head.open_session.

    Not thread-safe, but for `session`. Errors: those of lossd.errors.
    """

    def __init__(
        self,
        head: lossd.Head,
        *,
        session: lossd.Session | None = None,
        rank: int | None = None,
        group: dist.ProcessGroup | None = None,
        average: bool = False,
        device: torch.device | str | None = None,
        **session_options: Any,
    ) -> None:
        self.head = head
        self.group = group
        self.rank = rank if rank is not None else (torch.distributed.get_rank(group) if group is not None else 0)
        self.average = average
        self.device = torch.device(device) if device is not None else torch.device("cpu")
        self.anchor = torch.zeros(1, device=self.device, requires_grad=True)
        """A leaf that makes a loss differentiable when nothing else does: of a trunk that is not trained."""
        self.proxy = GradientProxy(self, self.device)
        """What optimizers, GradScaler and clip_grad_norm_ see of the head."""
        self._session_options = session_options
        self._session = session
        self._lock = threading.Lock()
        self._pending: list[Future[Any]] = []
        self._consumed: object = None if session is None else _accepted(session.marks())
        self._closed_at: object = None
        self._weight_version = 0
        self.landing: Landing | None = None
        """A flush_into that an error ended, with the rows that have landed."""
        self.windows_ended = 0
        """How many windows this process has seen end."""

    # Making one

    @classmethod
    def create(
        cls,
        client: lossd.Client,
        name: str,
        vocab_size: int,
        hidden_size: int,
        *,
        dtype: torch.dtype = torch.bfloat16,
        optimizer: Any = None,
        weights: torch.Tensor | torch.nn.Linear | None = None,
        bias: torch.Tensor | bool | None = None,
        rank: int | None = None,
        group: dist.ProcessGroup | None = None,
        average: bool = False,
        device: torch.device | str | None = None,
        session_options: Mapping[str, Any] | None = None,
        **config: Any,
    ) -> RemoteHead:
        """Creates the head `name`, or takes the one that is there with the same configuration, and writes `weights`.

        weights: [vocab_size, hidden_size] of any float dtype, or a Linear, whose bias comes with it. bias:
        [vocab_size], or True for a head with a bias that is written later. config: further arguments of
        Client.create_head, such as softcap. With a group every rank calls this, and the first one writes."""
        if isinstance(weights, torch.nn.Linear):
            bias = weights.bias if bias is None else bias
            weights = weights.weight
        with_bias = bias is not None and bias is not False
        head = client.create_head(
            name, vocab_size, hidden_size, dtype=name_of(dtype), optimizer=optimizer, bias=with_bias, **config
        )
        remote = cls(head, rank=rank, group=group, average=average, device=device, **(session_options or {}))
        if weights is not None:
            remote.write_weights(weights, bias if isinstance(bias, torch.Tensor) else None)
        return remote

    @classmethod
    def from_linear(
        cls, client: lossd.Client, linear: torch.nn.Linear, name: str, *, dtype: torch.dtype | None = None, **more: Any
    ) -> RemoteHead:
        """A head with the weights, and the bias, of `linear`; of its dtype unless another one is named. The rest as
        create()."""
        return cls.create(
            client,
            name,
            linear.out_features,
            linear.in_features,
            dtype=linear.weight.dtype if dtype is None else dtype,
            weights=linear,
            **more,
        )

    # What it is

    @property
    def name(self) -> str:
        return self.head.name

    @property
    def vocab_size(self) -> int:
        return self.head.vocab_size

    @property
    def hidden_size(self) -> int:
        return self.head.hidden_size

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights at the server."""
        return dtype_of(self.head.dtype)

    @property
    def has_bias(self) -> bool:
        return bool(self.head.config.bias)

    @property
    def frozen(self) -> bool:
        return bool(self.head.config.frozen)

    @property
    def weight_version(self) -> int:
        """The weights' version as this process knows it: written, stepped or asked for by it. 0: there are none yet."""
        if self._weight_version == 0:
            self._weight_version = self.head.info().weight_version
        return self._weight_version

    @weight_version.setter
    def weight_version(self, version: int) -> None:
        self._weight_version = version

    @property
    def session(self) -> lossd.Session:
        """Opened by the first call that needs it."""
        with self._lock:
            if self._session is None:
                self._session = self.head.open_session(rank=self.rank, **self._session_options)
                # An earlier process with this key may have left something in the window.
                resumed = "client_key" in self._session_options
                self._consumed = () if resumed else _accepted(self._session.marks())
            return self._session

    # Weights

    def write_weights(self, weights: torch.Tensor, bias: torch.Tensor | None = None) -> int:
        """Publishes weights [V, H], and the bias [V] of a head with one, as a new version, which is returned. They are
        rounded to the head's dtype before they are sent, or go as fp32 if the server keeps a master. With a group the
        first rank's count."""
        all_do(lambda: self._check_weights(weights, bias), self.group)
        values = None if bias is None else bias.detach().to(torch.float32)
        write = lambda: self.head.write_weights(weights.detach(), values)  # noqa: E731
        self._weight_version = first_rank_does(write, self.group)
        return self._weight_version

    def read_weights(
        self, *, out: torch.Tensor | None = None, dtype: torch.dtype | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The weights [V, H], in `out` or a new tensor of `dtype` (the head's), and the bias, fp32 [V], or None."""
        if out is None:
            out = torch.empty(self.vocab_size, self.hidden_size, dtype=dtype or self.dtype)
        self._check_shape("out", out, (self.vocab_size, self.hidden_size))
        bias = torch.empty(self.vocab_size) if self.has_bias else None
        self.head.read_weights(out=out, dtype=name_of(out.dtype), bias_out=bias)
        return out, bias

    def state_dict(self, *, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
        """{"weight": [V, H] of `dtype` (the head's)}, and "bias": fp32 [V] of a head with one, read from the
        server."""
        weight, bias = self.read_weights(dtype=dtype)
        return {"weight": weight} if bias is None else {"weight": weight, "bias": bias}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> int:
        """Writes what state_dict() gave; returns the version. KeyError for a missing or an unknown entry."""

        def check() -> None:
            wanted = {"weight", "bias"} if self.has_bias else {"weight"}
            if set(state) != wanted:
                raise KeyError(f"a state of head '{self.name}' has the entries {sorted(wanted)}, not {sorted(state)}")

        all_do(check, self.group)
        return self.write_weights(state["weight"], state.get("bias"))

    # The gradient window

    def add_pending(self, future: Future[Any]) -> None:
        """A batch that is still under way (Session.compute_async): what looks at the window waits for it."""
        self._pending.append(future)

    def wait(self) -> None:
        """Until no batch is under way. Raises what went wrong with the first that failed."""
        pending, self._pending = self._pending, []
        for future in pending:
            future.result()

    def contributions(self) -> object:
        """Changes whenever this process's session has added to the window; for comparison only."""
        return self._closed_at if self._session is None else _accepted(self._session.marks())

    @property
    def dirty(self) -> bool:
        """Whether this process has added anything since the window was last stepped, flushed or dropped."""
        return self.contributions() != self._consumed

    def marks(self) -> list[str]:
        """The marks of the sessions of this head that its client opened: what a flush or step in another process has to
        name. Waits for batches under way."""
        self.wait()
        return self.head.marks()

    @property
    def scale(self) -> float:
        """What the next step or flush multiplies the gradient with: 1 / ranks if averaged, times what was done to the
        proxy."""
        return self.proxy.factor / (world_size(self.group) if self.average else 1)

    def check_factor(self, gradient_scale: float = 1.0) -> None:
        """FloatingPointError if the next step would multiply the gradient with what is not finite. Collective with a
        group."""
        all_do(lambda: self._require_finite(gradient_scale * self.scale), self.group)

    def gradient_stats(self, *, gradient_scale: float = 1.0) -> GradientStats:
        """Statistics of the gradient that waits at the server, as the next step would take it. Collective with a
        group."""
        factor = gradient_scale * self.scale
        stats: GradientStats = self._collectively(
            lambda marks: self.head.gradient_stats(gradient_scale=factor, marks=marks)
        )
        return stats

    def refresh_gradient(self) -> torch.Tensor:
        """Reads the gradient's norm into proxy.grad, which is returned, and undoes what was done to it: NaN if an
        element is not finite, or a loss or its upstream gradient was not, of which nothing was added. Collective with
        a group."""
        self.proxy.forget()
        stats = self.gradient_stats()
        finite = stats.non_finite == 0 and self._losses_finite()
        norm = math.hypot(stats.norm, stats.bias_norm) if finite else math.nan
        return self.proxy.put(norm, self.contributions())

    def step(
        self,
        lr: float,
        *,
        gradient_scale: float = 1.0,
        skip_non_finite: bool = False,
        weight_decay: float | None = None,
        momentum: float | None = None,
        betas: tuple[float, float] | None = None,
        generation: int | None = None,
    ) -> StepResult:
        """One step of the server's optimizer, which consumes the window. Exactly once: after UnavailableError or
        DeadlineExceededError the same call again is about the same step. The factor that the server gets includes
        what was done to the proxy (unscale_, clip) and the average of a group. With skip_non_finite a gradient that is
        not finite, or a loss or a factor that was not (nothing of it is in the window), changes nothing but ends the
        window; the answer says `skipped`. Without it a factor that is not finite is a FloatingPointError, and nothing
        is stepped. FailedPreconditionError of a head without an optimizer."""
        factor = gradient_scale * self.scale
        if skip_non_finite and not self._losses_finite(factor):
            return self._skip_step()

        def ask(marks: list[str] | None) -> StepResult:
            return self.head.step(
                lr,
                gradient_scale=factor,
                skip_non_finite=skip_non_finite,
                weight_decay=weight_decay,
                momentum=momentum,
                betas=betas,
                generation=generation,
                marks=marks,
            )

        result: StepResult = self._collectively(ask, check=lambda: self._require_finite(factor))
        self._weight_version = result.weight_version
        self.end_window()
        return result

    def flush(self, out: torch.Tensor | None = None, *, gradient_scale: float = 1.0, **options: Any) -> FlushResult:
        """Head.flush with the marks and the factor of step(): dW into `out` [V, H], a new tensor, or a sink, and the
        window ends. Collective with a group: the first rank gets the gradient, the others a FlushResult without
        one."""
        factor = gradient_scale * self.scale
        if out is None and options.get("sink") is None and (self.group is None or self.rank_in_group == 0):
            out = torch.empty(self.vocab_size, self.hidden_size, dtype=options.pop("dtype", torch.float32))
        if out is not None:
            options["dtype"] = name_of(out.dtype)
        result: FlushResult = self._collectively(
            lambda marks: self.head.flush(out, gradient_scale=factor, marks=marks, **options), _without_gradient
        )
        if options.get("commit", True):
            self.end_window()
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops what waits in the window, whoever added it; nothing at all is sent if this process (with a group: any
        rank) has added nothing since the last step. set_to_none is there for the sake of callers, and makes no
        difference."""
        if self.frozen:
            return
        self._settle()
        dirty = self.dirty
        if self.group is not None:
            dirty = any(gather_objects(dirty, self.group))
        if dirty:
            first_rank_does(self._drop_window, self.group)
        self.end_window()

    def end_window(self) -> None:
        """The window was ended: what this process has of it is forgotten."""
        self.windows_ended += 1
        self._consumed = self.contributions()
        self.landing = None
        self.proxy.forget()
        self.anchor.grad = None

    def reopen(self) -> None:
        """For after an error of a batch, which ends its session: opens the session again, under its client_key, and
        drops what is in the window, so that the step can be computed anew from its first batch. Collective with a
        group."""
        all_do(self._open_again, self.group)
        self._pending = []
        self._weight_version = 0
        self.zero_grad()

    # Checkpoints

    def save_checkpoint(self, tag: str) -> Any:
        """Everything the server has of the head (weights, optimizer, window) under `tag`, which the trainer writes
        into its own checkpoint. Needs a server with --checkpoint_dir. Collective with a group. Returns a
        SavedCheckpoint."""
        self.wait()
        return first_rank_does(lambda: self.head.save_checkpoint(tag), self.group)

    def restore_checkpoint(self, tag: str = "") -> Any:
        """Takes the head back to `tag` (the newest, if empty), and drops what was in that checkpoint's window: a
        trainer that saved between steps had nothing there. Collective with a group. Returns a CheckpointInfo."""
        info = first_rank_does(lambda: self.head.client.restore_checkpoint(self.name, tag), self.group)
        self.reopen()
        return info

    def close(self) -> None:
        """Ends the session at the server. What it added to the window stays there."""
        self._closed_at = self.contributions()
        with self._lock:
            session, self._session = self._session, None
        if session is not None:
            session.close()

    # Inside

    @property
    def rank_in_group(self) -> int:
        return 0 if self.group is None else torch.distributed.get_rank(self.group)

    def _collectively(
        self,
        ask: Callable[[list[str] | None], Any],
        tell: Callable[[Any], Any] | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> Any:
        """ask(marks of all ranks), on the first of them; its answer everywhere. check(): what has to be right on each
        before."""

        def ready() -> list[str]:
            check()
            return self.marks()

        if self.group is None:
            check()
            self.wait()
            return ask(None)
        marks = [mark for own in all_do(ready, self.group) for mark in own]
        return first_rank_does(lambda: ask(marks), self.group, tell)

    def _losses_finite(self, factor: float = 1.0) -> bool:
        """Whether on all ranks every loss since the window began had a finite gradient, which the anchor's own says,
        and `factor` is finite."""
        grad = self.anchor.grad
        own = math.isfinite(factor) and (grad is None or bool(torch.isfinite(grad).all()))
        return all(gather_objects(own, self.group))

    def _require_finite(self, factor: float) -> None:
        if not math.isfinite(factor):
            raise FloatingPointError(
                f"the gradient of head '{self.name}' is multiplied with {factor}, as of a norm that is not finite: "
                f"nothing was stepped. Call zero_grad(), or let steps like this be skipped (skip_non_finite=True)"
            )

    def _skip_step(self) -> StepResult:
        self.zero_grad()
        return StepResult.skipped_at(first_rank_does(self.head.info, self.group))

    def _open_again(self) -> None:
        with self._lock:
            if self._session is not None:
                self._session_options["client_key"] = self._session.client_key
            self._session = None
            self._session = self.head.open_session(rank=self.rank, **self._session_options)
            self._consumed = ()  # unlike any contributions: the window may hold anything

    def _settle(self) -> None:
        """Waits for batches under way whose outcome nobody wants any more."""
        pending, self._pending = self._pending, []
        for future in pending:
            future.exception()

    def _drop_window(self) -> None:
        def drop() -> None:
            self.head.discard(marks=[session.text() for session in self.head.info().sessions])

        try:
            drop()
        except AlreadyExistsError:  # a flush before, whose commit had no answer, is over now; this window is not
            drop()

    def _check_weights(self, weights: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._check_shape("weights", weights, (self.vocab_size, self.hidden_size))
        if self.has_bias != (bias is not None):
            raise ValueError(
                f"head '{self.name}' has {'a' if self.has_bias else 'no'} bias, and bias is "
                f"{bias if bias is None else list(bias.shape)}: {'give' if self.has_bias else 'leave out'} it"
            )
        if bias is not None:
            self._check_shape("bias", bias, (self.vocab_size,))

    def _check_shape(self, what: str, tensor: torch.Tensor, want: Sequence[int]) -> None:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{what} of head '{self.name}' is a {type(tensor).__name__}, not a torch.Tensor")
        if tuple(tensor.shape) != tuple(want):
            raise ValueError(f"{what} of head '{self.name}' is {list(tensor.shape)}, and must be {list(want)}")
        if not tensor.is_floating_point() or tensor.is_meta:
            raise TypeError(
                f"{what} of head '{self.name}' is {tensor.dtype} on {tensor.device}: give floating point values"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> RemoteHead:
        return self  # a copied module shares the head: there is one set of weights

    def __repr__(self) -> str:
        return f"RemoteHead('{self.name}', {self.vocab_size}x{self.hidden_size}, {self.dtype}, rank={self.rank})"


def _accepted(marks: str) -> tuple[Any, ...]:
    """What of a session's marks changes when it adds a chunk."""
    parsed = json.loads(marks)
    return (parsed["session_id"], tuple((lane["lane"], lane["accepted"]) for lane in parsed["lanes"]))


def _without_gradient(result: FlushResult) -> FlushResult:
    return dataclasses.replace(result, gradient=None, bias_gradient=None)
