"""What test_memory.py starts: trains a few steps, and tells what its process has needed for that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

import lossd
from lossd.torch import RemoteHead, linear_cross_entropy

VOCABULARY, HIDDEN, TOKENS, STEPS = 1 << 16, 256, 256, 2
LOGITS_BYTES = TOKENS * VOCABULARY * 4
WEIGHT_BYTES = VOCABULARY * HIDDEN * 4
KINDS = ("declared", "undeclared", "local")


class LargestTensor(TorchDispatchMode):
    """The largest storage, in bytes, of any tensor that PyTorch makes in this thread; backward's on a CPU included."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for value in tree_iter(result):
            if isinstance(value, torch.Tensor):
                self.bytes = max(self.bytes, value.untyped_storage().nbytes())
        return result


def status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return 1024 * int(line.split()[1])
    raise LookupError(field)


class Local:
    def __init__(self) -> None:
        self.weight = torch.nn.Parameter(torch.empty(VOCABULARY, HIDDEN).normal_(0, 0.02))
        self.optimizer = torch.optim.SGD([self.weight], lr=0.1)

    def loss(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(F.linear(hidden, self.weight), labels)

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


class Remote:
    def __init__(self, client: lossd.Client, name: str, grad_scale: float | None) -> None:
        self.head = RemoteHead(client.create_head(name, VOCABULARY, HIDDEN, "float32", optimizer=lossd.SGD()))
        self.grad_scale = grad_scale
        # A part at a time: the whole never exists here.
        rows = 1024
        write = self.head.head.begin_write("initial")
        for first in range(0, VOCABULARY, rows):
            write.write_rows(first, torch.empty(rows, HIDDEN).normal_(0, 0.02))
        write.commit()

    def loss(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return linear_cross_entropy(hidden, labels, self.head, grad_scale=self.grad_scale)

    def step(self) -> None:
        self.head.step(0.1)


def train(kind: str, target: str, name: str) -> dict[str, Any]:
    """With a head of that name at `target`, or a local one. Run in a process of its own."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    with lossd.connect(target) as client:
        largest = LargestTensor()
        trunk = torch.nn.Linear(HIDDEN, HIDDEN)
        inputs, labels = torch.randn(TOKENS, HIDDEN), torch.randint(0, VOCABULARY, (TOKENS,))
        # The process as it is before it has a head: libraries loaded, buffers of the connection made.
        client.status()
        before = status_bytes("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from here.
        with largest:
            head = Local() if kind == "local" else Remote(client, name, 1.0 if kind == "declared" else None)
            losses = []
            for _ in range(STEPS):
                loss = head.loss(trunk(inputs), labels)
                loss.backward()
                head.step()
                losses.append(loss.item())
        growth = status_bytes("VmHWM") - before
    return {"growth": growth, "largest_tensor": largest.bytes, "losses": losses}
