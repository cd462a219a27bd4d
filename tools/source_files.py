#!/usr/bin/python3
"""Lists the project's own files: what git would track, or without git everything outside build trees.

usage: tools/source_files.py [SUFFIX...]   only files whose path ends in one of the suffixes
"""
import os
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def source_files(suffixes=(), root=ROOT):
    """Paths relative to `root`, sorted, with forward slashes."""
    if os.path.exists(os.path.join(root, ".git")):
        command = ["git", "-C", root, "ls-files", "--cached", "--others", "--exclude-standard"]
        try:
            listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
            return _select(root, listed, suffixes)
        except (OSError, subprocess.CalledProcessError):
            pass  # no git on this machine, or not its checkout
    listed = []
    for folder, folders, names in os.walk(root):
        relative = os.path.relpath(folder, root)
        folders[:] = [f for f in folders if f not in (".git", "__pycache__") and not (relative == "." and f.startswith("build"))]
        listed += [os.path.normpath(os.path.join(relative, name)) for name in names]
    return _select(root, listed, suffixes)


def _select(root, paths, suffixes):
    return sorted(
        path
        for path in set(paths)
        if (not suffixes or path.endswith(tuple(suffixes))) and os.path.isfile(os.path.join(root, path))
    )


if __name__ == "__main__":
    print("\n".join(source_files(sys.argv[1:])))
