#!/usr/bin/python3
"""Runs clang-tidy over the project's sources, several at once, skipping those that passed before and have not changed.

A source counts as unchanged while its own text, that of every header of the project it includes (however deep), with generated ones
that of the .proto files, the compile command, .clang-tidy and the version of clang-tidy are the same; the hash of all that is kept in the user's cache folder
($XDG_CACHE_HOME or ~/.cache, lossd/tidy), so that it serves every clone.

usage: tools/tidy.py [--build DIR] [--jobs N] [FILE...]   (default: every source in DIR/compile_commands.json)
"""
import argparse
import concurrent.futures
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile

from source_files import ROOT, source_files

TIDY = os.path.join(ROOT, "build/tidy/bin/clang-tidy")  # tools/tidy_env.sh
INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)
GCC_ONLY = re.compile(r" -fno-gnu-unique\b")  # options that clang refuses
GENERATED = re.compile(r"\.pb\.h$")


class Hasher:
    """Hash of a source with everything of the project that it includes."""

    def __init__(self):
        self._texts = {}
        version = subprocess.run([TIDY, "--version"], check=True, capture_output=True).stdout
        self._common = b"\0".join([version, self._read(".clang-tidy"), self._read("tests/.clang-tidy")])
        self._protos = source_files((".proto",))

    def _read(self, path):
        if path not in self._texts:
            with open(os.path.join(ROOT, path), "rb") as file:
                self._texts[path] = file.read()
        return self._texts[path]

    def _closure(self, path, seen):
        seen.add(path)
        for target in INCLUDE.findall(self._read(path).decode("utf-8")):
            if GENERATED.search(target):
                seen.update(self._protos)
            for candidate in (target, "client/include/" + target):
                if candidate not in seen and os.path.isfile(os.path.join(ROOT, candidate)):
                    self._closure(candidate, seen)
        return seen

    def key(self, path, command):
        digest = hashlib.sha256(self._common + command.replace(ROOT, ".").encode())
        for name in sorted(self._closure(path, set())):
            digest.update(name.encode() + b"\0" + self._read(name) + b"\0")
        return digest.hexdigest()


def tidy(build, path):
    """(passed, output) of one source."""
    # What is guarded by a mutex is touched with it held: server/engine/common/mutex.h.
    command = [TIDY, "--quiet", "--extra-arg=-Wthread-safety", "-p", build, os.path.join(ROOT, path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode == 0, done.stdout + ("" if done.returncode == 0 else done.stderr)


def write_commands(folder, commands):
    """A compile_commands.json that clang takes: omp.h, which it has none of, is GCC's, and so are deprecated parts of GCC's library."""
    headers = subprocess.run(["g++", "-print-file-name=include"], check=True, capture_output=True, text=True).stdout.strip()
    for command in commands:
        command["command"] = GCC_ONLY.sub("", command["command"]) + f" -idirafter {headers} -Wno-deprecated-declarations"
    with open(os.path.join(folder, "compile_commands.json"), "w", encoding="utf-8") as file:
        json.dump(commands, file)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--build", default="build-tidy")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("files", nargs="*", metavar="FILE")
    arguments = parser.parse_args()

    if not os.path.exists(TIDY):
        sys.exit("there is no build/tidy/bin/clang-tidy: run tools/tidy_env.sh")
    build = os.path.join(ROOT, arguments.build)
    with open(os.path.join(build, "compile_commands.json"), encoding="utf-8") as file:
        entries = json.load(file)
    commands = {os.path.relpath(c["file"], ROOT): c["command"] for c in entries}
    own = set(source_files((".cc",)))
    chosen = {os.path.relpath(f, ROOT) for f in arguments.files}
    sources = sorted(p for p in commands if p in own and (not chosen or p in chosen))
    unknown = chosen - set(sources)
    if unknown:
        sys.exit(f"not compiled in {arguments.build}: {', '.join(sorted(unknown))}")

    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    stamps = os.path.join(cache, "lossd", "tidy")
    os.makedirs(stamps, exist_ok=True)
    hasher = Hasher()
    keys = {path: hasher.key(path, commands[path]) for path in sources}
    pending = [path for path in sources if not os.path.exists(os.path.join(stamps, keys[path]))]
    print(f"{len(sources)} sources, {len(sources) - len(pending)} of them unchanged since they passed", flush=True)

    failed = []
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        write_commands(folder, entries)
        running = {pool.submit(tidy, folder, path): path for path in pending}
        for count, future in enumerate(concurrent.futures.as_completed(running), 1):
            path = running[future]
            passed, output = future.result()
            if passed:
                with open(os.path.join(stamps, keys[path]), "w", encoding="utf-8") as stamp:
                    stamp.write(path + "\n")
            else:
                failed.append(path)
                print(output)
            print(f"[{count}/{len(pending)}] {path}: {'ok' if passed else 'FAILED'}", flush=True)
    if failed:
        print("clang-tidy found something in: " + ", ".join(sorted(failed)))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
