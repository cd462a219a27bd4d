#!/usr/bin/python3
"""Runs clang-tidy over the project's sources, several at once, skipping those that passed before and have not changed.

Sources that are compiled alike are looked at as one text, because their headers take most of the time. Where something is found in
such a text, or its parts use a name twice, each of them is looked at by itself, and only that is said. So are MOST_RECENT sources that
the last commits or nobody's commit have changed: what each includes must be enough for it, and in one text its neighbours could help out.

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
import shlex
import subprocess
import sys
import tempfile

from source_files import ROOT, recently_changed, source_files

CONFIGURATIONS = (".clang-tidy", "tests/.clang-tidy", "bench/.clang-tidy")
TIDY = os.path.join(ROOT, "build/tidy/bin/clang-tidy")  # tools/tidy_env.sh
INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)
GCC_ONLY = re.compile(r" (-fno-gnu-unique|--param \S+)(?!\S)")  # options that clang refuses
GENERATED = re.compile(r"\.pb\.h$")
OF_ONE_FILE = re.compile(r" -o (?P<object>\S+) -c \S+$")  # what differs between the commands of a target's sources
MOST_TOGETHER = 12
MOST_RECENT = 40  # sources of the last commits that are looked at alone: a clone may have one commit for everything


class Hasher:
    """Hash of a source with everything of the project that it includes."""

    def __init__(self):
        self._texts = {}
        version = subprocess.run([TIDY, "--version"], check=True, capture_output=True).stdout
        self._common = b"\0".join([version, *(self._read(path) for path in CONFIGURATIONS)])
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


def run_tidy(*arguments, folder=ROOT):
    """(passed, output)"""
    # What is guarded by a mutex is touched with it held: server/engine/common/mutex.h.
    command = [TIDY, "--quiet", "--extra-arg=-Wthread-safety", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return done.returncode == 0, done.stdout + ("" if done.returncode == 0 else done.stderr)


def alike(commands, paths):
    """Lists of sources that one command compiles and one configuration is for; what changed recently is alone in its list."""
    groups = {}
    recent = recently_changed((".cc",))[:MOST_RECENT]
    for path in paths:
        if path in recent:
            yield [path]
            continue
        target = os.path.dirname(OF_ONE_FILE.search(commands[path]["command"])["object"]).partition(".dir")[0]
        flags = OF_ONE_FILE.sub("", commands[path]["command"])
        groups.setdefault((target, flags, path.partition("/")[0]), []).append(path)
    for group in groups.values():
        lists = -(-len(group) // MOST_TOGETHER)
        yield from (group[i::lists] for i in range(lists))


def passes_as_one(folder, commands, paths):
    """Whether nothing is found in a text of all of them."""
    with open(os.path.join(folder, paths[0].replace("/", "-")), "w", encoding="utf-8") as together:
        for path in paths:
            with open(os.path.join(ROOT, path), encoding="utf-8") as source:
                together.write(f'#line 1 "{path}"\n{source.read()}\n')
    config = subprocess.run([TIDY, "--dump-config", paths[0]], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    flags = shlex.split(OF_ONE_FILE.sub("", commands[paths[0]]["command"]))[1:]
    return run_tidy(f"--config={config}", together.name, "--", *flags, folder=commands[paths[0]]["directory"])[0]


def tidy(folder, commands, paths):
    """(path, passed, output) of each source."""
    if len(paths) > 1 and passes_as_one(folder, commands, paths):
        return [(path, True, "") for path in paths]
    return [(path, *run_tidy("-p", folder, os.path.join(ROOT, path))) for path in paths]


def write_commands(folder, commands):
    """A compile_commands.json that clang takes: omp.h, which it has none of, is GCC's, and so are deprecated parts of GCC's library."""
    headers = subprocess.run(["g++", "-print-file-name=include"], check=True, capture_output=True, text=True).stdout.strip()
    for command in commands:
        more = f" -idirafter {headers} -Wno-deprecated-declarations"
        command["command"] = OF_ONE_FILE.sub(lambda match: more + match[0], GCC_ONLY.sub("", command["command"]))
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
    commands = {os.path.relpath(entry["file"], ROOT): entry for entry in entries}
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
    keys = {path: hasher.key(path, commands[path]["command"]) for path in sources}
    pending = [path for path in sources if not os.path.exists(os.path.join(stamps, keys[path]))]
    print(f"{len(sources)} sources, {len(sources) - len(pending)} of them unchanged since they passed", flush=True)

    failed = []
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        write_commands(folder, entries)
        running = [pool.submit(tidy, folder, commands, paths) for paths in alike(commands, pending)]
        done = 0
        for future in concurrent.futures.as_completed(running):
            for path, passed, output in future.result():
                done += 1
                if passed:
                    with open(os.path.join(stamps, keys[path]), "w", encoding="utf-8") as stamp:
                        stamp.write(path + "\n")
                else:
                    failed.append(path)
                    print(output)
                print(f"[{done}/{len(pending)}] {path}: {'ok' if passed else 'FAILED'}", flush=True)
    if failed:
        print("clang-tidy found something in: " + ", ".join(sorted(failed)))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
