#!/usr/bin/python3
"""Has spin verify the models beside it exhaustively, and refute them once they are broken.

Every configuration must be searched to its end without an error, every line of a model must be reached by one of them, and
every BUG_ switch must lead to a violation. Needs spin and gcc (tools/setup.sh test).

usage: run_model.py [--smallest | --large] [--only NAME] [--keep FOLDER] [--stamp FILE]

  --smallest  one small configuration of each model, without the broken ones: what a model that has not changed is asked
  --large  larger configurations too: minutes each, up to 8 GiB
  --only   configurations and mutants whose names contain this
  --stamp  where to note what was verified; a model that has not changed since is not searched again
  --keep   leaves generated verifiers and trails there: spin -k FILE.trail -p -g MODEL.pml shows how a violation comes about
"""
import argparse
import concurrent.futures
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
DEPTH = 100000
MOST_AT_ONCE = 4  # each may take 2 GiB

# Lanes, chunks of a lane in a step, steps, faults; then whether kills are among the faults, and the second gradient.
CONFIGURATIONS = {
    "two lanes": "LANES=2 CHUNKS=2 STEPS=2 FAULTS=1 KILL=1 DOUBLE=0",
    "two lanes, double": "LANES=2 CHUNKS=2 STEPS=2 FAULTS=1 KILL=1 DOUBLE=1",
    "two faults": "LANES=2 CHUNKS=1 STEPS=2 FAULTS=2 KILL=1 DOUBLE=0",
    "two faults, double": "LANES=2 CHUNKS=1 STEPS=2 FAULTS=2 KILL=1 DOUBLE=1",
    "one long lane": "LANES=1 CHUNKS=3 STEPS=2 FAULTS=3 KILL=1 DOUBLE=1",
    "two lanes, two faults": "LANES=2 CHUNKS=2 STEPS=2 FAULTS=2 KILL=0 DOUBLE=0",
}
LARGE = {
    "two lanes, two faults, double": "LANES=2 CHUNKS=2 STEPS=2 FAULTS=2 KILL=0 DOUBLE=1",
    "three lanes": "LANES=3 CHUNKS=1 STEPS=2 FAULTS=1 KILL=1 DOUBLE=1",
    "three chunks": "LANES=2 CHUNKS=3 STEPS=2 FAULTS=1 KILL=1 DOUBLE=1",
    "two lanes, two faults, kills": "LANES=2 CHUNKS=2 STEPS=2 FAULTS=2 KILL=1 DOUBLE=0",
}
# Searched for cycles, of which there must be none: every run ends.
CYCLES = {"cycles": "LANES=2 CHUNKS=1 STEPS=2 FAULTS=1 KILL=1 DOUBLE=1"}

WEIGHTS_CONFIGURATIONS = {"weights": "WRITERS=2 WRITES=3 FAULTS=3"}
WEIGHTS_LARGE = {"weights, four writes": "WRITERS=2 WRITES=4 FAULTS=4"}
WEIGHTS_CYCLES = {"weights, cycles": "WRITERS=2 WRITES=2 FAULTS=2"}

RANKS_CONFIGURATIONS = {
    "ranks": "BATCHES=3 WINDOW=2 EPOCHS=2 FAULTS=1 SAVES=1 READS=0",
    "ranks, reads": "BATCHES=1 WINDOW=1 EPOCHS=2 FAULTS=1 SAVES=1 READS=1",
    "ranks, two faults": "BATCHES=1 WINDOW=1 EPOCHS=2 FAULTS=2 SAVES=1 READS=0",
}
RANKS_LARGE = {
    "ranks, reads, two batches": "BATCHES=2 WINDOW=2 EPOCHS=2 FAULTS=1 SAVES=1 READS=1",
    "ranks, all": "BATCHES=3 WINDOW=2 EPOCHS=2 FAULTS=1 SAVES=1 READS=1",
    "ranks, three epochs": "BATCHES=1 WINDOW=1 EPOCHS=3 FAULTS=2 SAVES=1 READS=0",
}
RANKS_CYCLES = {"ranks, cycles": "BATCHES=2 WINDOW=1 EPOCHS=2 FAULTS=1 SAVES=1 READS=0"}

HOSTS_CONFIGURATIONS = {
    "hosts": "BATCHES=2 WINDOW=1 EPOCHS=2 FAULTS=1 SAVES=1",
    "hosts, healing": "BATCHES=1 WINDOW=1 EPOCHS=2 FAULTS=1 SAVES=1 HEALING",
    "hosts, one epoch": "BATCHES=1 WINDOW=1 EPOCHS=1 FAULTS=1 SAVES=0",
}
HOSTS_LARGE = {
    "hosts, all healing": "BATCHES=2 WINDOW=2 EPOCHS=2 FAULTS=1 SAVES=1 HEALING",
    "hosts, two faults": "BATCHES=1 WINDOW=1 EPOCHS=2 FAULTS=2 SAVES=0 HEALING",
    "hosts, three epochs": "BATCHES=1 WINDOW=1 EPOCHS=3 FAULTS=2 SAVES=0",
}
HOSTS_CYCLES = {"hosts, cycles": "BATCHES=1 WINDOW=1 EPOCHS=2 FAULTS=1 SAVES=0"}

REPLICAS_CONFIGURATIONS = {
    "replicas": "REPLICAS=2 HEADS=2 STEPS=1 FLUSHES=2 FAULTS=1 SAVES=1 CALLS=0",
    "replicas, two faults": "REPLICAS=2 HEADS=1 STEPS=1 FLUSHES=0 FAULTS=2 SAVES=1 CALLS=1",
    "replicas, two windows": "REPLICAS=2 HEADS=1 STEPS=2 FLUSHES=1 FAULTS=1 SAVES=1 CALLS=1",
    "replicas, three": "REPLICAS=3 HEADS=1 STEPS=1 FLUSHES=0 FAULTS=2 SAVES=1 CALLS=0",
}
REPLICAS_LARGE = {
    "replicas, three faults": "REPLICAS=2 HEADS=1 STEPS=1 FLUSHES=1 FAULTS=3 SAVES=1 CALLS=1",
    "replicas, two heads, two faults": "REPLICAS=2 HEADS=2 STEPS=1 FLUSHES=2 FAULTS=2 SAVES=1 CALLS=0",
    "replicas, two windows, two faults": "REPLICAS=2 HEADS=1 STEPS=2 FLUSHES=0 FAULTS=2 SAVES=2 CALLS=1",
    "replicas, three, two heads": "REPLICAS=3 HEADS=2 STEPS=1 FLUSHES=2 FAULTS=1 SAVES=0 CALLS=0",
    "replicas, three, a flush": "REPLICAS=3 HEADS=1 STEPS=1 FLUSHES=1 FAULTS=2 SAVES=1 CALLS=1",
}
REPLICAS_CYCLES = {"replicas, cycles": "REPLICAS=2 HEADS=1 STEPS=1 FLUSHES=1 FAULTS=1 SAVES=1 CALLS=1"}

MUTANTS = {
    "REAPPLY": "a repeated chunk is added again",
    "KEEP_MARKS": "the accepted mark of withdrawn chunks does not go back",
    "WITHDRAW_STARTED": "chunks that were started are withdrawn too",
    "NO_FENCE": "messages of a fenced stream are taken",
    "FREEZE_UNCHECKED": "a window is frozen though marks have gone back since",
    "COMMIT_FORGOTTEN": "a repeated commit is not known",
    "COMMIT_TWICE": "a repeated commit clears the gradient again",
    "COMMIT_DROPS": "a commit drops the second gradient",
    "ABORT_DROPS": "an abort drops the second gradient",
    "NEXT_IN_FROZEN": "chunks of the next generation go to the frozen gradient",
    "STEP_FORGOTTEN": "a repeated step is not known",
    "STEP_MOVED": "a repeated step may name more than the step consumed",
    "STEP_NOT_PASSED": "losses that a repeated step named are wanted again of the next one",
    "NO_INCARNATION": "a killed server comes back with its incarnation",
    "DRAIN_FORGETS": "a drain checkpoint does not have the last commit",
    "DRAIN_REUSE": "a drain checkpoint is used a second time",
}
MUTANT_CONFIGURATIONS = (
    "LANES=2 CHUNKS=1 STEPS=2 FAULTS=2 KILL=1 DOUBLE=1",
    "LANES=2 CHUNKS=2 STEPS=2 FAULTS=2 KILL=0 DOUBLE=1",
    "LANES=1 CHUNKS=2 STEPS=2 FAULTS=3 KILL=0 DOUBLE=0",
)
WEIGHTS_MUTANTS = {
    "STAGED_SURVIVES": "a restore leaves a write that is under way",
    "PUBLISHING_SURVIVES": "a restore leaves a write whose commit waits for the device",
    "PUBLISH_WHATEVER_IS_STAGED": "a commit that was undone publishes the next write",
    "UNDONE_FORGOTTEN": "a write that was undone is as unknown as one that never was",
    "COMMIT_FORGOTTEN": "a repeated commit is not known",
    "DRAIN_FORGETS": "a drain checkpoint does not have the last commit",
}
RANKS_MUTANTS = {
    "MARK_BEFORE_RANKS": "a mark moves when the leader alone has added a batch",
    "REPORT_BEFORE_ADDING": "a rank reports a batch before it has added it",
    "OLD_COMMAND": "a command of an old epoch is executed",
    "OLD_REPLY": "a report of an old epoch counts",
    "NEXT_BEFORE_DEAD": "the next epoch begins while a process of the old one stands still",
    "CHECKPOINT_BEHIND": "a checkpoint takes what one rank had before its last batches",
    "SILENCE_UNNOTICED": "the parent notices nothing but death",
}
HOSTS_MUTANTS = {
    "OLD_APPLIED": "the leader counts what a rank of the last epoch has applied",
    "OLD_COMMAND": "a rank executes a command of the last epoch",
    "EPOCH_REUSED": "the next leader has the number of the last one",
    "TWO_LEADERS": "a rank that has lost its leader goes on with the next one",
    "SECOND_HELLO": "the leader takes a rank that comes again into the same epoch",
    "MARK_WITHOUT_LOST": "a mark moves without the rank that was lost",
    "LEADER_DEAF": "the leader does not notice that it hears nothing of a rank",
    "RANK_DEAF": "a rank does not notice that it hears nothing of the leader",
}
REPLICAS_MUTANTS = {
    "GENERATIONS_ALONE": "a head goes on that is empty at a replica which has come back, since its generation is the same",
    "NO_FLUSH": "heads go on of which some replicas hold a flush, or have ended it, and others not",
    "BROKEN_FORGOTTEN": "a head goes on, a step or a restore of which is not over",
    "OTHERS_BROKEN": "a head goes on, a step or a restore of which is not over at the coordinator",
    "STAYS_SEALED": "a window that was sealed when the epoch ended stays so",
    "OLD_COMMAND": "a replica does what it was told in the last epoch",
    "INSTALLED_EARLY": "a restored head is installed before all have gathered its weights",
    "WHOLE_EARLY": "the others are told that all are alike before the coordinator has installed a head",
    "COORDINATOR_FIRST": "the coordinator publishes, and answers, before all others have",
    "REFUSED_STAYS": "a window that one refuses to seal is opened again at the coordinator alone",
    "TWO_ENDINGS": "windows of two heads end at once, in any order at each replica",
    "PART_NOT_SAVED": "a checkpoint has the marks of all replicas, and the sum of one",
    "SAVED_IN_AN_ENDING": "a window is saved while it ends",
    "ANSWERED_BEFORE_DISK": "a save is answered before the checkpoint is there",
    "RESTORED_FORGOTTEN": "a restore that is to be installed is there no more when the epoch has ended",
    "DELETION_NOT_AWAITED": "the coordinator says hello with a head that a call is about to delete",
    "STALE_FATE": "a flush is ended as a caller wanted who was told to ask again, and another one asks now",
}
REPLICAS_MUTANT_CONFIGURATIONS = (
    "REPLICAS=2 HEADS=1 STEPS=1 FLUSHES=1 FAULTS=2 SAVES=0 CALLS=0",
    "REPLICAS=2 HEADS=2 STEPS=1 FLUSHES=0 FAULTS=0 SAVES=0 CALLS=0",
    "REPLICAS=2 HEADS=1 STEPS=1 FLUSHES=0 FAULTS=2 SAVES=1 CALLS=1",
)
HOSTS_MUTANT_CONFIGURATIONS = ("BATCHES=2 WINDOW=2 EPOCHS=2 FAULTS=1 SAVES=0",)
RANKS_MUTANT_CONFIGURATIONS = ("BATCHES=2 WINDOW=2 EPOCHS=2 FAULTS=1 SAVES=1 READS=0",)

# Model, what is searched of it, and what refutes its broken versions.
MODELS = (
    ("exactly_once.pml", CONFIGURATIONS, LARGE, CYCLES, MUTANTS, MUTANT_CONFIGURATIONS),
    ("weights.pml", WEIGHTS_CONFIGURATIONS, WEIGHTS_LARGE, WEIGHTS_CYCLES, WEIGHTS_MUTANTS, WEIGHTS_CONFIGURATIONS.values()),
    ("ranks.pml", RANKS_CONFIGURATIONS, RANKS_LARGE, RANKS_CYCLES, RANKS_MUTANTS, RANKS_MUTANT_CONFIGURATIONS),
    ("hosts.pml", HOSTS_CONFIGURATIONS, HOSTS_LARGE, HOSTS_CYCLES, HOSTS_MUTANTS, HOSTS_MUTANT_CONFIGURATIONS),
    ("replicas.pml", REPLICAS_CONFIGURATIONS, REPLICAS_LARGE, REPLICAS_CYCLES, REPLICAS_MUTANTS, REPLICAS_MUTANT_CONFIGURATIONS),
)
SMALLEST = ("two faults", "weights, cycles", "ranks, reads", "hosts, one epoch", "replicas, three")


class Failure(Exception):
    pass


def run(command, folder):
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def build(folder, model, definitions, options):
    """The verifier of the model with these definitions."""
    for part in os.listdir(HERE):
        if part.endswith(".pml"):
            shutil.copy(os.path.join(HERE, part), folder)
    spin = run(["spin", *[f"-D{definition}" for definition in definitions], "-a", model], folder)
    if spin.returncode or "rror" in spin.stdout:
        raise Failure(f"spin: {spin.stdout}{spin.stderr}")
    gcc = run(["gcc", "-w", "-DVECTORSZ=2048", *options, "-o", "pan", "pan.c"], folder)
    if gcc.returncode:
        raise Failure(f"gcc: {gcc.stderr}")


def number(pattern, text):
    found = re.search(pattern, text)
    return int(float(found.group(1))) if found else None


def search(name, model, definitions, folder, gib, cycles=False):
    """A report of the whole search: states, depth, errors, MiB, seconds and lines that were not reached."""
    began = time.monotonic()
    optimisation = "-O0" if any(definition.startswith("BUG_") for definition in definitions) else "-O2"  # found at once
    build(folder, model, definitions, [optimisation, f"-DMEMLIM={gib * 1024}", "-DNP" if cycles else "-DSAFETY"])
    pan = run(["./pan", f"-m{DEPTH}", "-w22", *(["-l"] if cycles else [])], folder)
    errors = number(r"errors: (\d+)", pan.stdout)
    if errors is None:
        raise Failure(f"{name}: {pan.stdout}{pan.stderr}")
    report = {
        "states": number(r"([0-9.e+]+) states, stored", pan.stdout),
        "depth": number(r"depth reached (\d+)", pan.stdout),
        "errors": errors,
        "mib": number(r"([0-9.]+)\s+total actual memory", pan.stdout),
        "seconds": time.monotonic() - began,
        "unreached": set(re.findall(r"(\w+\.pml:\d+), state", pan.stdout)),
        "what": (re.findall(r"pan:\d+: (.*)", pan.stdout) or [""])[0],
        "complete": not re.search(r"max search depth too small|out of memory|reached -DMEMLIM|Search not completed", pan.stdout),
    }
    return report


def show(name, report):
    print(f"{name:32} {report['states']:>11,} states  depth {report['depth']:>6,}  errors {report['errors']}"
          f"  {report['mib']:>6,} MiB  {report['seconds']:6.1f} s", flush=True)


def identity():
    """A digest of the model, of what is searched for and of what searches."""
    digest = hashlib.sha256(run(["spin", "-V"], HERE).stdout.encode())
    for name in sorted(os.listdir(HERE)):
        if name.endswith((".pml", ".py")):
            with open(os.path.join(HERE, name), "rb") as file:
                digest.update(name.encode() + b"\0" + file.read())
    return digest.hexdigest()


def chosen(arguments, name):
    return (name in SMALLEST if arguments.smallest else True) and (not arguments.only or arguments.only in name)


def at_once(arguments, search_one, names):
    """What the searches give, in order; one of them runs on each processor, unless they take the memory of all."""
    processors = len(os.sched_getaffinity(0))
    with concurrent.futures.ThreadPoolExecutor(1 if arguments.large else min(processors, MOST_AT_ONCE)) as searches:
        yield from searches.map(search_one, names)


def verify(arguments, workspace, model, small, large, cycles):
    """Problems of the search of one model."""
    problems, unreached = [], None

    def one(named):
        name, definitions = named
        folder = tempfile.mkdtemp(dir=workspace)
        return name, folder, search(name, model, definitions.split(), folder, 8 if name in large else 2, cycles=name in cycles)

    configurations = dict(small, **(large if arguments.large else {}), **cycles).items()
    for name, folder, report in at_once(arguments, one, (named for named in configurations if chosen(arguments, named[0]))):
        show(name, report)
        if report["errors"]:
            problems.append(f"{name}: {report['what']} ({folder})")
        elif not report["complete"]:
            problems.append(f"{name}: the search was cut short")
        unreached = report["unreached"] if unreached is None else unreached & report["unreached"]
    if unreached and not (arguments.only or arguments.smallest):
        problems.append(f"lines that no configuration reaches: {sorted(unreached)}")
    return problems


def refute(arguments, workspace, model, mutants, configurations):
    """Problems of the broken versions of one model."""
    problems = []

    def one(mutant):
        for definitions in configurations:
            folder = tempfile.mkdtemp(dir=workspace)
            report = search(mutant, model, [*definitions.split(), f"BUG_{mutant}"], folder, 2)
            if report["errors"]:
                break
        return mutant, mutants[mutant], report

    for mutant, meaning, report in at_once(arguments, one, (mutant for mutant in mutants if chosen(arguments, mutant))):
        if report["errors"]:
            print(f"{mutant:26} refuted: {meaning}: {report['what']}", flush=True)
        else:
            problems.append(f"BUG_{mutant} of {model} is not refuted: {meaning}")
    return problems


def check(arguments, workspace):
    problems = []
    for model, small, large, cycles, mutants, mutant_configurations in MODELS:
        problems += verify(arguments, workspace, model, small, large, cycles)
        if not arguments.smallest:
            problems += refute(arguments, workspace, model, mutants, mutant_configurations)
    return problems


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--smallest", action="store_true")
    size.add_argument("--large", action="store_true")
    parser.add_argument("--only")
    parser.add_argument("--keep")
    parser.add_argument("--stamp")
    arguments = parser.parse_args()
    for tool in ("spin", "gcc"):
        if not shutil.which(tool):
            sys.exit(f"{tool} is not installed: tools/setup.sh test")
    if arguments.stamp and os.path.exists(arguments.stamp):
        with open(arguments.stamp, encoding="utf-8") as file:
            if file.read() == identity():
                print("verified before; nothing has changed since")
                return
    if arguments.keep:
        os.makedirs(arguments.keep, exist_ok=True)
    workspace = arguments.keep or tempfile.mkdtemp(prefix="lossd-model-")
    try:
        problems = check(arguments, workspace)
    except Failure as failure:
        problems = [str(failure)]
    finally:
        if not arguments.keep:
            shutil.rmtree(workspace, ignore_errors=True)
    if arguments.stamp and not (problems or arguments.only or arguments.smallest):
        with open(arguments.stamp, "w", encoding="utf-8") as file:
            file.write(identity())
    refuted = "" if arguments.smallest else ", and every broken model is refuted"
    print("\n".join(problems) if problems else f"no violation{refuted}")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
