"""The tables that people read. What scripts read is the same cases as JSON, unchanged, with the ranking beside them."""
from __future__ import annotations

import math
from typing import Any

from peer_config import OK

Case = dict[str, Any]

_HEADER = (f"  {'peer':<20} {'ms':>8} {'ratio':>7} {'spread':>7} {'peak MiB':>9} {'work MiB':>9} {'dW':>9} {'err loss':>9} "
           f"{'err dX':>9} {'err dW':>9} {'unlabel.':>9}  status and notes")
_ERRORS = ("loss", "dx", "dw", "dw_unlabelled")
_FLOAT_NAMES = {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16"}


def _number(value: float | None, pattern: str) -> str:
    return "-" if value is None else format(value, pattern)


def _mebibytes(value: int | None) -> str:
    return "-" if value is None else f"{value / (1 << 20):.0f}"


def _errors(errors: dict[str, float | None]) -> str:
    return " ".join(f"{_number(errors.get(name), '.1e'):>9}" for name in _ERRORS)


def _row(row: dict[str, Any]) -> str:
    remark = row["status"] + (f": {row['note']}" if row["note"] else "")
    return (f"  {row['peer']:<20} {_number(row['milliseconds'], '.2f'):>8} {_number(row['ratio'], '.3f'):>7} "
            f"{_number(row['spread'], '.1%'):>7} {_mebibytes(row['peak_bytes']):>9} {_mebibytes(row['workspace_bytes']):>9} "
            f"{row['dw_dtype'] or '-':>9} {_errors(row['relative_error'])}  {remark}")


def _fastest_first(case: Case) -> list[dict[str, Any]]:
    return sorted(case["peers"], key=lambda row: (row["milliseconds"] is None, row["milliseconds"] or 0.0))


def table(case: Case) -> str:
    """One case as text: fastest peers first, those without a time last."""
    limit = _number(case["limit_milliseconds"], ".2f")
    lines = [f"{case['tokens']} tokens, vocabulary {case['vocab']}, hidden {case['hidden']}, {case['dtype']}; ignored rows "
             f"{case['ignored_share']:.0%}; errors against {case['reference']}",
             f"  limit {limit} ms, spread {_number(case['limit_spread'], '.1%')}: three products in sequence, all rows; "
             f"{case['limit']}",
             _HEADER]
    lines += [_row(row) for row in _fastest_first(case)]
    lines.append(f"  {'(exact, in bf16)':<20} {'':>8} {'':>7} {'':>7} {'':>9} {'':>9} {'bfloat16':>9} "
                 f"{_errors(case['bf16_rounding_error'])}")
    return "\n".join(lines)


def shape_name(case: Case) -> str:
    """As --shapes takes it."""
    return f"{case['tokens']}x{case['vocab']}x{case['hidden']}"


def ranking(cases: list[Case]) -> list[dict[str, Any]]:
    """Peers by the geometric mean of their ratios to the limit; those that are not right at every shape come last, unranked.

    Only right results with a time count. `first` is the number of shapes at which the peer is the fastest.
    """
    names = list(dict.fromkeys(row["peer"] for case in cases for row in case["peers"]))
    ratios: dict[str, dict[str, float]] = {name: {} for name in names}
    for case in cases:
        for row in case["peers"]:
            if row["status"] == OK and row["ratio"] is not None:
                ratios[row["peer"]][shape_name(case)] = row["ratio"]
    best = {shape: min(found[shape] for found in ratios.values() if shape in found)
            for shape in {shape for found in ratios.values() for shape in found}}
    entries: list[dict[str, Any]] = []
    for name, found in ratios.items():
        mean = math.exp(sum(map(math.log, found.values())) / len(found)) if len(found) == len(cases) else None
        first = sum(ratio == best[shape] for shape, ratio in found.items())
        entries.append({"peer": name, "rank": None, "geometric_mean_ratio": mean, "first": first, "ratios": found})
    entries.sort(key=lambda entry: (entry["geometric_mean_ratio"] is None, entry["geometric_mean_ratio"] or 0.0))
    for number, entry in enumerate(entries, 1):
        if entry["geometric_mean_ratio"] is not None:
            entry["rank"] = number
    return entries


def ranking_table(cases: list[Case]) -> str:
    """The ranking as a Markdown table, one column a shape."""
    shapes = [shape_name(case) for case in cases]
    lines = ["| | peer | mean ratio | " + " | ".join(shapes) + " |", "|---|---|---|" + "---|" * len(shapes)]
    for entry in ranking(cases):
        ratios = " | ".join(_number(entry["ratios"].get(shape), ".3f") for shape in shapes)
        lines.append(f"| {entry['rank'] or '-'} | {entry['peer']} | {_number(entry['geometric_mean_ratio'], '.3f')} | {ratios} |")
    return "\n".join(lines)


def _markdown_case(case: Case) -> str:
    lines = [f"## {case['tokens']} tokens, vocabulary {case['vocab']}, hidden {case['hidden']}", "",
             f"Limit {_number(case['limit_milliseconds'], '.2f')} ms: three bare products in sequence; {case['limit']}.", "",
             "| | peer | ms | ratio | dW | peak MiB | work MiB | relative error: loss, dX, dW, unlabelled dW | status and notes |",
             "|---|---|---|---|---|---|---|---|---|"]
    place = 0
    for row in _fastest_first(case):
        placed = row["status"] == OK and row["milliseconds"] is not None
        place += placed
        dw = _FLOAT_NAMES.get(row["dw_dtype"], row["dw_dtype"] or "-")
        errors = ", ".join(_number(row["relative_error"].get(name), ".1e") for name in _ERRORS)
        remark = "; ".join(part.replace("|", "/") for part in (row["status"], row["note"]) if part)
        lines.append(f"| {place if placed else '-'} | {row['peer']} | {_number(row['milliseconds'], '.2f')} | "
                     f"{_number(row['ratio'], '.3f')} | {dw} | {_mebibytes(row['peak_bytes'])} | "
                     f"{_mebibytes(row['workspace_bytes'])} | {errors} | {remark} |")
    return "\n".join(lines)


def markdown(cases: list[Case]) -> str:
    """Everything as one Markdown document."""
    parts = ["# Linear + cross-entropy, forward and backward: lossd and its peers"]
    measured = [case for case in cases if case["environment"] is not None]
    if measured:
        parts.append(environment_line(measured[-1]))
    parts += ["Ratios are to the three bare matrix products in the same rounds; the mean is the geometric one over all shapes. "
              "Peak: above inputs and\nweights; work: without dX and dW. Only results that passed their check have a place.",
              ranking_table(cases)]
    parts += [_markdown_case(case) for case in cases]
    return "\n\n".join(parts) + "\n"


def environment_line(case: Case) -> str:
    """Hardware and versions on one line."""
    about = case["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    return f"{about['hardware']}, CUDA {about['cuda']}, Python {about['python']}; {versions}; {about['time']}"
