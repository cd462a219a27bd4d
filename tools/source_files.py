#!/usr/bin/python3
"""Lists the project's own files: those that git would track. Without git, .gitignore says which ones.

usage: tools/source_files.py [--recent] [SUFFIX...]   only files whose path ends in one of the suffixes

  --recent   only those that the last 25 commits or nobody's commit have changed: none where there is no git
"""
import fnmatch
import os
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
IGNORE_FILES = (".git/info/exclude", ".gitignore")
RECENT_COMMITS = 25


def source_files(suffixes=(), root=ROOT):
    """Paths relative to `root`, sorted, with forward slashes."""
    if os.path.exists(os.path.join(root, ".git")):
        command = ["git", "-C", root, "ls-files", "--cached", "--others", "--exclude-standard"]
        try:
            listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
            return _select(root, listed, suffixes)
        except (OSError, subprocess.CalledProcessError):
            pass  # no git on this machine, or not its checkout
    return _select(root, _walk(root), suffixes)


def recently_changed(suffixes=(), root=ROOT):
    """Files that are not committed, then those of the last commits, the latest first; none where there is no history."""

    def lines(*arguments):
        try:
            done = subprocess.run(["git", "-C", root, *arguments], check=False, capture_output=True, text=True)
        except OSError:
            return []  # no git on this machine
        return done.stdout.splitlines() if done.returncode == 0 else []

    uncommitted = lines("ls-files", "--modified", "--others", "--exclude-standard")
    committed = lines("log", "--name-only", "--format=", f"-{RECENT_COMMITS}")
    return [path for path in dict.fromkeys(uncommitted + committed) if not suffixes or path.endswith(tuple(suffixes))]


def _walk(root):
    patterns = _patterns(root)
    for folder, folders, names in os.walk(root):
        below = os.path.relpath(folder, root)
        folders[:] = [f for f in folders if f != ".git" and not _ignored(os.path.normpath(os.path.join(below, f)), True, patterns)]
        for name in names:
            path = os.path.normpath(os.path.join(below, name))
            if path != ".git" and not _ignored(path, False, patterns):
                yield path


def _patterns(root):
    """Lines of the files that name what git ignores, but for comments."""
    lines = []
    for name in IGNORE_FILES:
        try:
            with open(os.path.join(root, name), encoding="utf-8") as file:
                lines += [line.strip() for line in file]
        except OSError:
            pass  # a tree without it
    return [line for line in lines if line and not line.startswith("#")]


def _ignored(path, is_folder, patterns):
    """As git has it for patterns without **: the last one that matches decides."""
    verdict = False
    for pattern in patterns:
        wanted = pattern.removeprefix("!")
        if wanted.endswith("/") and not is_folder:
            continue
        wanted = wanted.rstrip("/")
        subject = path if "/" in wanted else os.path.basename(path)
        wanted = wanted.removeprefix("/")
        if subject.count("/") == wanted.count("/") and fnmatch.fnmatchcase(subject, wanted):
            verdict = not pattern.startswith("!")
    return verdict


def _select(root, paths, suffixes):
    return sorted(
        path
        for path in set(paths)
        if (not suffixes or path.endswith(tuple(suffixes))) and os.path.isfile(os.path.join(root, path))
    )


if __name__ == "__main__":
    recent = sys.argv[1:2] == ["--recent"]
    files = recently_changed(sys.argv[2:]) if recent else source_files(sys.argv[1:])
    if files:
        print("\n".join(files))
