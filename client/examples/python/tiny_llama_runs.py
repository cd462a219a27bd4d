"""One training run: the trunk is here, the head in lossd or here, which is all that tells the runs apart."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaModel

import lossd
from lossd.torch import RemoteHead, linear_cross_entropy

BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1


class LocalHead:
    """The head as PyTorch has it. `kind` says how its sums are ordered."""

    def __init__(self, kind: str, weight: torch.Tensor) -> None:
        self._kind = kind
        self._weight = torch.nn.Parameter(weight)
        self._optimizer = torch.optim.AdamW([self._weight], betas=BETAS, weight_decay=WEIGHT_DECAY)

    def loss(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self._kind == "halves":
            half = len(self._weight) // 2
            logits = torch.cat([F.linear(hidden, self._weight[:half]), F.linear(hidden, self._weight[half:])], -1)
        elif self._kind == "float32-head":
            with torch.autocast(hidden.device.type, enabled=False):
                logits = F.linear(hidden.float(), self._weight)
        else:
            logits = F.linear(hidden, self._weight)
        return F.cross_entropy(logits.float().flatten(0, -2), labels.flatten())

    def step(self, lr: float) -> None:
        self._optimizer.param_groups[0]["lr"] = lr
        self._optimizer.step()
        self._optimizer.zero_grad()

    def close(self) -> None:
        pass


class Remote:
    """The head in lossd: its weights are sent once, then neither they nor their gradient move."""

    def __init__(self, client: lossd.Client, weight: torch.Tensor, dtype: torch.dtype) -> None:
        self._client = client
        self._head = RemoteHead.create(
            client,
            f"tiny-llama-{os.getpid()}",
            *weight.shape,
            dtype=dtype,
            master_weights=dtype != torch.float32,
            optimizer=lossd.AdamW(betas=BETAS, weight_decay=WEIGHT_DECAY),
            weights=weight,
            device=weight.device,
        )

    def loss(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        # Backward is called with an upstream gradient of 1: told so, each batch is sent once.
        return linear_cross_entropy(hidden, labels, self._head, grad_scale=1.0)

    def step(self, lr: float) -> None:
        self._head.step(lr)

    def close(self) -> None:
        self._client.delete_head(self._head.name, discard_gradient=True)


def train(kind: str, tokens: torch.Tensor, client: lossd.Client, options: argparse.Namespace) -> list[float]:
    """The loss of each step. `kind`: "remote", "local", or a local run with sums in another order."""
    device = torch.device(options.device)
    torch.manual_seed(options.seed)
    trunk = LlamaModel(_config(options)).to(device)
    weight = torch.empty(options.vocab, options.hidden, device=device).normal_(0, options.hidden**-0.5)
    optimizer = torch.optim.AdamW(trunk.parameters(), betas=BETAS, weight_decay=WEIGHT_DECAY)
    dtype = getattr(torch, options.dtype)
    head = Remote(client, weight, dtype) if kind == "remote" else LocalHead(kind, weight)
    places = torch.Generator().manual_seed(options.seed)
    losses = torch.empty(options.steps, device=device)
    for step in _progress(range(options.steps), kind, quiet=options.quiet):
        batch = _batch(tokens, places, options).to(device)
        if kind == "reversed":
            batch = batch.flip(0)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=options.dtype == "bfloat16"):
            hidden = trunk(batch[:, :-1]).last_hidden_state
            loss = head.loss(hidden, batch[:, 1:])
        loss.backward()
        lr = options.lr * _schedule(step, options.steps)
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
        head.step(lr)
        losses[step] = loss.detach()
    head.close()
    return losses.tolist()


def _config(options: argparse.Namespace) -> LlamaConfig:
    heads = options.hidden // 32
    return LlamaConfig(
        vocab_size=options.vocab,
        hidden_size=options.hidden,
        intermediate_size=8 * options.hidden // 3,
        num_hidden_layers=options.layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2),
        max_position_embeddings=options.length,
        use_cache=False,
    )


def _batch(tokens: torch.Tensor, places: torch.Generator, options: argparse.Namespace) -> torch.Tensor:
    """[batch, length + 1] tokens from random places."""
    starts = torch.randint(0, len(tokens) - options.length, (options.batch, 1), generator=places)
    return tokens[starts + torch.arange(options.length + 1)]


def _schedule(step: int, steps: int) -> float:
    """Warm-up over the first twentieth, then a cosine down to a tenth."""
    warmup = max(1, steps // 20)
    if step < warmup:
        return (step + 1) / warmup
    return 0.55 + 0.45 * math.cos(math.pi * (step - warmup) / max(1, steps - warmup))


def _progress(steps: Iterable[int], kind: str, *, quiet: bool) -> Iterable[int]:
    if quiet:
        return steps
    try:
        from tqdm import tqdm
    except ImportError:
        return steps
    return tqdm(steps, desc=f"{kind:>14}", unit="step")
