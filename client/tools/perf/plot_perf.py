#!/usr/bin/env python3
"""Draws what `lossd-perf sweep` measured: tokens a second, and the latency of batches, over the number of clients.

usage: plot_perf.py FOLDER      reads FOLDER/sweep.json, writes FOLDER/sweep.svg and FOLDER/sweep.png

Exit codes: 0 done, 1 no case was measured, 2 bad arguments or no sweep there, 3 this Python has no matplotlib.
"""
import json
import os
import sys

NO_MATPLOTLIB = """\
plot_perf.py: {python} has no matplotlib. Install it and run this again; one of
    apt-get install python3-matplotlib        (Debian 12, Ubuntu 24.04; then with /usr/bin/python3)
    tools/setup.sh plot                       (the same, from the source tree)
    python3 -m venv plot && plot/bin/pip install matplotlib        (no root; then with plot/bin/python)
"""


def lines_of(cases):
    """{(transport, tokens, chunk bytes, lanes): its cases by the number of clients}"""
    lines = {}
    for case in cases:
        settings = case["settings"]
        key = (settings.get("transport", "tcp"), settings["tokens"], settings["chunk_bytes"], settings.get("lanes", 0))
        lines.setdefault(key, []).append(case)
    for line in lines.values():
        line.sort(key=lambda case: case["settings"]["clients"])
    return lines


def label(transport, tokens, chunk_bytes, lanes):
    """The label of a line."""
    chunks = f", chunks of {chunk_bytes / 1048576:g} MiB" if chunk_bytes else ""
    return f"{transport}, {tokens} tokens{chunks}" + (f", {lanes} lanes" if lanes else "")


def draw(left, right, cases):
    """Throughput on the left; on the right the median with the range up to the 99th percentile."""
    for key, line in lines_of(cases).items():
        clients = [case["settings"]["clients"] for case in line]
        left.plot(clients, [case["tokens_per_second"] for case in line], "o-", label=label(*key))
        median = [case["latency_ms"]["p50"] for case in line]
        (drawn,) = right.plot(clients, median, "o-", label=label(*key))
        right.fill_between(clients, median, [case["latency_ms"]["p99"] for case in line], color=drawn.get_color(), alpha=0.15)
    left.set_ylabel("tokens/s")
    right.set_ylabel("batch latency, ms: median, shaded up to p99")
    left.legend(frameon=False, fontsize=8)
    for axes in (left, right):
        axes.set_xlabel("clients")
        axes.set_xticks(sorted({case["settings"]["clients"] for case in cases}))
        axes.set_ylim(bottom=0)
        axes.grid(linewidth=0.4)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)


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
        print(f"plot_perf.py: {error}", file=sys.stderr)
        return 2
    try:
        import matplotlib
        matplotlib.use("Agg")  # files, no window
        from matplotlib import pyplot
    except ImportError:
        print(NO_MATPLOTLIB.format(python=sys.executable), file=sys.stderr, end="")
        return 3
    cases = [case for case in sweep["cases"] if case.get("tokens_per_second")]
    if not cases:
        print("plot_perf.py: no case was measured", file=sys.stderr)
        return 1
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.5))
    draw(left, right, cases)
    settings = cases[0]["settings"]
    left.set_title(f"V {settings['vocab']}, H {settings['hidden']} — {cases[0]['device']}, {sweep['time'][:10]}", loc="left", fontsize=9)
    figure.tight_layout()
    for suffix in ("svg", "png"):
        path = os.path.join(folder, f"sweep.{suffix}")
        figure.savefig(path, dpi=150)
        print(f"plot: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
