#!/usr/bin/python3
"""train_lm against a server that is drained and killed at random moments, and comes back each time: the held-out
perplexity must be that of an undisturbed run, to the last digit.

usage: train_lm_kills.py LOSSD TRAIN_LM [--terms N] [--kills N] [--steps N] [--every N] [--seed N] [--device NAMES]
                         [--vocabulary N] [--hidden N] [--batch N]   with tests/support in PYTHONPATH

The run saves itself every so many steps, with a tagged checkpoint of its head at the server; after a kill it goes back
there. A drain it does not notice. The interruptions are spread over the run by what it has printed.
"""
import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time

from lossd_server import LossdServer, free_port
from programs import Program
from waiting import wait_until

LONGEST_RUN = 3600  # seconds, of one that is started by hand


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lossd")
    parser.add_argument("train_lm")
    parser.add_argument("--terms", type=int, default=20, help="drains, by SIGTERM")
    parser.add_argument("--kills", type=int, default=20, help="by SIGKILL")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=5, help="steps between two checkpoints")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--device", default="cpu", help="of the server; with commas a group")
    parser.add_argument("--vocabulary", type=int, default=300)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--batch", type=int, default=512)
    return parser.parse_args()


def write_text(path):
    """A text of chapters that any machine makes the same."""
    rng = random.Random(7)
    words = ["".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(2, 8))) for _ in range(400)]
    with open(path, "w", encoding="utf-8") as file:
        for chapter in range(1, 41):
            file.write(f"Chapter {chapter}. {rng.choice(words)}\n\n")
            for _ in range(12):
                file.write(" ".join(rng.choice(words[:rng.randint(20, 400)]) for _ in range(40)) + ".\n\n")


class Run(Program):
    def __init__(self, arguments, target, text, folder):
        self._json = os.path.join(folder, "results.json")
        super().__init__(
            arguments.train_lm, "--server", target, "--head", "lm", "--text", text, "--checkpoint-dir", os.path.join(folder, "run"),
            "--checkpoint-every", arguments.every, "--steps", arguments.steps, "--vocabulary", arguments.vocabulary,
            "--hidden", arguments.hidden, "--embedding", "16", "--batch", arguments.batch, "--threads", "1", "--evaluations", "2",
            "--json", self._json, log=os.path.join(folder, "train_lm.log"))

    def result(self):
        status = self.wait(LONGEST_RUN)
        if status != 0:
            sys.exit(f"train_lm ended with status {status}:\n{self.log()}")
        with open(self._json, encoding="utf-8") as file:
            return json.load(file), self.log()


def end(server, number):
    server.signal(number)
    status = server.wait()
    if number == signal.SIGTERM and status != 0:
        sys.exit(f"a drain ended with status {status}")


def saved_steps(folder):
    """How far the run has come that would be gone back to."""
    try:
        with open(os.path.join(folder, "run", "train_lm.run"), "rb") as file:
            return json.loads(file.readline())["steps"]
    except FileNotFoundError:
        return -1


def disturb(arguments, server, run, folder, rng, seconds):
    """Ends the server at random moments, spread over a run of so many seconds: one needs some progress after the one before."""
    ends = [signal.SIGTERM] * arguments.terms + [signal.SIGKILL] * arguments.kills
    rng.shuffle(ends)
    longest_wait = min(0.3, 0.5 * seconds / (len(ends) + 1))
    done = []
    for i, number in enumerate(ends):
        # Often enough early in the run that all of them find it running.
        least = arguments.steps * i // (len(ends) + 1) - arguments.every
        wait_until(lambda: not run.running() or saved_steps(folder) >= least, f"step {least} of the run", LONGEST_RUN, every=0.005)
        time.sleep(rng.random() * longest_wait)
        if not run.running():
            break
        end(server, number)
        time.sleep(rng.random() * 0.1)
        server.start()
        done.append(number)
    return done


def train(arguments, text, rng, seconds):
    """Undisturbed without `rng`; `seconds`: of the undisturbed run."""
    with tempfile.TemporaryDirectory() as folder:
        server = LossdServer(arguments.lossd, f"--listen=127.0.0.1:{free_port()}", f"--devices={arguments.device}", "--restore",
                             f"--checkpoint_dir={folder}/checkpoints", folder=folder)
        with server, Run(arguments, server.target, text, folder) as run:
            done = disturb(arguments, server, run, folder, rng, seconds) if rng else []
            result, log = run.result()
        return result, log, done


def main():
    arguments = parse()
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        text = os.path.join(folder, "text.txt")
        write_text(text)
        undisturbed, _, _ = train(arguments, text, None, 0)
        result, log, done = train(arguments, text, random.Random(seed), undisturbed["seconds"])
    terms, kills = done.count(signal.SIGTERM), done.count(signal.SIGKILL)
    back = log.count("back to where the run was saved")
    print(f"{terms} drains, {kills} kills, went back {back} times; perplexity {result['held_out_perplexity']!r}, "
          f"undisturbed {undisturbed['held_out_perplexity']!r}")
    if (terms, kills) != (arguments.terms, arguments.kills):
        sys.exit("the run was over before the server had been ended as often as asked: give it more --steps")
    if back == 0 and kills > 0:
        sys.exit("no kill was noticed")
    if result["losses"] != undisturbed["losses"]:
        step = next(i for i, pair in enumerate(zip(result["losses"], undisturbed["losses"]), 1) if pair[0] != pair[1])
        sys.exit(f"the two runs differ from step {step} on:\n{log}")
    if result["held_out_perplexity"] != undisturbed["held_out_perplexity"]:
        sys.exit("the two runs differ in what they end with")


if __name__ == "__main__":
    main()
