"""What a process knows of a head's gradient window: its session, what it has added, and what is to be done together."""

from __future__ import annotations

import functools
import math
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from lossd.errors import AlreadyExistsError, WindowLostError
from lossd.torch._moved import KEEP_OUT, MovedGradientError, Taken, require_own_value
from lossd.torch._stepping import UnsteppedHeadWarning, optimizer_steps
from lossd.torch.distributed import (
    active_wrapper,
    all_do,
    all_wrappers,
    first_rank_does,
    gather_objects,
    require_no_join,
    world_size,
)

if TYPE_CHECKING:
    import torch.distributed as dist

    import lossd
    from lossd.torch._proxy import GradientProxy
    from lossd.torch.contracts import Landing


_UNDECLARED_LOSSES = 100  # with a gradient of 1, until it is said that this could be declared


class UndeclaredGradientWarning(UserWarning):
    """Losses of a head take two passes, where a declared grad_scale would make it one. A declared loss must be given
    to backward, or dropped with zero_grad()."""


class HeadWindow:
    """The part of a RemoteHead that changes with every batch. The modules of this package reach it by window_of().

    head, rank, group, average, session_options: as RemoteHead was given them. proxy: its parameter. Not thread-safe,
    but for `session`.
    """

    def __init__(
        self,
        head: lossd.Head,
        *,
        session: lossd.Session | None,
        rank: int,
        group: dist.ProcessGroup | None,
        average: bool | int,
        session_options: dict[str, Any],
    ) -> None:
        self.head = head
        self.rank = rank
        self.group = group
        self.average = average
        self.proxy: GradientProxy
        """Set by the RemoteHead, whose parameter it is."""
        self.landing: Landing | None = None
        """A flush_into that an error ended, with the rows that have landed."""
        self.windows_ended = 0
        """How many windows this process has seen end."""
        self.windows_gone = 0
        """How many of them were stepped or dropped. The gradient of those that were flushed is the caller's."""
        self.windows_stepped = 0
        """How many of them were stepped or flushed."""
        self._session_options = session_options
        self._session = session
        self._lock = threading.Lock()
        self._consumed: object = None if session is None else _added_by(session)
        self._closed_at: object = None
        self.source_weight: weakref.ref[torch.Tensor] | None = None
        """The parameter of the Linear that the head was made from."""
        self._steps_seen = 0
        self._written_at: int | None = None
        """The parameter's version when it was last known to be as lossd left it; None: before steps, or told."""
        self._warned = False
        self.undeclared: float = 0
        """How many losses could have declared their gradient; inf once a call has declined to."""
        self.given: int | None = None
        """The backward pass that last gave the parameter a gradient, to be accumulated unless it was
        torch.autograd.grad."""

    # The session

    @property
    def session(self) -> lossd.Session:
        """Opened by the first call that needs it."""
        with self._lock:
            if self._session is None:
                self._session = self.head.open_session(rank=self.rank, **self._session_options)
                # An earlier process with this key may have left something in the window.
                left = self._closed_at is not None and self._closed_at != self._consumed
                resumed = left or "client_key" in self._session_options
                self._consumed = () if resumed else _added_by(self._session)
            return self._session

    def open_again(self) -> None:
        """For after an error that ended the session. The window may hold anything then."""
        with self._lock:
            if self._session is not None:
                self._session_options["client_key"] = self._session.client_key
            self._session = None
            try:
                self._session = self.head.open_session(rank=self.rank, **self._session_options)
            except WindowLostError:  # which is why it is opened again
                self._session = self.head.open_session(rank=self.rank, **self._session_options)
            self._consumed = ()  # unlike any contributions

    def close(self) -> None:
        self._closed_at = self.contributions()
        with self._lock:
            session, self._session = self._session, None
        if session is not None:
            session.close()

    # What was added

    def contributions(self) -> object:
        """Changes whenever this process's session adds to the window; for comparison only."""
        return self._closed_at if self._session is None else _added_by(self._session)

    @property
    def dirty(self) -> bool:
        """Whether this process has added anything since the window was last stepped, flushed or dropped. Batches that
        only look (losses without gradients) add nothing."""
        return not self.head.config.frozen and self.contributions() != self._consumed

    def dirty_anywhere(self) -> bool:
        """`dirty` of any rank. Collective with a group."""
        return any(gather_objects(self.dirty, self.group))

    def touched_anywhere(self) -> bool:
        """Whether a backward pass of any rank has come here since the window began, if only to add nothing, as that of
        a loss that is not finite. Collective with a group."""
        return any(gather_objects(self.dirty or self.proxy.marker is not None, self.group))

    def before_gradient(self) -> None:
        """To be called before a batch adds to the window: settles what was done to the gradient since the last one, and
        warns if optimizers step and this head is left out (unless another process steps it)."""
        require_own_value(self.proxy)
        if not self.dirty:
            self.proxy.taken = Taken()
            self._notice_written()
        if self.dirty and self.proxy.zeroed:
            if self.group is not None:  # dropping it would be for all ranks, and this is one of them
                raise RuntimeError(
                    f"the gradient of head '{self.head.name}' was set to zero in place, and is that of all ranks: call "
                    "zero_grad(set_to_none=True), or head.zero_grad() on every rank"
                )
            self.drop()
        if self.dirty and self.proxy.factor != 1.0:
            raise RuntimeError(
                f"the gradient of head '{self.head.name}' was scaled (clipped, unscaled), and now more would be added "
                "to it: scale it behind the last backward of a step, then step, or drop it with head.zero_grad()"
            )
        if not self.dirty:
            self._steps_seen = optimizer_steps()
        elif self.proxy.marker is None and self.given not in (None, torch._C._current_graph_task_id()):
            self._warn_once(
                f"a backward pass has added to the gradient of head '{self.head.name}', and nothing to .grad of its "
                "parameter, as torch.autograd.grad does: it still waits, and now more is added. Updates by hand do "
                "not reach the head. Call loss.backward(), or head.zero_grad(); if you call head.step(lr), all is well"
            )
        elif optimizer_steps() > self._steps_seen and self.head.info().window_tokens > 0:
            self._warn_of_steps("still waits at the server, and this backward adds to it")

    def _notice_written(self) -> None:
        """Warns once if somebody has written to the parameter since a step."""
        if self._written_at in (None, self.proxy._version):
            return
        self._written_at = None
        warnings.warn(
            f"the parameter of head '{self.head.name}' was written to after a step, as by Lookahead or an average of "
            "parameters that is copied back: the weights at the server have not changed. To have such weights, keep "
            "them here with lossd.torch.LocalWeight, or write them with head.write_weights(). DistributedDataParallel "
            "writes it when it is made: all is well then",
            stacklevel=3,
        )

    def _warn_of_steps(self, state: str) -> None:
        taken = self.proxy.taken.how
        if taken and self.windows_stepped == 0 and not self.proxy.held:
            self.proxy.taken = Taken()
            raise MovedGradientError(
                f"an optimizer has stepped without head '{self.head.name}', whose gradient was taken from its "
                f"parameter ({taken}) and {state}. {KEEP_OUT}"
            )
        self._warn_once(
            f"an optimizer has stepped and head '{self.head.name}' was left out: its gradient {state}. Make the "
            "optimizer of parameters() that contain the head's (model.lm_head = head, before the optimizer is made), "
            "call head.step(lr), or drop the gradient with head.zero_grad() before an optimizer steps. If that was the "
            "optimizer of another model, all is well"
        )

    def _warn_once(self, said: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(said, UnsteppedHeadWarning, stacklevel=4)

    def notice_undeclared(self) -> None:
        """A loss without a grad_scale was given a gradient of exactly 1. Warns once, at the hundredth."""
        self.undeclared += 1
        if self.undeclared == _UNDECLARED_LOSSES:
            warnings.warn(
                f"{_UNDECLARED_LOSSES} losses of head '{self.head.name}' were given a gradient of exactly 1, and none "
                "had declared it: each sent its tokens twice. Declare it once, with "
                "RemoteHead.from_linear(..., grad_scale=1.0) or patch(..., grad_scale=1.0), or with each call",
                UndeclaredGradientWarning,
                stacklevel=4,
            )

    # The window's end

    def end(self, *, flushed: bool = False, dropped: bool = False) -> None:
        """The window was ended: what this process has of it is forgotten."""
        self.windows_ended += 1
        self.windows_gone += not flushed
        if not dropped:
            self._written_at = self.proxy._version if self.windows_stepped == 0 else self._written_at
            self.windows_stepped += 1
            self.proxy.taken = Taken()
        self._consumed = self.contributions()
        self.landing = None
        self.given = None
        self.proxy.forget()
        self.proxy.marker = None

    def drop(self, *, on_purpose: bool = False) -> None:
        """Drops what waits at the server, whoever added it; sends nothing if no rank has added anything since the last
        window ended. on_purpose: no warning that nobody has stepped it. Collective with a group."""
        if self.dirty and optimizer_steps() > self._steps_seen and not on_purpose:
            self._warn_of_steps("is dropped unused")
        if self.dirty_anywhere():
            first_rank_does(self._discard, self.group)
        self.end(dropped=True)

    def _discard(self) -> None:
        def discard() -> None:
            self.head.discard(marks=[session.text() for session in self.head.info().sessions])

        try:
            discard()
        except AlreadyExistsError:  # a flush before, whose commit had no answer, is over now; this window is not
            discard()

    # Together with the other ranks

    @functools.cached_property
    def _wrappers(self) -> list[weakref.ref[torch.nn.parallel.DistributedDataParallel]]:
        return all_wrappers()

    def require_no_join(self) -> None:
        """To be called before a loss that will have a gradient: distributed.require_no_join()."""
        if self.group is None:
            return
        active = active_wrapper()
        # The head may stand outside of the module that is wrapped.
        require_no_join(self.head.name, [one() for one in self._wrappers] if active is None else [active])

    @property
    def rank_in_group(self) -> int:
        return 0 if self.group is None else torch.distributed.get_rank(self.group)

    @property
    def scale(self) -> float:
        """What the next step or flush multiplies the gradient with: 1 / ranks if averaged, times what was done to the
        proxy."""
        return self.proxy.factor / (world_size(self.group) if self.average is True else self.average or 1)

    def collectively(
        self,
        ask: Callable[[list[str] | None], Any],
        tell: Callable[[Any], Any] | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> Any:
        """ask(marks of all ranks), on the first of them; its answer everywhere. check(): what has to be right on each
        before."""

        def ready() -> list[str]:
            check()
            return self.head.marks()

        if self.group is None:
            check()
            return ask(None)
        marks = [mark for own in all_do(ready, self.group) for mark in own]
        return first_rank_does(lambda: ask(marks), self.group, tell)

    def losses_finite(self, factor: float = 1.0) -> bool:
        """Whether on all ranks every loss since the window began had a finite gradient, which the proxy's marker says,
        and `factor` is finite."""
        marker = self.proxy.marker
        own = math.isfinite(factor) and (marker is None or bool(torch.isfinite(marker).all()))
        return all(gather_objects(own, self.group))

    def require_finite(self, factor: float) -> None:
        if not math.isfinite(factor):
            raise FloatingPointError(
                f"the gradient of head '{self.head.name}' is multiplied with {factor}, as of a norm that is not "
                f"finite: nothing was stepped. Call zero_grad(), or let steps like this be skipped "
                f"(skip_non_finite=True)"
            )

    def check_factor(self, gradient_scale: float = 1.0) -> None:
        """FloatingPointError if the next step would multiply the gradient with what is not finite. Collective with a
        group."""
        all_do(lambda: self.require_finite(gradient_scale * self.scale), self.group)


def window_of(head: Any) -> HeadWindow:
    """The window of a RemoteHead."""
    window: HeadWindow = head._window  # noqa: SLF001  (this is the way in)
    return window


def _added_by(session: lossd.Session) -> tuple[Any, ...]:
    return session.client_key, session.gradient_batches
