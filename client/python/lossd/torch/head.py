"""RemoteHead: a lossd head as a trainer holds it."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import math
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import lossd.torch._saving as _saving
from lossd.client import Client, impatient
from lossd.errors import AlreadyExistsError, LossdError, NotFoundError
from lossd.results import StepResult
from lossd.torch._call import checked_grad_scale
from lossd.torch._compiled import traced
from lossd.torch._dtypes import dtype_of, name_of
from lossd.torch._function import linear_cross_entropy
from lossd.torch._holder import ProxyHolder
from lossd.torch._options import check_session_options
from lossd.torch._proxy import GradientProxy
from lossd.torch._sharded import is_dtensor
from lossd.torch._weight import RemoteTensor
from lossd.torch._window import HeadWindow
from lossd.torch.distributed import all_do, first_rank_does, write_shard

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement

    import lossd
    from lossd.results import FlushResult, GradientStats

_COPY_ROWS = 4096  # of weights that are under way from one head to another


class FrozenCopyWarning(UserWarning):
    """copy.deepcopy() of a head made a frozen copy of it."""


class StaleWeightsWarning(UserWarning):
    """A head was stepped while the Linear that its weights came from is still in use."""


class RemoteHead(ProxyHolder):
    """A head of a server as a module of the trainer: it takes the place of a model's lm_head.

        model.lm_head = RemoteHead.from_linear(
            client, model.lm_head, "lm_head", optimizer=lossd.AdamW(), grad_scale=1.0
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        model.lm_head(hidden, labels).backward()           # the loss; without labels: logits, without a gradient
        optimizer.step()                                   # the local parameters here, the head at its server

    head: the lossd.Head. session: one of it; opened when first needed, as `rank`, unless given. device: of the
    parameter (default: the CPU; of weights that are given, theirs). group: the process group whose ranks all have a
    session of this head, each with its own `rank` (default: its rank in the group). With a group step(), flush(),
    gradient_stats(), refresh_gradient(), zero_grad() and deepcopy are collective: the marks of all ranks are gathered,
    the first rank asks the server once, and every rank gets its answer or its error. average: the gradient is divided
    by the number of ranks, as DistributedDataParallel divides that of its parameters, or by this number, where some
    ranks share a batch; without it what the ranks added is a sum. session_options: further arguments of
    Head.open_session.

    parameters() has one, `proxy` [1, 1], which stands for the weights [V, H]: an optimizer of torch.optim that holds it
    steps the head with the lr, weight_decay, betas and momentum of its group, by the head's own rule. `weight` and
    `bias` are read-only views that fetch when their values are needed. state_dict() has `weight` and `bias`, read from
    the server, and load_state_dict() writes them. to(), cuda() and half() move the proxy's device and nothing else.
    grad_scale: the gradient that will come back to losses of forward() in training, 1.0 for loss.backward(): each is
    one pass then, not two (linear_cross_entropy has more of it). Another gradient is corrected by a further pass, and
    a call's own grad_scale counts, None among them. A declared loss must be given to backward, or dropped with
    zero_grad(). eval() makes forward() leave grad_scale out, so that a loss adds nothing until it is given to backward.
    deepcopy makes a frozen copy (snapshot); a head cannot be pickled.

    Not thread-safe, but for `session`. Errors: those of lossd.errors.
    """

    proxy: GradientProxy

    def __init__(
        self,
        head: lossd.Head,
        *,
        session: lossd.Session | None = None,
        rank: int | None = None,
        group: dist.ProcessGroup | None = None,
        average: bool | int = False,
        device: torch.device | str | None = None,
        grad_scale: float | None = None,
        **session_options: Any,
    ) -> None:
        super().__init__()
        check_session_options(session_options)
        self.head = head
        rank = rank if rank is not None else (torch.distributed.get_rank(group) if group is not None else 0)
        self._window = HeadWindow(
            head, session=session, rank=rank, group=group, average=average, session_options=session_options
        )
        self.proxy = GradientProxy(self, self._window, torch.device(device) if device is not None else None)
        self.proxy.requires_grad_(not self.frozen)
        self._window.proxy = self.proxy
        self.grad_scale = checked_grad_scale(grad_scale)
        """The gradient that losses of forward() will be given in training; None: not declared."""
        self.traced = traced(self)
        """What torch.compile sees of the head."""
        self._weight_version = 0
        self._source: weakref.ref[nn.Linear] | None = None
        self.spread: tuple[DeviceMesh, Sequence[Placement]] | None = None
        """state_mesh, and how rows are placed on it."""
        self.delete_copy: Callable[[], object] = lambda: None
        """Deletes the head of a deepcopy at the server at once; otherwise that is done when the copy is collected."""

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
        weights: torch.Tensor | nn.Linear | None = None,
        bias: torch.Tensor | bool | None = None,
        exist_ok: bool = False,
        reset: bool = False,
        rank: int | None = None,
        group: dist.ProcessGroup | None = None,
        average: bool | int = False,
        device: torch.device | str | None = None,
        grad_scale: float | None = None,
        session_options: Mapping[str, Any] | None = None,
        **config: Any,
    ) -> RemoteHead:
        """Creates the head `name` and writes `weights`.

        weights: [vocab_size, hidden_size] of any float dtype, or a Linear, whose bias comes with it. bias:
        [vocab_size], or True for a head with a bias that is written later. grad_scale: as RemoteHead has it. config:
        further arguments of Client.create_head, such as softcap. With a group every rank calls this, and the first one
        creates and writes.
        Weights that are a DTensor, as fully_shard leaves them, are written by all ranks, each its rows, and the head's
        state_mesh is theirs.

        A head of that name that is in use already is an AlreadyExistsError. exist_ok=True takes it as it is, with its
        weights, its optimizer's moments and what waits in its window, and writes nothing; its configuration has to be
        the same. reset=True deletes it, with all that, and begins anew."""
        check_session_options(session_options or ())
        if isinstance(weights, nn.Linear):
            bias = weights.bias if bias is None else bias
            weights = weights.weight
        with_bias = bias is not None and bias is not False
        device = weights.device if device is None and weights is not None else device
        if is_dtensor(weights) and group is None and weights.device_mesh.size() > 1:
            raise ValueError(
                f"the weights of head '{name}' are a DTensor over {weights.device_mesh.size()} ranks: give the group "
                "of these ranks, such as group=torch.distributed.group.WORLD, and every rank calls this"
            )

        def make() -> bool:
            taken = _in_use(client, name, exist_ok=exist_ok, reset=reset)
            client.create_head(
                name, vocab_size, hidden_size, dtype=name_of(dtype), optimizer=optimizer, bias=with_bias, **config
            )
            return taken

        taken = first_rank_does(make, group)
        head = client.create_head(  # the same for every rank, which has a client of its own
            name, vocab_size, hidden_size, dtype=name_of(dtype), optimizer=optimizer, bias=with_bias, **config
        )
        remote = cls(
            head,
            rank=rank,
            group=group,
            average=average,
            device=device,
            grad_scale=grad_scale,
            **(session_options or {}),
        )
        if is_dtensor(weights):
            remote.spread = weights.device_mesh, weights.placements
        if weights is not None and not taken:
            remote.write_weights(weights, bias if isinstance(bias, torch.Tensor) else None)
        return remote

    @classmethod
    def from_linear(
        cls, client: lossd.Client, linear: nn.Linear, name: str, *, dtype: torch.dtype | None = None, **more: Any
    ) -> RemoteHead:
        """A head with the weights, and the bias, of `linear`; of its dtype unless another one is named. The rest as
        create(). Put it in the Linear's place: `model.lm_head = RemoteHead.from_linear(client, model.lm_head, ...)`.
        A Linear that stays has the old weights; the first step warns of it (StaleWeightsWarning), and of an optimizer
        that goes on training the Linear's weight, which an embedding tied to it has (UntiedHeadWarning)."""
        _check_linear(client, linear)
        remote = cls.create(
            client,
            name,
            linear.out_features,
            linear.in_features,
            dtype=linear.weight.dtype if dtype is None else dtype,
            weights=linear,
            **more,
        )
        remote._source = weakref.ref(linear)  # noqa: SLF001  (of a class method, which ruff cannot tell)
        remote._window.source_weight = weakref.ref(linear.weight)  # noqa: SLF001
        return remote

    def snapshot(self, name: str) -> RemoteHead:
        """A frozen copy of the head as it is now, as head `name` of the same server: a reference model's. The weights
        pass through this process in pieces. It stays until Client.delete_head(name). Collective with a group.
        AlreadyExistsError if there is a head of that name, ValueError of a head with class weights, which the server
        does not give away."""
        config = self.head.config
        if config.has_class_weights:
            raise ValueError(f"head '{self.name}' has class weights, which cannot be read: create the copy yourself")
        client = self.head.client

        def create() -> lossd.Head:
            return client.create_head(
                name,
                self.vocab_size,
                self.hidden_size,
                dtype=self.head.dtype,
                logit_scale=config.logit_scale,
                softcap=config.softcap,
                bias=config.bias,
                frozen=True,
            )

        def copy() -> int:
            _in_use(client, name, exist_ok=False, reset=False)
            return _copy_weights(self.head, create())

        first_rank_does(copy, self.group)
        return RemoteHead(create(), rank=self.rank, group=self.group, device=self.device)

    # What it is

    @property
    def name(self) -> str:
        return self.head.name

    @property
    def group(self) -> dist.ProcessGroup | None:
        return self._window.group

    @property
    def rank(self) -> int:
        return self._window.rank

    @property
    def average(self) -> bool | int:
        return self._window.average

    @property
    def vocab_size(self) -> int:
        return self.head.vocab_size

    @property
    def hidden_size(self) -> int:
        return self.head.hidden_size

    @property
    def in_features(self) -> int:
        """hidden_size, as a Linear calls it."""
        return self.hidden_size

    @property
    def out_features(self) -> int:
        """vocab_size, as a Linear calls it."""
        return self.vocab_size

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights at the server."""
        return dtype_of(self.head.dtype)

    @property
    def device(self) -> torch.device:
        """The proxy's. The weights are on the server's device."""
        return self.proxy.device

    @property
    def has_bias(self) -> bool:
        return bool(self.head.config.bias)

    @property
    def frozen(self) -> bool:
        """Whether the head was created frozen, for good: there is no gradient of it."""
        return bool(self.head.config.frozen)

    @property
    def weight(self) -> RemoteTensor:
        """[V, H] of the head's dtype: a read-only view, whose values are fetched by each operation that needs them,
        with a FetchedWeightsWarning that says how much came."""
        shape = (self.vocab_size, self.hidden_size)
        fetch = lambda: self.read_weights()[0].to(self.device)  # noqa: E731
        return RemoteTensor(shape, self.dtype, self.device, f"the weight of head '{self.name}'", fetch)

    @property
    def bias(self) -> RemoteTensor | None:
        """[V], fp32, as `weight`; None of a head without one."""
        if not self.has_bias:
            return None
        fetch = lambda: self._read_bias().to(self.device)  # noqa: E731
        return RemoteTensor((self.vocab_size,), torch.float32, self.device, f"the bias of head '{self.name}'", fetch)

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
    def state_mesh(self) -> DeviceMesh | None:
        """The mesh over whose ranks state_dict() spreads the rows: its entries are DTensors, of which each rank reads
        its own, as a checkpoint of shards has them. None: plain tensors, all of [V, H] on each rank that asks."""
        return None if self.spread is None else self.spread[0]

    @state_mesh.setter
    def state_mesh(self, mesh: DeviceMesh | None) -> None:
        if mesh is None:
            self.spread = None
        else:
            from torch.distributed.tensor import Shard

            self.spread = mesh, [Shard(0)] * mesh.ndim

    @property
    def session(self) -> lossd.Session:
        """Opened by the first call that needs it."""
        return self._window.session

    # As a module

    def forward(self, hidden: torch.Tensor, labels: torch.Tensor | None = None, **options: Any) -> Any:
        """hidden [..., H], labels [...] -> the loss, as linear_cross_entropy(hidden, labels, self, **options) returns
        it. Without labels: logits(hidden), which have no gradient: RuntimeError where one would be wanted."""
        if labels is not None:
            if not self.training:  # nobody has said that there would be a backward pass
                options.pop("grad_scale", None)
            elif options.get("reduction") != "none":
                if options.get("grad_scale", 0.0) is None and not torch.compiler.is_compiling():
                    self._window.undeclared = math.inf  # the caller knows that it could be
                options.setdefault("grad_scale", self.grad_scale)
            return linear_cross_entropy(hidden, labels, self, **options)
        if torch.is_grad_enabled() and (hidden.requires_grad or (self.training and self.proxy.requires_grad)):
            raise RuntimeError(
                f"logits of head '{self.name}' have no gradient, since they are never kept: give it the labels, "
                "model.lm_head(hidden, labels) is the loss (a model of transformers: lossd.transformers.patch), or "
                "call it under torch.no_grad() if no gradient is wanted"
            )
        return self.logits(hidden)

    def logits(self, hidden: torch.Tensor, **options: Any) -> Any:
        """Head.logits of hidden [..., H]: [..., V], of the dtype of `hidden` unless another is named, no gradient."""
        return self.head.logits(hidden.detach(), **{"dtype": name_of(hidden.dtype), **options})

    def extra_repr(self) -> str:
        shape = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.has_bias}"
        return f"{shape}, head={self.name!r}, {self.dtype}, rank={self.rank}"

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        _saving.save(self, destination, prefix)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        _saving.load(self, state_dict, prefix, strict, missing_keys, unexpected_keys, error_msgs)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("weight", "bias"):
            raise AttributeError(
                f"the {name} of head '{self.name}' is at its server: write_weights() publishes another"
            )
        super().__setattr__(name, value)

    # Weights

    def write_weights(self, weights: torch.Tensor | None, bias: torch.Tensor | None = None) -> int:
        """Publishes weights [V, H], and the bias [V] of a head with one, as a new version, which is returned. They are
        rounded to the head's dtype before they are sent, or go as fp32 if the server keeps a master. With a group the
        first rank's count, and the others may give None; of DTensors that are sharded by rows each rank sends its
        own."""
        if weights is not None or self._window.rank_in_group == 0:
            all_do(lambda: self._check_weights(weights, bias), self.group)
        else:
            all_do(lambda: None, self.group)
        if is_dtensor(weights):
            key = f"shards over version {self.head.info().weight_version}"
            return write_shard(self, weights, bias=bias, write_key=key, group=self.group)
        rows = None if weights is None else weights.detach()
        if rows is not None and rows.dtype == torch.float64:
            rows = rows.to(torch.float32)
        values = None if bias is None else bias.detach().to(torch.float32)
        self._weight_version = first_rank_does(lambda: self.head.write_weights(rows, values), self.group)
        return self._weight_version

    def read_weights(
        self, *, out: torch.Tensor | None = None, dtype: torch.dtype | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The weights [V, H], in `out` or a new tensor of `dtype` (the head's), and the bias, fp32 [V], or None."""
        if out is None:
            out = torch.empty(self.vocab_size, self.hidden_size, dtype=dtype or self.dtype, device="cpu")
        self._check_shape("out", out, (self.vocab_size, self.hidden_size))
        bias = torch.empty(self.vocab_size, dtype=torch.float32, device="cpu") if self.has_bias else None
        self.head.read_weights(out=out, dtype=name_of(out.dtype), bias_out=bias)
        return out, bias

    def _read_bias(self) -> torch.Tensor:
        bias = torch.empty(self.vocab_size, dtype=torch.float32, device="cpu")
        rows = torch.empty(min(_COPY_ROWS, self.vocab_size), self.hidden_size, dtype=torch.float32, device="cpu")
        for first in range(0, self.vocab_size, _COPY_ROWS):
            count = min(_COPY_ROWS, self.vocab_size - first)
            self.head.read_rows(first, count, out=rows[:count], bias_out=bias[first : first + count])
        return bias

    # The gradient window

    @property
    def dirty(self) -> bool:
        """Whether this process has added anything to the gradient since the window was last stepped, flushed or
        dropped."""
        return self._window.dirty

    def marks(self) -> list[str]:
        """The marks of the sessions of this head that its client opened: what a flush or step in another process has to
        name."""
        return self.head.marks()

    def gradient_stats(self, *, gradient_scale: float = 1.0) -> GradientStats:
        """Statistics of the gradient that waits at the server, as the next step would take it. Collective with a
        group."""
        factor = gradient_scale * self._window.scale
        stats: GradientStats = self._window.collectively(
            lambda marks: self.head.gradient_stats(gradient_scale=factor, marks=marks)
        )
        return stats

    def refresh_gradient(self) -> torch.Tensor:
        """Reads the gradient's norm into proxy.grad, which is returned, and undoes what was done to it: NaN if an
        element is not finite, or a loss or its upstream gradient was not, of which nothing was added. Collective with
        a group."""
        self.proxy.forget()
        stats = self.gradient_stats()
        finite = stats.non_finite == 0 and self._window.losses_finite()
        norm = math.hypot(stats.norm, stats.bias_norm) if finite else math.nan
        return self.proxy.put(norm, self._window.contributions())

    def step(
        self,
        lr: float | None = None,
        *,
        gradient_scale: float = 1.0,
        skip_non_finite: bool = False,
        weight_decay: float | None = None,
        momentum: float | None = None,
        betas: tuple[float, float] | None = None,
        generation: int | None = None,
    ) -> StepResult:
        """One step of the server's optimizer, which consumes the window; a torch optimizer that holds the head's
        parameter calls it. lr: None takes that of the optimizer that the head was created with (lossd.AdamW(lr=1e-3)).

        Exactly once: after UnavailableError or DeadlineExceededError the same call again is about the same step. The
        factor that the server gets includes what was done to the proxy (unscale_, clip) and the average of a group.
        With skip_non_finite a gradient that is not finite, or a loss or a factor that was not (nothing of it is in the
        window), changes nothing but ends the window; the answer says `skipped`. Without it a factor that is not finite
        is a FloatingPointError, and nothing is stepped. FailedPreconditionError of a head without an optimizer."""
        window = self._window
        factor = gradient_scale * window.scale
        if skip_non_finite and not window.losses_finite(factor):
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

        result: StepResult = window.collectively(ask, check=lambda: window.require_finite(factor))
        self._weight_version = result.weight_version
        window.end()
        self._warn_of_source()
        return result

    def flush(self, out: torch.Tensor | None = None, *, gradient_scale: float = 1.0, **options: Any) -> FlushResult:
        """Head.flush with the marks and the factor of step(): dW into `out` [V, H], a new tensor, or a sink, and the
        window ends. Collective with a group: the first rank gets the gradient, the others a FlushResult without
        one."""
        window = self._window
        factor = gradient_scale * window.scale
        if out is None and options.get("sink") is None and window.rank_in_group == 0:
            dtype = options.pop("dtype", torch.float32)
            out = torch.empty(self.vocab_size, self.hidden_size, dtype=dtype, device="cpu")
        if out is not None:
            options["dtype"] = name_of(out.dtype)
        result: FlushResult = window.collectively(
            lambda marks: self.head.flush(out, gradient_scale=factor, marks=marks, **options), _without_gradient
        )
        if options.get("commit", True):
            window.end(flushed=True)
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops what waits in the window, whoever added it; nothing at all is sent if this process (with a group: any
        rank) has added nothing since the last step. set_to_none is there for the sake of callers, and makes no
        difference."""
        if not self.frozen:
            self._window.drop()

    def reopen(self) -> None:
        """For after an error of a batch, which ends its session: opens the session again, under its client_key, and
        drops what is in the window, so that the step can be computed anew from its first batch. Collective with a
        group."""
        all_do(self._window.open_again, self.group)
        self._weight_version = 0
        if not self.frozen:
            self._window.drop(on_purpose=True)

    # Checkpoints

    def save_checkpoint(self, tag: str, *, marks: Sequence[str] | None = None) -> Any:
        """Everything the server has of the head (weights, optimizer, window) under `tag`, which the trainer writes
        into its own checkpoint. Needs a server with --checkpoint_dir. Collective with a group. Returns a
        SavedCheckpoint.

        marks: as Head.save_checkpoint has them; None stands for those that a step would name, of all ranks. So the
        window that is saved has what they have added and nothing else, or nothing is saved: WindowLostError says that
        a part of it was lost, with a replica for instance. With () it is whatever the window has."""
        if self.frozen or marks is not None:
            return first_rank_does(lambda: self.head.save_checkpoint(tag, marks=marks or ()), self.group)

        def save(of_all: list[str] | None) -> Any:
            return self.head.save_checkpoint(tag, marks=self.head.marks() if of_all is None else of_all)

        return self._window.collectively(save)

    def restore_checkpoint(self, tag: str = "") -> Any:
        """Takes the head back to `tag` (the newest, if empty), and drops what was in that checkpoint's window: a
        trainer that saved between steps had nothing there. Collective with a group. Returns a CheckpointInfo."""
        info = first_rank_does(lambda: self.head.client.restore_checkpoint(self.name, tag), self.group)
        self.reopen()
        return info

    def close(self) -> None:
        """Ends the session at the server. What it added to the window stays there."""
        self._window.close()

    # Inside

    def _skip_step(self) -> StepResult:
        self.zero_grad()
        return StepResult.skipped_at(first_rank_does(self.head.info, self.group))

    def _warn_of_source(self) -> None:
        linear = self._source() if self._source is not None else None
        self._source = None
        if linear is not None and linear.weight.numel() > 0 and _is_in_a_module(linear):
            warnings.warn(
                f"head '{self.name}' was stepped, and the Linear that its weights came from is still there, with the "
                "old ones, in state_dict() for instance: put the head in its place (model.lm_head = head), or drop it",
                StaleWeightsWarning,
                stacklevel=3,
            )

    def _check_weights(self, weights: torch.Tensor | None, bias: torch.Tensor | None) -> None:
        self._check_shape("weights", weights, (self.vocab_size, self.hidden_size))
        if self.has_bias != (bias is not None):
            raise ValueError(
                f"head '{self.name}' has {'a' if self.has_bias else 'no'} bias, and bias is "
                f"{bias if bias is None else list(bias.shape)}: {'give' if self.has_bias else 'leave out'} it"
            )
        if bias is not None:
            self._check_shape("bias", bias, (self.vocab_size,))

    def _check_shape(self, what: str, tensor: torch.Tensor | None, want: Sequence[int]) -> None:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{what} of head '{self.name}' is a {type(tensor).__name__}, not a torch.Tensor")
        if tuple(tensor.shape) != tuple(want):
            raise ValueError(f"{what} of head '{self.name}' is {list(tensor.shape)}, and must be {list(want)}")
        if not tensor.is_floating_point() or tensor.is_meta:
            raise TypeError(
                f"{what} of head '{self.name}' is {tensor.dtype} on {tensor.device}: give floating point values"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> RemoteHead:
        def free_name() -> str:
            taken = {info.config.name for info in self.head.client.heads()}
            names = (f"{self.name}-copy-{number}" for number in itertools.count(1))
            return next(name for name in names if name not in taken)

        copy = self.snapshot(first_rank_does(free_name, self.group))
        copy.train(self.training)
        if self._window.rank_in_group == 0:
            copy.delete_copy = weakref.finalize(copy, _delete, self.head.client, copy.name)
        warnings.warn(
            f"head '{self.name}' was copied as it is now, to the frozen head '{copy.name}': right for a reference "
            "model; an average of parameters (EMA, SWA) leaves it as it is. It is deleted with the copy",
            FrozenCopyWarning,
            stacklevel=2,
        )
        memo[id(self)], memo[id(self.proxy)] = copy, copy.proxy
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"head '{self.name}' cannot be pickled, since it is at a server: save its state_dict(), or "
            "save_checkpoint() it there, and take it from a client in the other process (RemoteHead(client.head(name)))"
        )


def _check_linear(client: Any, linear: Any) -> None:
    if not isinstance(client, Client):
        way = "client()" if hasattr(client, "client") else "lossd.connect(address) or lossd.launch().client()"
        raise TypeError(f"client is a {type(client).__name__}; want a lossd.Client: {way}")
    if not isinstance(linear, nn.Linear):
        raise TypeError(f"linear is a {type(linear).__name__}; want the torch.nn.Linear that the head takes over")
    if linear.weight.is_meta:
        raise TypeError("linear is on the meta device, where it has no values: load its weights first")


def _is_in_a_module(linear: nn.Linear) -> bool:
    """Whether some module has it as a child. Others may hold it as well: fully_shard keeps those that it has seen."""
    children = (one for one in gc.get_referrers(linear) if isinstance(one, dict))
    return any(all(value is None or isinstance(value, nn.Module) for value in one.values()) for one in children)


def _in_use(client: lossd.Client, name: str, *, exist_ok: bool, reset: bool) -> bool:
    """Whether there is a head of that name that the caller wants to go on with."""
    try:
        info = client.head(name).info()
    except NotFoundError:
        return False
    if info.weight_version == 0 and not info.sessions:  # made, perhaps by a process that failed then, and never used
        return False
    if reset:
        client.delete_head(name, discard_gradient=True)
        return False
    if exist_ok:
        return True
    raise AlreadyExistsError(
        f"there is a head '{name}' at the server: after {info.optimizer_steps} steps of its optimizer, with "
        f"{info.window_tokens} tokens in its gradient. exist_ok=True goes on with it as it is, reset=True deletes it "
        "and begins anew; another rank of one training passes group="
    )


def _copy_weights(source: lossd.Head, target: lossd.Head) -> int:
    version = source.info().weight_version
    write = target.begin_write(f"copy of {source.name} at {version}")
    dtype = dtype_of(source.dtype)
    for first in range(0, source.vocab_size, _COPY_ROWS):
        rows = torch.empty(min(_COPY_ROWS, source.vocab_size - first), source.hidden_size, dtype=dtype, device="cpu")
        bias = torch.empty(rows.shape[0], dtype=torch.float32, device="cpu") if source.config.bias else None
        source.read_rows(first, rows.shape[0], out=rows, weight_version=version, bias_out=bias)
        write.write_rows(first, rows, bias)
    return write.commit()


def _delete(client: lossd.Client, name: str) -> None:
    """When the copy of a head is collected, or the process ends."""
    try:
        with impatient(client) as brief:
            brief.delete_head(name, discard_gradient=True)
    except (LossdError, RuntimeError):  # the server is gone, or this process forked
        pass


def _without_gradient(result: FlushResult) -> FlushResult:
    return dataclasses.replace(result, gradient=None, bias_gradient=None)
