"""The benchmark's own logic, tested on the CPU with tiny shapes: arithmetic, judging, rows of peers that misbehave, lossd's row.

FAKE_SPECS and FAKE_BUILDERS are peers that misbehave on purpose; the measuring process takes them in if its case asks for fakes.
"""
from __future__ import annotations

import contextlib
import io
import json
import math
import os
import tempfile
import time
import unittest
from typing import Any

import torch
import torch.nn.functional as F

import peer_worker
import peers
from peer_adapters import BUILDERS, Limit, Missing, Step, quack_chunk_rows
from peer_config import FAILED, FAST_PEERS, HUNG, MISSING, OK, OUT_OF_MEMORY, PEERS, WRONG, CaseConfig, PeerSpec, Shape, Tolerance
from peer_problem import (IGNORE_INDEX, LOGIT_DEVIATION, Outputs, Problem, compute_reference, errors_of, make_problem,
                          relative_error, rounding_floor, violations)
from peer_report import table

_SHAPE = Shape(96, 512, 64)
_CPU = torch.device("cpu")


def _without_softmax(problem: Problem) -> Step:
    """Gradients of the labels' term alone: what an implementation gives that forgets the softmax."""
    def run() -> Outputs:
        right = BUILDERS["torch-eager"](problem).run()
        valid = problem.labels != IGNORE_INDEX
        one_hot = F.one_hot(problem.labels.where(valid, 0), problem.shape.vocab) * valid[:, None]
        gradient = -one_hot.to(torch.bfloat16) / problem.valid_tokens
        return Outputs(right.loss, gradient @ problem.weight.detach(), gradient.T @ problem.hidden_states.detach())

    return Step(run)


def _missing(problem: Problem) -> Step:
    raise Missing("no package nowhere")


def _raising(problem: Problem) -> Step:
    raise ValueError("several\nlines of trouble")


def _out_of_memory(problem: Problem) -> Step:
    raise torch.OutOfMemoryError("out of it")


def _late(problem: Problem) -> Step:
    passes = iter(range(3))

    def run() -> Outputs:
        if next(passes, None) is None:
            raise RuntimeError("only when timed")
        return BUILDERS["torch-eager"](problem).run()

    return Step(run)


def _crashing(problem: Problem) -> Step:
    os.abort()


def _hanging(problem: Problem) -> Step:
    time.sleep(600)
    raise AssertionError("nobody waits that long")


def _poisoning(problem: Problem) -> Step:
    def refuse(_: peer_worker.Device) -> None:
        raise RuntimeError("the device is gone")

    peer_worker.Device.synchronize = refuse
    raise RuntimeError("illegal address")


FAKE_BUILDERS = {"fake-wrong": _without_softmax, "fake-missing": _missing, "fake-raising": _raising,
                 "fake-memory": _out_of_memory, "fake-late": _late, "fake-crashing": _crashing, "fake-hanging": _hanging,
                 "fake-poisoning": _poisoning}
FAKE_SPECS = tuple(PeerSpec(name, "none", "misbehaves") for name in FAKE_BUILDERS)


def run(names: tuple[str, ...], timeout_s: float = 60.0, **settings: Any) -> dict[str, Any]:
    with contextlib.redirect_stderr(io.StringIO()):
        return peers.run_case(CaseConfig(_SHAPE, names, "cpu", repetitions=4, fakes=True, **settings), timeout_s)


def rows_of(case: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["peer"]: row for row in case["peers"]}


def _exit_status(*arguments: str) -> int:
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        try:
            return peers.main(list(arguments))
        except SystemExit as exit_:
            return int(exit_.code or 0)


class ArithmeticTest(unittest.TestCase):
    def setUp(self) -> None:
        self.problem = make_problem(_SHAPE, seed=7, ignored_share=0.25, device=_CPU)
        self.reference = compute_reference(self.problem, torch.float64)

    def test_inputs_are_as_described(self) -> None:
        again = make_problem(_SHAPE, seed=7, ignored_share=0.25, device=_CPU)
        self.assertTrue(torch.equal(again.weight, self.problem.weight) and torch.equal(again.labels, self.problem.labels))
        self.assertEqual(int((self.problem.labels != IGNORE_INDEX).sum()), self.problem.valid_tokens)
        self.assertEqual(self.problem.valid_tokens, 72)
        deviation = (self.problem.hidden_states.double() @ self.problem.weight.double().T).std().item()
        self.assertAlmostEqual(deviation, LOGIT_DEVIATION, delta=0.15)
        self.assertEqual(make_problem(Shape(4, 8, 8), 1, 0.99, _CPU).valid_tokens, 1)

    def test_reference_agrees_with_autograd_in_fp64(self) -> None:
        x = self.problem.hidden_states.detach().double().requires_grad_()
        w = self.problem.weight.detach().double().requires_grad_()
        loss = F.cross_entropy(x @ w.T, self.problem.labels, ignore_index=IGNORE_INDEX)
        dx, dw = torch.autograd.grad(loss, (x, w))
        self.assertAlmostEqual(self.reference.loss, loss.item(), places=12)
        self.assertLess(relative_error(dx, self.reference.dx), 1e-7)
        self.assertLess(relative_error(dw, self.reference.dw), 1e-7)

    def test_unlabelled_rows_are_those_without_a_label(self) -> None:
        labels = set(self.problem.labels.tolist())
        self.assertEqual([v for v in range(_SHAPE.vocab) if v not in labels], self.reference.unlabelled.nonzero()[:, 0].tolist())

    def test_errors_show_what_is_wrong_and_nan_never_passes(self) -> None:
        exact = Outputs(torch.tensor(self.reference.loss), self.reference.dx, self.reference.dw)
        self.assertEqual(violations(errors_of(exact._replace(loss=exact.loss.double()), self.reference), Tolerance()), [])
        unwritten = exact.dw.clone()
        unwritten[3, 5] = math.nan
        self.assertTrue(violations(errors_of(exact._replace(dw=unwritten), self.reference), Tolerance()))
        self.assertAlmostEqual(errors_of(exact._replace(dx=exact.dx * 1.5), self.reference)["dx"], 0.5, places=6)
        with self.assertRaises(ValueError):
            errors_of(exact._replace(dx=exact.dx.T), self.reference)
        floor = rounding_floor(self.reference)
        self.assertTrue(1e-3 < floor["dx"] < 2.5e-3 and 1e-3 < floor["dw_unlabelled"] < 2.5e-3, floor)

    def test_limit_runs(self) -> None:
        limit = Limit(self.problem)
        limit.run()
        self.assertIn("bf16", limit.kind)

    def test_quack_chunks_never_have_as_many_rows_as_h(self) -> None:
        self.assertEqual(quack_chunk_rows(16384, 4096), 8192)
        self.assertEqual(quack_chunk_rows(16384, 2048), 4096)
        self.assertEqual(quack_chunk_rows(2048, 4096), 4096)
        self.assertEqual(quack_chunk_rows(2048, 2048), 1024)
        self.assertEqual(quack_chunk_rows(8192, 2304), 4096)

    def test_spread(self) -> None:
        self.assertEqual(peer_worker.spread([2.0]), 0.0)
        self.assertAlmostEqual(peer_worker.spread([1.0, 2.0, 3.0, 4.0, 5.0]), 2.0 / 3.0)


class RunTest(unittest.TestCase):
    def test_a_right_peer_is_timed_and_a_wrong_one_is_found(self) -> None:
        case = run(("torch-eager", "fake-wrong"), ignored_share=0.25)
        right, wrong = rows_of(case)["torch-eager"], rows_of(case)["fake-wrong"]
        self.assertEqual((right["status"], right["dw_dtype"], len(right["all_milliseconds"])), (OK, "bfloat16", 4), right)
        self.assertGreater(right["ratio"], 0.0)
        self.assertLess(right["relative_error"]["dw_unlabelled"], 1e-2)
        self.assertEqual(wrong["status"], WRONG)
        self.assertAlmostEqual(wrong["relative_error"]["dw_unlabelled"], 1.0)
        self.assertEqual(len(case["all_limit_milliseconds"]), 4)
        self.assertIn("torch-eager", table(case))

    def test_peers_that_do_not_run_are_rows(self) -> None:
        rows = rows_of(run(("fake-missing", "fake-raising", "fake-memory", "fake-late", "torch-eager")))
        self.assertEqual({name: row["status"] for name, row in rows.items()},
                         {"fake-missing": MISSING, "fake-raising": FAILED, "fake-memory": OUT_OF_MEMORY, "fake-late": FAILED,
                          "torch-eager": OK})
        self.assertEqual(rows["fake-raising"]["note"], "ValueError: several lines of trouble")
        self.assertIsNone(rows["fake-late"]["milliseconds"])

    def test_whoever_ends_the_process_or_the_device_does_so_alone(self) -> None:
        rows = rows_of(run(("fake-crashing", "fake-poisoning", "torch-eager", "fake-hanging"), timeout_s=15.0))
        self.assertEqual([(name, row["status"]) for name, row in rows.items()],
                         [("fake-crashing", FAILED), ("fake-poisoning", FAILED), ("torch-eager", OK), ("fake-hanging", HUNG)])
        self.assertEqual(rows["fake-poisoning"]["note"], "RuntimeError: illegal address")

    def test_a_device_that_is_not_there_is_said(self) -> None:
        with contextlib.redirect_stderr(io.StringIO()):
            case = peers.run_case(CaseConfig(_SHAPE, ("torch-eager",), "no-such-device"), 60.0)
        self.assertEqual(rows_of(case)["torch-eager"]["status"], FAILED)
        self.assertIn("torch-eager", table(case))
        self.assertEqual(_exit_status("--device", "cuda:99", "--shapes", "4x8x8", "--peers", "torch-eager"), 2)



class CommandTest(unittest.TestCase):
    def test_every_peer_has_a_builder(self) -> None:
        self.assertEqual([spec.name for spec in PEERS], list(BUILDERS))

    def test_arguments(self) -> None:
        options = peers.parse_arguments(["--shapes", "4x5x6,7x8x9", "--peers", "torch-eager,all"])
        self.assertEqual(options.shapes, (Shape(4, 5, 6), Shape(7, 8, 9)))
        self.assertEqual(peers.parse_arguments(["--shapes", "issue"]).shapes, peers.parse_arguments([]).shapes)
        self.assertEqual(len(peers.parse_arguments([]).shapes), 5)
        self.assertEqual(peers.parse_arguments(["--peers", "fast"]).peers, FAST_PEERS)
        self.assertEqual(options.peers[0], "torch-eager")
        self.assertEqual(len(options.peers), len(PEERS))
        for bad in (["--shapes", "4x5"], ["--shapes", "0x1x1"], ["--peers", "nobody"], ["--ignored", "1"], ["--repetitions", "0"],
                    ["--lossd-bench", "/nowhere/lossd-bench"], ["--device", "gpu"], ["--nothing"]):
            self.assertEqual(_exit_status(*bad), 2, bad)
        self.assertEqual(_exit_status("--help"), 0)

    def test_json_and_exit_status(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path, text_path = os.path.join(folder, "peers.json"), os.path.join(folder, "peers.md")
            common = ("--device", "cpu", "--peers", "torch-eager", "--repetitions", "2", "--json", path, "--markdown", text_path)
            self.assertEqual(_exit_status("--shapes", "32x128x32,16x64x32", *common), 0)
            with open(path, encoding="utf-8") as file:
                written = json.load(file)
            with open(text_path, encoding="utf-8") as file:
                self.assertIn("## 16 tokens, vocabulary 64, hidden 32", file.read())
        cases = written["cases"]
        self.assertEqual([(entry["peer"], entry["rank"]) for entry in written["ranking"]], [("torch-eager", 1)])
        self.assertEqual([(case["tokens"], case["vocab"], case["hidden"]) for case in cases], [(32, 128, 32), (16, 64, 32)])
        self.assertIn("torch", cases[0]["environment"]["versions"])
        self.assertGreater(cases[0]["seconds"], 0.0)

    def test_a_case_survives_its_journey_to_the_measuring_process(self) -> None:
        config = CaseConfig(_SHAPE, ("torch-eager",), "cpu", ignored_share=0.5, lossd_bench="x")
        self.assertEqual(CaseConfig.from_json(config.to_json()), config)


def main(lossd_bench: str | None) -> int:
    """Exit status. With the path of a lossd-bench, that one is tested too."""
    import peer_lossd_test  # which imports this module

    peer_lossd_test.LossdTest.real = lossd_bench
    loader = unittest.TestLoader()
    tests = (ArithmeticTest, RunTest, peer_lossd_test.LossdTest, peer_lossd_test.ReportTest, CommandTest)
    suite = unittest.TestSuite(loader.loadTestsFromTestCase(test) for test in tests)
    return 0 if unittest.TextTestRunner(verbosity=2).run(suite).wasSuccessful() else 1
