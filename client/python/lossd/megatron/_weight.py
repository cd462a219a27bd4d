"""A weight that stays Megatron's own: [V / ranks, H] on each tensor-parallel rank, whose gradient is the server's."""

from __future__ import annotations

import ctypes
import uuid
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from lossd.torch import RemoteHead, gather_marks, write_shard
from lossd.torch._stepping import optimizer_steps
from lossd.torch._window import window_of
from lossd.torch.distributed import all_do, first_rank_does, gather_objects

if TYPE_CHECKING:
    from torch import Tensor

HOW_TO_FINALIZE = (
    "Set config.finalize_model_grads_func = layer.finalizing(finalize_model_grads); under Megatron-LM's train(), which "
    "overwrites that with a function of its own, megatron.training.training.finalize_model_grads = "
    "layer.finalizing(finalize_model_grads)"
)

_ROWS, _END = 1, 0


class OwnWeight:
    """What lossd.torch.LocalWeight is to a whole weight, to the rows [first_row, first_row + n) of it that a
    tensor-parallel rank has.

    Data-parallel ranks have the same rows. The gradient of all of them lands on the first one, the others get zeros:
    Megatron's reduction sums or averages, and is right either way. shared: it is the embedding's weight as well."""

    def __init__(
        self,
        head: RemoteHead,
        weight: torch.nn.Parameter,
        tp_group: dist.ProcessGroup,
        *,
        delay_wgrad: bool = False,
        shared: bool = False,
    ) -> None:
        self.head = head
        self.weight = weight
        self.tp_group = tp_group
        self.delay_wgrad = delay_wgrad
        self.shared = shared
        self.first_row = dist.get_rank(tp_group) * weight.shape[0]
        self.waiting = False
        """A gradient is to be fetched by wgrad()."""
        self.behind = False
        """The parameter was given other values, as by load_state_dict(), since it was written to the server."""
        self._landed = False
        """A gradient has landed since then, so that an optimizer may step."""
        self._written = self._changes()
        self._steps_seen = 0
        """The optimizers' steps when the gradient that waits came."""
        self._cut = False
        self._uncommitted: str | None = None
        firsts = gather_objects(dist.get_rank(head.group) == 0, tp_group)
        self._source = firsts.index(True) if True in firsts else -1
        """The rank in tp_group of the head's first rank, which flushes; -1: it is of another tp_group."""

    def __call__(self, hidden: Tensor) -> Tensor:
        """`hidden` as it is; its backward is where the weight gets its gradient."""
        tied: Tensor = _Tie.apply(hidden, self.weight, self)
        return tied

    def gradient(self) -> Tensor | None:
        """What backward returns for the weight, once the tokens' gradients are at the server."""
        self.waiting, self._steps_seen = True, optimizer_steps()
        if self.delay_wgrad:
            # None, which Megatron asserts against where it reduces before wgrad() can have been called.
            return None
        if hasattr(self.weight, "main_grad"):
            self.wgrad()
            return self._nothing()
        fresh = torch.zeros(self.weight.shape, dtype=torch.float32, device=self.weight.device)
        self._land(fresh, overwrite=False)
        return fresh.to(self.weight.dtype)

    def drop(self) -> None:
        """Drops what waits at the server, as after a step that is computed again. Collective over the head's group."""
        self.head.zero_grad()
        self.forget()

    def drop_unwanted(self) -> None:
        """Drops the dW that came with the dX of a loss whose weight was frozen; the head is not."""
        if self.waiting:
            raise RuntimeError(
                f"the weight of head '{self.head.name}' was frozen while a delayed gradient of it waits: call wgrad() "
                "of the layer before"
            )
        self.drop()

    def _nothing(self) -> Tensor | None:
        if not hasattr(self.weight, "grad_added_to_main_grad"):
            return None
        if not self.shared:  # of which the embedding's own gradient is yet to be added
            self.weight.grad_added_to_main_grad = True
        return torch.zeros_like(self.weight)

    def wgrad(self) -> None:
        """Adds what waits at the server to the weight's main_grad (its .grad, if it has none). Collective over the
        head's group; nothing if nothing waits."""
        if not self.waiting:
            return
        if hasattr(self.weight, "main_grad"):
            target = self.weight.main_grad.view(self.weight.shape)
            self._land(target, overwrite=bool(getattr(self.weight, "overwrite_main_grad", False)))
            return
        if self.weight.grad is None:
            self.weight.grad = torch.zeros_like(self.weight)
        self._land(self.weight.grad, overwrite=False)

    def catch_up(self) -> None:
        """What has to be done before the server's weights are used. RuntimeError if an optimizer has stepped while the
        gradient still waited."""
        if self.delay_wgrad and self.waiting and optimizer_steps() > self._steps_seen:
            raise RuntimeError(
                f"an optimizer has stepped, and the delayed gradient of head '{self.head.name}' still waits at the "
                f"server: nothing called the layer's wgrad(). {HOW_TO_FINALIZE}; after drop_gradient() of the layer "
                "the training can go on"
            )
        if not (self.behind or self._landed):
            return
        # One rank may see a step that another one, without parameters of its own, does not.
        if any(gather_objects(self.behind or self._changes() != self._written, self.head.group)):
            self.write()

    def _changes(self) -> tuple[int, int]:
        """Differs from what it was if the parameter may have changed. Optimizers that write through `.data` or into a
        buffer that holds the parameter are counted by their steps."""
        return optimizer_steps(), 0 if self.weight.is_inference() else self.weight._version

    def write(self) -> int:
        """Publishes the parameter's rows of all tensor-parallel ranks as a new version. Collective over the head's
        group."""
        key = first_rank_does(lambda: uuid.uuid4().hex, self.head.group)
        self._written = self._changes()
        rows = self.weight.detach()
        if self._source < 0:  # the first tensor-parallel group has the same
            rows = rows[:0]
        first = self.first_row if self._source >= 0 else 0
        version = write_shard(self.head, rows, write_key=key, first_row=first, group=self.head.group)
        self.behind = self._landed = False
        return version

    def _land(self, target: Tensor, *, overwrite: bool) -> None:
        """Everything in the server's window, into the rows that this rank has."""
        all_do(self._require_whole, self.head.group)
        if self._uncommitted is None:
            marks = gather_marks(self.head, self.head.group)
            flush = self._send if dist.get_rank(self.head.group) == 0 else self._receive if self._source >= 0 else None
            answer = flush(target, overwrite, marks) if flush is not None else None
            self._uncommitted = first_rank_does(lambda: _raised(answer), self.head.group)
            self._cut = False
        flush_id = str(self._uncommitted)
        first_rank_does(lambda: self.head.head.commit_flush(flush_id), self.head.group)
        self._uncommitted = None
        window_of(self.head).end()
        self.waiting, self._landed = False, True

    def _require_whole(self) -> None:
        if self._cut:
            raise RuntimeError(
                f"an earlier flush of head '{self.head.name}' was cut, and the weight's gradient has a part of it: "
                "call drop_gradient() of the layer, zero the gradient, and compute the step again"
            )

    def forget(self) -> None:
        """The window was dropped, and what has landed of it is zeroed by the caller."""
        self.waiting = self._cut = False
        self._uncommitted = None

    def _send(self, target: Tensor, overwrite: bool, marks: list[str]) -> str | Exception:
        """The first rank's: reads dW, keeps its own rows, and passes all on to its tensor-parallel ranks. Returns the
        flush's id, or the error."""

        def put(first_row: int, rows: Any, _bias: Any) -> None:
            # Not from_numpy, which warns of arrays that are not to be written to.
            memory = (ctypes.c_char * rows.nbytes).from_address(rows.ctypes.data)
            values = torch.frombuffer(memory, dtype=torch.float32).view(rows.shape).to(target.device)
            if dist.get_world_size(self.tp_group) > 1:
                self._pass_on(torch.tensor([_ROWS, first_row, len(rows)], device=target.device))
                self._pass_on(values)
            self._put(target, first_row, values, overwrite)

        outcome: str | Exception
        try:
            outcome = self.head.head.flush(
                dtype="float32", gradient_scale=window_of(self.head).scale, sink=put, commit=False, marks=marks
            ).flush_id
        except Exception as error:  # noqa: BLE001  (it is raised on all ranks)
            outcome = error
        if dist.get_world_size(self.tp_group) > 1:
            self._pass_on(torch.tensor([_END, 0, 0], device=target.device))
        return outcome

    def _receive(self, target: Tensor, overwrite: bool, _marks: list[str]) -> None:
        while True:
            head = torch.empty(3, dtype=torch.int64, device=target.device)
            self._pass_on(head)
            what, first_row, count = head.tolist()
            if what == _END:
                return
            values = torch.empty(count, self.weight.shape[1], dtype=torch.float32, device=target.device)
            self._pass_on(values)
            self._put(target, first_row, values, overwrite)

    def _pass_on(self, tensor: Tensor) -> None:
        dist.broadcast(tensor, src=dist.get_global_rank(self.tp_group, self._source), group=self.tp_group)

    def _put(self, target: Tensor, first_row: int, values: Tensor, overwrite: bool) -> None:
        """Those of the rows from first_row on that are here."""
        first = max(first_row, self.first_row)
        end = min(first_row + len(values), self.first_row + self.weight.shape[0])
        if first >= end:
            return
        with torch.no_grad():
            own = values[first - first_row : end - first_row]
            place = target[first - self.first_row : end - self.first_row]
            self._cut = True  # until all of it has landed
            place.copy_(own) if overwrite else place.add_(own)


def _raised(answer: Any) -> Any:
    if isinstance(answer, Exception):
        raise answer
    return answer


class _Tie(torch.autograd.Function):
    """The identity, between the trunk and the loss: its backward runs once the loss's has."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, own: OwnWeight) -> Tensor:
        ctx.own = own
        return hidden.view_as(hidden)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        if ctx.needs_input_grad[1]:
            return grad, ctx.own.gradient(), None
        ctx.own.drop_unwanted()
        return grad, None, None
