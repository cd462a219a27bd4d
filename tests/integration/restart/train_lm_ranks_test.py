#!/usr/bin/python3
"""train_lm on a head that lies on four devices: the losses of one device, to the last bit. Its session is deterministic, and so
has fixed segments.

usage: train_lm_ranks_test.py LOSSD TRAIN_LM [--device NAMES] [--steps N]
"""
import os
import sys
import tempfile

import train_lm_kills as runs


def losses_on(arguments, device, text):
    arguments.device = device
    result, _, _ = runs.train(arguments, text, None, 0)
    return result["losses"]


def main():
    arguments = runs.parse()
    ranks = arguments.device if "," in arguments.device else "cpu,cpu,cpu,cpu"
    with tempfile.TemporaryDirectory() as folder:
        text = os.path.join(folder, "text.txt")
        runs.write_text(text)
        one = losses_on(arguments, "cpu", text)
        many = losses_on(arguments, ranks, text)
    if len(one) != arguments.steps or len(many) != arguments.steps:
        sys.exit(f"{len(one)} and {len(many)} losses of {arguments.steps} steps")
    print(f"{ranks}: losses from {many[0]!r} to {many[-1]!r}; one device: from {one[0]!r} to {one[-1]!r}")
    if one[-1] >= 0.95 * one[0]:
        sys.exit("one device has not learnt anything")
    if many != one:
        sys.exit(f"they differ from step {next(i for i, pair in enumerate(zip(one, many), 1) if pair[0] != pair[1])} on")


if __name__ == "__main__":
    main()
