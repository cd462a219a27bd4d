"""Tests of lossd as a peer, and of what is made of all cases together. Run by peers.py --self-test."""
from __future__ import annotations

import os
import stat
import sys
import tempfile
import unittest
from typing import Any

from peer_config import FAILED, MISSING, OK, WRONG, Row, Shape
from peer_report import markdown, ranking
from peer_self_test import rows_of, run

# Makes the right outputs from the files it is given; what it then says is each test's own.
_STAND_IN = """
import json, sys
sys.path.insert(0, {peers!r})
import torch
from peer_config import Shape
from peer_problem import IGNORE_INDEX, Problem, compute_reference
assert sys.argv[1] == "passes" and sys.argv[2] == "--device=cpu", sys.argv
n, v, h = (int(argument.split("=")[1]) for argument in sys.argv[3:6])
folder = sys.argv[-1]
def read(name, dtype, *sizes):
    return torch.from_file(folder + "/" + name, shared=False, size=torch.Size(sizes).numel(), dtype=dtype).reshape(sizes)
def write(name, values):
    torch.from_file(folder + "/" + name, shared=True, size=values.numel(), dtype=values.dtype).copy_(values.reshape(-1))
def answer(**values):
    print(json.dumps(values), flush=True)
labels = read("labels.bin", torch.int64, n)
valid = int((labels != IGNORE_INDEX).sum())
x, w = read("hidden_states.bin", torch.bfloat16, n, h), read("weight.bin", torch.bfloat16, v, h)
problem = Problem(Shape(n, v, h), x, w, labels, valid)
reference = compute_reference(problem, torch.float64)
write("losses.bin", torch.full((n,), reference.loss).where(labels != IGNORE_INDEX, 0.0))
write("dx.bin", reference.dx.bfloat16())
write("dw.bin", reference.dw)
"""


class LossdTest(unittest.TestCase):
    """Stand-ins for lossd-bench that speak its protocol; and the real one, if --lossd-bench names it."""

    real: str | None = None

    def _row(self, body: str, **settings: Any) -> dict[str, Any]:
        """lossd's row beside one peer, where lossd-bench is a script: `body` with what it needs before it."""
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "lossd-bench")
            with open(path, "w", encoding="utf-8") as file:
                file.write(f"#!{sys.executable}\n" + _STAND_IN.format(peers=os.path.dirname(os.path.abspath(__file__))) + body)
            os.chmod(path, stat.S_IRWXU)
            return rows_of(run(("torch-eager",), lossd_bench=path, **settings))["lossd"]

    def test_it_gets_the_same_inputs_and_is_judged_and_timed_like_a_peer(self) -> None:
        row = self._row("answer(tile_rows=96, peak_bytes=1000)\nfor line in sys.stdin: answer(milliseconds=[3.0, 5.0][:int(line)])\n",
                        ignored_share=0.25, lossd_workspace_bytes=12345)
        self.assertIn("dW made anew", row["note"])
        self.assertEqual((row["status"], row["milliseconds"], row["all_milliseconds"]), (OK, 4.0, [3.0, 5.0] * 2), row)
        self.assertGreater(row["ratio"], 0.0)
        self.assertLess(row["relative_error"]["dw_unlabelled"], 1e-5)
        self.assertEqual((row["workspace_bytes"], row["peak_bytes"]), (1000, 1000 + 96 * 64 * 2 + 512 * 64 * 4))
        self.assertEqual(row["dw_dtype"], "float32")
        self.assertIn("tiles of 96 rows", row["note"])

    def test_a_wrong_result_is_wrong(self) -> None:
        row = self._row("torch.from_file(folder + '/dw.bin', shared=True, size=512 * 64).mul_(1.5)\n"
                        "answer(tile_rows=1, peak_bytes=-1)\n"
                        "for line in sys.stdin: answer(milliseconds=[1.0, 1.0])\n")
        self.assertEqual((row["status"], row["peak_bytes"]), (WRONG, None), row)
        self.assertAlmostEqual(row["relative_error"]["dw"], 0.5, places=4)

    def test_what_it_says_when_it_fails_is_its_row(self) -> None:
        for body, said in (("answer(error='no such device')\n", "no such device"), ("sys.exit(3)\n", "ended with status 3"),
                           ("answer(tile_rows=1, peak_bytes=0)\nsys.stdin.readline()\nsys.exit(4)\n", "ended with status 4")):
            row = self._row(body)
            self.assertEqual((row["status"], row["milliseconds"]), (FAILED, None), row)
            self.assertIn(said, row["note"])

    def test_it_is_not_waited_for_forever(self) -> None:
        row = self._row("import time; time.sleep(60)\n", lossd_timeout_s=8.0)
        self.assertEqual(row["status"], FAILED)
        self.assertIn("said nothing for 8 s", row["note"])

    def test_the_real_one(self) -> None:
        if self.real is None:
            self.skipTest("--lossd-bench was not given")
        rows = rows_of(run(("torch-eager",), lossd_bench=self.real, ignored_share=0.25))
        self.assertEqual(rows["lossd"]["status"], OK, rows["lossd"])
        self.assertEqual(len(rows["lossd"]["all_milliseconds"]), 4)
        self.assertLess(rows["lossd"]["relative_error"]["dw_unlabelled"], 1e-2)


class ReportTest(unittest.TestCase):
    @staticmethod
    def _case(shape: Shape, **ratios: float | str) -> dict[str, Any]:
        """A case whose limit takes 10 ms; a text instead of a ratio is the status of a peer without one."""
        rows = [Row(name, OK, milliseconds=10 * ratio, ratio=ratio, dw_dtype="float32") if isinstance(ratio, float)
                else Row(name, ratio, "why | not") for name, ratio in ratios.items()]
        return {"tokens": shape.tokens, "vocab": shape.vocab, "hidden": shape.hidden, "dtype": "bf16", "limit_milliseconds": 10.0,
                "limit": "products", "environment": None, "peers": [row.to_dict() for row in rows]}

    def test_ranking_is_by_the_mean_of_all_shapes_and_leaves_out_who_lacks_one(self) -> None:
        cases = [self._case(Shape(4, 8, 8), a=1.0, b=1.2, c=0.5, d=MISSING),
                 self._case(Shape(8, 8, 8), a=1.44, b=1.1, c=WRONG, d=MISSING)]
        found = ranking(cases)
        self.assertEqual([(entry["peer"], entry["rank"]) for entry in found], [("b", 1), ("a", 2), ("c", None), ("d", None)])
        self.assertAlmostEqual(found[1]["geometric_mean_ratio"], 1.2)
        self.assertEqual([entry["first"] for entry in found], [1, 0, 1, 0])

    def test_markdown_has_every_shape_and_peer(self) -> None:
        text = markdown([self._case(Shape(4, 8, 8), a=1.0, b=WRONG), self._case(Shape(8, 8, 8), a=1.5, b=1.25)])
        self.assertIn("| 1 | a | 1.225 | 1.000 | 1.500 |", text)
        self.assertIn("| 1 | b | 12.50 | 1.250 | fp32 |", text)
        self.assertIn("why / not", text)
        for line in text.splitlines():
            if line.startswith("|"):
                self.assertIn(line.count("|"), (6, 10), line)
