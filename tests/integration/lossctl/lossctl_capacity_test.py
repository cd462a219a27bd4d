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

    def test_every_option_that_costs_memory_is_in_it(self):
        named = {option for options, *_ in table()[1] for option in options if option.startswith("--")}
        offered = set(re.findall(r"--[a-z-]+", self.succeed("head", "create", "--help")))
        self.assertLessEqual(named, offered)
        self.assertLessEqual({"--frozen", "--double-buffer", "--optimizer", "--master-weights", "--dtype"}, named)


if __name__ == "__main__":
    unittest.main(verbosity=2)
