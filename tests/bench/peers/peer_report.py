"""The table that people read. What scripts read is the same case as JSON, unchanged."""
from __future__ import annotations

from typing import Any

_HEADER = (f"  {'peer':<20} {'ms':>8} {'ratio':>7} {'spread':>7} {'peak MiB':>9} {'work MiB':>9} {'dW':>9} {'err loss':>9} "
           f"{'err dX':>9} {'err dW':>9} {'unlabel.':>9}  status and notes")


def _number(value: float | None, pattern: str) -> str:
    return "-" if value is None else format(value, pattern)


def _mebibytes(value: int | None) -> str:
    return "-" if value is None else f"{value / (1 << 20):.0f}"


def _errors(errors: dict[str, float | None]) -> str:
    return " ".join(f"{_number(errors.get(name), '.1e'):>9}" for name in ("loss", "dx", "dw", "dw_unlabelled"))


def _row(row: dict[str, Any]) -> str:
    remark = row["status"] + (f": {row['note']}" if row["note"] else "")
    return (f"  {row['peer']:<20} {_number(row['milliseconds'], '.2f'):>8} {_number(row['ratio'], '.3f'):>7} "
            f"{_number(row['spread'], '.1%'):>7} {_mebibytes(row['peak_bytes']):>9} {_mebibytes(row['workspace_bytes']):>9} "
            f"{row['dw_dtype'] or '-':>9} {_errors(row['relative_error'])}  {remark}")


def table(case: dict[str, Any]) -> str:
    """One case as text: fastest peers first, those without a time last."""
    limit = _number(case["limit_milliseconds"], ".2f")
    lines = [f"{case['tokens']} tokens, vocabulary {case['vocab']}, hidden {case['hidden']}, {case['dtype']}; ignored rows "
             f"{case['ignored_share']:.0%}; errors against {case['reference']}",
             f"  limit {limit} ms, spread {_number(case['limit_spread'], '.1%')}: three products in sequence, all rows; "
             f"{case['limit']}",
             _HEADER]
    rows = sorted(case["peers"], key=lambda row: (row["milliseconds"] is None, row["milliseconds"] or 0.0))
    lines += [_row(row) for row in rows]
    lines.append(f"  {'(exact, in bf16)':<20} {'':>8} {'':>7} {'':>7} {'':>9} {'':>9} {'bfloat16':>9} "
                 f"{_errors(case['bf16_rounding_error'])}")
    return "\n".join(lines)


def environment_line(case: dict[str, Any]) -> str:
    """Hardware and versions on one line."""
    about = case["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    return f"{about['hardware']}, CUDA {about['cuda']}, Python {about['python']}; {versions}; {about['time']}"
