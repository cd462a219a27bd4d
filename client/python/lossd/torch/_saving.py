"""The head's weights in the state_dict of a module, where a checkpoint has them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lossd.torch.distributed import gather_objects, write_shard

if TYPE_CHECKING:
    from lossd.torch.head import RemoteHead


def save(head: RemoteHead, destination: dict[str, Any], prefix: str) -> None:
    """Module._save_to_state_dict of a module that stands for the head: `weight` [V, H] of the head's dtype and, of a
    head with one, `bias`, fp32 [V], read from the server there and then. Whoever does not want [V, H] in its memory
    leaves state_dict() to one rank, or uses read_shard."""
    weight, bias = head.read_weights()
    destination[prefix + "weight"] = weight
    if bias is not None:
        destination[prefix + "bias"] = bias


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
    server's weights alone. Of a head with a process group the first rank's are written, and every rank has to load. A
    DTensor that is sharded by rows is written by all ranks, each its own."""
    names = {entry: prefix + entry for entry in (("weight", "bias") if head.has_bias else ("weight",))}
    if strict:
        unexpected.extend(key for key in state if key.startswith(prefix) and key not in names.values())
    found = {entry: state[name] for entry, name in names.items() if name in state}
    absent = [name for entry, name in names.items() if entry not in found]
    if absent and strict:
        missing.extend(absent)
    if absent and found:
        problems = [f"weight and bias of head '{head.name}' are one version: {absent} is missing, nothing was written"]
    else:
        problems = _problems(head, found, names)
    errors.extend(problems)
    # Writing is for all ranks or for none.
    others = gather_objects((absent, problems), head.group)
    for rank, (their_absent, their_problems) in enumerate(others):
        if not problems and (their_problems or bool(their_absent) != bool(absent)):
            theirs = their_problems or (f"it lacks {their_absent}" if their_absent else "it has them")
            errors.append(f"weights of head '{head.name}' were not written, because of rank {rank}: {theirs}")
            return
    if not absent and not problems:
        _write(head, found)


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


def _write(head: RemoteHead, found: dict[str, torch.Tensor]) -> None:
    weight, bias = found["weight"], found.get("bias")
    if hasattr(weight, "to_local"):
        version = head.head.info().weight_version
        write_shard(head, weight, bias=bias, write_key=f"load_state_dict over {version}", group=head.group)
    else:
        head.write_weights(weight, bias)
