#!/usr/bin/python3
"""Measures which branches of the product the functional C++ tests take, by gcov, and sums them by folder.

Builds the preset "coverage" in build-coverage, runs the suites unit, conformance and integration, and adds up the counts of all
programs. A branch counts once, however many programs and template instantiations contain it. Branches that the compiler adds to calls
which may throw are not counted. CTest lists failing tests, which do not stop the run. kernels/cpu and the tests stay optimised, since
that would take too long otherwise. A header counts where the product includes it. The whole takes hours on two cores.

usage: tools/coverage.py [--jobs N] [--json FILE] [--no-build] [--no-tests] [--depth N] [FOLDER...]
  --no-build, --no-tests  use the existing programs, or the existing counts
  --depth N               levels of folders that are shown, by default 3
  FOLDER                  by default server client kernels/cpu
"""
import argparse
import collections
import contextlib
import concurrent.futures
import json
import os
import re
import subprocess
import sys

from source_files import ROOT

BUILD = os.path.join(ROOT, "build-coverage")
OBJECT = re.compile(r" -o (\S+)\.o -c ")
SUITES = "^(unit|conformance|integration)$"


def objects():
    """Paths of the objects that count, without .o: gcov's files are beside them."""
    with open(os.path.join(BUILD, "compile_commands.json"), encoding="utf-8") as file:
        outputs = [os.path.join(BUILD, OBJECT.search(entry["command"])[1]) for entry in json.load(file)]
    return [output for output in outputs if os.path.exists(output + ".gcno")]


def build(jobs):
    subprocess.run(["cmake", "--preset", "coverage"], cwd=ROOT, check=True)
    subprocess.run(["ninja", "-C", BUILD, f"-j{jobs}"], check=True)


def run_tests(jobs):
    for counted in objects():
        with contextlib.suppress(FileNotFoundError):
            os.remove(counted + ".gcda")
    environment = {name: value for name, value in os.environ.items() if name != "LOSSD_UNCHANGED"}
    command = ["ctest", "--test-dir", BUILD, "-L", SUITES, "-E", "^model_test$", f"-j{jobs}"]
    subprocess.run(command, env=environment, check=False)


def written_branches(branches):
    """Leaves out the two branches of a call that may throw: its return, and the exception."""
    kept = []
    for branch in branches:
        if not branch["throw"]:
            kept.append(branch)
        elif kept and kept[-1]["fallthrough"]:
            kept.pop()
    return kept


def branches_of(counted, folders):
    """{(file, line, index of the branch): whether it was taken} of one object, also of one that no program has run."""
    command = ["gcov", "--json-format", "--stdout", "--branch-probabilities", counted + ".gcno"]
    done = subprocess.run(command, cwd=BUILD, check=True, capture_output=True, text=True)
    taken = {}
    for document in done.stdout.splitlines():
        for source in json.loads(document)["files"]:
            name = os.path.relpath(os.path.join(BUILD, source["file"]), ROOT)
            if not name.startswith(folders):
                continue
            for line in source["lines"]:
                for index, branch in enumerate(written_branches(line["branches"])):
                    key = (name, line["line_number"], index)
                    taken[key] = taken.get(key, False) or branch["count"] > 0
    return taken


def all_branches(jobs, folders):
    taken = {}
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        for of_object in pool.map(lambda counted: branches_of(counted, folders), objects()):
            for key, is_taken in of_object.items():
                taken[key] = taken.get(key, False) or is_taken
    return taken


def summed(taken, depth):
    """{folder: [branches taken, all branches]}, each with its subfolders."""
    sums = collections.defaultdict(lambda: [0, 0])
    for (name, _, _), is_taken in taken.items():
        parts = name.split("/")[:-1]
        for end in range(1, min(depth, len(parts)) + 1):
            of_folder = sums["/".join(parts[:end])]
            of_folder[0] += is_taken
            of_folder[1] += 1
    return dict(sorted(sums.items()))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--no-build", action="store_true")
    parser.add_argument("--no-tests", action="store_true")
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("folders", nargs="*", metavar="FOLDER", default=["server", "client", "kernels/cpu"])
    arguments = parser.parse_args()
    if not arguments.no_build:
        build(arguments.jobs)
    if not arguments.no_tests:
        run_tests(arguments.jobs)
    sums = summed(all_branches(arguments.jobs, tuple(folder.rstrip("/") + "/" for folder in arguments.folders)), arguments.depth)
    for folder, (taken, branches) in sums.items():
        print(f"{taken:7} of {branches:7}  {100 * taken / branches:5.1f} %  {folder}")
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({folder: {"taken": taken, "branches": branches} for folder, (taken, branches) in sums.items()}, file, indent=2)
            file.write("\n")
    return 0 if sums else 1


if __name__ == "__main__":
    sys.exit(main())
