"""lossd as one of the peers: a process of its own that gets the same inputs and runs its passes in turns with the others.

The process is `lossd-bench passes`, which says in its --help what it reads, writes and answers. Tensors go through files, in
memory where that has room.
"""
from __future__ import annotations

import json
import os
import queue
import shutil
import subprocess
import tempfile
import threading
from typing import Any

import torch
from torch import Tensor

from peer_config import CaseConfig
from peer_problem import Outputs, Problem

_MEMORY_FOLDER = "/dev/shm"


def _folder_for(byte_count: int) -> str | None:
    """Memory's folder if it has that much room and some to spare; None: the usual one for temporary files."""
    try:
        return _MEMORY_FOLDER if shutil.disk_usage(_MEMORY_FOLDER).free > byte_count + (1 << 30) else None
    except OSError:
        return None


def _write(folder: str, name: str, tensor: Tensor) -> None:
    path = os.path.join(folder, name)
    torch.from_file(path, shared=True, size=tensor.numel(), dtype=tensor.dtype).copy_(tensor.detach().reshape(-1))


def _read(folder: str, name: str, dtype: torch.dtype, *sizes: int) -> Tensor:
    path = os.path.join(folder, name)
    count = 1
    for size in sizes:
        count *= size
    if os.path.getsize(path) != count * dtype.itemsize:
        raise RuntimeError(f"{name} has {os.path.getsize(path)} bytes, not {count * dtype.itemsize}")
    return torch.from_file(path, shared=False, size=count, dtype=dtype).reshape(sizes)


class Lossd:
    """A running lossd-bench. Everything raises RuntimeError, with what it said, if it fails or takes too long."""

    def __init__(self, config: CaseConfig, problem: Problem):
        assert config.lossd_bench is not None
        shape = config.shape
        self._problem, self._shape, self._timeout_s = problem, shape, config.lossd_timeout_s
        moved = (shape.tokens + shape.vocab) * shape.hidden * 6
        self._folder = tempfile.mkdtemp(prefix="lossd-peer-", dir=_folder_for(moved))
        try:
            _write(self._folder, "weight.bin", problem.weight)
            _write(self._folder, "hidden_states.bin", problem.hidden_states)
            _write(self._folder, "labels.bin", problem.labels)
            command = [config.lossd_bench, "passes", f"--device={config.device}", f"--tokens={shape.tokens}", f"--vocab={shape.vocab}",
                       f"--hidden={shape.hidden}", "--dtype=bf16", f"--workspace_bytes={config.lossd_workspace_bytes}",
                       *(["--add"] if config.lossd_adds else []), self._folder]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            self._lines: queue.Queue[str | None] = queue.Queue()
            threading.Thread(target=self._read_lines, daemon=True).start()
            ready = self._answer()
            self.tile_rows, self.peak_bytes = int(ready["tile_rows"]), int(ready["peak_bytes"])
        except BaseException:
            self._remove_files()
            raise

    def outputs(self) -> Outputs:
        """What the first pass left, on the problem's device. Once: the files are gone then."""
        shape, device = self._shape, self._problem.weight.device
        try:
            losses = _read(self._folder, "losses.bin", torch.float32, shape.tokens)
            dx = _read(self._folder, "dx.bin", torch.bfloat16, shape.tokens, shape.hidden).to(device)
            dw = _read(self._folder, "dw.bin", torch.float32, shape.vocab, shape.hidden).to(device)
            return Outputs(losses.double().sum() / self._problem.valid_tokens, dx, dw)
        finally:
            self._remove_files()

    def burst(self, passes: int, untimed: int) -> list[float]:
        """Milliseconds of so many passes in a row, after `untimed` others, at least one; by the device's own clock."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{untimed - 1 + passes}\n")  # and one before them
            self._process.stdin.flush()
        except OSError as error:
            raise RuntimeError(f"lossd-bench is gone: {error}") from error
        return [float(value) for value in self._answer()["milliseconds"]][-passes:]

    def close(self) -> None:
        """Ends the process; to be called once, whatever happened before."""
        self._remove_files()
        try:
            self._process.communicate(timeout=10)
        except (subprocess.TimeoutExpired, OSError, ValueError):
            self._process.kill()
            self._process.wait()

    def _read_lines(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def _answer(self) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=self._timeout_s)
        except queue.Empty:
            self._process.kill()
            raise RuntimeError(f"lossd-bench said nothing for {self._timeout_s:.0f} s") from None
        if line is None:
            raise RuntimeError(f"lossd-bench ended with status {self._process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def _remove_files(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
