"""The layer that stands where GPTModel's output_layer stood."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from lossd.megatron._rows import GatherRows, ShareRows, gathered, share_of
from lossd.megatron._weight import HOW_TO_FINALIZE, OwnWeight
from lossd.torch import RemoteHead, multi_token_cross_entropy


class RemoteOutputLayer(nn.Module):
    """Hidden states and labels in, losses out; the logits exist nowhere. replace_output_layer() makes one.

    It has no parameters, or the `weight` [V / tp, H] that is given, which Megatron's optimizer steps. head: a
    RemoteHead whose group is that of all ranks with this layer (tensor-, data- and context-parallel). shared_weight:
    the embedding's, where they are tied: it is what the loss is of, and `weight`, if there is one as well, only an
    entry of state dicts. gradient_scale: what a step of the server's multiplies dW with, which is the sum over all
    ranks: 1 over the data- and context-parallel ranks, where Megatron averages; None where it divides by the tokens of
    the step (calculate_per_token_loss), which finalizing() finds out. skip_masked: tokens whose loss_mask is 0 are not
    sent, and their losses are 0.
    options: of the loss, such as lse_square_scale, as linear_cross_entropy's."""

    def __init__(
        self,
        head: RemoteHead,
        *,
        tp_group: dist.ProcessGroup,
        sequence_parallel: bool = False,
        gather_output: bool = False,
        weight: nn.Parameter | None = None,
        shared_weight: nn.Parameter | None = None,
        delay_wgrad: bool = False,
        gradient_scale: float | None = 1.0,
        skip_masked: bool = False,
        device: torch.device | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        # Not as a module: Megatron is to see nothing of it, neither for its buffers nor for its checkpoints.
        self._held = (head,)
        self.tp_group = tp_group
        self.sequence_parallel = sequence_parallel and dist.get_world_size(tp_group) > 1
        self.gather_output = gather_output
        self.skip_masked = skip_masked
        self.options = dict(options or {})
        self.register_parameter("weight", weight)
        self.register_parameter("bias", None)
        self._device = device or torch.device("cpu")
        self._gradient_scale = gradient_scale
        self._tokens_scale: Tensor | None = None
        ranks = dist.get_world_size(tp_group)
        if head.vocab_size % ranks:
            raise ValueError(f"head '{head.name}' has {head.vocab_size} rows, which {ranks} ranks cannot share evenly")
        self.rows_per_rank = head.vocab_size // ranks
        self.first_row = dist.get_rank(tp_group) * self.rows_per_rank
        own = weight if shared_weight is None else shared_weight
        self.own: OwnWeight | None = None
        if own is not None:
            self.own = OwnWeight(head, own, tp_group, delay_wgrad=delay_wgrad, shared=shared_weight is not None)
        self._register_load_state_dict_pre_hook(
            lambda state, prefix, *arguments: state.setdefault(f"{prefix}_extra_state") and None
        )

    @property
    def head(self) -> RemoteHead:
        return self._held[0]

    # The loss

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        """Logits [s, b, V], or [s, b, V / tp] unless they are gathered, of hidden states [s, b, h] ([s / tp, b, h] with
        sequence parallelism), as ColumnParallelLinear's: for generation. RuntimeError where they would need a gradient:
        give the model labels. weight: ignored."""
        if torch.is_grad_enabled() and (self.training or input_.requires_grad):
            raise RuntimeError(
                "the logits of a remote output layer have no gradient: call the model with labels=..., which computes "
                "the losses at the server; for logits, call it under torch.no_grad()"
            )
        self._catch_up()
        hidden = input_.detach()
        if self.sequence_parallel:
            hidden = gathered(hidden, hidden.shape[0] * dist.get_world_size(self.tp_group), self.tp_group)
        logits: Tensor = self.head.head.logits(hidden, dtype=str(hidden.dtype).removeprefix("torch."))
        if not (self.gather_output if runtime_gather_output is None else runtime_gather_output):
            logits = logits[..., self.first_row : self.first_row + self.rows_per_rank].contiguous()
        return logits, None

    def losses(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Losses [b, s], fp32, the same on all tensor-parallel ranks, of hidden states [s, b, h] ([s / tp, b, h] with
        sequence parallelism) and labels [b, s]; -100 has loss 0."""
        return self.losses_of_depths(hidden.unsqueeze(0), [labels])[0]

    def losses_of_depths(self, hidden: Tensor, labels: Sequence[Tensor]) -> list[Tensor]:
        """losses() of D prediction depths, of which the server sees one batch. hidden: [D, s, b, h] ([D, s / tp, b, h]
        with sequence parallelism); labels: D of [b, s]. Returns D of [b, s]."""
        self._catch_up()
        if self.own is not None:
            hidden = self.own(hidden)
        targets = torch.stack([one.t() for one in labels])
        depths, tokens, samples = targets.shape
        if dist.get_world_size(self.tp_group) == 1:
            losses = self._compute(hidden, targets)
        elif self.sequence_parallel:
            first, end = share_of(tokens, self.tp_group)
            own = self._compute(hidden, targets[:, first:end])
            losses = GatherRows.apply(own.transpose(0, 1), tokens, self.tp_group).transpose(0, 1)
        else:
            rows = depths * tokens * samples
            first, end = share_of(rows, self.tp_group)
            shared = ShareRows.apply(hidden.reshape(rows, -1), self.tp_group)
            own = self._compute(shared.unsqueeze(0), targets.reshape(1, rows)[:, first:end])
            losses = GatherRows.apply(own[0], rows, self.tp_group).view(targets.shape)
        return [one.t().contiguous() for one in losses.unbind(0)]

    def _compute(self, hidden: Tensor, targets: Tensor) -> Tensor:
        options = self.options
        if self.own is not None and not self.own.weight.requires_grad and not hidden.requires_grad:
            options = {**options, "train_head": False}  # nothing here needs a gradient
        return multi_token_cross_entropy(hidden, targets, self.head, reduction="none", **options)[0]

    # The gradient

    @property
    def gradient_scale(self) -> float:
        """What a step at the server multiplies dW with, for the gradient that Megatron would have reduced.
        RuntimeError before finalizing() has seen the step's tokens, where they are needed."""
        if self._gradient_scale is not None:
            return self._gradient_scale
        if self._tokens_scale is None:
            raise RuntimeError(
                "calculate_per_token_loss divides gradients by the tokens of the step, which are not known here. "
                + HOW_TO_FINALIZE
            )
        return float(self._tokens_scale)

    def finalizing(self, finalize: Callable[..., Any]) -> Callable[..., Any]:
        """A finalize_model_grads_func that does what `finalize` (megatron.core.distributed.finalize_model_grads) does,
        and besides fetches a delayed gradient before, and keeps the number of tokens for gradient_scale. It raises
        ValueError if a weight of the model's own would be gathered behind the forward pass that writes it to the server
        (overlap_param_gather)."""

        def both(models: Any, num_tokens: Tensor | None = None, *arguments: Any, **named: Any) -> Any:
            if self.own is not None:
                _check_gathered(models)
            self.wgrad()
            answer = finalize(models, num_tokens, *arguments, **named)
            if num_tokens is not None:  # summed up over all ranks in place
                self._tokens_scale = 1.0 / num_tokens.detach().clamp(min=1)
            return answer

        return both

    def wgrad(self) -> None:
        """With a weight of its own and delay_wgrad: adds the gradient that waits at the server to its main_grad. Once a
        step, behind its last backward and before gradients are reduced: finalizing() does it. Collective."""
        if self.own is not None:
            self.own.wgrad()

    def drop_gradient(self) -> None:
        """Drops what waits at the server, as after a step that is computed again. Collective."""
        if self.own is not None:
            self.own.drop()
        else:
            self.head.zero_grad()

    # The weights

    def upload(self) -> int | None:
        """Writes a weight of the model's own to the server, and returns its version there. The first forward pass
        behind an optimizer's step, or behind a state that was loaded, does it by itself. Collective."""
        return None if self.own is None else self.own.write()

    def _catch_up(self) -> None:
        if self.own is not None:
            self.own.catch_up()

    def write_rows(self, rows: Tensor) -> int:
        """Publishes the rows [V / tp, H] of all tensor-parallel ranks (of the first of data-parallel ones) as the
        head's weights; returns the version. Collective."""
        writer = OwnWeight(self.head, nn.Parameter(rows.detach(), requires_grad=False), self.tp_group)
        return writer.write()

    def read_rows(self) -> Tensor:
        """This rank's rows [V / tp, H] of the server's weights, in the head's dtype."""
        out = torch.empty(self.rows_per_rank, self.head.hidden_size, dtype=self.head.dtype, device=self._device)
        if self.head.head.info().weight_version == 0:
            return out.zero_()
        dtype = str(out.dtype).removeprefix("torch.")
        self.head.head.read_rows(self.first_row, self.rows_per_rank, out=out, dtype=dtype)
        return out

    # Checkpoints

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.own is None:
            destination[prefix + "weight"] = self.read_rows()

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        key = prefix + "weight"
        if self.own is not None:
            super()._load_from_state_dict(
                state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
            )
            self.own.behind = True
            return
        if key not in state_dict:
            missing_keys.append(key)
        elif tuple(state_dict[key].shape) != (self.rows_per_rank, self.head.hidden_size):
            wanted = [self.rows_per_rank, self.head.hidden_size]
            error_msgs.append(f"size mismatch for {key}: {list(state_dict[key].shape)}, and the head's is {wanted}")
        else:
            self.write_rows(state_dict[key])

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """As ColumnParallelLinear's: "weight", sharded by rows. Where the server steps it, it is read from there."""
        made: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )
        return made

    def get_extra_state(self) -> None:
        """None: state dicts have the keys of ColumnParallelLinear's."""

    def set_extra_state(self, state: Any) -> None:
        """Nothing is in it."""

    def extra_repr(self) -> str:
        head = self.head
        owner = "the server" if self.own is None else "the trainer"
        return f"head={head.name!r}, vocab_size={head.vocab_size}, hidden_size={head.hidden_size}, stepped by {owner}"


def _check_gathered(models: Any) -> None:
    for model in models:
        if getattr(getattr(model, "ddp_config", None), "overlap_param_gather", False):
            raise ValueError(
                "overlap_param_gather gathers the output layer's weight while the forward pass runs, which has written "
                "it to the server before: turn it off (--overlap-param-gather), or let the server step the head"
            )
