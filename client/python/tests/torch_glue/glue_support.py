"""Batches, and a server that comes back."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import torch
from ranks import Ranks as Ranks

import lossd
from lossd.server import find_program
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


class Restartable:
    """A server with checkpoints that comes back at the same address."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.target = f"unix:{folder / 'socket'}"
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        flags = ["--device=cpu", f"--listen={self.target}", "--metrics_listen=", "--memory_limit_bytes=1073741824"]
        checkpoints = [f"--checkpoint_dir={self._folder / 'checkpoints'}", "--restore"]
        with open(self._folder / "log", "ab") as log:
            self.process = subprocess.Popen([str(find_program()), *flags, *checkpoints], stdout=log, stderr=log)
        try:
            lossd.connect(self.target).close()  # waits until it serves
        except lossd.LossdError as error:
            raise RuntimeError(f"{error}; its log:\n{(self._folder / 'log').read_text()}") from error

    def end(self, how: signal.Signals) -> None:
        """SIGTERM drains: what clients had lives on in the next one. SIGKILL does not."""
        assert self.process is not None
        self.process.send_signal(how)
        self.process.wait()
