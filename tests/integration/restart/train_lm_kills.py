#!/usr/bin/python3
"""train_lm against a server that is drained and killed at random moments, and comes back each time: the held-out
perplexity must be that of an undisturbed run, to the last digit.

usage: train_lm_kills.py LOSSD TRAIN_LM [--terms N] [--kills N] [--steps N] [--every N] [--seed N] [--device NAMES]
                         [--vocabulary N] [--hidden N] [--batch N]

The run saves itself every so many steps, with a tagged checkpoint of its head at the server; after a kill it goes back
there. A drain it does not notice. The interruptions are spread over the run by what it has printed.
"""
import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time


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


class Server:
    """On one port for its whole life, however often it ends."""

    def __init__(self, arguments, folder):
        self._arguments, self._folder = arguments, folder
        self._listen, self._process = "127.0.0.1:0", None
        self.start()

    def start(self):
        ports = os.path.join(self._folder, "ports.json")
        if os.path.exists(ports):
            os.remove(ports)
        with open(os.path.join(self._folder, "log"), "a", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                [self._arguments.lossd, f"--listen={self._listen}", "--metrics_listen=", f"--devices={self._arguments.device}",
                 "--restore", f"--checkpoint_dir={self._folder}/checkpoints", f"--port_file={ports}"],
                stdout=log, stderr=subprocess.STDOUT)
        while not os.path.exists(ports):
            if self._process.poll() is not None:
                with open(os.path.join(self._folder, "log"), encoding="utf-8") as log:
                    sys.exit(f"lossd ended with {self._process.returncode}:\n{log.read()}")
            time.sleep(0.01)
        with open(ports, encoding="utf-8") as file:
            self.target = self._listen = f"127.0.0.1:{json.load(file)['grpc']}"

    def end(self, number):
        self._process.send_signal(number)
        status = self._process.wait()
        if number == signal.SIGTERM and status != 0:
            sys.exit(f"a drain ended with status {status}")


class Run:
    def __init__(self, arguments, server, text, folder):
        self._json = os.path.join(folder, "results.json")
        self.log = os.path.join(folder, "train_lm.log")
        with open(self.log, "w", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                [arguments.train_lm, "--server", server.target, "--head", "lm", "--text", text,
                 "--checkpoint-dir", os.path.join(folder, "run"), "--checkpoint-every", str(arguments.every),
                 "--steps", str(arguments.steps), "--vocabulary", str(arguments.vocabulary), "--hidden", str(arguments.hidden),
                 "--embedding", "16", "--batch", str(arguments.batch), "--threads", "1", "--evaluations", "2",
                 "--json", self._json],
                stdout=log, stderr=subprocess.STDOUT)

    def running(self):
        return self._process.poll() is None

    def result(self):
        status = self._process.wait()
        with open(self.log, encoding="utf-8") as log:
            text = log.read()
        if status != 0:
            sys.exit(f"train_lm ended with status {status}:\n{text}")
        with open(self._json, encoding="utf-8") as file:
            return json.load(file), text


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
        while run.running() and saved_steps(folder) < arguments.steps * i // (len(ends) + 1) - arguments.every:
            time.sleep(0.005)
        time.sleep(rng.random() * longest_wait)
        if not run.running():
            break
        server.end(number)
        time.sleep(rng.random() * 0.1)
        server.start()
        done.append(number)
    return done


def train(arguments, text, rng, seconds):
    """Undisturbed without `rng`; `seconds`: of the undisturbed run."""
    with tempfile.TemporaryDirectory() as folder:
        server = Server(arguments, folder)
        try:
            run = Run(arguments, server, text, folder)
            done = disturb(arguments, server, run, folder, rng, seconds) if rng else []
            result, log = run.result()
        finally:
            server.end(signal.SIGKILL)
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
