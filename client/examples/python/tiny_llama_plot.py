#!/usr/bin/env python3
"""Draws what tiny_llama.py --json wrote: python tiny_llama_plot.py float32.json bfloat16.json curves.svg

Above both loss curves, one over the other; below their relative difference at each step, and in bfloat16 that of local
runs whose sums are ordered differently.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402


def draw(path: Path, runs: dict[str, dict[str, list[float]]]) -> None:
    """`runs`: by dtype, the losses by kind of run ("remote", "local", ...). The file's suffix says its format."""
    style = {"svg.hashsalt": "lossd", "svg.fonttype": "none", "font.size": 9, "axes.grid": True, "grid.alpha": 0.3}
    with pyplot.rc_context(style):
        figure, axes = pyplot.subplots(
            2, len(runs), figsize=(5.2 * len(runs), 5.2), sharex=True, squeeze=False, height_ratios=[3, 2]
        )
        for column, (dtype, losses) in enumerate(runs.items()):
            _curves(axes[0][column], dtype, losses)
            _differences(axes[1][column], losses)
        figure.tight_layout()
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
        pyplot.close(figure)


def _curves(axis: pyplot.Axes, dtype: str, losses: dict[str, list[float]]) -> None:
    steps = range(1, len(losses["local"]) + 1)
    axis.plot(steps, losses["local"], color="tab:orange", linewidth=3.0, alpha=0.6, label="head in this process")
    axis.plot(steps, losses["remote"], color="tab:blue", linewidth=0.8, label="head in lossd")
    axis.set_title(f"tiny Llama, {dtype}")
    axis.set_ylabel("loss")
    axis.legend()


def _differences(axis: pyplot.Axes, losses: dict[str, list[float]]) -> None:
    local = losses["local"]
    steps = range(1, len(local) + 1)
    others = [name for name in losses if name not in ("local", "remote")]
    for index, name in enumerate(others):
        label = "local runs in other orders - local" if index == 0 else None
        axis.plot(steps, _relative(losses[name], local), color="tab:orange", linewidth=0.6, alpha=0.7, label=label)
    axis.plot(steps, _relative(losses["remote"], local), color="tab:blue", linewidth=0.8, label="lossd - local")
    axis.set_xlabel("step")
    axis.set_ylabel("relative difference")
    axis.ticklabel_format(axis="y", scilimits=(0, 0))
    axis.legend()


def _relative(values: list[float], reference: list[float]) -> list[float]:
    return [(value - other) / other for value, other in zip(values, reference)]


def main() -> int:
    if len(sys.argv) < 3:
        print(__doc__, file=sys.stderr)
        return 2
    results = [json.loads(Path(name).read_text()) for name in sys.argv[1:-1]]
    draw(Path(sys.argv[-1]), {result["settings"]["dtype"]: result["losses"] for result in results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
