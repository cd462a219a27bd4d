#!/usr/bin/python3
"""What no compiler sees: sizes of files and folders, paths of one machine, left-over notes, stray white space, comments without a
subject, rulers, lines of prose and of CMake that are too long to be read.

Exit status 1 and one line per violation.

usage: tools/check_text.py [ROOT]
"""
import collections
import os
import re
import sys

from source_files import ROOT, source_files

MAX_LINES = 800
MAX_COLUMNS = 120  # a line of prose, or of CMake, which no formatter lays out
MAX_FILES = 40  # in a folder
SIZED = (".h", ".c", ".cc", ".cu", ".cuh", ".py", ".sh", ".cmake", ".proto", "CMakeLists.txt")
CMAKE = (".cmake", "CMakeLists.txt")
TEXT = SIZED + (".md", ".json", ".svg", ".yaml", ".yml", ".supp", ".clang-format", ".clang-tidy", ".ci/run")
CODE = SIZED + (".json", ".yaml", ".yml", ".supp")
# Written so that this file does not match itself.
MACHINE_PATH = re.compile(r"(?<![\w.$}])/(?:work|root|home|Users|mnt)/\w")
NOTE = re.compile(r"\b(?:TO" r"DO|FIX" r"ME|X" r"XX|HA" r"CK)\b")
# A comment is a sentence that names what it speaks of.
NO_SUBJECT = re.compile(r'(?:(?<!\S)(?://+|#|/\*+) *|^ *""")' r"Of\b")
# Whose deadline gRPC may miss for ever: https://github.com/grpc/grpc/issues/16128.
NO_DEADLINE = re.compile(r"\bWaitFor(?:Connected|StateChange)\(")
# A row of dashes, with or without a title: a file that needs some holds several things.
RULER = re.compile(r"\s*(?://|#)\s*[-=]{3,}")
# What cannot be wrapped: a row of a table, a quotation (of a licence), a picture, one word (an address, a code span).
UNWRAPPED = re.compile(r"\s*(?:\||>|!\[|(?:[-*] )?\S+$)")
FENCE = re.compile(r" *(?:```|~~~)")


def prose_of(lines):
    """Numbers and lines of a page that are not code: neither between fences nor set off by four columns behind an empty line."""
    fenced = False
    code_from = None  # columns by which the present block of code is set off
    text_from = 0  # columns at which the text of the present list item begins
    before = ""
    for number, line in enumerate(lines, 1):
        indent = len(line) - len(line.lstrip(" "))
        if line.strip():
            if code_from is not None and indent < code_from:
                code_from = None
            if not fenced and code_from is None and not before.strip():
                if indent < text_from:
                    text_from = 0
                if indent >= text_from + 4:
                    code_from = text_from + 4
            fence = code_from is None and FENCE.match(line)
            if not fenced and not fence and code_from is None:
                item = re.match(r" *(?:[-*+]|\d+[.)]) +", line)
                if item:
                    text_from = len(item.group(0))
                yield number, line
            fenced = fenced != bool(fence)
        before = line


def violations_of(path, text):
    lines = text.split("\n")
    if path.endswith(SIZED) and len(lines) - 1 > MAX_LINES:
        yield f"{path}: {len(lines) - 1} lines; past {MAX_LINES} a file holds two things"
    if text and not text.endswith("\n"):
        yield f"{path}: no newline at the end"
    for number, line in enumerate(lines, 1):
        if "\r" in line:
            yield f"{path}:{number}: carriage return"
        if path.endswith(CODE) and line != line.rstrip():
            yield f"{path}:{number}: white space at the end of the line"
        if MACHINE_PATH.search(line):
            yield f"{path}:{number}: absolute path of one machine"
        if path.endswith(CODE) and RULER.match(line):
            yield f"{path}:{number}: a ruler; say in words what follows, or give it a file of its own"
        if path.endswith(CMAKE) and len(line) > MAX_COLUMNS:
            yield f"{path}:{number}: {len(line)} columns; CMake has at most {MAX_COLUMNS}"
        if NOTE.search(line):
            yield f"{path}:{number}: note of unfinished work"
        if path.endswith((".h", ".cc")) and NO_DEADLINE.search(line):
            yield f"{path}:{number}: a wait that may never end; lossd::internal::AwaitConnected does"
        if path.endswith(CODE) and NO_SUBJECT.search(line):
            yield f"{path}:{number}: a comment that begins with 'Of'; name what it speaks of"


def long_prose_of(path, text):
    for number, line in prose_of(text.split("\n")):
        if len(line) > MAX_COLUMNS and not UNWRAPPED.match(line):
            yield f"{path}:{number}: {len(line)} columns; prose has at most {MAX_COLUMNS}"


def full_folders_of(paths):
    counts = collections.Counter(os.path.dirname(path) for path in paths)
    for folder, count in sorted(counts.items()):
        if count > MAX_FILES:
            yield f"{folder}: {count} files; past {MAX_FILES} a folder no longer shows what is in it"


def check(root):
    problems = list(full_folders_of(source_files((), root)))
    for path in source_files(TEXT, root):
        try:
            with open(os.path.join(root, path), encoding="utf-8", newline="") as file:
                text = file.read()
            problems += violations_of(path, text)
            if path.endswith(".md"):
                problems += long_prose_of(path, text)
        except UnicodeDecodeError:
            problems.append(f"{path}: not UTF-8")
    return problems


if __name__ == "__main__":
    found = check(sys.argv[1] if len(sys.argv) > 1 else ROOT)
    print("\n".join(found) if found else "sizes and text: no violation")
    sys.exit(1 if found else 0)
