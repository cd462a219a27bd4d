"""The module that stands where a model's `lm_head` was."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lossd.torch._holder import ProxyHolder
from lossd.torch._saving import load, save

if TYPE_CHECKING:
    from lossd.torch import RemoteHead

# The first forward with labels gives the model these in place of logits: negative, zero, small, beyond any softcap.
_PROBES = (-100.0, -3.0, 0.0, 0.5, 100.0)


class RemoteLmHead(ProxyHolder):
    """Turns hidden states [..., H] into logits [..., V] of a remote head, without a weight of its own.

    While a loss is wanted (`capture`), it keeps the hidden states and hands on next to nothing instead of logits:
    what the model then does to them (a softcap, a scale) is the server's to do. Not thread-safe, as a model is not.
    """

    remote: RemoteHead

    def __init__(self, remote: RemoteHead, linear: nn.Linear | None, *, logit_scale: float, softcap: float) -> None:
        """linear: of a tied head, whose weight the embedding has as well; it stays a parameter of the model."""
        super().__init__()
        self.__dict__["remote"] = remote  # no submodule: names and states are those of the Linear in its place
        if linear is None:
            self.proxy = remote.proxy
        else:
            # One Parameter under both names, as transformers has it: its checkpoints and tie_weights() stay right.
            self._parameters.update(weight=linear.weight, bias=linear.bias)
        self.in_features = remote.hidden_size
        self.out_features = remote.vocab_size
        self.logit_scale = logit_scale
        self.softcap = softcap
        self._in_fp32 = False
        self._capturing = False
        self._checked = False
        self._hidden: torch.Tensor | None = None

    def begin_capture(self) -> None:
        self._capturing = True
        self._hidden = None

    def end_capture(self, logits: torch.Tensor | None) -> torch.Tensor:
        """The hidden states [..., H] of the forward since begin_capture, whose outputs had these "logits".

        Raises RuntimeError if the model did not come here, ValueError if it does to logits what the server would not.
        """
        hidden = self._hidden
        self.cancel_capture()
        if hidden is None:
            raise RuntimeError("the patched model's forward did not call its lm_head: lossd cannot compute its loss")
        if not self._checked:
            self._check(hidden, logits)
            self._checked = True
        return hidden

    def cancel_capture(self) -> None:
        self._capturing = False
        self._hidden = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._capturing:
            if "weight" not in self._parameters and self._parameters.get("proxy") is not self.remote.proxy:
                raise TypeError(
                    f"the parameter of head {self.remote.name!r} was replaced, as by torch.func.functional_call: leave "
                    "it out of the parameters given, since it stands for weights at a server"
                )
            self._hidden = hidden
            return self._stand_in(hidden)
        weight = self._parameters.get("weight", self._parameters.get("proxy"))
        wanted = hidden.requires_grad or (weight is not None and weight.requires_grad)
        if self.training and torch.is_grad_enabled() and wanted:
            raise RuntimeError(
                "logits of a remote head have no gradient: give the model `labels`, or call it under torch.no_grad() "
                "or in eval mode. Of a Trainer with label_smoothing_factor: use RemoteHeadTrainer, or "
                "RemoteHeadTrainerMixin with its class; a compute_loss_func of logits cannot be used"
            )
        # Scale and softcap are in the model's own forward.
        dtype = torch.float32 if self._in_fp32 else hidden.dtype
        return self.remote.head.logits(hidden.detach(), dtype=_name(dtype), logit_scale=1.0, softcap=0.0)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "forward" and getattr(value, "__name__", "") == "cast_forward_to_fp32":  # GRPOTrainer's
            require_fp32(self.remote)
            self._in_fp32 = True  # as that would answer, whose product of hidden states and weights is the server's
        else:
            super().__setattr__(name, value)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        if "weight" in self._parameters:
            super()._save_to_state_dict(destination, prefix, keep_vars)
        else:
            save(self.remote, destination, prefix)

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
        if "weight" in self._parameters:
            found = (state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
            super()._load_from_state_dict(*found)
        else:
            load(self.remote, state_dict, prefix, strict, missing_keys, unexpected_keys, error_msgs)

    def __getattr__(self, name: str) -> Any:
        if name in ("weight", "bias") and name not in self._parameters:
            view = getattr(self.remote, name)
            if view is not None and self.training and torch.is_grad_enabled() and self.remote.proxy.requires_grad:
                view.in_training = True  # TRL's DistillationTrainer would train the trunk with it, and not the head
            return view
        return super().__getattr__(name)

    def __deepcopy__(self, memo: dict[int, Any]) -> RemoteLmHead:
        if not memo:  # not a part of a model that is copied: PEFT would train such a copy
            raise TypeError(
                f"the module of head {self.remote.name!r} of a lossd server cannot be copied alone: "
                f"{self.advice_to_adapters()}, or take the head back with lossd.transformers.unpatch(model) before; a "
                "copy of the whole model has a frozen copy of the head"
            )
        clone: RemoteLmHead = type(self).__new__(type(self))
        memo[id(self)] = clone
        clone.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return clone

    def extra_repr(self) -> str:
        # Messages show this, such as PEFT's to those that want to adapt it.
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, head {self.remote.head.name!r} of a "
            f"lossd server: {self.advice_to_adapters()}"
        )

    def advice_to_adapters(self) -> str:
        """Which options of PEFT's make it adapt a head, that cannot be."""
        advice = "leave 'lm_head' out of PEFT's target_modules and modules_to_save"
        if "weight" in self._parameters:
            advice += ", and ensure_weight_tying and trainable_token_indices out, which adapt it with its embedding"
        return advice

    def _stand_in(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._checked:
            return hidden.new_empty((*hidden.shape[:-1], 0))
        return hidden.new_tensor(_PROBES).expand(*hidden.shape[:-1], len(_PROBES))

    def _check(self, hidden: torch.Tensor, logits: torch.Tensor | None) -> None:
        shown_shape = (*hidden.shape[:-1], len(_PROBES))
        if logits is None or logits.shape != shown_shape:
            shape = None if logits is None else tuple(logits.shape)
            raise ValueError(
                "lossd cannot compute this model's loss: its logits are not what its lm_head makes of hidden states "
                f"(shown {shown_shape} it answered {shape})"
            )
        if logits.numel() == 0:
            return
        expected = torch.tensor(_PROBES, dtype=torch.float64, device="cpu") * self.logit_scale
        if self.softcap:
            expected = self.softcap * torch.tanh(expected / self.softcap)
        shown = logits.detach().reshape(-1, len(_PROBES))[0].double().cpu()
        if not torch.allclose(shown, expected, rtol=2e-2, atol=1e-6):
            raise ValueError(
                f"the model makes {shown.tolist()} of the logits {list(_PROBES)}, a head with logit_scale="
                f"{self.logit_scale:g} and softcap={self.softcap:g} would make {expected.tolist()} of them: give "
                "patch() the logit_scale and softcap of the model"
            )


def require_fp32(remote: RemoteHead) -> None:
    """Raises ValueError, of TRL's option cast_lm_head_to_fp32, if the head computes in less."""
    if remote.dtype != torch.float32:
        raise ValueError(
            f"cast_lm_head_to_fp32: head {remote.name!r} is {remote.dtype} at the server, which computes in that; make "
            'it with patch(..., dtype="float32")'
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
