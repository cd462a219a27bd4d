"""Ranks of one training run: data-parallel ones with a session each, and sharded ones with rows of the weight each.

Objects travel with torch.distributed's own collectives, so that any backend does. An error on one rank is raised on
all of them, so that none waits for it for ever."""

from __future__ import annotations

import gc
import pickle
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from lossd.torch.head import RemoteHead

T = TypeVar("T")


def world_size(group: dist.ProcessGroup | None) -> int:
    """Ranks of the group; 1 without one."""
    return 1 if group is None else dist.get_world_size(group)


def global_token_count(
    target: torch.Tensor, ignore_index: int = -100, group: dist.ProcessGroup | None = None, *, shift: bool | int = False
) -> int:
    """Labels of `target` [..., T] on all ranks that are not `ignore_index`: the `normalizer` of a mean over the global
    batch.

    group: None is the default group, or this process alone if torch.distributed is not initialised. shift: as in
    linear_cross_entropy; the first labels of each row, which no hidden state predicts, are not counted. Collective.
    """
    counted = target[..., int(shift) :] if shift else target
    count = (counted != ignore_index).sum()
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(count, group=group)
    return int(count)


def gather_objects(value: T, group: dist.ProcessGroup | None) -> list[T]:
    """`value` of every rank, by rank. Collective."""
    if group is None:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def all_do(work: Callable[[], T], group: dist.ProcessGroup | None) -> list[T]:
    """work() on every rank; returns every rank's answer, by rank, once all are done. Raises if any rank's failed: the
    rank's own error there, and on the others the first one's. Collective."""
    if group is None:
        return [work()]
    own: BaseException | None = None
    answer: Any = None
    try:
        answer = work()
    except Exception as error:  # noqa: BLE001  (it is raised below, on all ranks)
        own = error
    outcomes = gather_objects((answer, _portable(own)), group)
    if own is not None:
        raise own
    for _, failed in outcomes:
        if failed is not None:
            raise failed
    return [outcome[0] for outcome in outcomes]


def first_rank_does(
    work: Callable[[], T], group: dist.ProcessGroup | None, tell: Callable[[T], Any] | None = None
) -> T:
    """work() on the group's first rank; its answer, or its error, on every rank. tell: what the others get of the
    answer. Collective."""
    if group is None:
        return work()
    own: BaseException | None = None
    answer: Any = None
    first = dist.get_rank(group) == 0
    if first:
        try:
            answer = work()
        except Exception as error:  # noqa: BLE001  (it is raised below, on all ranks)
            own = error
    told = tell(answer) if first and own is None and tell is not None else answer
    box: list[Any] = [(told, _portable(own))]
    dist.broadcast_object_list(box, src=dist.get_global_rank(group, 0), group=group)
    if own is not None:
        raise own
    if box[0][1] is not None:
        raise box[0][1]
    result: T = answer if first else box[0][0]
    return result


def gather_marks(head: RemoteHead, group: dist.ProcessGroup | None) -> list[str]:
    """Marks of the sessions of all ranks, for the one rank that flushes or steps. Waits for batches under way.
    Collective."""
    return [mark for marks in all_do(head.marks, group) for mark in marks]


# DistributedDataParallel around the model


def active_wrapper() -> DistributedDataParallel | None:
    """The DistributedDataParallel whose forward pass is under way."""
    return getattr(DistributedDataParallel, "_active_ddp_module", None)


def all_wrappers() -> list[weakref.ref[DistributedDataParallel]]:
    """Every one of this process. It looks at all objects, which takes some time."""
    return [weakref.ref(one) for one in gc.get_objects() if issubclass(type(one), DistributedDataParallel)]


def require_no_join(name: str, wrappers: Sequence[DistributedDataParallel | None]) -> None:
    """ValueError if a rank may run out of batches before the others do, and step head `name` no more. With
    throw_on_early_termination all ranks end together."""
    for wrapper in wrappers:
        config = getattr(wrapper, "_join_config", None)
        if config is not None and config.enable and not config.throw_on_early_termination:
            raise ValueError(
                f"head '{name}' is that of all ranks, and cannot be trained inside DistributedDataParallel.join(): the "
                "others would wait in each step for a rank that has no more batches. Give every rank as many "
                "batches (DistributedSampler, DataLoader(drop_last=True), accelerate's even_batches=True), or give a "
                "rank that has no more some whose labels are all ignore_index, and leave join() out. "
                "join(throw_on_early_termination=True) works: it ends all ranks together"
            )


# Rows of sharded weights


def write_shard(
    head: RemoteHead,
    rows: torch.Tensor,
    *,
    write_key: str,
    first_row: int | None = None,
    bias: torch.Tensor | None = None,
    group: dist.ProcessGroup | None = None,
) -> int:
    """Publishes one version of which each rank has its own rows; returns it. No rank needs the rest. Collective.

    rows: [R, H], rows [first_row, first_row + R) of the weight; R may differ between ranks and be 0. Or a DTensor [V,
    H] that is sharded by rows, of which the local part is sent and `first_row` is known. bias: its [R] (fp32), or a
    DTensor [V]. Rows are rounded to the head's dtype message by message before they are sent, unless the server keeps
    an fp32 master. write_key: the same on all ranks, and another one for each version, such as "step 100": a rank that
    was restarted may send its rows again. group: the ranks that have the rows; of a DTensor by default all.
    FailedPreconditionError if rows of the head are missing, naming the first."""
    group = _group_of(rows, group)

    def send() -> Any:
        local, first = _local_rows(head, rows, first_row)
        local_bias = None if bias is None else _local(bias).detach().to(torch.float32)
        if local_bias is not None and local_bias.shape != local.shape[:1]:
            raise ValueError(f"bias has {list(local_bias.shape)} of {local.shape[0]} rows")
        write = head.head.begin_write(write_key)
        if local.shape[0]:
            write.write_rows(first, local.detach(), local_bias)
        return write

    # Every rank holds its own handle, and the answers are not wanted: handles do not travel.
    handle: list[Any] = []
    all_do(lambda: handle.append(send()), group)
    head.weight_version = all_do(lambda: handle[0].commit(), group)[0]
    return head.weight_version


def read_shard(
    head: RemoteHead,
    rows: torch.Tensor,
    *,
    first_row: int | None = None,
    bias: torch.Tensor | None = None,
    weight_version: int = 0,
    group: dist.ProcessGroup | None = None,
) -> int:
    """Reads into `rows` what write_shard() sends from there, in the dtype of `rows`, all ranks of one version, which
    is returned. bias: [R] fp32 or a DTensor [V], likewise. weight_version: what it must be; 0: the newest, as the
    first rank meets it. Collective."""
    group = _group_of(rows, group)
    all_do(lambda: _local_rows(head, rows, first_row) and None, group)
    local, first = _local_rows(head, rows, first_row)
    local_bias = None if bias is None else _local(bias)
    version = weight_version or first_rank_does(lambda: head.head.info().weight_version, group)

    def receive() -> None:
        if local.shape[0] == 0:
            return
        out = local.detach()
        head.head.read_rows(
            first,
            local.shape[0],
            out=out,
            dtype=str(out.dtype).removeprefix("torch."),
            weight_version=version,
            bias_out=None if local_bias is None else local_bias.detach(),
        )

    all_do(receive, group)
    return version


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _group_of(rows: torch.Tensor, group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    return dist.group.WORLD if group is None and hasattr(rows, "to_local") else group


def _local_rows(head: RemoteHead, rows: torch.Tensor, first_row: int | None) -> tuple[torch.Tensor, int]:
    local = _local(rows)
    if local is not rows:
        if tuple(rows.shape) != (head.vocab_size, head.hidden_size):
            raise ValueError(
                f"the DTensor is {list(rows.shape)}; head '{head.name}' is {[head.vocab_size, head.hidden_size]}"
            )
        return local, shard_offset(rows)
    if first_row is None:
        raise ValueError("first_row is needed: only a DTensor knows where its rows are")
    if (
        local.dim() != 2
        or local.shape[1] != head.hidden_size
        or first_row + local.shape[0] > head.vocab_size
        or first_row < 0
    ):
        raise ValueError(
            f"rows {list(local.shape)} from row {first_row} are no part of head '{head.name}', "
            f"{[head.vocab_size, head.hidden_size]}"
        )
    return local, first_row


def shard_offset(tensor: torch.Tensor) -> int:
    """First row of this rank's part of a DTensor that is placed Shard(0) and Replicate(), as fully_shard and tensor
    parallelism cut rows; 0 of a part without any."""
    from torch.distributed.tensor import Replicate

    if tensor.device_mesh.get_coordinate() is None:
        raise ValueError("this rank is not in the DTensor's mesh")
    for placement in tensor.placements:
        if not isinstance(placement, Replicate) and getattr(placement, "dim", None) != 0:
            raise ValueError(f"the DTensor is placed {placement}; rows of a head are Shard(0) or Replicate()")
    rows = tensor.to_local().shape[0]
    (chunk,) = tensor.__create_chunk_list__()  # what torch.distributed.checkpoint asks for
    if chunk.sizes[0] != rows:
        raise ValueError(f"rows of the DTensor {tensor.placements} are not in one piece on this rank")
    return int(chunk.offsets[0]) if rows else 0


def _portable(error: BaseException | None) -> BaseException | None:
    """The error, if another process can be sent it; otherwise a RuntimeError that says the same."""
    if error is None:
        return None
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001  (whatever its class does)
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


__all__: Sequence[str] = (
    "active_wrapper",
    "all_do",
    "all_wrappers",
    "first_rank_does",
    "gather_marks",
    "gather_objects",
    "global_token_count",
    "read_shard",
    "require_no_join",
    "shard_offset",
    "world_size",
    "write_shard",
)
