"""A head in the checkpoints of torch.distributed.checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lossd.torch._saving import read
from lossd.torch.distributed import first_rank_does

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from lossd.torch.head import RemoteHead


class HeadState:
    """The head's weights as a Stateful, for dcp.save({"lm_head": HeadState(head)}) and dcp.load.

    state_dict() has `weight` [V, H] of the head's dtype and, of a head with one, `bias`, fp32 [V], as DTensors that are
    sharded by rows over `mesh`: each rank reads, saves, loads and writes its rows, and none has all. Any other number
    of ranks may load them, and so may the Linear of a model. mesh: None is the head's state_mesh, or one of its group;
    of a head with neither they are plain tensors.

    Moments and steps of the optimizer are not in it: HeadCheckpoint. Both calls are collective of a head with a group,
    as saving, loading and writing weights are.
    """

    def __init__(self, head: RemoteHead, mesh: DeviceMesh | None = None) -> None:
        self.head = head
        self._spread: tuple[Any, Any] | None = head.spread
        if mesh is None and head.spread is None and head.group is not None:
            from torch.distributed.device_mesh import DeviceMesh

            mesh = DeviceMesh.from_group(head.group, head.device.type)
        if mesh is not None:
            from torch.distributed.tensor import Shard

            self._spread = mesh, [Shard(0)] * mesh.ndim

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Read from the server, each time: the newest version, which another process may have written. Zeros of a head
        without weights. Collective of a head with a group."""
        head = self.head
        if self._spread is not None:  # all ranks read one version
            head.weight_version = first_rank_does(lambda: head.head.info().weight_version, head.group)
        found = read(head, self._spread)
        return {name: value for name, value in zip(("weight", "bias"), found, strict=True) if value is not None}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Writes it to the server as a new version. KeyError for a missing entry."""
        self.head.write_weights(state["weight"], state["bias"] if self.head.has_bias else None)


class HeadCheckpoint:
    """All that a server has of a head (weights, moments, steps) as a Stateful: the server keeps the state
    (--checkpoint_dir), and the trainer's checkpoint its tag.

        lm_head = HeadCheckpoint(head)
        lm_head.save("step-100")                # collective of a head with a group
        dcp.save({"model": ..., "lm_head": lm_head}, checkpoint_id=...)
        dcp.load({"model": ..., "lm_head": lm_head}, checkpoint_id=...)     # goes back to what was saved under the tag

    Any number of ranks may load it. Save between steps.
    """

    def __init__(self, head: RemoteHead) -> None:
        self.head = head
        self.tag = ""

    def save(self, tag: str) -> None:
        """RemoteHead.save_checkpoint(tag), which state_dict() names from now on."""
        self.head.save_checkpoint(tag)
        self.tag = tag

    def state_dict(self) -> dict[str, str]:
        """{"tag": ...}, empty before the first save(); asks nobody."""
        return {"tag": self.tag}

    def load_state_dict(self, state: dict[str, str]) -> None:
        """RemoteHead.restore_checkpoint of the tag. ValueError if it was saved without one."""
        if not state["tag"]:
            raise ValueError(
                f"nothing of head '{self.head.name}' was saved: call HeadCheckpoint.save(tag) before dcp.save"
            )
        self.head.restore_checkpoint(state["tag"])
        self.tag = state["tag"]
