"""A head: weights [V, H], their gradient and their optimizer, at the server."""

from __future__ import annotations

import ctypes as c
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import lossd._flush as _flush
import lossd._logits as _logits
import lossd._step as _step
import lossd._structs as s
from lossd._arguments import ProgressCallback, Raised, integer, number
from lossd._core import HeadCore
from lossd._library import encoded, library, marks_array
from lossd._window import Contributor
from lossd.averages import MovingAverage
from lossd.errors import (
    AbortedError,
    AlreadyExistsError,
    DeadlineExceededError,
    FailedPreconditionError,
    LossdError,
    NotFoundError,
    UnavailableError,
    WindowLostError,
)
from lossd.results import (
    FlushResult,
    GradientStats,
    HeadConfig,
    HeadInfo,
    LoadedWeights,
    SavedCheckpoint,
    StepResult,
    from_json,
)
from lossd.session import Session
from lossd.weights import WeightWrite, begin_write, read_rows, write_weights

if TYPE_CHECKING:
    from lossd.client import Client


class Head:
    """Made by Client.create_head and Client.head. Thread-safe.

    Where marks are asked for, None stands for those of every session of this head that this client opened and that
    may have added to the window, closed ones too. Those of other processes (Session.marks) are given as strings, and
    then this process's own have to be among them.
    """

    def __init__(self, client: Client, core: HeadCore, *, lr: float | None = None, restored: bool = False) -> None:
        self._client = client
        self._core = core
        self._lr = lr
        # The head may be another server's, or another one of this name; or the caller had it restored just now, and so
        # knows what its marks stand for.
        self._forget_lost(core.window.marks(), told=restored)

    @property
    def client(self) -> Client:
        return self._client

    @property
    def config(self) -> HeadConfig:
        return self._core.config

    @property
    def name(self) -> str:
        return self._core.name

    @property
    def vocab_size(self) -> int:
        return self._core.vocab_size

    @property
    def hidden_size(self) -> int:
        return self._core.hidden_size

    @property
    def dtype(self) -> str:
        """The weights' dtype: "float32", "bfloat16" or "float16"."""
        return self._core.config.weight_type

    def info(self) -> HeadInfo:
        """What the server knows of it now."""
        return self._core.info()

    # Weights

    def write_weights(
        self, weights: Any, bias: Any = None, *, dtype: Any = None, progress: ProgressCallback | None = None
    ) -> int:
        """Publishes weights [V, H], and of a head with a bias bias [V], as one new version, which is returned.

        float32, bfloat16 or float16; rounded to the head's dtype before they are sent, unless the server keeps an
        fp32 master. dtype: "bfloat16" of an array of uint16. A tensor on a GPU is read in pieces.
        """
        return write_weights(self._core, weights, bias, dtype, progress)

    def read_weights(
        self,
        *,
        out: Any = None,
        dtype: Any = "float32",
        bias_out: Any = None,
        progress: ProgressCallback | None = None,
    ) -> Any:
        """All rows, of one version, into `out` [V, H] (whose dtype counts then) or a new NumPy array, which is
        returned; bfloat16 in NumPy is uint16. bias_out [V] fp32: of a head with a bias."""
        return read_rows(self._core, 0, self.vocab_size, out, dtype, 0, bias_out, progress)

    def read_rows(
        self,
        first_row: int,
        rows: int,
        *,
        out: Any = None,
        dtype: Any = "float32",
        weight_version: int = 0,
        bias_out: Any = None,
        progress: ProgressCallback | None = None,
    ) -> Any:
        """Rows [first_row, first_row + rows), [rows, H]; FailedPreconditionError if they are not of weight_version
        (0: any)."""
        return read_rows(self._core, first_row, rows, out, dtype, weight_version, bias_out, progress)

    def begin_write(self, write_key: str, *, replace: bool = True) -> WeightWrite:
        """A version that several processes write together, under the same key, each its own rows. replace: drop an
        unfinished write of another key."""
        return begin_write(self._core, write_key, replace=replace, owner=self)

    def snapshot(self, name: str = "", *, source_version: int = 0) -> Head:
        """A frozen copy of the weights, as of now, that the server makes by itself: a reference model, a teacher.

        name: "" takes that of this head with the version of its weights, "lm_head.v17". source_version: what the
        weights must be of; 0: any. AlreadyExistsError if there is a head of that name. Client.copy_head does more.
        """
        if name:
            return self._client.copy_head(self.name, name, frozen=True, source_version=source_version)
        while True:
            version = source_version or max(1, self.info().weight_version)  # 0 would take any
            try:
                return self._client.copy_head(self.name, f"{self.name}.v{version}", frozen=True, source_version=version)
            except FailedPreconditionError:
                # A step may have come between the two calls: the name is to say what is in it.
                if source_version or max(1, self.info().weight_version) == version:
                    raise

    def park(self) -> HeadInfo:
        """Client.park_head of this head, whose sessions are closed."""
        return self._client.park_head(self.name)

    def ema(self, decay: float, name: str = "") -> MovingAverage:
        """A moving average of the weights that the server keeps, beginning with what they are now. Its update() is
        called after each step. name: of its head; "" takes that of this one with ".ema". The average of 16-bit weights
        is kept in fp32. AlreadyExistsError if there is a head of that name: lossd.MovingAverage goes on with it.
        """
        kept = number(decay, "decay")
        if not 0 <= kept <= 1:
            raise ValueError(f"decay is {decay}; want 0 to 1")
        average = self._client.copy_head(self.name, name or f"{self.name}.ema", frozen=True, master_weights=True)
        return MovingAverage(self, average, kept)

    def blend(self, source: Head | str, decay: float, *, source_version: int = 0, target_version: int = 0) -> int:
        """These weights become decay · weights + (1 − decay) · the source's, at the server, as a new version, which is
        returned. Both heads are of the same sizes, dtype, bias, logit_scale and softcap.

        source: a head of this server; only its name is sent.
        source_version, target_version: what the weights of either must be of; 0: any. FailedPreconditionError if they
        are not, without weights, while a write of these weights is under way, and while this head's window has a
        gradient (a frozen one has none).
        """
        version = c.c_uint64()
        with self._core.handle as head:
            library().call(
                "lossd_head_blend",
                head,
                encoded(source if isinstance(source, str) else source.name, "source"),
                number(decay, "decay"),
                integer(source_version, "source_version"),
                integer(target_version, "target_version"),
                c.byref(version),
            )
        return version.value

    def load_weights(
        self, path: str, tensor: str = "", bias_tensor: str = "", *, progress: ProgressCallback | None = None
    ) -> LoadedWeights:
        """The server reads them from a safetensors file below its --weights_dir. tensor: "" takes "lm_head.weight",
        or else the only one of the head's shape."""
        raised = Raised()
        with self._core.handle as head:
            data = library().json(
                "lossd_head_load_weights",
                head,
                encoded(path, "path"),
                encoded(tensor, "tensor") or None,
                encoded(bias_tensor, "bias_tensor") or None,
                raised.progress(progress),
                None,
            )
        raised.again()
        return from_json(LoadedWeights, data)

    def logits(
        self,
        hidden: Any,
        *,
        dtype: Any = "float32",
        top_k: int | None = None,
        logit_scale: float | None = None,
        softcap: float | None = None,
        bias: str = "head",
        weight_version: int = 0,
        hidden_dtype: Any = None,
    ) -> Any:
        """Logits of a few tokens, for generation and evaluation, all of one weight version. Needs no session, and
        nothing of the window moves.

        hidden: [..., H] as Session.compute takes it, all finite; PyTorch tensors on a GPU go through the CPU.
        dtype: of the logits [..., V] that are returned, an array of the kind of hidden: rounded at the server,
            infinite where they do not fit; bfloat16 in NumPy is uint16.
        top_k: 1 to 64: of each token only so many of the largest logits come, and the log-sum-exp of all (TopLogits):
            a few bytes instead of V numbers.
        logit_scale, softcap: None takes the head's, softcap=0 none. bias: "head" (if it has one), "ignore", "use".
        weight_version: what the weights must be of (FailedPreconditionError if not); 0: whatever they are.
        """
        request = _logits.Request(hidden_dtype, dtype, top_k, logit_scale, softcap, bias, weight_version)
        return _logits.run(self._core, hidden, request)

    def save_checkpoint(self, tag: str, *, marks: Sequence[str] = ()) -> SavedCheckpoint:
        """Everything the server has of the head, as of one moment, in its --checkpoint_dir.

        marks: of every session that has added to the window (Head.marks of all processes). The checkpoint has that
        and nothing else, or nothing is saved: FailedPreconditionError names the difference, and WindowLostError says
        that a replica was lost with it. Without them, what the window has.
        """
        with self._core.handle as head:
            data = library().json("lossd_head_save_checkpoint", head, encoded(tag, "tag"), *marks_array(list(marks)))
        return from_json(SavedCheckpoint, data)

    # Sessions

    def open_session(
        self,
        *,
        client_key: str = "",
        rank: int = 0,
        lanes: int = 0,
        chunk_bytes: int = 0,
        deterministic: bool = False,
        spread_lanes: bool = True,
        held_hidden_bytes: int = 0,
    ) -> Session:
        """client_key: names this client, so that a restarted process resumes the session; "": random. lanes:
        connections that a large batch is spread over, 0: by size. chunk_bytes: 0: by device. deterministic: what it
        adds to dW is bitwise independent of chunks, lanes and repeats; ranks of a head's sessions must differ then.
        spread_lanes: where heads lie over several devices, lanes are opened at each of the processes that have these.
        held_hidden_bytes: memory of the server's host in which it holds the hidden states of batches with a `hold`, so
        that their second phase does not send them again (docs/losses.md): InvalidArgumentError if it never has so much,
        ResourceExhaustedError if others have it.

        Raises WindowLostError, once, if a session that this client had under client_key is gone with what it had added
        to the window, since its server or replica was lost: open it again, and compute its batches of the window again.
        """
        options = library().make(s.SessionOptions)
        options.client_key = encoded(client_key, "client_key") or None
        options.rank = integer(rank, "rank", most=(1 << 31) - 1)
        options.lanes = integer(lanes, "lanes", most=s.LOSSD_MOST_LANES)
        options.chunk_bytes = integer(chunk_bytes, "chunk_bytes")
        options.deterministic = bool(deterministic)
        options.lanes_at_target = not spread_lanes
        options.held_hidden_bytes = integer(held_hidden_bytes, "held_hidden_bytes")
        pointer = c.c_void_p()
        with self._core.handle as head:
            library().call("lossd_head_open_session", head, c.byref(options), c.byref(pointer))
        return Session(self, self._core, pointer.value, deterministic=deterministic)

    def marks(self) -> list[str]:
        """What None stands for where marks are asked for."""
        return list(self._named().values())

    def _named(self) -> dict[Contributor, str]:
        if self._core.window.has_ended():
            self._core.window.forget_consumed(self.info())
        return self._core.window.marks()

    # The gradient window

    def flush(
        self,
        out: Any = None,
        *,
        dtype: Any = "float32",
        gradient_scale: float = 1.0,
        marks: Sequence[str] | None = None,
        bias_out: Any = None,
        sink: Callable[[int, Any, Any], None] | None = None,
        on_frozen: Callable[[], None] | None = None,
        progress: ProgressCallback | None = None,
        commit: bool = True,
    ) -> FlushResult:
        """Reads dW [V, H], times gradient_scale, and ends the window.

        out: where it goes (its dtype counts), else a new NumPy array of dtype; FlushResult.gradient. bias_out: [V]
        fp32 of a head with a bias. sink(first_row, rows, bias): is given the rows as they arrive instead, in order,
        as NumPy arrays [n, H] and [n] (None without a bias) that are valid during the call only; what it raises ends
        the flush and leaves the window whole. on_frozen: called once the window is frozen. commit=False leaves it
        frozen for commit_flush or abort_flush. After an error the window is whole, and `out` holds a part of dW.

        With one exception: an error with a flush_id (UnavailableError, DeadlineExceededError) says that all of dW was
        read and only the commit has no answer. Repeat commit_flush(error.flush_id), and dW is what was read; or call
        flush, discard or step again: it first repeats the commit, and raises AlreadyExistsError once that is done,
        having read and dropped nothing of the window behind it (a discard with the same marks returns). The same call
        says so after a KeyboardInterrupt that came when the window had just been ended.
        """
        self._settle_interrupted()
        request = _flush.Request(out, dtype, gradient_scale, bias_out, sink, on_frozen, progress, commit)
        mine = {} if commit else self._core.window.marks()
        result: FlushResult = self._consuming(marks, commit, lambda given: _flush.run(self._core, request, given))
        if not commit:
            self._core.window.froze(mine)
        return result

    def discard(self, *, marks: Sequence[str] | None = None) -> FlushResult:
        """Ends the window without reading it. Its gradient is dropped, not sent; the result describes it."""
        self._settle_interrupted()
        result: FlushResult = self._consuming(marks, True, lambda given: _flush.discard(self._core, given))
        return result

    def commit_flush(self, flush_id: str) -> None:
        """Ends the window that a flush with commit=False left frozen."""
        with self._core.handle as head:
            library().call("lossd_head_commit_flush", head, encoded(flush_id, "flush_id"))
        self._core.window.committed()

    def abort_flush(self, flush_id: str) -> None:
        """Reopens the window whole."""
        with self._core.handle as head:
            library().call("lossd_head_abort_flush", head, encoded(flush_id, "flush_id"))

    def gradient_stats(self, *, gradient_scale: float = 1.0, marks: Sequence[str] | None = None) -> GradientStats:
        """Statistics of the window's gradient times gradient_scale: norm, largest magnitude, what is not finite."""
        scale = number(gradient_scale, "gradient_scale")
        stats = library().make(s.GradientStats)

        def ask(given: list[str]) -> None:
            with self._core.handle as head:
                library().call("lossd_head_gradient_stats", head, *marks_array(given), scale, c.byref(stats))

        self._consuming(marks, False, ask)
        return GradientStats(stats.norm, stats.bias_norm, stats.largest, stats.non_finite, stats.window_tokens)

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
        marks: Sequence[str] | None = None,
    ) -> StepResult:
        """One step of the head's optimizer, which consumes the window. Exactly once: after UnavailableError or
        DeadlineExceededError the same call again is about the same step, also if losses alone (mode="loss") were
        computed in between. A window without a token changes nothing, as torch.optim leaves a parameter alone that has
        no gradient: the result says `skipped`, and the next window begins.

        lr: None takes that of the optimizer which Client.create_head was given here (lossd.AdamW(lr=1e-3)).
        gradient_scale: multiplies the gradient before anything else sees it. skip_non_finite: a gradient with NaN or
        infinity, or such a gradient_scale, changes nothing, and the window ends; without it such a gradient_scale is a
        FloatingPointError, and nothing has happened. weight_decay, momentum, betas: None takes the head's.
        generation: the window that the step is to consume, for a process that does not know whether it was taken.
        """
        rate = number(self._rate(lr), "lr")
        options = _step.options_of(rate, gradient_scale, skip_non_finite, weight_decay, momentum, betas, generation)
        if not math.isfinite(options.gradient_scale):  # and so no element of the gradient is
            return self._skip_step(marks)
        self._settle_interrupted()
        answered = _step.untold(self._core, options)
        if answered is not None:
            return answered
        call = _step.StepCall(self._core, options)
        self._consuming(marks, True, call.run, step=call)
        return call.result()

    def _rate(self, lr: float | None) -> float:
        rate = self._lr if lr is None else lr
        if rate is None:
            raise ValueError(
                f"step() of head {self.name!r} needs a learning rate: step(lr=1e-3), or create the head with "
                "optimizer=lossd.AdamW(lr=1e-3), which optimizers with lr=None (Adafactor's relative_step) step it with"
            )
        return rate

    def _skip_step(self, marks: Sequence[str] | None) -> StepResult:
        dropped = self.discard(marks=marks)
        return StepResult.skipped_at(self.info(), dropped.window_tokens)

    def _consuming(
        self,
        marks: Sequence[str] | None,
        ends: bool,
        call: Callable[[list[str]], Any],
        *,
        step: _step.StepCall | None = None,
    ) -> Any:
        """Runs `call` with the marks, and keeps book of whose are still to be named."""
        if isinstance(marks, str):
            raise TypeError("marks is a str; want a list of them, one of each session")
        window = self._core.window
        mine = (step is not None and window.open_step()) or (self._named() if marks is None else window.marks())
        try:
            answer = call(list(mine.values()) if marks is None else list(marks))
        except LossdError as error:
            if step is not None:
                open_again = isinstance(error, (UnavailableError, DeadlineExceededError)) and not error.flush_id
                window.named_by(mine if open_again else {})
            if isinstance(error, AlreadyExistsError):
                window.committed()
            elif error.flush_id:
                window.left_open(mine, error.flush_id)
            elif isinstance(error, (WindowLostError, NotFoundError)):
                self._forget_lost(mine, told=True)
            raise
        except BaseException as error:
            window.keep_interrupted(mine)
            if step is not None and step.is_untold:
                window.consumed(mine)
            elif step is not None and isinstance(error.__cause__, LossdError):  # it may have been taken
                window.named_by(mine)
            raise
        if ends:
            window.consumed(mine)
        return answer

    def _settle_interrupted(self) -> None:
        """Before the next window ends: what an interruption kept from the caller, who has the gradient all the same."""
        flush_id = self._core.window.interrupted()
        if not flush_id:
            return
        try:
            self.commit_flush(flush_id)
        except (AbortedError, NotFoundError, WindowLostError):
            self._core.window.committed()
            raise
        error = AlreadyExistsError(
            f"flush {flush_id}, which was interrupted when it had ended its window, is committed: what it read, if it "
            "read, is the gradient. Nothing was done to the window behind it; make this call again if it is meant"
        )
        error.flush_id = flush_id
        raise error

    def _forget_lost(self, marks: dict[Contributor, str], *, told: bool) -> None:
        """Leaves out those of `marks` that the server, asked after they were taken, does not know of."""
        if not marks:
            return
        try:
            self._core.window.drop_lost(marks, self.info(), told=told)
        except NotFoundError:
            self._core.window.drop_lost(marks, HeadInfo(), told=told)
        except LossdError:  # the caller gets the error that matters; the next call comes here again
            pass

    def close(self) -> None:
        """Lets go of the handle; the head stays at the server. Needed by nobody who closes the client."""
        self._core.handle.close()

    def __repr__(self) -> str:
        return f"<lossd.Head {self.name!r} [{self.vocab_size}, {self.hidden_size}] {self.dtype}>"
