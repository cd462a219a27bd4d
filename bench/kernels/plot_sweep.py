#!/usr/bin/env python3
"""Draws what `lossd-bench sweep` measured: the fused step's ratio to its limit, and TFLOP/s with the limit's beside them.

usage: plot_sweep.py FOLDER      reads FOLDER/sweep.json, writes FOLDER/sweep.svg and FOLDER/sweep.png

Exit codes: 0 done, 1 no case has a time, 2 bad arguments or no sweep there, 3 this Python has no matplotlib.
"""
import json
import os
import sys

NO_MATPLOTLIB = """\
plot_sweep.py: {python} has no matplotlib. Install it and run this again; one of
    apt-get install python3-matplotlib        (Debian 12, Ubuntu 24.04; then with /usr/bin/python3)
    tools/setup.sh plot                       (the same, from the source tree)
    python3 -m venv plot && plot/bin/pip install matplotlib        (no root; then with plot/bin/python)
"""
FUSED, LIMIT, GREY = "#1f6fb4", "#d9822b", "#777777"


def label(case):
    """What stands beside a case's marks."""
    sizes = f"{case['tokens']}, {case['vocab']}, {case['hidden']}"
    name = f"{case['name']}\n" if case.get("name") else ""
    return f"{name}{sizes} {case['dtype']}"


def draw_ratios(axes, cases):
    """One mark a case and its number; the limit is the line at 1."""
    ratios = [case.get("ratio") for case in cases]
    axes.axvline(1.0, color=LIMIT, linewidth=1.5)
    for y, ratio in enumerate(ratios):
        if ratio is None:
            axes.text(1.0, y, " failed", va="center", color=GREY)
            continue
        axes.hlines(y, 1.0, ratio, color=FUSED, linewidth=2)
        axes.plot(ratio, y, "o", color=FUSED)
        side = 1 if ratio >= 1 else -1  # away from the line
        axes.annotate(f"{ratio:.3f}", (ratio, y), xytext=(7 * side, 0), textcoords="offset points", va="center",
                      ha="left" if side > 0 else "right", fontsize=8)
    known = [ratio for ratio in ratios if ratio is not None]
    margin = 0.25 * max(0.04, max(known) - min(1.0, min(known)))
    axes.set_xlim(min(1.0, min(known)) - margin, max(1.0, max(known)) + 1.5 * margin)
    axes.set_xlabel("time over the limit's (1: as fast as the bare products)")


def draw_speeds(axes, cases):
    """Bars of the step's TFLOP/s, the limit's as a tick across each."""
    for y, case in enumerate(cases):
        if case.get("tflops") is not None:
            axes.barh(y, case["tflops"], height=0.55, color=FUSED, label="fused step")
        if case.get("limit_tflops") is not None:
            axes.vlines(case["limit_tflops"], y - 0.4, y + 0.4, color=LIMIT, linewidth=2.5, label="limit")
    handles, names = axes.get_legend_handles_labels()
    once = dict(zip(names, handles))
    axes.legend(once.values(), once.keys(), loc="lower left", bbox_to_anchor=(0, 1), ncol=2, frameon=False, fontsize=8)
    axes.set_xlabel("TFLOP/s")


def main(arguments):
    """Returns the exit code."""
    if len(arguments) != 1 or arguments[0] in ("-h", "--help"):
        print(__doc__.strip(), file=sys.stderr)
        return 0 if arguments in (["-h"], ["--help"]) else 2
    folder = arguments[0]
    try:
        with open(os.path.join(folder, "sweep.json"), encoding="utf-8") as file:
            sweep = json.load(file)
    except (OSError, ValueError) as error:
        print(f"plot_sweep.py: {error}", file=sys.stderr)
        return 2
    try:
        import matplotlib
        matplotlib.use("Agg")  # files, no window
        from matplotlib import pyplot
    except ImportError:
        print(NO_MATPLOTLIB.format(python=sys.executable), file=sys.stderr, end="")
        return 3
    cases = sweep["cases"]
    if not any(case.get("ratio") for case in cases):
        print("plot_sweep.py: no case has a time", file=sys.stderr)
        return 1
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 1.8 + 0.5 * len(cases)), sharey=True)
    draw_ratios(left, cases)
    draw_speeds(right, cases)
    left.set_yticks(range(len(cases)))
    left.set_yticklabels([label(case) for case in cases], fontsize=8)
    left.set_ylim(len(cases) - 0.4, -0.6)
    for axes in (left, right):
        axes.grid(axis="x", linewidth=0.4)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    hardware = next((case["hardware"] for case in cases if case.get("hardware")), "")
    left.set_title(f"N, V, H — {hardware}, {sweep['time'][:10]}", loc="left", fontsize=9)
    figure.tight_layout()
    for suffix in ("svg", "png"):
        path = os.path.join(folder, f"sweep.{suffix}")
        figure.savefig(path, dpi=150)
        print(f"plot: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
