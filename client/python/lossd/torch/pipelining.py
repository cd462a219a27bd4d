"""A remote head as the end of torch.distributed.pipelining.

    stage = PipelineStage(tail, rank, stages, device)        # hidden states [n, ..., H] come out; nn.Identity() will do
    loss = PipelineLoss(head, stage)
    schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=loss, scale_grads=False)
    loss.begin_step(target, schedule)
    schedule.step(target=target, losses=losses)                # the sum of `losses` is the mean over all tokens
    head.step(lr)

client/examples/python/pipeline.py is a whole program.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from lossd.torch._tokens import class_weight_sum, shift_labels

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.pipelining import PipelineStage

    from lossd.torch import RemoteHead


class PipelineLoss:
    """The `loss_fn` of a schedule whose last stage answers hidden states.

    Each microbatch's loss is its sum over tokens, divided by the tokens of the whole step (`begin_step`). Microbatches
    may have different numbers of them; gradients add up to those of the mean over the step, here and in the server. So
    the schedule must not scale gradients itself: `scale_grads=False`, on every rank.

    To learn shapes, a schedule's first step calls its loss_fn with uninitialised memory. That call is recognised and
    nothing of it reaches the server, which is why the stage must be known. Not thread-safe.
    """

    def __init__(
        self,
        head: RemoteHead,
        stage: PipelineStage,
        *,
        ignore_index: int = -100,
        shift: bool | int = False,
        grad_scale: float | None = 1.0,
        **options: Any,
    ) -> None:
        """`stage`: the last stage, of this process. `shift`, `grad_scale` and `options`: linear_cross_entropy's.

        Schedules start backward with an upstream gradient of 1, so hidden states are sent once.
        Raises ValueError if `stage` is not the last, RuntimeError if it has a forward context of somebody else's.
        """
        if not stage.is_last:
            raise ValueError(f"stage: got stage {stage.stage_index} of {stage.num_stages}, want the last")
        self._head = head
        self._ignore_index = ignore_index
        self._shift = int(shift)
        self._options = {"grad_scale": grad_scale, "shift": self._shift, **options}
        self._normalizer: float | None = None
        self._z_normalizer: float | None = None
        self._rehearsal = False
        self._stage = stage
        if hasattr(stage, "register_forward_context"):
            self._handle = stage.register_forward_context(self._around_forward)

    def begin_step(
        self,
        target: torch.Tensor,
        schedule: Any = None,
        *,
        group: ProcessGroup | None = None,
        count: float | None = None,
    ) -> int:
        """Counts the tokens of the step that comes next: all its microbatches' `target`, before they are cut.

        `group`: the last stages of data-parallel pipelines, whose tokens count together. `schedule`: checked to leave
        gradients unscaled. `count`: what the cross-entropy is divided by (over the whole group), if not the tokens: of
        a head with class weights the sum of the labels' weights; it is counted here if the option `weight` has them.
        Returns the number of tokens. Raises ValueError if the schedule scales gradients, or a count is missing.
        """
        if getattr(schedule, "scale_grads", False):
            raise ValueError(
                "schedule: make it with scale_grads=False (on every rank): this loss is normalised by the step's tokens"
            )
        if self._shift and target.dim() < 2:
            raise ValueError(
                f"shift is {self._shift}, but target has the shape {list(target.shape)}: sequences would be cut; want "
                "[sequences, tokens]"
            )
        labels = shift_labels(target, self._shift, self._ignore_index)
        tokens = _total((labels != self._ignore_index).sum(), group)
        if count is None:
            count = self._class_weight_sum(labels, group) if self._has_class_weights else float(tokens)
        self._normalizer = count
        self._z_normalizer = float(tokens) if self._has_class_weights else None
        return int(tokens)

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """output [..., H], target [...] int64 -> the microbatch's share of the step's mean loss, fp32. In a schedule's
        eval() it adds nothing to the head's gradient.

        Raises RuntimeError if begin_step has not been called, and what linear_cross_entropy raises.
        """
        if self._rehearsal:
            # Dense, as the real gradient is: its strides are what the schedule learns here.
            return (output.float() * 0.0).sum()
        if self._normalizer is None:
            raise RuntimeError("PipelineLoss: call begin_step(target, schedule) before the schedule's step")
        from lossd.torch import linear_cross_entropy

        # The schedule's eval() sends nothing back, and a declared grad_scale would have added to dW already.
        evaluates = getattr(self._stage, "has_backward", True) is False
        with torch.no_grad() if evaluates else contextlib.nullcontext():
            return linear_cross_entropy(
                output,
                target,
                self._head,
                ignore_index=self._ignore_index,
                reduction="mean",
                # A step of no tokens at all: every microbatch's sum is 0.
                normalizer=self._normalizer or 1.0,
                z_normalizer=None if self._z_normalizer is None else self._z_normalizer or 1.0,
                **{**self._options, **({"grad_scale": None} if evaluates else {})},
            )

    @property
    def _has_class_weights(self) -> bool:
        weight = self._options.get("weight")
        return bool(self._head.head.config.has_class_weights) if weight is None else weight is not False

    def _class_weight_sum(self, labels: torch.Tensor, group: ProcessGroup | None) -> float:
        weight = self._options.get("weight")
        if not isinstance(weight, torch.Tensor):
            raise ValueError(
                f"head {self._head.head.name!r} has class weights: give the sum of those of the step's labels as "
                "count, or the weights themselves as PipelineLoss(weight=...), or weight=False"
            )
        own = class_weight_sum(weight, labels, self._ignore_index)
        return float(_total(torch.tensor(own, dtype=torch.float64, device=labels.device), group))

    @contextlib.contextmanager
    def _around_forward(self, info: Any) -> Iterator[None]:
        self._rehearsal = info.is_metadata_inference
        yield


def _total(own: torch.Tensor, group: ProcessGroup | None) -> torch.Tensor:
    if group is not None:
        torch.distributed.all_reduce(own, group=group)
    return own
