#!/usr/bin/env python3
"""One training step of a Llama: its head in PyTorch, in Liger's fused loss, and in lossd.

Each mode is a process of its own, with the same weights and the same tokens: forward, backward and AdamW's step, in
bfloat16, with activation checkpoints. The modes:

  torch             the model as transformers has it
  liger             Liger's fused linear cross-entropy; skipped where liger_kernel or a GPU is missing
  lossd             lossd.transformers.patch(..., grad_scale=1.0): the upstream gradient is declared
  lossd-undeclared  the same without grad_scale: backward computes the logits once more

Before a time is printed, the first and the last losses are compared with those of the first mode that ran: they may
differ by 0.1 % and 2 %. The last ones come after updates in bfloat16, whose rounding differs. Every mode has to train.

Columns: the median step after the warm-up; the most memory that the trainer's tensors took (on a CPU: its resident
set); all that is in use on the card after the last step, with the server and PyTorch's cache.

Exit codes: 0 done, 1 a loss was wrong or a mode failed, 2 bad arguments.

    real_step.py --json real_step.json --chart real_step.svg
    real_step.py --device cpu --layers 2 --hidden 64 --intermediate 128 --heads 4 --kv-heads 2 --vocab 512 \\
        --batch 2 --length 32 --steps 4 --warmup 1
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

MODES = ("torch", "liger", "lossd", "lossd-undeclared")
FIRST, LAST = 1e-3, 2e-2  # relative differences of losses
GIB = 1 << 30


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--device", default="cuda:0", help="cpu, cuda:0, ... (default: %(default)s)")
    parser.add_argument("--modes", default=",".join(MODES), help="with commas between them (default: %(default)s)")
    sizes = {"layers": 16, "hidden": 2048, "intermediate": 8192, "heads": 32, "kv-heads": 8, "vocab": 128256}
    for name, value in {**sizes, "batch": 4, "length": 4096, "steps": 9, "warmup": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=value, help="default: %(default)s")
    parser.add_argument("--program", help="the lossd to start (default: as lossd.launch finds it)")
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    parser.add_argument("--chart", metavar="FILE.svg", help="draw them there")
    parser.add_argument("--worker", choices=MODES, help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    options.modes = options.modes.split(",")
    for mode in options.modes:
        if mode not in MODES:
            parser.error(f"--modes: there is no {mode!r}; name some of {', '.join(MODES)}")
    for name in (*sizes, "batch", "steps"):
        if getattr(options, name.replace("-", "_")) < 1:
            parser.error(f"--{name} must be at least 1")
    if options.length < 2:
        parser.error("--length must be at least 2: a label is the next token")
    if not 0 <= options.warmup < options.steps:
        parser.error("--warmup must be at least 0 and leave a step of --steps to be timed")
    if options.hidden % options.heads or options.heads % options.kv_heads or options.hidden // options.heads % 2:
        parser.error("--hidden must be an even multiple of --heads, and --heads a multiple of --kv-heads")
    return options


def why_skipped(mode: str, device: str) -> str | None:
    if mode != "liger":
        return None
    if device == "cpu":
        return "Liger's kernels need a GPU"
    return None if importlib.util.find_spec("liger_kernel") else "not installed: pip install liger-kernel"


def make_model(options: argparse.Namespace) -> Any:
    import torch
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=options.vocab,
        hidden_size=options.hidden,
        intermediate_size=options.intermediate,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=options.kv_heads,
        max_position_embeddings=max(options.length, 64),
        tie_word_embeddings=False,
        use_cache=False,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="sdpa",
    )
    if options.worker == "liger":
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama(
            rope=False, swiglu=False, rms_norm=False, cross_entropy=False, fused_linear_cross_entropy=True
        )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(options.device):
        model = transformers.LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    model.train()
    model.gradient_checkpointing_enable()
    return model


def trainer_bytes(device: str) -> int:
    if device == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    import torch

    return torch.cuda.max_memory_allocated(device)


def card_bytes(device: str) -> int | None:
    if device == "cpu":
        return None
    import torch

    free, total = torch.cuda.mem_get_info(device)
    return total - free


def train(options: argparse.Namespace, model: Any, optimizer: Any) -> dict[str, Any]:
    import torch

    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(options.vocab, (options.batch, options.length), generator=generator).to(options.device)
    synchronize: Callable[[], None] = (lambda: None) if options.device == "cpu" else torch.cuda.synchronize
    seconds, losses = [], []
    for step in range(options.steps):
        synchronize()
        began = time.perf_counter()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        synchronize()
        seconds.append(time.perf_counter() - began)
        losses.append(float(loss.detach()))
        said = f"{options.worker}: step {step + 1} of {options.steps}, loss {losses[-1]:.4f}"
        print(said, file=sys.stderr, flush=True)
    timed = seconds[options.warmup :]
    return {
        "milliseconds": 1e3 * statistics.median(timed),
        "all_milliseconds": [1e3 * value for value in seconds],
        "trainer_bytes": trainer_bytes(options.device),
        "card_bytes": card_bytes(options.device),
        "losses": losses,
    }


def work(options: argparse.Namespace) -> dict[str, Any]:
    """One mode, in this process."""
    import torch

    model = make_model(options)
    if options.device != "cpu":
        torch.cuda.set_device(options.device)
    if not options.worker.startswith("lossd"):
        return train(options, model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))
    import lossd
    from lossd.transformers import patch

    grad_scale = 1.0 if options.worker == "lossd" else None
    with lossd.launch(options.device, program=options.program) as server, server.client() as client:
        patch(model, client=client, optimizer=lossd.AdamW(), grad_scale=grad_scale)
        return train(options, model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))


def run_mode(mode: str, words: Sequence[str], device: str) -> dict[str, Any]:
    skipped = why_skipped(mode, device)
    if skipped is not None:
        return {"mode": mode, "skipped": skipped}
    # Hugging Face asks its hub for nothing: the model is made of its configuration.
    command = [sys.executable, str(Path(__file__).resolve()), *words, "--worker", mode]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=environment)
    if done.returncode != 0:
        return {"mode": mode, "failed": f"its process ended with status {done.returncode}; the reason is above"}
    return {"mode": mode, **json.loads(done.stdout.splitlines()[-1])}


def judge(results: list[dict[str, Any]]) -> list[str]:
    """What is wrong with them, a line each."""
    problems = [f"{result['mode']}: {result['failed']}" for result in results if "failed" in result]
    ran = [result for result in results if "losses" in result]
    if not ran:
        return [*problems, "no mode ran"]
    for result in ran:
        mode, losses, wanted = result["mode"], result["losses"], ran[0]["losses"]
        if not all(math.isfinite(loss) for loss in losses) or (len(losses) > 1 and losses[-1] >= losses[0]):
            problems.append(f"{mode}: it did not train, its losses are {losses}")
        for name, at, most in (("first", 0, FIRST), ("last", -1, LAST)):
            if not abs(losses[at] - wanted[at]) <= most * abs(wanted[at]):
                problems.append(
                    f"{mode}: its {name} loss is {losses[at]:.5f}, {ran[0]['mode']}'s {wanted[at]:.5f}; "
                    f"they may differ by {100 * most:g} %"
                )
    return problems


def gib(count: int | None) -> str:
    return "" if count is None else f"{count / GIB:.1f}"


def table(results: list[dict[str, Any]]) -> str:
    """In Markdown, as README.md has it."""
    lines = ["| head | step, ms | trainer, GiB | card, GiB | losses |", "|---|---:|---:|---:|---|"]
    for result in results:
        if "skipped" in result:
            lines.append(f"| {result['mode']} | skipped: {result['skipped']} | | | |")
        else:
            losses = f"{result['losses'][0]:.4f} → {result['losses'][-1]:.4f}"
            sizes = f"{gib(result['trainer_bytes'])} | {gib(result['card_bytes'])}"
            lines.append(f"| {result['mode']} | {result['milliseconds']:.1f} | {sizes} | {losses} |")
    return "\n".join(lines)


STYLE = """text { font: 13px sans-serif; fill: #1f2328 } .lossd { fill: #0969da } .other { fill: #8c959f }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .lossd { fill: #4493f8 } .other { fill: #7d8590 } }"""


def panel(title: str, left: int, bars: list[tuple[str, float, str]]) -> list[str]:
    most = max(value for _, value, _ in bars)
    lines = [f'<text x="{left}" y="18" font-weight="bold">{escape(title)}</text>']
    for row, (mode, value, said) in enumerate(bars):
        top, width = 30 + 28 * row, 170 * value / most
        kind = "lossd" if mode.startswith("lossd") else "other"
        lines.append(f'<rect class="{kind}" x="{left}" y="{top}" width="{width:.1f}" height="20"/>')
        lines.append(f'<text x="{left + width + 6:.1f}" y="{top + 15}">{escape(said)}</text>')
    return lines


def chart(results: list[dict[str, Any]], title: str) -> str:
    """An SVG that follows the reader's light or dark scheme."""
    ran = [result for result in results if "losses" in result]
    names = [f'<text x="0" y="{45 + 28 * row}">{escape(result["mode"])}</text>' for row, result in enumerate(ran)]
    times = [(r["mode"], r["milliseconds"], f"{r['milliseconds']:.0f}") for r in ran]
    where = "trainer" if any(r["card_bytes"] is None for r in ran) else "card"
    memory = [(r["mode"], r[f"{where}_bytes"], gib(r[f"{where}_bytes"])) for r in ran]
    bars = [*panel("step, ms", 130, times), *panel(f"memory of the {where}, GiB", 370, memory)]
    height = 40 + 28 * len(ran)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 600 {height}" role="img">'
    about = [f"<title>{escape(title)}</title>", f"<style>{STYLE}</style>"]
    return "\n".join([head, *about, *names, *bars, "</svg>"]) + "\n"


def main() -> int:
    options = arguments()
    if options.worker is not None:
        print(json.dumps(work(options)))
        return 0
    results = [run_mode(mode, sys.argv[1:], options.device) for mode in options.modes]
    problems = judge(results)
    sizes = {name: value for name, value in vars(options).items() if name not in ("worker", "json", "chart", "program")}
    if options.json:
        report = {**sizes, "results": results, "tolerances": {"first": FIRST, "last": LAST}, "problems": problems}
        Path(options.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if problems:
        print("\n".join(problems), file=sys.stderr)
        return 1
    print(table(results))
    if options.chart:
        model = f"{options.layers} layers, H={options.hidden}, V={options.vocab}"
        title = f"A step of a Llama: {model}, {options.batch} × {options.length} tokens"
        Path(options.chart).write_text(chart(results, title), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
