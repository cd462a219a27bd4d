"""An embedding that is the head's weight as well: it stays with the trainer, the head follows it.

The trainer's optimizer updates the parameter, so its `.grad` has to hold both gradients before anything is done with
it. They come together at the end of a backward pass: the embedding is the first layer, so when its own gradient is
in `.grad`, the server has had every token of that pass, and what it gathered is flushed into the same `.grad`. Weights
that have changed since are written to the server before the next forward. Unchanged ones are not: they keep their
version, on which a loss may depend whose backward pass is still to come.

Ranks that share the head call forwards as they like, one perhaps to sample, so forwards ask no other rank anything.
The ranks write together when an optimizer has stepped, and where each of them finds by itself that its weights have
changed.
"""

from __future__ import annotations

import copy
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lossd.torch._stepping import outer_optimizers
from lossd.torch.distributed import first_rank_does
from lossd.transformers._ranks import LastBackward
from lossd.transformers._weights import bias_of

if TYPE_CHECKING:
    from lossd.torch import RemoteHead

# Integers that a digest multiplies at once.
_DIGEST_VALUES = 1 << 21
# Rows that are looked at where a change of a few would be seen later.
_SAMPLE_ROWS = 256


class TiedWeight:
    """Keeps a remote head and the parameter [V, H] that it is tied to the same."""

    def __init__(self, remote: RemoteHead, linear: nn.Linear, last: LastBackward, *, automatic: bool) -> None:
        """`linear` has the weight, which the server has too by now. Collective with a group."""
        self._remote = remote
        self._linear = linear
        self._last = last
        self._remember(_digest(linear.weight))
        self._in_doubt = True
        # Another rank may begin with other weights. Once it has the first one's, there is nothing to write.
        self._first_digest = first_rank_does(lambda: self._digest, remote.group)
        self._waiting: object = None
        self._flushes_each = False
        self._hook = None
        if automatic and linear.weight.requires_grad:
            self._hook = linear.weight.register_post_accumulate_grad_hook(self._after_backward)
        if not remote.frozen:
            _followed.add(self)

    @torch.compiler.disable
    def refresh(self) -> None:
        """To be called before a forward. Writes the weights to the server if they have changed since the last time,
        and drops what it gathered of a step that was given up; with a group every rank has to find that it is so."""
        if torch.is_grad_enabled():
            self._drop_if_given_up()
        changed = self._changed()
        if changed is not None:
            self._write(changed)

    def require_tied(self, weight: object) -> None:
        """TypeError unless `weight`, which the model's head has now, is the parameter that is followed here."""
        if weight is not self._linear.weight:
            raise TypeError(
                f"the weight that head {self._remote.name!r} is tied to was replaced (torch.func.functional_call): "
                "leave it out of the parameters given, since the head at the server follows the model's own"
            )

    def watch(self, loss: torch.Tensor) -> None:
        """RuntimeError from a backward pass of `loss` that would answer the weight's gradient without the head's."""
        wanted = self._hook is not None and self._linear.weight.requires_grad and loss.requires_grad
        if wanted and not torch.compiler.is_compiling():
            loss.register_hook(self._require_accumulation)

    def _require_accumulation(self, _: torch.Tensor) -> None:
        node = torch.autograd.graph.get_gradient_edge(self._linear.weight).node
        try:
            torch._C._will_engine_execute_node(node)  # noqa: SLF001  (there is no public way)
        except RuntimeError as error:  # of torch.autograd.grad, where the weight is among the inputs
            raise RuntimeError(
                f"torch.autograd.grad does not get the gradient of head {self._remote.name!r}, which is added to .grad "
                "of the weight that it is tied to: call loss.backward()"
            ) from error

    def flush(self) -> None:
        """Adds what the server has gathered to the parameter's `.grad`; the next window begins."""
        from lossd.torch import flush_into

        flush_into(self._remote, self._linear.weight, to="grad", bias=self._linear.bias)
        self._waiting = None
        # Now weights may change, and an optimizer that writes to `.data` leaves the parameter's version alone.
        self._in_doubt = True

    def close(self) -> None:
        _followed.discard(self)
        if self._hook is not None:
            self._hook.remove()

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """To be called before `optimizer` steps. RuntimeError if it would do so without the head's gradient."""
        if self._waiting is None or not self._is_stepped_by(optimizer) or self._drop_if_given_up():
            return
        # A loop that accumulates does not step now: this is another one, whose passes are all to be flushed.
        self._flushes_each = True
        raise RuntimeError(
            f"an optimizer steps the weight that head {self._remote.name!r} is tied to, without the head's gradient: a "
            "step's last backward is still to come. Either accelerate says so (GradientState().sync_gradients is "
            "False), as it does when a run was interrupted, or every forward was in DistributedDataParallel.no_sync(). "
            "Call zero_grad() and compute the step again, which is right then, or lossd.transformers.flush_tied(model) "
            "before gradients are unscaled and clipped"
        )

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """To be called when `optimizer` has stepped, which ranks do together, as their next forwards may not be."""
        weight = self._linear.weight
        if self._remote.group is not None and weight.grad is not None and self._is_stepped_by(optimizer):
            self._write(_digest(weight))

    def __deepcopy__(self, memo: dict[int, Any]) -> TiedWeight:
        """For a copied model, whose head is a frozen copy: it follows the copied embedding, and has no gradient.
        Collective with a group."""
        changed = self._changed()
        remote, linear = copy.deepcopy(self._remote, memo), copy.deepcopy(self._linear, memo)
        clone = TiedWeight(remote, linear, LastBackward(), automatic=False)
        if changed is not None:  # the copy of the head, which the server made, has them from before
            clone._write(changed)
        return clone

    def _changed(self) -> int | None:
        """The weights' digest, if the server has others. After a write and until the next flush it looks at some rows
        only: what is done to a few others meanwhile, through `.data`, is seen behind that flush."""
        if not self._in_doubt and self._state() == self._seen and _digest(self._sampled()) == self._sample:
            return None
        digest = _digest(self._linear.weight)
        if digest not in (self._digest, self._first_digest):
            return digest
        self._remember(digest)
        return None

    def _write(self, digest: int) -> None:
        self._remote.write_weights(self._linear.weight, bias_of(self._linear))
        self._remember(digest)
        self._first_digest = digest
        self._in_doubt = False

    def _remember(self, digest: int) -> None:
        self._digest, self._seen, self._sample = digest, self._state(), _digest(self._sampled())

    def _state(self) -> tuple[int, int]:
        return self._linear.weight.data_ptr(), self._linear.weight._version

    def _sampled(self) -> torch.Tensor:
        weight = self._linear.weight.detach()
        return weight[:: max(1, weight.shape[0] // _SAMPLE_ROWS)]

    def _is_stepped_by(self, optimizer: torch.optim.Optimizer) -> bool:
        """Once a step: not by one that is part of another (ZeroRedundancyOptimizer), which not every rank has."""
        return self._has(optimizer) and not any(self._has(outer) for outer in outer_optimizers(optimizer))

    def _has(self, optimizer: torch.optim.Optimizer) -> bool:
        weight = self._linear.weight
        return any(parameter is weight for group in optimizer.param_groups for parameter in group["params"])

    def _after_backward(self, _: torch.Tensor) -> None:
        last = bool(self._last)
        if last or self._flushes_each:
            self._flushes_each = not last
            self.flush()
        else:
            self._waiting = self._gradient_state()

    def _drop_if_given_up(self) -> bool:
        """Drops what waits at the server if somebody has cleared the gradient that it was to be added to."""
        gradient = self._linear.weight.grad
        if self._waiting is None or self._waiting == self._gradient_state():
            return False
        if gradient is not None and bool(gradient.any()):
            return False
        self._remote.zero_grad()
        self._waiting = None
        return True

    def _gradient_state(self) -> object:
        gradient = self._linear.weight.grad
        return None if gradient is None else (gradient.data_ptr(), gradient._version)


_followed: weakref.WeakSet[TiedWeight] = weakref.WeakSet()


@torch._disable_dynamo
def _before_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for tied in list(_followed):
        tied.before_step(optimizer)


@torch._disable_dynamo
def _after_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for tied in list(_followed):
        tied.after_step(optimizer)


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)


def _digest(weight: torch.Tensor) -> int:
    """A digest of the bits of `weight` [V, H], modulo 2**64: their sum with random factors of rows and columns."""
    bits = _bits(weight.detach().resolve_neg())
    rows, columns = (_factors(size, bits.device) for size in bits.shape)
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    at_once = max(1, _DIGEST_VALUES // bits.shape[1])
    for part, factors in zip(bits.split(at_once), rows.split(at_once), strict=True):
        total += ((part * columns).sum(dim=1) * factors).sum()
    return int(total)


def _bits(weight: torch.Tensor) -> torch.Tensor:
    """As integers, of 8 bytes where rows can be divided into such: the fewer there are, the faster is their sum."""
    size = weight.element_size()
    if weight.is_contiguous() and all(count * size % 8 == 0 for count in (weight.shape[1], weight.storage_offset())):
        return weight.view(torch.int64)
    return weight.view({4: torch.int32, 2: torch.int16}[size])


def _factors(size: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(size)
    drawn = torch.randint(-(1 << 62), 1 << 62, (size,), generator=generator, dtype=torch.int64, device="cpu")
    return drawn.bitwise_or(1).to(device)
