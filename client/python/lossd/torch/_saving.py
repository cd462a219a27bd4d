"""The head's weights in the state_dict of a module, where a checkpoint has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from lossd.torch._dtypes import name_of
from lossd.torch._sharded import is_dtensor
from lossd.torch.distributed import first_rank_does, gather_objects, shard_offset

if TYPE_CHECKING:
    from lossd.torch.head import RemoteHead


def save(head: RemoteHead, destination: dict[str, Any], prefix: str) -> None:
    """Module._save_to_state_dict of a module that stands for the head: `weight` [V, H] of the head's dtype and, of a
    head with one, `bias`, fp32 [V], read from the server there and then. Of a head with a state_mesh they are DTensors,
    of which each rank reads its own rows; otherwise, whoever does not want [V, H] in its memory leaves state_dict() to
    one rank."""
    weight, bias = read(head, head.spread)
    destination[prefix + "weight"] = weight
    if bias is not None:
        destination[prefix + "bias"] = bias


def read(head: RemoteHead, spread: tuple[Any, Sequence[Any]] | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The weights [V, H] of the head's dtype and the bias, fp32 [V], or None; zeros of a head without weights, whose
    entries torch.distributed.checkpoint asks for before it loads them. spread: mesh and placements of DTensors: each
    rank reads its rows, of head.weight_version, and none waits for another."""
    if spread is not None:
        return _read_spread(head, *spread)
    if head.head.info().weight_version:
        return head.read_weights()
    bias = torch.zeros(head.vocab_size, dtype=torch.float32, device="cpu") if head.has_bias else None
    return torch.zeros(head.vocab_size, head.hidden_size, dtype=head.dtype, device="cpu"), bias


def _read_spread(head: RemoteHead, mesh: Any, placements: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
    from torch.distributed.tensor import DTensor, empty

    weight = empty(head.vocab_size, head.hidden_size, dtype=head.dtype, device_mesh=mesh, placements=placements)
    first, rows = shard_offset(weight), weight.to_local()
    own = torch.zeros(rows.shape, dtype=rows.dtype, device="cpu")
    own_bias = torch.zeros(rows.shape[0], dtype=torch.float32, device="cpu") if head.has_bias else None
    version = head.weight_version
    if rows.shape[0] and version:
        head.head.read_rows(
            first, rows.shape[0], out=own, dtype=name_of(own.dtype), weight_version=version, bias_out=own_bias
        )
    rows.copy_(own)
    if own_bias is None:
        return weight, None
    bias = own_bias.to(rows.device)
    shape = torch.Size([head.vocab_size])
    return weight, DTensor.from_local(bias, mesh, placements, run_check=False, shape=shape, stride=(1,))


def load(
    head: RemoteHead,
    state: dict[str, Any],
    prefix: str,
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    """Module._load_from_state_dict of such a module: writes the weights to the server. Missing, unexpected and wrongly
    shaped entries are reported as torch reports those of parameters, and with strict=False a missing one leaves the
    server's weights alone. A head with master weights keeps them if they round to the entries, which then say nothing
    new. Of a head with a process group the first rank's are written, so that the others need not
    have any, and every rank has to load. A DTensor that is sharded by rows is written by all ranks, each its own."""
    names = {entry: prefix + entry for entry in (("weight", "bias") if head.has_bias else ("weight",))}
    if strict:  # `proxy` is put there by torch.distributed.checkpoint.state_dict, from parameters()
        known = {*names.values(), prefix + "proxy"}
        unexpected.extend(key for key in state if key.startswith(prefix) and key not in known)
    found = {entry: state[name] for entry, name in names.items() if name in state}
    absent = [name for entry, name in names.items() if entry not in found]
    if absent and found:
        problems = [f"weight and bias of head '{head.name}' are one version: {absent} is missing, nothing was written"]
    else:
        problems = _problems(head, found, names)
    errors.extend(problems)
    # Writing is for all ranks or for none.
    sharded = any(is_dtensor(value) for value in found.values())
    others = gather_objects((absent, problems, sharded), head.group)
    of_first = not any(others[0])  # it has plain tensors, which are written, whatever others have
    if absent and strict and not of_first:
        missing.extend(absent)
    for rank, (their_absent, their_problems, _) in enumerate(others):
        differs = bool(their_absent) != bool(absent) and not of_first
        if their_problems or differs:
            theirs = their_problems or (f"it lacks {their_absent}" if their_absent else "it has them")
            if not problems:
                errors.append(f"weights of head '{head.name}' were not written, because of rank {rank}: {theirs}")
            return
    if len({their_sharded for their_absent, _, their_sharded in others if not their_absent}) > 1:
        errors.append(f"weights of head '{head.name}' were not written: they are DTensors on some ranks alone")
    elif (of_first or not (absent or problems)) and not _unchanged(head, found, sharded):
        head.write_weights(found.get("weight"), found.get("bias"))


def _unchanged(head: RemoteHead, found: dict[str, Any], sharded: bool) -> bool:
    """Whether the entries are what state_dict() would have of weights that the server keeps in more bits. Collective
    with a group: the first rank's count."""
    if not head.head.config.master_weights or sharded:
        return False

    def same() -> bool:
        weight, bias = head.read_weights(dtype=found["weight"].dtype)
        return torch.equal(weight, found["weight"].cpu()) and (bias is None or torch.equal(bias, found["bias"].cpu()))

    return bool(first_rank_does(same, head.group))


def _problems(head: RemoteHead, found: dict[str, Any], names: dict[str, str]) -> list[str]:
    shapes = {"weight": (head.vocab_size, head.hidden_size), "bias": (head.vocab_size,)}
    problems = []
    for entry, value in found.items():
        name = names[entry]
        if not isinstance(value, torch.Tensor):
            problems.append(f"{name} is a {type(value).__name__}, not a tensor")
        elif tuple(value.shape) != shapes[entry]:
            problems.append(
                f"size mismatch for {name}: copying a param with shape {tuple(value.shape)} from checkpoint, the shape "
                f"of head '{head.name}' is {shapes[entry]}."
            )
        elif value.is_meta or not value.is_floating_point():
            problems.append(
                f"{name} is {value.dtype} on {value.device}: head '{head.name}' needs floating point values"
            )
    return problems
