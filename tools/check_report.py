#!/usr/bin/env python3
"""What a run of ./check.sh has shown: single tests and their times, out of the reports of CTest, GoogleTest and pytest.

usage: tools/check_report.py watch SPEEDS PARENT
       tools/check_report.py suite OUT NAME SECONDS TIMES SPEEDS [--check TITLE SECONDS ok|failed]... [--ctest REPORT TESTS]...
                                                               [--pytest REPORT LOG]...
       tools/check_report.py table OUT SECONDS BUDGETS SUITE...

`watch` adds a line to SPEEDS every half minute, for as long as the process PARENT, which started it, lives: the time, and how fast a
processor compiles a text then, beside all that runs. A processor may be half as fast for minutes, because of what its machine does for
others; what fits in a small cache does not notice. A speed is 1 at most, and where there is no compiler.

`suite` writes what a suite has shown to OUT. TESTS is what CTest says of its tests (--show-only=json-v1): GTEST_OUTPUT is where a
GoogleTest program leaves a report of its own. Its tests count one by one, other programs as one test. A test that was skipped, or a
program that did not run, has shown nothing and counts as failed. A report that is not there counts as one failure. LOG is what pytest
printed: an interpreter that crashed, or a test that hung, has left the place there.

TIMES is what bash's `times` printed in the suite's process. The suite's `speed` is the mean of those in SPEEDS that were measured during
its SECONDS; where there is none, it is measured now.

`table` joins such files to OUT ({"seconds", "suites": [{"name", "seconds", "processor_seconds", "speed", "passed", "unchanged",
"failed", "slowest", "failures"}]}) and prints them as a table; a file that is not there is a suite that failed. `unchanged`: how many
of those that passed did so in an earlier run of the same program. Exit status 1 if anything failed.

BUDGETS is {SUITE: {"wall", "processor"}}, in seconds of the machine whose `speed` is 1. Seconds on the wall are shown beside their
budget. A suite fails whose processes took a quarter more processor seconds than its budget, divided by its speed, or by a half where
that is less. {SUITE: null}: it may take any time. A suite that is not there fails.
"""
import argparse
import itertools
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree

SLOWEST = 10
STACK_LINES = 40
LEEWAY = 1.25  # of a budget
LEAST_SPEED = 0.5  # that a budget is divided by
COMPILER = ("g++", "-std=c++20", "-fsyntax-only", "-x", "c++", "-")
COMPILED = "#include <functional>\n#include <memory>\n"
COMPILING_SECONDS = 0.75  # what that takes where `speed` is 1
SECONDS_BETWEEN_SPEEDS = 30
UNCHANGED = "unchanged since it passed"  # what tests/test_main.cc prints
UNREADABLE = (OSError, ValueError, KeyError, ElementTree.ParseError)


def why_not_passed(case):
    """Why a <testcase> did not pass, in a few words; None if it did."""
    for child in case:
        if child.tag in ("failure", "error", "skipped"):
            words = (child.get("message") or child.text or "").strip().split("\n", 1)[0]
            return f"{child.tag}: {words[:200]}" if words else child.tag
    return "not run" if case.get("status") in ("disabled", "notrun") or case.get("result") == "skipped" else None


def cases_of(path):
    """(name, seconds, why it did not pass or None) of every test of a report."""
    for case in ElementTree.parse(path).iter("testcase"):
        owner, name = case.get("classname"), case.get("name")
        full = name if owner in (None, "", name) else f"{owner}.{name}"
        yield full, float(case.get("time") or 0), why_not_passed(case)


def unchanged_programs(report):
    """The programs that did not run, since they had passed before."""
    for case in ElementTree.parse(report).iter("testcase"):
        if (case.findtext("system-out") or "").strip() == UNCHANGED:
            yield case.get("name")


def own_reports(tests):
    """{name: where its report is} of the GoogleTest programs."""
    with open(tests, encoding="utf-8") as file:
        listed = json.load(file)["tests"]
    environments = {test["name"]: each["value"] for test in listed for each in test["properties"] if each["name"] == "ENVIRONMENT"}
    found = {name: [re.match("GTEST_OUTPUT=xml:(.*)", each) for each in value] for name, value in environments.items()}
    return {name: each[1] for name, matches in found.items() for each in matches if each}


def unchanged_count(report, tests):
    try:
        reports = own_reports(tests)
        return sum(len(list(cases_of(reports[name]))) for name in unchanged_programs(report))
    except UNREADABLE:  # told of where the report's tests are read
        return 0


def ctest_cases(report, tests):
    reports = own_reports(tests)
    for name, seconds, why in cases_of(report):
        own_report = reports.get(name, "")
        cases = list(cases_of(own_report)) if os.path.exists(own_report) else []
        if own_report and not cases and why is None:
            why = "it has left no report of its tests"
        # tests/unchanged.cc left it there: how the program ended counts, too.
        if own_report and why is None and os.path.exists(f"{own_report}.key"):
            os.replace(f"{own_report}.key", f"{own_report}.passed")
        for test, test_seconds, test_why in cases:
            yield f"{name}: {test}", test_seconds, test_why
        # A program can end badly without a test that failed; and one without tests of its own is a test itself.
        if not cases or (why is not None and all(test_why is None for _, _, test_why in cases)):
            yield name, seconds, why


def crashes_of(log):
    """(title, seconds, stack) of every crash, and of every test that hung, that Python's faulthandler has told of."""
    try:
        with open(log, encoding="utf-8", errors="replace") as file:
            lines = [line.rstrip() for line in file]
    except OSError:  # told of where the report is read
        return
    for at, line in enumerate(lines):
        found = re.search(r"Fatal Python error.*|Timeout \(\d+:\d\d:\d\d\)!", line)
        if found:
            stacks = list(itertools.takewhile(lambda each: not re.search("Extension modules|node down", each), lines[at + 1 :]))
            threads = [i for i, each in enumerate(stacks) if each.startswith(("Current thread", "Thread"))] or [0]
            # The main thread comes last where none is the current one.
            current = next((i for i in threads if stacks[i].startswith("Current")), threads[-1])
            verdict = "hung" if found[0].startswith("Timeout") else "crashed"
            yield found[0], 0.0, "\n    ".join([verdict, *stacks[current : current + STACK_LINES]])


def read_or_complain(cases, *report):
    try:
        return list(cases(*report)) or [(report[0], 0.0, "no test was run")]
    except UNREADABLE as error:
        return [(report[0], 0.0, f"no report: {error}")]


def write(path, content, **options):
    """Whole or not at all: who reads it meanwhile has the old one."""
    beside = f"{path}.{os.getpid()}"
    with open(beside, "w", encoding="utf-8") as file:
        json.dump(content, file, **options)
        file.write("\n")
    os.replace(beside, path)


def measured_speed():
    """How fast a processor is now, by the processor seconds of a fixed piece of work; 1 at most."""
    began = resource.getrusage(resource.RUSAGE_CHILDREN)
    try:
        subprocess.run(COMPILER, input=COMPILED, text=True, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return 1.0
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return min(1.0, COMPILING_SECONDS / (ended.ru_utime + ended.ru_stime - began.ru_utime - began.ru_stime))


def watch(arguments):
    with open(arguments.speeds, "w", encoding="utf-8") as file:
        for second in itertools.count():
            if os.getppid() != arguments.parent:
                break
            if second % SECONDS_BETWEEN_SPEEDS == 0:
                print(f"{time.time():.0f} {measured_speed():.3f}", file=file, flush=True)
            time.sleep(1)


def speed_during(path, seconds):
    """The mean of what `watch` has written in the last seconds."""
    try:
        with open(path, encoding="utf-8") as file:
            lines = [line.split() for line in file]
    except OSError:
        lines = []
    speeds = [float(speed) for at, speed in lines if float(at) >= time.time() - seconds]
    return statistics.mean(speeds) if speeds else measured_speed()


def processor_seconds(path):
    """The sum of what `times` printed: minutes and seconds of a user and of the system, of the shell and of its children."""
    with open(path, encoding="utf-8") as file:
        times = re.findall(r"(\d+)m([\d.,]+)s", file.read())
    if len(times) != 4:
        raise ValueError(f"{path} has {len(times)} times, not four")
    return sum(60 * float(minutes) + float(seconds.replace(",", ".")) for minutes, seconds in times)


def suite(arguments):
    cases = [(title, float(seconds), None if verdict == "ok" else verdict) for title, seconds, verdict in arguments.check]
    unchanged = 0
    for report, tests in arguments.ctest:
        cases += read_or_complain(ctest_cases, report, tests)
        unchanged += unchanged_count(report, tests)
    for report, log in arguments.pytest:
        cases += read_or_complain(cases_of, report)
        cases += crashes_of(log)
    took = 0
    try:
        took = processor_seconds(arguments.times)
    except UNREADABLE as error:
        cases.append(("processor time", 0.0, str(error)))
    failures = [[name, why] for name, _, why in cases if why is not None]
    if not cases:
        failures = [["the suite", "nothing was run"]]
    slowest = sorted(((seconds, name) for name, seconds, _ in cases), reverse=True)[:SLOWEST]
    content = result(arguments.name, arguments.seconds)
    content.update(
        processor_seconds=round(took),
        speed=round(speed_during(arguments.speeds, arguments.seconds), 2),
        passed=len(cases) - (len(failures) if cases else 0),
        unchanged=unchanged,
        failed=len(failures),
        slowest=[[name, round(seconds, 3)] for seconds, name in slowest],
        failures=failures,
    )
    write(arguments.out, content)


def result(name, seconds):
    """What is said of a suite of which nothing is known yet."""
    empty = {"processor_seconds": 0, "speed": 1.0, "passed": 0, "unchanged": 0, "failed": 0}
    return {"name": name, "seconds": seconds, **empty, "slowest": [], "failures": []}


def shown(path):
    """What `suite` has left there."""
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except (OSError, ValueError) as error:
        name = os.path.basename(path).removeprefix("check-").removesuffix(".json")
        return {**result(name, 0), "failed": 1, "failures": [["the suite", f"ended without a result: {error}"]]}


def hold(budgets, each):
    """Adds a failure to a suite that took too much, or that has no budget."""
    if each["name"] not in budgets:
        each["failures"].append(["the budget", "tests/budgets.json has none"])
        each["failed"] += 1
        return
    most = LEEWAY * (budgets[each["name"]] or {}).get("processor", float("inf")) / max(LEAST_SPEED, each["speed"])
    if each["processor_seconds"] > most:
        took = f"{each['processor_seconds']} processor seconds at speed {each['speed']:.2f}"
        each["failures"].append(["the budget", f"it took {took}; its budget, with a quarter more, is {most:.0f} at that speed"])
        each["failed"] += 1


def with_budget(seconds, budget):
    return f"{seconds:5} / {budget}" if budget else f"{seconds:5}"


def table(arguments):
    with open(arguments.budgets, encoding="utf-8") as file:
        budgets = json.load(file)
    suites = [shown(path) for path in arguments.suites]
    for each in suites:
        hold(budgets, each)
    write(arguments.out, {"seconds": arguments.seconds, "suites": suites}, indent=1)
    print(f"\n{'suite':12} {'result':8} {'passed':>6} {'failed':>6} {'s / budget':>12} {'processor s':>13} {'speed':>5}  slowest test")
    for each in suites:
        budget = budgets.get(each["name"]) or {}
        slowest = f"{each['slowest'][0][1]:.1f} s {each['slowest'][0][0]}" if each["slowest"] else ""
        wall, processor = with_budget(each["seconds"], budget.get("wall")), with_budget(each["processor_seconds"], budget.get("processor"))
        verdict = "FAILED" if each["failed"] else "ok"
        numbers = f"{each['passed']:6} {each['failed']:6} {wall:>12} {processor:>13} {each['speed']:5.2f}"
        print(f"{each['name']:12} {verdict:8} {numbers}  {slowest}")
    failures = [f"{each['name']}: {name}: {why}" for each in suites for name, why in each["failures"]]
    if failures:
        print("\ndid not pass:", *failures, sep="\n  ")
    passed = sum(each["passed"] for each in suites)
    print(f"\n{arguments.seconds} s in all; {os.path.relpath(arguments.out)} has the slowest tests of each suite, logs are in build/logs/")
    unchanged = sum(each["unchanged"] for each in suites)
    print(f"{passed} passed{f' ({unchanged} of them earlier, and unchanged since)' if unchanged else ''}, {len(failures)} failed")
    return 1 if failures else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(required=True)
    always = commands.add_parser("watch")
    always.add_argument("speeds")
    always.add_argument("parent", type=int)
    always.set_defaults(run=watch)
    one = commands.add_parser("suite")
    one.add_argument("out")
    one.add_argument("name")
    one.add_argument("seconds", type=int)
    one.add_argument("times")
    one.add_argument("speeds")
    one.add_argument("--check", nargs=3, action="append", default=[], metavar=("TITLE", "SECONDS", "VERDICT"))
    one.add_argument("--ctest", nargs=2, action="append", default=[], metavar=("REPORT", "TESTS"))
    one.add_argument("--pytest", action="append", default=[], nargs=2, metavar=("REPORT", "LOG"))
    one.set_defaults(run=suite)
    all_of_them = commands.add_parser("table")
    all_of_them.add_argument("out")
    all_of_them.add_argument("seconds", type=int)
    all_of_them.add_argument("budgets")
    all_of_them.add_argument("suites", nargs="+")
    all_of_them.set_defaults(run=table)
    arguments = parser.parse_args()
    return arguments.run(arguments)


if __name__ == "__main__":
    sys.exit(main())
