"""How each peer is called: one builder a peer, which makes a step out of a problem.

A builder raises Missing if the peer is not installed or has no such operation; anything else it raises is the peer's failure.
Imports of peers stay inside their builders, so that none is loaded unasked.
"""
from __future__ import annotations

import importlib.util
import os
import site
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from peer_problem import IGNORE_INDEX, Outputs, Problem

_LIGER_WIDE = 8  # the package's own multiplier of rows a chunk; 4096 rows where N, V, H are 16384, 131072, 4096
_QUACK_ROWS = 4096  # the package's default rows a chunk


class Missing(Exception):
    """The peer is not here; the text says what is missing."""


@dataclass(frozen=True)
class Step:
    """One forward and backward pass. `note` goes into the peer's row."""

    run: Callable[[], Outputs]
    note: str = ""


Builder = Callable[[Problem], Step]


def enable_path_files() -> None:
    """Reads the .pth files of PYTHONPATH's folders, as an installed package's would be: the CuTe DSL needs its own."""
    for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        if folder and os.path.isdir(folder):
            site.addsitedir(folder)


def _need(*modules: str) -> None:
    absent = [module for module in modules if importlib.util.find_spec(module) is None]
    if absent:
        raise Missing(f"no package {', '.join(absent)}")


def _differentiated(problem: Problem, loss_of: Callable[[Tensor, Tensor, Tensor], Tensor], note: str = "") -> Step:
    def run() -> Outputs:
        loss = loss_of(problem.hidden_states, problem.weight, problem.labels)
        dx, dw = torch.autograd.grad(loss, (problem.hidden_states, problem.weight))
        return Outputs(loss.detach(), dx, dw)

    return Step(run, note)


def _unfused(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, w).float(), labels, ignore_index=IGNORE_INDEX)


def _torch_eager(problem: Problem) -> Step:
    return _differentiated(problem, _unfused)


def _torch_compile(problem: Problem) -> Step:
    return _differentiated(problem, torch.compile(_unfused, fullgraph=True, dynamic=False))


def _torch_native(problem: Problem) -> Step:
    operation = getattr(F, "linear_cross_entropy", None)
    if operation is None:
        raise Missing(f"not there in torch {torch.__version__}; it came with 2.13")
    options = getattr(torch.nn, "LinearCrossEntropyOptions")()  # the chunked way; without it, the op is eager's arithmetic
    return _differentiated(
        problem, lambda x, w, y: operation(x, w, y, reduction="mean", ignore_index=IGNORE_INDEX, options=options))


def _liger_rows(problem: Problem, multiplier: int) -> int:
    """Rows a chunk as the package sizes them: a power of two near N·H·multiplier / V."""
    pieces = -(-problem.shape.vocab // (multiplier * problem.shape.hidden))
    rows = -(-problem.shape.tokens // pieces)
    return min(problem.shape.tokens, 1 << (rows - 1).bit_length())


def _liger_chunked(problem: Problem, implementation: str | None, multiplier: int) -> Step:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    def loss_of(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
        # Bias, class weights, ignored label, z-loss, smoothing, reduction, softcap, z-loss wanted, type of dW's sum, token
        # scaling, accuracy wanted, predictions wanted, cross-entropy's implementation and mode, rows' multiplier.
        return LigerFusedLinearCrossEntropyFunction.apply(
            x, w, labels, None, None, IGNORE_INDEX, 0.0, 0.0, "mean", None, False, torch.float32, False, False, False,
            implementation, None, multiplier)[0]

    return _differentiated(problem, loss_of, f"chunks of {_liger_rows(problem, multiplier)} rows; dW summed in fp32")


def _liger_triton(problem: Problem) -> Step:
    _need("liger_kernel")
    return _liger_chunked(problem, None, 1)


def _liger_cute_ce(problem: Problem) -> Step:
    _need("liger_kernel", "cutlass")
    return _liger_chunked(problem, "nvidia-cutedsl", _LIGER_WIDE)


def _liger_cute(problem: Problem) -> Step:
    _need("liger_kernel", "cutlass")
    from liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90 import liger_fused_linear_cross_entropy_sm90

    return _differentiated(
        problem, lambda x, w, y: liger_fused_linear_cross_entropy_sm90(x, w, y, ignore_index=IGNORE_INDEX, reduction="mean"),
        "one chunk")


def _cce_exact(problem: Problem) -> Step:
    _need("cut_cross_entropy")
    from cut_cross_entropy import linear_cross_entropy

    options = {"ignore_index": IGNORE_INDEX, "reduction": "mean", "impl": "cce", "filter_eps": None}
    return _differentiated(problem, lambda x, w, y: linear_cross_entropy(x, w, y, **options), "dX and dW summed in bf16")


def quack_chunk_rows(tokens: int, hidden: int) -> int:
    """Rows a chunk for the fused path, which cannot tell a vector's direction where a chunk has as many rows as H."""
    for rows in (_QUACK_ROWS, 8192, 2048, 1024):
        last = -(-((tokens - 1) % rows + 1) // 128) * 128
        if hidden != last and (hidden != rows or tokens <= rows):
            return rows
    raise Missing(f"no chunk size for {tokens} rows of {hidden}")


def _quack(problem: Problem, rows: int, note: str, **options: object) -> Step:
    _need("quack", "cutlass")
    where = importlib.util.find_spec("cutlass")
    if where is None or "-packages" + os.sep not in (where.origin or ""):
        # It tells installed functions from a user's by their path, and fails on the DSL's own otherwise.
        raise Missing("quack works only from a folder named site-packages")
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    def loss_of(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
        return chunked_linear_cross_entropy(x, w, labels, rows, IGNORE_INDEX, "mean", **options)

    return _differentiated(problem, loss_of, f"chunks of {min(rows, problem.shape.tokens)} rows; {note}")


def _quack_fused(problem: Problem) -> Step:
    rows = quack_chunk_rows(problem.shape.tokens, problem.shape.hidden)
    return _quack(problem, rows, "dW summed in fp32", use_scaled_exp=True)


def _quack_chunked(problem: Problem) -> Step:
    return _quack(problem, _QUACK_ROWS, "dW summed in fp32", use_scaled_exp=False, tuned=False)


BUILDERS: dict[str, Builder] = {
    "torch-eager": _torch_eager,
    "torch-compile": _torch_compile,
    "torch-native": _torch_native,
    "liger-triton": _liger_triton,
    "liger-cute-ce": _liger_cute_ce,
    "liger-cute": _liger_cute,
    "cce-exact": _cce_exact,
    "quack-fused": _quack_fused,
    "quack-chunked": _quack_chunked,
}


class Limit:
    """The three bare products of the whole batch, in sequence: logits [N, V], dX [N, H], dW [V, H]."""

    def __init__(self, problem: Problem):
        self._x, self._w = problem.hidden_states.detach(), problem.weight.detach()
        self._dw: Tensor | None = torch.zeros(self._w.shape, dtype=torch.float32, device=self._w.device)
        try:
            few = self._x[:128]  # enough for a trial
            self._accumulate(self._dw, few @ self._w.T, few)
            self.kind = "bf16 in, fp32 sums; logits and dX leave as bf16, dW += into fp32"
        except torch.OutOfMemoryError:
            raise
        except (TypeError, RuntimeError):
            self._dw = None
            self.kind = "bf16 in and out, dW too: this torch has no product of bf16 that is added to fp32"

    @staticmethod
    def _accumulate(dw: Tensor, gradient: Tensor, x: Tensor) -> None:
        torch.addmm(dw, gradient.T, x, out_dtype=torch.float32, out=dw)

    @torch.no_grad()
    def run(self) -> None:
        logits = torch.mm(self._x, self._w.T)
        torch.mm(logits, self._w)
        if self._dw is None:
            torch.mm(logits.T, self._x)
        else:
            self._accumulate(self._dw, logits, self._x)
