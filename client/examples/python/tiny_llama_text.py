"""Text files to tokens, with a byte-level BPE tokenizer trained on them."""

from __future__ import annotations

import gzip
import subprocess
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

REPOSITORY = Path(__file__).resolve().parents[3]
# Debian's manuals, by package and file, as tools/packages.sh has them.
MANUALS = {
    "debian-reference-en": "debian-reference.en.txt.gz",
    "debian-policy": "policy.txt.gz",
    "developers-reference": "developers-reference.txt.gz",
}


class TextError(Exception):
    """There is no text, or too little of it."""


def default_texts() -> list[Path]:
    """The manuals, where dpkg or tools/setup.sh has put them. Raises TextError if there are none."""
    found = [path for package, name in MANUALS.items() if (path := _manual(package, name)) is not None]
    if not found:
        raise TextError(
            f"no text: none of the packages {', '.join(MANUALS)} is installed; run tools/setup.sh run, or give --text"
        )
    return found


def load_tokens(paths: list[Path], vocabulary: int) -> torch.Tensor:
    """All files' tokens in a row, [N] int64, below `vocabulary`. Raises TextError or OSError."""
    texts = [_read(path) for path in paths]
    tokenizer = _train(texts, vocabulary)
    tokens = torch.tensor([token for text in texts for token in tokenizer.encode(text).ids], dtype=torch.int64)
    if len(tokens) < 10_000:
        raise TextError(f"{len(tokens)} tokens in {', '.join(map(str, paths))}: too little to train on; want 10,000")
    return tokens


def _manual(package: str, name: str) -> Path | None:
    try:
        listed = subprocess.run(["dpkg-query", "-L", package], capture_output=True, text=True, check=False).stdout
    except FileNotFoundError:
        listed = ""
    places = [Path(line) for line in listed.splitlines() if line.endswith(f"/{name}")]
    return next((path for path in [*places, REPOSITORY / "build" / "corpus" / name] if path.is_file()), None)


def _read(path: Path) -> str:
    data = path.read_bytes()
    if path.suffix == ".gz":
        try:
            data = gzip.decompress(data)
        except (gzip.BadGzipFile, EOFError) as error:
            raise TextError(f"{path}: {error}") from error
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise TextError(f"{path}: not UTF-8: {error}") from error


def _train(texts: list[str], vocabulary: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
