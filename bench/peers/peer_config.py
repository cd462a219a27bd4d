"""What both processes of the benchmark know: shapes, the peers' names, one case's settings and its result. No torch here."""
from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass, field
from typing import Any

# --shapes=issue, and the default: those for which docs/performance.md has bars.
ISSUE_SHAPES = "16384x131072x4096,16384x131072x2048,8192x262144x2304,16384x32000x4096,2048x128256x4096"

# How a peer's row ended.
OK = "ok"
WRONG = "wrong"
MISSING = "missing"
FAILED = "failed"
OUT_OF_MEMORY = "out of memory"
HUNG = "hung"


@dataclass(frozen=True)
class Shape:
    """One problem's sizes: X [tokens, hidden], W [vocab, hidden]."""

    tokens: int
    vocab: int
    hidden: int

    @staticmethod
    def parse(text: str) -> Shape:
        """Reads TOKENSxVOCABxHIDDEN; ValueError says what is wrong."""
        match = re.fullmatch(r"(\d+)x(\d+)x(\d+)", text.strip())
        if match is None:
            raise ValueError(f"'{text}' is no shape: write TOKENSxVOCABxHIDDEN, as in 16384x131072x4096")
        sizes = [int(part) for part in match.groups()]
        if min(sizes) < 1:
            raise ValueError(f"'{text}': every size must be at least 1")
        return Shape(*sizes)

    def __str__(self) -> str:
        return f"{self.tokens}x{self.vocab}x{self.hidden}"


@dataclass(frozen=True)
class Tolerance:
    """Largest relative errors that still count as right. None: not judged."""

    loss: float = 1e-3
    dx: float = 1e-2
    dw: float = 1e-2
    # dW of vocabulary entries that are nobody's label: the softmax's part alone, which the labels' part hides elsewhere.
    dw_unlabelled: float | None = 5e-2


@dataclass(frozen=True)
class PeerSpec:
    """One row of the table: its name, the package it comes from and how it is judged."""

    name: str
    package: str
    about: str
    tolerance: Tolerance = field(default_factory=Tolerance)


# Adds up bf16 sums in memory, block after block: rounding there is the peer's design, not an error of this run.
_ACCUMULATES_IN_BF16 = Tolerance(dx=1e-1, dw=1e-1, dw_unlabelled=None)

PEERS: tuple[PeerSpec, ...] = (
    PeerSpec("torch-eager", "torch", "logits in bf16, cross-entropy on their fp32 copy"),
    PeerSpec("torch-compile", "torch", "the same through torch.compile"),
    PeerSpec("torch-native", "torch", "torch.nn.functional.linear_cross_entropy, chunked (torch 2.13 and later)"),
    PeerSpec("liger-triton", "liger-kernel", "Triton cross-entropy, chunks as the package sizes them, dW summed in fp32"),
    PeerSpec("liger-cute-ce", "liger-kernel", "chunks of eight times as many rows, the package's CuTe cross-entropy"),
    PeerSpec("liger-cute", "liger-kernel", "every product in CuTe for Hopper, logits kept whole"),
    PeerSpec("cce-exact", "cut-cross-entropy", "no filter; sums in bf16", tolerance=_ACCUMULATES_IN_BF16),
    PeerSpec("quack-fused", "quack-kernels", "chunks whose logits are stored as scaled exponentials (Hopper)"),
    PeerSpec("quack-chunked", "quack-kernels", "chunked logits, cross-entropy kernel, dW summed in fp32"),
)
LOSSD = PeerSpec("lossd", "lossd", "lossd-bench in a process of its own, in turns with the others")
# Those that came within a factor of 1.3 of the limit, and PyTorch's own.
FAST_PEERS = ("torch-compile", "torch-native", "liger-cute-ce", "liger-cute", "quack-fused", "quack-chunked")
LIMIT = "limit"


@dataclass(frozen=True)
class CaseConfig:
    """Everything the measuring process needs for one shape."""

    shape: Shape
    peers: tuple[str, ...]
    device: str = "cuda:0"
    repetitions: int = 10
    seed: int = 1
    ignored_share: float = 0.0
    reference: str = "fp64"
    lossd_bench: str | None = None
    lossd_workspace_bytes: int = 5 << 29
    lossd_timeout_s: float = 300.0
    lossd_adds: bool = False  # to dW in the timed passes, instead of making it anew as peers do
    fakes: bool = False  # adds the self-test's own peers

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> CaseConfig:
        values = json.loads(text)
        return CaseConfig(**{**values, "shape": Shape(**values["shape"]), "peers": tuple(values["peers"])})


@dataclass
class Row:
    """One peer's result for one shape. Times in milliseconds, sizes in bytes, errors relative."""

    peer: str
    status: str
    note: str = ""
    milliseconds: float | None = None
    ratio: float | None = None  # median over the rounds of time over that round's limit
    spread: float | None = None  # interquartile range over median
    peak_bytes: int | None = None  # above inputs and weights: outputs included
    workspace_bytes: int | None = None  # the same without dX and dW
    dw_dtype: str | None = None
    relative_error: dict[str, float | None] = field(default_factory=dict)
    all_milliseconds: list[float] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)
