#!/usr/bin/python3
"""The table of sizes in docs/operations.md, against what the server reserves.

usage: lossctl_capacity_test.py LOSSD LOSSCTL WINDOW_FILLER
"""
import re
import unittest
from pathlib import Path

from lossctl_harness import LossctlTest

OPERATIONS = Path(__file__).resolve().parents[3] / "docs/operations.md"
VOCAB, HIDDEN = 512, 256
GIB = 2**30
SGD = ["--optimizer", "sgd", "--momentum", "0.9"]
ADAMW = ["--optimizer", "adamw"]
# Options that are not in the table: value, what they need beside them, and the bytes that they cost on the CPU.
OTHERS = {
    "--bias": ([], [], 3 * 4 * VOCAB),
    "--logit_scale": (["2"], [], 0),
    "--softcap": (["30"], [], 0),
    "--fixed-segments": ([], [], 0),
    "--held-bytes": (["1MiB"], [], 0),  # a CPU holds nothing
    "--weight-decay": (["0.1"], ADAMW, 0),
    "--dampening": (["0.1"], SGD, 0),
    "--nesterov": ([], SGD, 0),
    "--beta1": (["0.8"], ADAMW, 0),
    "--beta2": (["0.9"], ADAMW, 0),
    "--eps": (["1e-7"], ADAMW, 0),
    "--maximize": ([], ADAMW, 0),
}


def table():
    """(shapes as [V * H], rows as [options, bytes on the CPU, bytes on a GPU, GiB of each shape])."""
    lines = OPERATIONS.read_text(encoding="utf-8").splitlines()
    (start,) = (i for i, line in enumerate(lines) if line.startswith("| head | options of `lossctl head create`"))
    cells = [cell.strip() for cell in lines[start].strip("|").split("|")]
    shapes = [int(v) * int(h) for v, h in (cell.replace(",", "").split(" × ") for cell in cells[4:])]
    rows = []
    for line in lines[start + 2:]:
        if not line.startswith("|"):
            break
        _, options, cpu, gpu, *sizes = (cell.strip() for cell in line.strip("|").split("|"))
        rows.append((options.strip("`").split(), int(cpu), int(gpu), sizes))
    return shapes, rows


class Capacity(LossctlTest):
    def test_every_row_is_what_the_server_reserves(self):
        _, rows = table()
        self.assertGreaterEqual(len(rows), 8)
        for number, (options, cpu, gpu, _) in enumerate(rows):
            with self.subTest(options=options):
                sizes = ["--vocab", str(VOCAB), "--hidden", str(HIDDEN)]
                memory = self.succeed_json("head", "create", f"sized-{number}", *sizes, *options)["memory"]
                self.assertEqual(sum(memory.values()), cpu * VOCAB * HIDDEN)
                # A GPU has the same but for the copy that writes are staged in.
                self.assertEqual(sum(memory.values()) - memory["weight_staging"], gpu * VOCAB * HIDDEN)

    def test_sizes_of_the_shapes_follow(self):
        shapes, rows = table()
        for options, _, gpu, sizes in rows:
            self.assertEqual(sizes, [f"{gpu * elements / GIB:.1f}" for elements in shapes], options)

    def test_every_option_that_costs_memory_is_in_it_or_named_below_it(self):
        named = {option for options, *_ in table()[1] for option in options if option.startswith("--")}
        described = self.succeed("head", "create", "--help").split("\nCommon options:\n")[0]
        offered = set(re.findall(r"(?m)^  (?:-h,)?(--[a-z0-9_-]+)", described)) - {"--help", "--vocab", "--hidden"}
        self.assertEqual(offered, named | set(OTHERS))
        for option, (value, beside, cost) in OTHERS.items():
            with self.subTest(option=option):
                self.assertEqual(self.bytes_of(option, *value, *beside) - self.bytes_of(*beside), cost)
        below = OPERATIONS.read_text(encoding="utf-8").split("| head | options of")[1].split("\n## ")[0]
        for option in (option for option, (_, _, cost) in OTHERS.items() if cost > 0):
            self.assertIn(f"`{option}`", below)

    def bytes_of(self, *options):
        sizes = ["--vocab", str(VOCAB), "--hidden", str(HIDDEN)]
        memory = self.succeed_json("head", "create", "one-of-many", *sizes, *options)["memory"]
        self.succeed("head", "delete", "one-of-many")
        return sum(memory.values())


if __name__ == "__main__":
    unittest.main(verbosity=2)
