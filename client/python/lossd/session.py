"""A stream of batches into a head's gradient window."""

from __future__ import annotations

import ctypes as c
import json
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING, Any

import lossd._device as _device
import lossd._structs as s
import lossd._tensors as t
from lossd._arguments import integer
from lossd._batch import (
    BatchOptions,
    Distillation,
    LossKeywords,
    TargetLists,
    known_numbers,
    prepare,
    result_of,
    takes_loss_numbers,
)
from lossd._core import HeadCore
from lossd._handles import Handle
from lossd._library import library
from lossd._staging import Staged, Staging, stage
from lossd._window import Contributor, generation_of
from lossd.errors import CancelledError, WindowLostError
from lossd.results import BatchResult

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from lossd.head import Head


class _Turn:
    """Lets one call of a session in after the other. Unlike the library's own lock it lets a signal through."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None

    def __enter__(self) -> None:
        if self._owner == threading.get_ident():
            raise RuntimeError("the handler of a signal must not use the session whose call it has interrupted")
        self._lock.acquire()
        self._owner = threading.get_ident()

    def __exit__(self, *_error: object) -> None:
        self._owner = None
        self._lock.release()


class Session:
    """Made by Head.open_session. Each token it computes counts in dW exactly once, whatever the network does.

    Methods may be called from any thread; calls of one session wait for each other. Arguments are checked before
    anything is sent. After an error from the server other than a rejected argument the session is over: open one
    with the same client_key, or after WindowLostError a new one. The same holds after a KeyboardInterrupt that cut a
    compute short: a part of its batch may be in the window, so discard that (Head.discard) and replay it, or resume_at
    the batch. A context manager, which closes it.
    """

    def __init__(self, head: Head, core: HeadCore, pointer: int | None, *, deterministic: bool = False) -> None:
        self._head = head
        self._core = core
        self._deterministic = deterministic
        self._gradient_batches = 0
        self._stagings: dict[Any, Staging] = {}
        self._handle = Handle(pointer, "lossd_session_free", "this session")
        self._turn = _Turn()
        with self._handle as session:
            key = library().function("lossd_session_client_key")(session)
            in_window = library().function("lossd_session_opened_in_window")(session)
        self._client_key = bytes(key).decode()
        self._contributor = Contributor(self._client_key, self._marks_of(self._handle, self._turn))
        self._executor: ThreadPoolExecutor | None = None
        self._interrupted = False  # in a compute
        self._lock = threading.Lock()
        if not in_window:  # what an earlier process with this client_key added belongs to windows that have ended
            self._contributor.begin_window(self._contributor.marks())
        try:
            self._tell_lost(core.window.add(self._contributor))
        except BaseException:
            core.window.drop(self._contributor)
            self._handle.close()
            raise

    def _tell_lost(self, earlier: dict[Contributor, str]) -> None:
        """`earlier`: sessions of this client_key that had added what this one does not have. Their lease has ended, and
        the window still has it, or they are gone with it."""
        if not earlier:
            return
        info = self._core.info()
        for marks in self._core.window.drop_lost(earlier, info, told=False):
            if generation_of(marks) >= info.generation:  # else that window has ended
                raise WindowLostError(
                    f"window lost: replay since generation {info.generation} of head '{self._core.name}' (what a "
                    f"session of client_key '{self._client_key}' had added is gone; it can be opened anew)"
                )

    @staticmethod
    def _marks_of(handle: Handle, turn: _Turn) -> Any:
        # Holds the handle and not the session, which may be dropped before the flush that has to name it.
        def read() -> str:
            with handle as session, turn:
                return library().text("lossd_session_marks", session)

        return read

    @property
    def head(self) -> Head:
        return self._head

    @property
    def client_key(self) -> str:
        """A process that was restarted opens the same session with it."""
        return self._client_key

    @property
    def held_hidden_bytes(self) -> int:
        """What the server has set aside for hidden states between two phases: less than was asked for at an older
        server, and of a session that was open before where more is not free."""
        with self._handle as session:
            return int(library().function("lossd_session_held_hidden_bytes")(session))

    @property
    def session_id(self) -> str:
        return str(json.loads(self.marks())["session_id"])

    @property
    def reconnects(self) -> int:
        """How often a stream was re-established."""
        with self._handle as session, self._turn:
            return int(library().function("lossd_session_reconnects")(session))

    def lane_places(self) -> list[dict[str, str]]:
        """Where each lane is: its "target", and in "why_not_elsewhere" why it is not where the server has named a
        place for it; "" if it is."""
        with self._handle as session, self._turn:
            places: list[dict[str, str]] = json.loads(library().text("lossd_session_lane_places", session))
            return places

    @takes_loss_numbers
    def compute(
        self,
        hidden: Any,
        labels: Any,
        *,
        mode: str = "gradients",
        dx: Any = True,
        dx_dtype: Any = None,
        hidden_dtype: Any = None,
        losses: bool = True,
        reduction: str = "sum",
        normalizer: float | None = None,
        z_normalizer: float | None = None,
        ignore_index: int = -100,
        gradient_scale: float = 1.0,
        z_gradient_scale: float | None = None,
        class_weights: str = "head",
        bias: str = "head",
        token_weights: Any = None,
        lse_gradients: Any = None,
        entropy_gradients: Any = None,
        kept_tokens: tuple[Any, Any] | None = None,
        target_lists: TargetLists | None = None,
        weight_version: int = 0,
        hold: int = 0,
        first_token: int = 0,
        window_token: int | None = None,
        torch_compat: bool = False,
        distillation: Distillation | None = None,
        returns: Collection[str] = (),
        top_k: int = 0,
        out: Mapping[str, Any] | None = None,
        **numbers: Unpack[LossKeywords],
    ) -> BatchResult:
        """Sends the batch and returns when all that is wanted has arrived; the GIL is released meanwhile.

        hidden: [..., H] of float32, bfloat16 or float16, with any strides (copied only if it is not dense): a NumPy
            array, anything NumPy can look at, or a PyTorch tensor. bfloat16 in NumPy is ml_dtypes.bfloat16, or uint16
            with hidden_dtype="bfloat16".
        labels: [...] integers in [0, V), or ignore_index. No tokens at all are fine.
        mode: "gradients" adds to dW and makes dX; "loss" only looks.
        dx: True makes dX of dx_dtype (None: that of hidden), False does not (nor is it sent: dW alone is a product
            less), an array is written to.
        PyTorch tensors on a GPU: outputs are on it, too. Where the server runs on the same GPU (same_host_regions) they
            do not leave it, otherwise they travel through pinned memory, on a stream of the session's own. Both are
            in the order of the current stream. labels and the like may be on the GPU or not.
        losses: whether the loss of each token is wanted.
        reduction: of `loss` and of what the gradients are of: "sum"; "mean", over `normalizer` if it is given (the
            global batch's count of valid tokens, or with class weights the sum of the labels' weights), otherwise
            over this batch's; "late_mean", whose factor Head.flush or Head.step gets. docs/losses.md has the rest.
        gradient_scale: multiplies dX and dW, not the losses.
        logit_scale, softcap: None takes the head's. class_weights, bias: "head" (if it has any), "ignore", "use".
        token_weights, lse_gradients, entropy_gradients: [...], of each token: its weight, the upstream gradients of
            its log-sum-exp and its entropy. One whose values there are all 0, its weight among them, costs nothing if
            no returns but "z_losses" are wanted.
        kept_tokens: (offsets [N + 1], ids [offsets[N]]), integers: each token's distribution is over its list of ids
            alone, ids[offsets[i]:offsets[i + 1]] of the i-th of the N tokens. A list has the token's label, and nothing
            twice; an ignored token's may be empty. Not with label_smoothing, a distillation or top_k
            (InvalidArgumentError), nor where heads lie over several devices (UnimplementedError).
        target_lists: soft targets on a list of ids for each token. Not with label_smoothing, a distillation or
            kept_tokens (InvalidArgumentError), nor where heads lie over several devices or have fixed_segments
            (UnimplementedError).
        weight_version: what the weights must be of (FailedPreconditionError if not); 0: whatever they are.
        hold: a number of both phases of one batch, by which the head's held_bytes keep what mode="loss" has computed
            for mode="gradients" of the same tokens, and the session's held_hidden_bytes their hidden states, which are
            then sent once and must not change in between (docs/losses.md); 0: nothing is kept.
        returns: of each token: "log_sum_exp", "z_losses", "log_probabilities", "entropies", "predictions",
            "target_ranks", "divergences" (with a distillation or target_lists), "top_k" with top_k of 1 to 64.
        out: arrays of the caller to write to, by the names of BatchResult; dense, fp32 or int32.

        Raises TypeError or ValueError for arguments that cannot be right, InvalidArgumentError for what the server
        rejects, WindowLostError, UnavailableError and the others of lossd.errors.
        """
        others = ("self", "hidden", "labels", "out", "numbers")
        options = BatchOptions(
            **{name: value for name, value in locals().items() if name not in (*others, "others")},
            **known_numbers(numbers, "compute"),
            out={} if out is None else out,
        )
        return self._compute(hidden, labels, options)

    @property
    def gradient_batches(self) -> int:
        """How many batches with mode="gradients" it was given so far; one that failed may have added something."""
        return self._gradient_batches

    def _compute(self, hidden: Any, labels: Any, options: BatchOptions) -> BatchResult:
        if _device.layer_of(hidden) is not None:
            return self._stage(hidden, labels, options).compute(self._run, wait=False)
        kind = t.kind_of(hidden)
        view = t.float_view(hidden, "hidden", options.hidden_dtype)
        self._check_hidden(view.shape)
        dx = None
        arrays: dict[str, Any] = {}
        if options.wants_dx:
            dtype = view.dtype if options.dx_dtype is None else t.dtype_name(options.dx_dtype, "dx_dtype")
            array = options.dx_array
            arrays["dx"] = kind.empty(view.shape, dtype) if array is None else array
            dx = t.output_view(arrays["dx"], "dx", view.shape, dtype)
        prepared = prepare(view, labels, kind, dx, options)
        result = self._run(prepared.batch, prepared.outputs)
        return result_of(result, {**prepared.arrays, **arrays})

    def _check_hidden(self, shape: tuple[int, ...]) -> None:
        if not shape or shape[-1] != self._head.hidden_size:
            raise ValueError(f"hidden has shape {shape}; want [..., {self._head.hidden_size}] for {self._head.name!r}")

    def _stage(self, hidden: Any, labels: Any, options: BatchOptions) -> Staged:
        """Begins to bring a batch from its GPU, in the order of the calling thread's current stream."""
        self._check_hidden(tuple(hidden.shape))
        shape = tuple(labels.shape if hasattr(labels, "shape") else t.label_view(labels).shape)
        if shape != tuple(hidden.shape[:-1]):
            raise ValueError(f"labels has shape {shape}; want {tuple(hidden.shape[:-1])}")
        with self._lock:
            staging = self._stagings.get(hidden.device)
            if staging is None:
                layer, torch = _device.layer_of(hidden), t.torch_of(hidden)
                assert layer is not None
                regions = not self._deterministic  # these may not lie in device regions
                staging = Staging(self._head.client, layer, hidden.device, torch, regions=regions)
                self._stagings[hidden.device] = staging
        return stage(staging, hidden, labels, options)

    def _run(self, batch: s.Batch, outputs: s.Outputs) -> s.Result:
        if batch.mode == s.LOSSD_LOSS_AND_GRADIENTS:
            self._gradient_batches += 1
            self._core.window.note_gradient()
        result = library().make(s.Result)
        try:
            with self._handle as session, self._turn:
                if self._interrupted:
                    raise CancelledError(
                        f"this session ended with an earlier error: a compute was interrupted, and its batch, or part "
                        f"of it, is in the window. Open another session with client_key '{self._client_key}', and "
                        "discard the window or resume at the batch"
                    )
                library().call(
                    "lossd_session_compute",
                    session,
                    c.byref(batch),
                    c.byref(outputs),
                    c.byref(result),
                    interrupted=self._note_interrupted,
                )
        except WindowLostError:
            # The session's contribution is gone, so no flush can name it any more.
            self._core.window.drop(self._contributor)
            raise
        return result

    def _note_interrupted(self, done: bool) -> None:
        # The library ends a session whose compute it cut short. One that it has done, and whose caller does not know,
        # ends here: the same batch again would be counted twice.
        self._interrupted = done

    def compute_async(self, hidden: Any, labels: Any, **options: Any) -> Future[BatchResult]:
        """The same as compute, in a thread of the session's own, in the order of the calls. The tensors must be left
        as they are until the future is done. Cancelling it works until its turn has come. Tensors on a GPU are taken
        in the order of the calling thread's stream, while the batch before is computed (two are under way at most),
        and the outputs may be used in any stream."""
        if _device.layer_of(hidden) is None:
            return self._thread().submit(self.compute, hidden, labels, **options)
        # Tensors on a GPU are copied while the batch before is computed, in the order of this thread's stream.
        options["out"] = options.get("out") or {}
        thread = self._thread()
        staged = self._stage(hidden, labels, BatchOptions(**options))
        future = thread.submit(staged.compute, self._run, wait=True)
        future.add_done_callback(lambda done: staged.cancel() if done.cancelled() else None)
        return future

    def _thread(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._executor is None:
                if self._handle.closed:
                    raise ValueError("this session is closed")
                self._executor = ThreadPoolExecutor(1, thread_name_prefix="lossd-session")
            return self._executor

    def marks(self) -> str:
        """What the server has accepted of this session, as JSON text: what a flush or a step in another process has
        to be given. True right after it was opened and after every compute that succeeded."""
        return self._contributor.marks()

    def resume_at(self, sequences: Sequence[int]) -> None:
        """The next batch is the one that began at `sequences` (BatchResult.first_sequences): what the server has of
        it is computed again, and not added again. For a process that was restarted with the same client_key."""
        numbers = [integer(one, "sequences", least=1) for one in sequences]
        array = (c.c_uint64 * len(numbers))(*numbers)
        with self._handle as session, self._turn:
            library().call("lossd_session_resume_at", session, array, len(numbers))

    def close(self) -> None:
        """Ends the session at the server; what it added to the window stays there. May be called again."""
        if self._handle.closed:
            return
        self._finish_thread()
        # It waits for the call of another thread. A signal then leaves the session open: its marks are not known yet.
        self._contributor.end()
        try:
            with self._handle as session, self._turn:
                library().call("lossd_session_close", session)
            self._core.window.forget_ended()
        finally:
            self._handle.close()
            for staging in self._stagings.values():
                staging.close()

    def __del__(self, _process_ends: Callable[[], bool] = sys.is_finalizing) -> None:
        # The server keeps an unclosed session until its lease ends, and a flush has to name its marks. When the
        # interpreter ends, no flush follows, and modules that this method needs are empty.
        if _process_ends():
            return
        contributor, handle = getattr(self, "_contributor", None), getattr(self, "_handle", None)
        if contributor is not None and handle is not None and not handle.closed and handle.is_ours:
            contributor.end()
            self._core.window.forget_ended()

    def _finish_thread(self) -> None:
        with self._lock:
            executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(wait=True)

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close()
        except Exception:  # the error that is on its way says more
            pass

    def __repr__(self) -> str:
        state = "closed" if self._handle.closed else "open"
        return f"<lossd.Session {self._client_key} of {self._head.name!r}, {state}>"
