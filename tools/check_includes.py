#!/usr/bin/python3
"""Enforces the layers: which folder may include what. Exit status 1 and one line per violation.

    client ──> proto <── server/rpc ──> server/engine ──> kernels
                                   └──> server/telemetry

and within each of them the folders, from top to bottom: arrows go down the lists of RULES, never up.

The modules of the Python package must not import each other in a circle.

usage: tools/check_includes.py [ROOT]
"""
import ast
import graphlib
import os
import re
import sys

from source_files import ROOT, source_files

GENERATED = r"lossd/(group/)?v1/.*\.pb\.h$|server/version\.h$"
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')

RPC = r"grpc|grpcpp/|grpc\+\+/|google/protobuf/|google/rpc/|lossd/(group/)?v1/"
DEVICE = r"cuda|cublas|nccl|nvml|dnnl|oneapi/dnnl|omp\.h"
OWN = r"kernels/|server/|client/|lossd/|tests/|bench/|proto/"
# What moves data between ranks: one folder knows it, and all others know kernels/collectives/communicator.h.
COLLECTIVES = r"gloo/|nccl"
COLLECTIVES_FOLDER = "kernels/collectives/"
COMMUNICATOR = r"kernels/collectives/communicator\.h$"
THREADS = r"(thread|jthread|future|pthread\.h)$"


def layers(root, rows, also, must_not):
    """One rule for each folder of `rows`, from top to bottom: its files may include each other, files of the rows below, and what
    `also` names. Folders in one row, which is a tuple, do not include each other. "" is the folder `root` itself; a name that
    does not end in a slash is that of a file."""

    def pattern(folder):
        return root + folder + (r"[^/]+$" if folder == "" or folder.endswith("/") else r"\.")

    rows = [row if isinstance(row, tuple) else (row,) for row in rows]
    rules = []
    for number, row in enumerate(rows):
        below = [pattern(folder) for lower in rows[number + 1 :] for folder in lower]
        rules += [(root + folder, "|".join([pattern(folder), *below, also]), must_not) for folder in row]
    # The first that fits decides: files before their folders, folders before those that they are in.
    return sorted(rules, key=lambda rule: -len(rule[0]))


def folders_in(path, root="server/engine/"):
    """Those below `path` as layers() takes them: a new one needs no line here."""
    names = {re.match(re.escape(path) + r"[^/]+/", file) for file in source_files((".cc", ".h", ".cu", ".cuh"))}
    return tuple(sorted(match.group()[len(root) :] for match in names if match))


def single_devices():
    """All but that which makes one device of those of a group."""
    return tuple(folder for folder in folders_in("server/engine/device/") if folder != "device/sharded/")


# One constant, made by CMake from the project's version.
VERSION = r"server/version\.h$"
# The element types' sizes and names are one enum for the whole server.
TYPES = r"kernels/data_type\.h$"

# (folder or file prefix, what of the project it may include, what of the outside it must not). The first prefix that fits
# decides; a file that none fits is itself a violation.
RULES = [
    *layers(
        "kernels/cuda/",
        ["", ("losses/", "optimizer/", "portable/", "sm90/"), "rows/", "memory/"],
        r"kernels/[^/]+$|kernels/collectives/communicator\.h$",
        rf"{RPC}|absl/|prometheus/|spdlog/|{THREADS}",
    ),
    (COLLECTIVES_FOLDER, r"kernels/collectives/|kernels/[^/]+$", rf"{RPC}|absl/|prometheus/|spdlog/|{THREADS}"),
    ("kernels/cpu/", rf"kernels/cpu/|{COMMUNICATOR}|kernels/[^/]+$", rf"{RPC}|absl/|prometheus/|spdlog/|{THREADS}"),
    ("kernels/", rf"{COMMUNICATOR}|kernels/[^/]+$", rf"{RPC}|absl/|prometheus/|spdlog/|{THREADS}"),
    # Files that both ends read: no message, but absl::Status, as everywhere above the kernels.
    ("proto/safetensors/", r"proto/safetensors/", rf"{RPC}|prometheus/|spdlog/|{DEVICE}|{THREADS}"),
    ("proto/", r"proto/|lossd/v1/", rf"absl/|prometheus/|spdlog/|{DEVICE}|{THREADS}"),
    # What a checkpoint says of a head is the head's to define: so checkpoint/ is above head/, which only knows where tensors go.
    *layers(
        "server/engine/",
        ["", "checkpoint/", "replicas/", "head/", "head/replica/", "head/parts/", "schedule/", "device/sharded/", "group/", single_devices(), "device/",
         "regions/", "chunk/", "memory/", "common/"],
        r"kernels/",
        rf"{RPC}|prometheus/",
    ),
    *layers(
        "server/telemetry/",
        ["", ("metrics/", "status_page/"), "http/", "common/"],
        rf"server/engine/|{VERSION}",
        rf"{RPC}",
    ),
    # Ranks of a group meet before they have a communicator, so this is where the two know of each other.
    (
        "server/rpc/group/",
        r"server/rpc/(group|convert|fields)/|server/rpc/(calls/worker_pool|compression|connections/(acceptor|call_counts)|no_plugins)\.h$|server/engine/(group|common)/|server/engine/device/device_report(_fields)?\.h$|kernels/collectives/(rendezvous|result)\.h$|lossd/group/v1/",
        rf"{DEVICE}|prometheus/",
    ),
    # Replicas meet as ranks do, and serve each other's clients.
    (
        "server/rpc/replicas/",
        r"server/rpc/(replicas|group|services|calls|convert|fields)/|server/engine/|server/telemetry/common/|kernels/collectives/|lossd/(group/)?v1/",
        rf"{DEVICE}|prometheus/",
    ),
    # The messages between ranks that lanes go by.
    (
        "server/rpc/lanes/",
        rf"server/rpc/(lanes|services|compute|connections|transport|calls|convert)/|server/rpc/compression\.h$|server/engine/|server/telemetry/|proto/|lossd/(group/)?v1/|{TYPES}",
        rf"{DEVICE}|prometheus/",
    ),
    *layers(
        "server/rpc/",
        ["", "replicas/", "lanes/", "services/", "compute/", "connections/", "transport/", "calls/", "convert/", "fields/"],
        rf"server/engine/|server/telemetry/|proto/|lossd/v1/|{VERSION}|{TYPES}",
        rf"{DEVICE}|prometheus/",
    ),
    # Who starts the ranks of a group connects them.
    (
        "server/startup/group/",
        rf"server/startup/(group/|port_file\.h$)|server/rpc/|server/telemetry/|server/engine/|kernels/collectives/|kernels/shard\.h$|{VERSION}",
        rf"{DEVICE}",
    ),
    (
        "server/startup/replicas/",
        rf"server/startup/((replicas|group)/|flag_checks\.h$)|server/rpc/|server/engine/|kernels/collectives/|{VERSION}",
        rf"{DEVICE}",
    ),
    *layers("server/", ["", "startup/", "startup/replicas/", "startup/group/"], rf"server/rpc/|server/telemetry/|server/engine/|kernels/threads\.h$|{VERSION}", rf"{DEVICE}"),
    ("client/include/", r"lossd/(?!v1/)", rf"{RPC}|{DEVICE}|spdlog/|prometheus/"),
    # The example's local twin computes its head in process, by the kernels' reference.
    ("client/examples/", r"client/examples/|lossd/(?!v1/)|kernels/", r"prometheus/"),
    # What C sees is made of what every program sees.
    ("client/src/c_api/", r"client/src/c_api/|lossd/(?!v1/)", rf"{RPC}|{DEVICE}|prometheus/"),
    *layers(
        "client/src/",
        ["", "session/", "batch/", "gradient/", "weights/", "common/", "regions/", "connection/"],
        r"lossd/|proto/",
        rf"{DEVICE}|prometheus/",
    ),
    ("client/", r"client/|lossd/|proto/", rf"{DEVICE}|prometheus/"),
    # A user's program: it sees what is installed, as <lossd/...>.
    ("tests/integration/package/outside/", r"lossd/(?!v1/)", r"$^"),
    ("tests/", r"(?!bench/)", r"$^"),
    ("bench/", OWN, r"$^"),
]
OUTSIDE = "tests/integration/package/outside/"
# Exceptions, each with its reason.
ALLOWED = {
    # How they connect, and how they clear away what they made, is the same in every program.
    ("client/examples/", "client/tools/connection_options.h"),
    ("client/examples/", "client/tools/own_head.h"),
}


def violations_of(path, lines, exists):
    """Yields messages for one file; `exists` tells whether a path relative to the root is there."""
    rule = next((r for r in RULES if path.startswith(r[0])), None)
    if rule is None:
        yield f"{path}: no rule says what this folder may include (tools/check_includes.py)"
        return
    prefix, may, must_not = rule
    for number, line in enumerate(lines, 1):
        match = INCLUDE.match(line)
        if not match:
            continue
        quote, target = match.groups()
        where = f"{path}:{number}: "
        if re.match(must_not, target):
            yield where + f"{prefix} must not include {target}"
        elif re.match(COLLECTIVES, target) and prefix != COLLECTIVES_FOLDER:
            yield where + f"only {COLLECTIVES_FOLDER} may include {target}"
        elif re.match(OWN, target):
            if not re.match(may, target) and (prefix, target) not in ALLOWED:
                yield where + f"{prefix} must not include {target}"
            elif quote != '"' and prefix != OUTSIDE:
                yield where + f'{target} is the project\'s own: include it with ""'
            elif not re.match(GENERATED, target) and not (
                exists(target) or exists("client/include/" + target)
            ):
                yield where + f"{target} is no path from the root of the repository"
        elif quote == '"' and "/" not in target and exists(os.path.join(os.path.dirname(path), target)):
            yield where + f"{target} must be named by its path from the root of the repository"


def check(root):
    problems = []
    for path in source_files((".h", ".c", ".cc", ".cu", ".cuh"), root):
        with open(os.path.join(root, path), encoding="utf-8") as file:
            problems += violations_of(path, file, lambda p: os.path.isfile(os.path.join(root, p)))
    return problems


def imports_of(source, modules):
    """Those of `modules` that a Python module imports, inside functions too, but not for the sake of types alone."""
    tree = ast.parse(source)
    for_types = [node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    skipped = {inner for node in for_types for inner in ast.walk(node)}
    for node in set(ast.walk(tree)) - skipped:
        if isinstance(node, ast.Import):
            yield from modules & {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            submodules = modules & {f"{node.module}.{alias.name}" for alias in node.names}
            yield from submodules or modules & {node.module}


def circles_of(sources):
    """A message if the modules, given as {name: source}, import each other in a circle."""
    graph = {name: set(imports_of(source, set(sources))) for name, source in sources.items()}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return ["a circle of imports: " + " imports ".join(reversed(error.args[1]))]
    return []


def check_python(root, folder="client/python/"):
    sources = {}
    for path in source_files((".py",), root):
        if path.startswith(folder + "lossd/"):
            with open(os.path.join(root, path), encoding="utf-8") as file:
                module = path.removeprefix(folder).removesuffix(".py").removesuffix("/__init__")
                sources[module.replace("/", ".")] = file.read()
    return circles_of(sources)


if __name__ == "__main__":
    root = sys.argv[1] if len(sys.argv) > 1 else ROOT
    found = check(root) + check_python(root)
    print("\n".join(found) if found else "include rules: no violation")
    sys.exit(1 if found else 0)
