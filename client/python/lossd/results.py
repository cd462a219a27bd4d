"""What calls answer. All are immutable."""

from __future__ import annotations

import dataclasses
import json
import math
import typing
from dataclasses import dataclass, field
from typing import Any, TypeVar

from lossd.optimizers import SGD, Adam, AdamW, optimizer_of


@dataclass(frozen=True)
class LaneMarks:
    """How far one lane of a session has come, in chunks: `accepted` by the server, of which `applied` are in the
    results."""

    lane: int = 0
    accepted: int = 0
    applied: int = 0


@dataclass(frozen=True)
class SessionMarks:
    """What the server has accepted of one session, lane by lane: what a flush or step names."""

    session_id: str = ""
    lanes: tuple[LaneMarks, ...] = ()
    incarnation: str = ""
    """The server's. Marks of before its head went back to a checkpoint that has not all of them are a WindowLostError,
    whatever the window has come to since."""
    restores: int = 0
    generation: int = 0
    """That the head was known to have come to there."""

    def text(self) -> str:
        """As Session.marks gives it."""
        return json.dumps(dataclasses.asdict(self))


@dataclass(frozen=True)
class MemoryItem:
    """One use of the server's memory. `bytes`: reserved for it."""

    purpose: str = ""
    bytes: int = 0


@dataclass(frozen=True)
class HeadConfig:
    """What a head was created with (Client.create_head). vocab_size V and hidden_size H: of the weights [V, H];
    weight_type: "float32", "bfloat16" or "float16"."""

    name: str = ""
    vocab_size: int = 0
    hidden_size: int = 0
    weight_type: str = "bfloat16"
    logit_scale: float = 1.0
    softcap: float = 0.0
    frozen: bool = False
    bias: bool = False
    optimizer: SGD | Adam | AdamW | None = None
    master_weights: bool = False
    double_buffer: bool = False
    fixed_segments: bool = False
    held_bytes: int = 0
    has_class_weights: bool = False


@dataclass(frozen=True)
class HeadInfo:
    """What a server knows of a head at one moment. Counts are of tokens, bytes, rows and steps as their names say."""

    config: HeadConfig = field(default_factory=HeadConfig)
    weight_version: int = 0
    """0: no weights yet."""
    generation: int = 0
    window_state: str = "open"
    """ "open", "freezing" or "frozen"."""
    window_tokens: int = 0
    sessions: tuple[SessionMarks, ...] = ()
    open_sessions: int = 0
    memory: tuple[MemoryItem, ...] = ()
    optimizer_steps: int = 0
    staged_rows: int = 0
    flush_id: str = ""
    """The flush that holds the window, with which Head.abort_flush ends it, whoever began it; "": none does."""
    flush_seconds: float = 0.0
    """Since it was begun."""
    parked_bytes: int = 0
    """What it takes of the server's host while it is parked (Client.park_head), without memory; 0: it is not."""
    steps_since_checkpoint: int | None = None
    """Steps of the optimizer since the newest checkpoint that was saved of the head or that it was restored from; None
    where the server keeps no checkpoints, or without an optimizer."""


@dataclass(frozen=True)
class RankStatus:
    """One of the processes that compute a server's heads together, each with a device; rank 0 leads them."""

    rank: int = 0
    device: str = ""
    device_description: str = ""
    pci_bus_id: str = ""
    host: str = ""
    memory_limit_bytes: int = 0
    memory_reserved_bytes: int = 0
    uptime_seconds: float = 0.0
    waited_seconds: float = 0.0
    """For the other ranks, since it was ready: who waits least is the one that they wait for."""
    command: str = ""
    """The oldest that it has to do, for command_seconds now; empty: it has done all."""
    command_seconds: float = 0.0
    waits_at: str = ""
    """At what exchange it waits for the others now; else empty."""
    stuck: bool = False
    """The command takes so long that the server says it is not ready."""


@dataclass(frozen=True)
class ReplicaStatus:
    """One of the servers of a set, as replica 0 sees it."""

    replica: int = 0
    sessions_placed: int = 0
    """How many sessions were opened there."""
    late_seconds: dict[str, float] = field(default_factory=dict)
    """By phase of the end of a window ("seal", "sum", "step", "flush"): how long after the first one it answered, as a
    mean in which the last windows weigh most; or of what it has yet to answer, if that is more."""


@dataclass(frozen=True)
class ReplicaSetStatus:
    """The set of servers that hold replicas of a server's heads. Counts are since the server was started."""

    name: str = ""
    """Empty: the server's heads are its own."""
    replica: int = 0
    """That the server is."""
    replicas: int = 0
    whole: bool = False
    """All are there: windows end, heads and weights can be written."""
    why_not: str = ""
    """Names who is missing, or, at replica 0, who has not answered for long; "": windows end."""
    epochs: int = 0
    """How often all have met."""
    returns: int = 0
    """How often heads here went back to a checkpoint, or were gone, since the replicas were not alike."""
    history: int = 0
    """Their windows' past: another number once they went back to a checkpoint."""
    members: tuple[ReplicaStatus, ...] = ()
    """By number; only replica 0 knows."""


@dataclass(frozen=True)
class ServerStatus:
    """A server at one moment. Counters are since it started."""

    version: str = ""
    incarnation: str = ""
    draining: bool = False
    device: str = ""
    device_description: str = ""
    uptime_seconds: float = 0.0
    chunks_applied: int = 0
    tokens_applied: int = 0
    queued_chunks: int = 0
    heads: tuple[HeadInfo, ...] = ()
    features: tuple[str, ...] = ()
    """What the server can do, by the names in docs/compatibility.md."""
    ranks: tuple[RankStatus, ...] = ()
    """Where heads lie over several devices; else none."""
    group_epoch: int = 0
    """How often these were started, this time included."""
    replicas: ReplicaSetStatus = field(default_factory=ReplicaSetStatus)
    """Where heads have replicas at several servers; else without a name."""


@dataclass(frozen=True)
class HeadMemory:
    """What one head has reserved of the server's memory, by use. row_streams: reads and writes of its weights and
    gradient that are under way, and the bytes that they hold."""

    name: str = ""
    items: tuple[MemoryItem, ...] = ()
    row_streams: int = 0
    row_stream_bytes: int = 0


@dataclass(frozen=True)
class RankMemory:
    """What one rank has, where heads lie over several devices: its part of each head."""

    rank: int = 0
    limit_bytes: int = 0
    reserved_bytes: int = 0
    process_resident_bytes: int = 0
    process_peak_bytes: int = 0
    heads: tuple[HeadMemory, ...] = ()
    shared: tuple[MemoryItem, ...] = ()
    device_total_bytes: int = 0
    device_free_bytes: int = 0


@dataclass(frozen=True)
class ServerMemory:
    """The server's memory in bytes: what heads may reserve, what they have, and what the process and the device
    have."""

    limit_bytes: int = 0
    reserved_bytes: int = 0
    process_resident_bytes: int = 0
    process_peak_bytes: int = 0
    heads: tuple[HeadMemory, ...] = ()
    shared: tuple[MemoryItem, ...] = ()
    device_total_bytes: int = 0
    device_free_bytes: int = 0
    head_quota_bytes: int = 0
    staging_limit_bytes: int = 0
    staging_reserved_bytes: int = 0
    row_streams: int = 0
    row_stream_bytes: int = 0
    ranks: tuple[RankMemory, ...] = ()
    """Where heads lie over several devices, each rank's; all else is the leader's."""


@dataclass(frozen=True)
class Traffic:
    """Bytes of this client's messages so far; not what lies in regions."""

    bytes_sent: int = 0
    bytes_received: int = 0


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint in the server's --checkpoint_dir. bytes: of its files, shared ones included."""

    head: str = ""
    tag: str = ""
    generation: int = 0
    weight_version: int = 0
    optimizer_steps: int = 0
    window_tokens: int = 0
    bytes: int = 0
    saved_at: float = 0.0
    """Seconds since 1970."""


@dataclass(frozen=True)
class SavedCheckpoint:
    """What Head.save_checkpoint wrote. bytes_written: new on the disk; the rest is shared with older checkpoints."""

    info: CheckpointInfo = field(default_factory=CheckpointInfo)
    bytes_written: int = 0
    deleted: tuple[str, ...] = ()
    """Older tags that went because of the server's --checkpoint_keep."""


@dataclass(frozen=True)
class DeletedCheckpoint:
    """What Client.delete_checkpoint removed."""

    info: CheckpointInfo = field(default_factory=CheckpointInfo)
    """A damaged checkpoint has only head and tag here."""
    bytes_freed: int = 0
    """On the server's disk; the rest is shared with other checkpoints."""


@dataclass(frozen=True)
class LoadedWeights:
    """What Head.load_weights published: the version, and the name of the tensor in the file."""

    weight_version: int = 0
    tensor: str = ""


@dataclass(frozen=True)
class BatchResult:
    """What Session.compute returns. Arrays are of the kind of `hidden` (NumPy, or PyTorch on its device) and have its
    leading shape [...]; what was not wanted is None."""

    loss: float
    """As `reduction` says; 0 of a batch without valid tokens (NaN with torch_compat)."""
    loss_sum: float
    z_loss_sum: float
    class_weight_sum: float
    divergence_sum: float
    valid_tokens: int
    correct_tokens: int
    """Tokens whose label is predicted; 0 unless "predictions" are wanted."""
    weight_version: int
    """0 if chunks met different ones."""
    teacher_weight_version: int
    chunks: int
    repeated_chunks: int
    first_sequences: tuple[int, ...]
    """What resume_at takes to have this batch computed again."""
    losses: Any = field(default=None, repr=False)
    """[...], fp32."""
    dx: Any = field(default=None, repr=False)
    """[..., H]."""
    log_sum_exp: Any = field(default=None, repr=False)
    z_losses: Any = field(default=None, repr=False)
    log_probabilities: Any = field(default=None, repr=False)
    entropies: Any = field(default=None, repr=False)
    divergences: Any = field(default=None, repr=False)
    predictions: Any = field(default=None, repr=False)
    """[...], int32; -1 of ignored tokens."""
    target_ranks: Any = field(default=None, repr=False)
    top_tokens: Any = field(default=None, repr=False)
    """[..., top_k], int32, best first."""
    top_log_probabilities: Any = field(default=None, repr=False)
    """[..., top_k], fp32."""


@dataclass(frozen=True)
class TopLogits:
    """The largest logits of each row, best first, as Head.logits returns them with top_k. Arrays are of the kind of
    `hidden`."""

    tokens: Any = field(repr=False)
    """[..., top_k], int32; -1 of rows whose logits overflow."""
    logits: Any = field(repr=False)
    """[..., top_k], fp32; NaN of such rows."""
    log_sum_exp: Any = field(repr=False)
    """[...], fp32, of all of a row's logits: logits - log_sum_exp are log-probabilities."""
    weight_version: int


@dataclass(frozen=True)
class FlushResult:
    """A gradient that was read, and whose window ended (Head.flush), or that was dropped (Head.discard). norm,
    bias_norm: Frobenius norms of dW [V, H] and db [V], both times gradient_scale. non_finite: elements that are NaN
    or infinite."""

    flush_id: str
    generation: int
    rows: int
    columns: int
    norm: float
    bias_norm: float
    window_tokens: int
    non_finite: int
    gradient: Any = field(default=None, repr=False)
    """[V, H]: `out`, or a new array; None if a sink took the rows."""
    bias_gradient: Any = field(default=None, repr=False)
    """[V], fp32, of a head with a bias."""


@dataclass(frozen=True)
class GradientStats:
    """The gradient that waits (Head.gradient_stats), times gradient_scale. norm, bias_norm: Frobenius norms of dW
    [V, H] and db [V]; largest: the largest magnitude; non_finite: elements that are NaN or infinite."""

    norm: float
    bias_norm: float
    largest: float
    non_finite: int
    window_tokens: int


@dataclass(frozen=True)
class StepResult:
    """What a step of the optimizer did (Head.step)."""

    generation: int
    """That of the next window."""
    weight_version: int
    step: int
    """Steps that the optimizer has taken, this one included unless it was skipped."""
    skipped: bool
    """Weights and optimizer are as they were: no token was in the window, or skip_non_finite asked for it."""
    norm: float
    """The norm of the scaled gradient."""
    bias_norm: float
    non_finite: int
    window_tokens: int

    @classmethod
    def skipped_at(cls, head: HeadInfo, window_tokens: int = 0) -> StepResult:
        """The result of a step that nobody had to ask the server for."""
        versions = (head.generation, head.weight_version, head.optimizer_steps)
        return cls(*versions, True, math.nan, 0.0, 0, window_tokens)


T = TypeVar("T")


def from_json(kind: type[T], data: Any) -> T:
    """A dataclass of this module from the library's JSON. Fields that this package does not know are left out."""
    hints = typing.get_type_hints(kind)
    values = {}
    for item in dataclasses.fields(kind):  # type: ignore[arg-type]
        if data.get(item.name) is not None:
            values[item.name] = _value(hints[item.name], data[item.name])
    return kind(**values)


def _value(hint: Any, value: Any) -> Any:
    if Adam in typing.get_args(hint):
        return optimizer_of(value)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return from_json(hint, value)
    if typing.get_origin(hint) is tuple:
        return tuple(_value(typing.get_args(hint)[0], item) for item in value)
    return value
