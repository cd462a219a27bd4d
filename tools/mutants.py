#!/usr/bin/python3
"""Shows which test notices each of forty fixed faults. An entry of tests/mutants.json names a file, a text that occurs there once,
the faulty text and what breaks.

All faults are compiled at once into a copy of the tree, build-mutants/src. LOSSD_MUTANT=N in the environment of a program switches
fault N on. For each fault the tests of CTest run, the nearest ones first, until one fails twice. A test also fails if it takes a
minute more than four times its usual time. CUDA and the tests of the Python package are left out. The whole takes an hour on two cores.

usage: tools/mutants.py [--only N,M...] [--jobs N] [--json FILE] [--target T]... [--tests REGEX] [--check]
  --target, --tests  build only this program, run only tests whose name matches: for work on one test
  --check            only check that the table fits the sources
Exit status: 0 if every fault is noticed, 1 if one is not, 2 if the table has become stale.
"""
import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ET

from source_files import ROOT, source_files

TABLE = os.path.join(ROOT, "tests/mutants.json")
TREE = os.path.join(ROOT, "build-mutants/src")
BUILD = os.path.join(TREE, "build")  # as in an ordinary tree, so that the compiler cache has all files without a fault
HEADER = """\
#pragma once
#include <cstdlib>
namespace lossd_mutants {
inline const int active = [] {
  const char* number = std::getenv("LOSSD_MUTANT");
  return number == nullptr ? 0 : std::atoi(number);
}();
}  // namespace lossd_mutants
#define LOSSD_MUTANT(number) (lossd_mutants::active == (number))
"""
# By the top folder of a fault: its own tests, which run first, and the labels of the tests behind them.
RINGS = {
    "server": ("^unit/engine/", ("unit", "integration", "conformance")),
    "client": ("^unit/client/", ("unit", "integration", "conformance")),
    "kernels": ("^unit/kernels/", ("conformance", "unit", "integration")),
}
WITHOUT_LOSSD = ("/tests/unit/tools/", "/tests/model/")  # scripts that start no program with a fault
SECONDS_MORE = 60


def read_table():
    with open(TABLE, encoding="utf-8") as file:
        return json.load(file)


def both(mutant):
    """An expression, or a statement, that is either of the two."""
    number, original, mutated = mutant["number"], mutant["original"], mutant["mutated"]
    if original.endswith((";", "}")):
        return f"{{ if (LOSSD_MUTANT({number})) {{ {mutated} }} else {{ {original} }} }}"
    return f"(LOSSD_MUTANT({number}) ? ({mutated}) : ({original}))"


def with_mutants(text, mutants):
    """(the text with both versions of each place, one message for each stale entry)"""
    places, stale = [], []
    for mutant in mutants:
        count = text.count(mutant["original"])
        if count == 1:
            places.append((text.index(mutant["original"]), mutant))
        else:
            stale.append(f"mutant {mutant['number']}: stands {count} times in {mutant['file']}: {mutant['original']}")
    changed_from = len(text)
    for begin, mutant in sorted(places, key=lambda place: -place[0]):
        end = begin + len(mutant["original"])
        if end > changed_from:
            stale.append(f"mutant {mutant['number']}: overlaps another one in {mutant['file']}: {mutant['original']}")
            continue
        text = text[:begin] + both(mutant) + text[end:]
        changed_from = begin
    return '#include "mutants.h"\n' + text, stale


def mutated_files(mutants, root=ROOT):
    """({path: its text with both versions}, messages for stale entries)"""
    texts, stale = {}, []
    for path in sorted({mutant["file"] for mutant in mutants}):
        text = ""
        with contextlib.suppress(FileNotFoundError), open(os.path.join(root, path), encoding="utf-8") as file:
            text = file.read()
        texts[path], wrong = with_mutants(text, [mutant for mutant in mutants if mutant["file"] == path])
        stale += wrong
    return texts, stale


def write_tree(texts):
    """Makes the copy. Files that are as they were keep their time, so that they are not compiled again."""
    os.makedirs(TREE, exist_ok=True)
    wanted = {"mutants.h": HEADER.encode(), **{path: text.encode() for path, text in texts.items()}}
    for path in source_files():
        if path not in wanted:
            with open(os.path.join(ROOT, path), "rb") as file:
                wanted[path] = file.read()
    for path in source_files(root=TREE):
        if path not in wanted:
            os.remove(os.path.join(TREE, path))
    for path, content in wanted.items():
        to = os.path.join(TREE, path)
        with contextlib.suppress(FileNotFoundError), open(to, "rb") as file:
            if file.read() == content:
                continue
        os.makedirs(os.path.dirname(to), exist_ok=True)
        with open(to, "wb") as file:
            file.write(content)
        if path not in texts and path != "mutants.h":
            shutil.copymode(os.path.join(ROOT, path), to)


def build(jobs, targets):
    subprocess.run(["cmake", "--preset", "release", "-DLOSSD_CUDA=OFF"], cwd=TREE, check=True)
    subprocess.run(["ninja", "-C", BUILD, f"-j{jobs}", *targets], check=True)


def all_tests(pattern):
    """{name: (number in CTest, labels)} of the tests that may be run."""
    shown = subprocess.run(["ctest", "--test-dir", BUILD, "--show-only=json-v1"], check=True, capture_output=True, text=True)
    tests = {}
    for number, test in enumerate(json.loads(shown.stdout)["tests"], 1):
        labels = [label for one in test["properties"] if one["name"] == "LABELS" for label in one["value"]]
        starts_lossd = not any(part in " ".join(test.get("command", [])) for part in WITHOUT_LOSSD)
        if starts_lossd and re.search(pattern, test["name"]):
            tests[test["name"]] = (number, labels)
    return tests


def rings(area, tests):
    """Lists of names, the nearest tests first."""
    nearest, labels = RINGS[area]
    own = [name for name in tests if re.search(nearest, name)]
    return [own, *([name for name, (_, of_test) in tests.items() if label in of_test and name not in own] for label in labels)]


def run(names, tests, number, jobs, *options):
    """{name: (passed, seconds, the case that failed)} of those that CTest has run, with this mutant."""
    report = os.path.join(BUILD, "mutants.xml")
    with contextlib.suppress(FileNotFoundError):
        os.remove(report)
    chosen = ",".join(str(tests[name][0]) for name in names)
    command = ["ctest", "--test-dir", BUILD, "-I", f"0,0,0,{chosen}", f"-j{jobs}", "--output-junit", report, *options]
    environment = {name: value for name, value in os.environ.items() if name != "LOSSD_UNCHANGED"}
    environment.update(LOSSD_MUTANT=str(number), GTEST_FAIL_FAST="1")
    if names:
        subprocess.run(command, env=environment, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    results = {}
    for case in ET.parse(report).iter("testcase") if os.path.exists(report) else ():
        if case.get("status") in ("run", "fail"):
            failed = re.search(r"\[  FAILED  \] ([\w/.]+)", case.findtext("system-out") or "")
            results[case.get("name")] = (case.get("status") == "run", float(case.get("time")), failed[1] if failed else "")
    return results


def without_mutant(names, tests, jobs):
    """What run() returns for the product. It is kept until a program is linked anew."""
    kept = os.path.join(BUILD, "without_mutant.json")
    programs = [entry for folder in ("bin", "lib") for entry in os.scandir(os.path.join(BUILD, folder)) if entry.is_file()]
    results = {}
    if os.path.exists(kept) and os.path.getmtime(kept) > max(program.stat().st_mtime for program in programs):
        with open(kept, encoding="utf-8") as file:
            results = json.load(file)
    missing = [name for name in names if not results.get(name, (False,))[0]]
    if missing:
        print(f"running {len(missing)} tests without a fault", flush=True)
        results.update(run(missing, tests, 0, jobs))
        with open(kept, "w", encoding="utf-8") as file:
            json.dump(results, file)
    return {name: result for name, result in results.items() if name in names}


def limit_times(results):
    """CTest's own limits are ten minutes and more."""
    for folder, _, names in os.walk(os.path.join(BUILD, "tests")):
        if "CTestTestfile.cmake" not in names:
            continue
        path = os.path.join(folder, "CTestTestfile.cmake")
        with open(path, encoding="utf-8") as file:
            lines = file.readlines()
        for i, line in enumerate(lines):
            test = re.match(r"set_tests_properties\(\[=\[(.+?)\]=\]", line)
            if test and test[1] in results:
                lines[i] = re.sub(r' TIMEOUT "\d+"', f' TIMEOUT "{int(4 * results[test[1]][1]) + SECONDS_MORE}"', line)
        with open(path, "w", encoding="utf-8") as file:
            file.writelines(lines)


def killer(number, of_rings, tests, jobs):
    """(test, case) that notices the mutant, or None."""
    for names in of_rings:
        while names:
            results = run(names, tests, number, jobs, "--stop-on-failure")
            for name, (passed, _, case) in results.items():
                if not passed and not run([name], tests, number, 1).get(name, (True,))[0]:
                    return name, case
            if all(passed for passed, _, _ in results.values()):
                break
            names = [name for name in names if name not in results]  # a test that failed only once counts as passed
    return None


def try_out(mutants, arguments):
    """Fills in what becomes of each mutant."""
    tests = all_tests(arguments.tests)
    of_area = {area: rings(area, tests) for area in {mutant["file"].split("/")[0] for mutant in mutants}}
    wanted = {name for of_rings in of_area.values() for names in of_rings for name in names}
    results = without_mutant(sorted(wanted), tests, arguments.jobs)
    for name in sorted(wanted):
        if not results.get(name, (False,))[0]:
            print(f"left out: {name} {'fails without a fault' if name in results else 'does not run'}")
    limit_times(results)
    passing = {name for name, (passed, _, _) in results.items() if passed}
    for done, mutant in enumerate(mutants, 1):
        began = time.monotonic()
        of_rings = [[name for name in names if name in passing] for names in of_area[mutant["file"].split("/")[0]]]
        found = killer(mutant["number"], of_rings, tests, arguments.jobs)
        mutant["killed_by"], mutant["case"] = found or (None, None)
        mutant["seconds"] = round(time.monotonic() - began, 1)
        verdict = " ".join(found) if found else "SURVIVED"
        print(f"[{done}/{len(mutants)}] {mutant['number']:2} {mutant['file']}: {verdict} ({mutant['seconds']:.0f} s)", flush=True)


def show(mutants, path):
    survivors = [mutant for mutant in mutants if mutant["killed_by"] is None]
    for mutant in mutants:
        print(f"{mutant['number']:3}  {mutant['killed_by'] or 'SURVIVED':60}  {mutant['breaks']}")
    print(f"{len(mutants) - len(survivors)} of {len(mutants)} are noticed")
    if path:
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"killed": len(mutants) - len(survivors), "mutants": mutants}, file, indent=2)
            file.write("\n")
    return 1 if survivors else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--only", type=lambda text: {int(number) for number in text.split(",")})
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--target", action="append", default=[])
    parser.add_argument("--tests", default="", metavar="REGEX")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()

    mutants = read_table()
    texts, stale = mutated_files(mutants)
    if stale:
        print("\n".join(stale), file=sys.stderr)
        return 2
    if arguments.check:
        return 0
    write_tree(texts)
    build(arguments.jobs, arguments.target)
    chosen = [mutant for mutant in mutants if arguments.only is None or mutant["number"] in arguments.only]
    try_out(chosen, arguments)
    return show(chosen, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
