"""Batches."""

from __future__ import annotations

import torch
from ranks import Ranks as Ranks

from lossd.torch.head import RemoteHead

VOCAB, HIDDEN = 11, 6


def batch(
    seed: int = 0, tokens: int = 8, vocab: int = VOCAB, hidden: int = HIDDEN
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden_states = torch.randn(tokens, hidden, generator=generator)
    return hidden_states, torch.randint(vocab, (tokens,), generator=generator)


def weights_of(head: RemoteHead) -> torch.Tensor:
    return head.read_weights(dtype=torch.float32)[0]
