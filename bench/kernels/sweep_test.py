"""Runs `lossd-bench sweep` at sizes for a CPU and reads what it leaves: sweep_test.py LOSSD_BENCH.

One size is far too large on purpose. The plot is looked at where this Python has matplotlib, otherwise what is said instead.
"""
import csv
import importlib.util
import json
import os
import subprocess
import sys
import tempfile

TOO_LARGE = 1 << 40


def run(*arguments):
    return subprocess.run([sys.argv[1], "sweep", "--device=cpu", *arguments], capture_output=True, text=True, check=False, timeout=300)


def text_of(folder, name):
    with open(os.path.join(folder, name), encoding="utf-8", newline="") as file:
        return file.read()


def check_files(folder):
    """Two sizes with times and one that says why it has none, in every file."""
    cases = json.loads(text_of(folder, "sweep.json"))["cases"]
    assert [(case["vocab"], case["hidden"]) for case in cases] == [(1000, 64), (TOO_LARGE, 64), (1000, 96), (TOO_LARGE, 96)], cases
    for case in cases:
        if case["vocab"] == TOO_LARGE:
            assert case["error"] and case.get("ratio") is None, case
            continue
        assert "error" not in case and case["ratio"] > 0 and case["relative_error"]["dw"] < 1e-2, case
        assert case["tflops"] > 0 and [part["name"] for part in case["products"]] == ["logits", "dx", "dw"], case
        assert all(part["bytes"] > 0 and part["tflops"] > 0 for part in case["products"]), case
    rows = list(csv.DictReader(text_of(folder, "sweep.csv").splitlines()))
    assert [bool(row["problem"]) for row in rows] == [False, True, False, True], rows
    assert float(rows[0]["ratio"]) == cases[0]["ratio"], rows
    table = [line for line in text_of(folder, "sweep.md").splitlines() if line.startswith("|")]
    assert len(table) == 2 + len(cases) and len({line.count("|") for line in table}) == 1, table
    assert cases[1]["error"] in table[3], table


def check_plot(folder, said):
    """A plot, or how to get one."""
    if importlib.util.find_spec("matplotlib") is None:
        assert "no plot" in said and "plot_sweep.py" in said, said
        assert "apt-get install python3-matplotlib" in text_of(folder, "sweep.log")
        print("without matplotlib: what is said was checked, nothing was drawn")
        return
    assert text_of(folder, "sweep.svg").count("<svg") == 1 and os.path.getsize(os.path.join(folder, "sweep.png")) > 1000, said


def main():
    with tempfile.TemporaryDirectory() as folder:
        done = run("--tokens=50", f"--vocab=1000,{TOO_LARGE}", "--hidden=64,96", "--repetitions=2", f"--python={sys.executable}",
                   f"--out={folder}/results")
        assert done.returncode == 1 and "[4/4" in done.stderr and "2 of 4 cases done" in done.stdout, done
        check_files(folder + "/results")
        check_plot(folder + "/results", done.stdout)
        done = run("--tokens=50", "--vocab=1000", "--hidden=64", "--repetitions=1", "--no_plot", f"--out={folder}/one")
        assert done.returncode == 0 and "plot" not in done.stdout, done
        done = run("--tokens=4096", "--vocab=65536", "--hidden=1024", "--timeout=1", "--no_plot", f"--out={folder}/slow")
        assert done.returncode == 1 and "took longer than 1 s" in done.stderr, done
    for bad in (["--out=x", "--preset=nothing"], [], ["--out=x", "--preset=issue", "--tokens=4"]):
        assert run(*bad).returncode == 2, bad


if __name__ == "__main__":
    main()
