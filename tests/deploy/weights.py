"""A file with weights for a head, for tests."""

from __future__ import annotations

import json
from pathlib import Path


def write_weights(path: Path, vocab_size: int, hidden_size: int) -> None:
    """A safetensors file with an lm_head of zeros."""
    size = 2 * vocab_size * hidden_size
    tensor = {"dtype": "BF16", "shape": [vocab_size, hidden_size], "data_offsets": [0, size]}
    header = json.dumps({"lm_head.weight": tensor}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(size))
