"""Runs lossd-perf against a lossd on the CPU and reads what it prints: lossd_perf_test.py LOSSD LOSSD_PERF.

What it measures is looked at for being there and consistent, never for how fast it is.
"""
import csv
import json
import os
import subprocess
import sys
import tempfile
import unittest
import urllib.request

from lossd_server import LossdServer
from programs import run

LOSSD, LOSSD_PERF = sys.argv[1:3]
del sys.argv[1:3]

SMALL = ["--tokens=60", "--vocab=500", "--hidden=32", "--warm_up=1"]
OWN = ["--device=cpu", "--server_flag=--workspace_bytes=16777216", "--server_flag=--memory_limit_bytes=268435456"]
OK, FAILED, USAGE, UNREACHABLE = range(4)


def perf(*arguments, **options):
    return run(LOSSD_PERF, *arguments, stdin=subprocess.DEVNULL, **options)


class LossdPerfTest(unittest.TestCase):
    def succeed(self, *arguments):
        done = perf(*arguments, "--json")
        self.assertEqual(done.returncode, OK, done)
        return json.loads(done.stdout)

    def check_report(self, report, batches):
        self.assertEqual(report["batches"], batches)
        self.assertEqual(report["tokens"], 60 * batches)
        self.assertEqual(report["latency_ms"]["samples"], batches)
        latency = [report["latency_ms"][name] for name in ("p50", "p90", "p99", "max")]
        self.assertEqual(latency, sorted(latency))
        self.assertGreater(latency[0], 0)
        self.assertAlmostEqual(report["tokens_per_second"] * report["seconds"], report["tokens"], delta=0.01)
        self.assertEqual(report["errors"]["total"], 0)
        self.assertEqual(report["errors"]["wrong_results"], 0)

    def test_running_server(self):
        with LossdServer(LOSSD, "--device=cpu", "--workspace_bytes=16777216", "--memory_limit_bytes=268435456") as server:
            metrics = server.metrics_url.split("/")[2]
            report = self.succeed(f"--target={server.target}", f"--metrics={metrics}", *SMALL, "--clients=2", "--batches=8")
            self.check_report(report, 8)
            self.assertEqual(report["target"], server.target)
            stages = report["server_stages_ms"]
            for stage in ("queue", "forward", "weight_gradient"):
                self.assertEqual(stages[stage]["samples"], report["chunks"], stage)
            for stage in ("upload", "queue", "copy", "compute", "download"):
                found = report["stages_ms"][stage]
                self.assertEqual(found["samples"], report["chunks"], stage)
                self.assertGreaterEqual(found["p50"], 0, stage)
                self.assertLessEqual(found["p50"], found["p99"], stage)
            self.assertEqual(report["stages_ms"]["copy"]["max"], 0)  # a CPU copies nothing
            self.assertGreater(report["stages_ms"]["compute"]["p50"], 0)
            self.assertTrue(0 <= report["stages_ms"]["hidden_share"] <= 1, report["stages_ms"])
            self.assertIsNone(report["cpu"]["server"])
            with urllib.request.urlopen(server.metrics_url) as answer:
                text = answer.read().decode()
            self.assertIn("\nlossd_heads 0\n", text)
            self.assertIn("\nlossd_sessions 0\n", text)
            self.assertEqual(server.stop(), 0)

    def test_server_of_its_own(self):
        report = self.succeed(*OWN, *SMALL, "--batches=5", "--dtype=fp32", "--dx_dtype=fp16", "--ignored=0.3")
        self.check_report(report, 5)
        self.assertEqual([report["settings"][name] for name in ("weight_dtype", "hidden_dtype", "dx_dtype")],
                         ["float32", "float32", "float16"])
        self.assertGreaterEqual(report["cpu"]["server"]["seconds"], 0)
        self.assertGreater(report["server_memory"]["peak_bytes"], 0)
        self.assertEqual(report["server_stages_ms"]["forward"]["samples"], report["chunks"])

    def test_reads_of_the_gradient(self):
        report = self.succeed(*OWN, *SMALL, "--batches=3", "--flushes=4")
        flushes = report["flushes"]
        for name, size in (("float32", 4), ("bfloat16", 2)):
            self.assertEqual(flushes[name]["bytes"], 500 * 32 * size)
            self.assertEqual(flushes[name]["ms"]["samples"], 4)
            self.assertGreater(flushes[name]["gb_per_second"], 0)
            self.assertGreater(flushes[name]["norm"], 0)
        self.assertEqual(flushes["float32"]["norm"], flushes["bfloat16"]["norm"])
        self.assertIsNone(self.succeed(*OWN, *SMALL, "--batches=1")["flushes"])
        self.assertEqual(perf("--flushes=1", "--loss_only").returncode, USAGE)

    def test_options_of_the_loss(self):
        plain = self.succeed(*OWN, *SMALL, "--batches=2", "--dtype=fp32")
        report = self.succeed(*OWN, *SMALL, "--batches=2", "--dtype=fp32", "--label_smoothing=0.2", "--lse_square_scale=0.01",
                              "--softcap=2", "--logit_scale=1.5")
        self.check_report(report, 2)
        self.assertEqual([report["settings"][name] for name in ("softcap", "logit_scale")], [2, 1.5])
        self.assertLess(report["check"]["loss_error"], 1e-5)  # against the same options in fp64
        self.assertLess(report["check"]["dx_relative_error"], 1e-5)
        self.assertGreater(report["check"]["mean_loss"], plain["check"]["mean_loss"] + 0.3)  # the z-loss: 0.01 log(500)²

    def test_lanes(self):
        big = ["--vocab=64", "--hidden=1024", "--tokens=4096", "--batches=2"]  # 8 MiB: two of the largest chunks
        for lanes, granted in ((0, 2), (1, 1), (3, 3)):
            report = self.succeed(*OWN, *big, f"--lanes={lanes}")
            self.assertEqual(report["settings"]["lanes"], lanes)
            self.assertEqual(report["session_lanes"], granted)
            self.assertEqual(report["errors"]["wrong_results"], 0)
            self.assertEqual(report["stages_ms"]["compute"]["samples"], report["chunks"])

    def test_lanes_over_tls(self):
        report = self.succeed(*OWN, "--vocab=64", "--hidden=1024", "--tokens=4096", "--batches=2", "--transport=tls", "--lanes=2")
        self.assertEqual((report["batches"], report["errors"]["total"], report["errors"]["wrong_results"]), (2, 0, 0))
        self.assertEqual((report["settings"]["transport"], report["session_lanes"]), ("tls", 2))

    def test_open_loop_over_a_socket_file(self):
        report = self.succeed(*OWN, *SMALL, "--transport=unix", "--rate=200", "--batches=20", "--clients=2", "--loss_only")
        self.check_report(report, 20)
        self.assertTrue(report["target"].startswith("unix:"), report["target"])
        self.assertEqual(report["settings"]["transport"], "uds")
        self.assertEqual(report["settings"]["loop"], "open")
        self.assertEqual(report["never_sent"], 0)

    def test_shared_memory(self):
        report = self.succeed(*OWN, *SMALL, "--transport=shm", "--batches=20", "--clients=2", "--dtype=fp32")
        self.check_report(report, 20)
        self.assertEqual(report["settings"]["transport"], "shm")
        self.assertEqual(report["stages_ms"]["compute"]["samples"], report["chunks"])

    def test_device_memory_that_is_not_there(self):
        done = perf(*OWN, *SMALL, "--transport=cuda_ipc", "--batches=2")
        self.assertEqual(done.returncode, FAILED, done)
        self.assertIn("memory", done.stderr)

    def test_several_devices_beside_one_of_them(self):
        limits = OWN[1:]
        for transport in ("tcp", "shm"):
            compared = self.succeed("--devices=cpu,cpu", *limits, *SMALL, f"--transport={transport}", "--batches=4", "--rounds=2")
            one, over = compared["one_device"], compared["over_devices"]
            self.assertEqual((one["devices"], over["devices"]), ("cpu", "cpu,cpu"))
            for side in (one, over):
                self.assertEqual(len(side["rounds"]), 2)
                for report in side["rounds"]:
                    self.check_report(report, 4)
                    self.assertEqual(report["settings"]["transport"], transport)
            self.assertIn("2 ranks", over["rounds"][0]["device"])
            self.assertNotIn("ranks", one["rounds"][0]["device"])
            self.assertAlmostEqual(compared["speedup"], over["tokens_per_second"] / one["tokens_per_second"])

    def test_processor_time_of_several_devices_is_that_of_all_ranks(self):
        compared = self.succeed("--devices=cpu,cpu", *OWN[1:], "--tokens=2000", "--vocab=8000", "--hidden=64", "--batches=5", "--rounds=1")
        one, over = (compared[side]["rounds"][0]["cpu"]["server"]["seconds"] for side in ("one_device", "over_devices"))
        self.assertGreater(over, one / 2)  # the parent process itself only waits

    def test_comparison_as_text(self):
        done = perf("--devices=cpu,cpu", *OWN[1:], *SMALL, "--batches=3", "--rounds=1")
        self.assertEqual(done.returncode, OK, done)
        self.assertEqual(done.stdout.count("throughput"), 2)
        for word in ("one device", "over devices", "speed-up", "round 1 of 1: cpu,cpu"):
            self.assertIn(word, done.stdout + done.stderr)

    def test_replicas_beside_one_server(self):
        compared = self.succeed("--devices=cpu,cpu", "--replicas=2", *OWN[1:], *SMALL, "--clients=4", "--batches=8", "--rounds=1")
        self.check_report(compared["over_devices"]["rounds"][0], 8)
        for bad in (["--devices=cpu,cpu,cpu", "--replicas=2"], ["--devices=cpu,cpu", "--replicas=2", "--transport=shm"], ["--replicas=2"]):
            self.assertEqual(perf(*bad).returncode, USAGE, bad)

    def test_devices_that_are_no_group_are_told_what_to_name(self):
        one = perf("--devices=cpu")
        self.assertEqual(one.returncode, USAGE, one)
        self.assertIn("--device=cpu", one.stderr)
        for devices, said in (("cpu,gpu", "a list of cpu, cuda:0"), ("cpu,cuda:0", "of one kind"), (",".join(["cpu"] * 9), "at most 8")):
            done = perf(f"--devices={devices}")
            self.assertEqual(done.returncode, UNREACHABLE, done)
            self.assertIn(said, done.stderr)

    def test_transports_of_a_server_of_its_own(self):
        for transport, prefix in (("uds", "unix:"), ("tls", "127.0.0.1:")):
            report = self.succeed(*OWN, *SMALL, f"--transport={transport}", "--batches=4")
            self.check_report(report, 4)
            self.assertEqual(report["settings"]["transport"], transport)
            self.assertTrue(report["target"].startswith(prefix), report["target"])

    def test_tls_without_openssl_says_what_is_missing(self):
        done = perf(*OWN, *SMALL, "--transport=tls", env={**os.environ, "PATH": "/nonexistent"})
        self.assertEqual(done.returncode, UNREACHABLE, done)
        self.assertIn("openssl", done.stderr)

    def test_refused_sessions_are_counted_apart(self):
        done = perf(*OWN, "--server_flag=--max_sessions=1", *SMALL, "--clients=3", "--batches=6",
                    "--timeout=0.5", "--json")
        self.assertEqual(done.returncode, FAILED, done)
        errors = json.loads(done.stdout)["errors"]
        self.assertGreater(errors["resource_exhausted"], 0)
        self.assertEqual(errors["resource_exhausted"], errors["total"])

    def test_text(self):
        done = perf(*OWN, *SMALL, "--batches=3")
        self.assertEqual(done.returncode, OK, done)
        for word in ("throughput", "latency", "upload", "compute", "download", "hidden", "forward", "server CPU", "0 calls failed; 0 wrong results"):
            self.assertIn(word, done.stdout)

    def test_sweep(self):
        with tempfile.TemporaryDirectory() as folder:
            out = os.path.join(folder, "results")
            done = perf("sweep", *OWN, "--vocab=500", "--hidden=32", "--batches=3", "--clients=1,2", "--tokens=20,60", "--lanes=1,2", "--no_plot",
                        f"--out={out}")
            self.assertEqual(done.returncode, OK, done)
            with open(os.path.join(out, "sweep.json"), encoding="utf-8") as file:
                cases = json.load(file)["cases"]
            self.assertEqual([tuple(case["settings"][name] for name in ("clients", "tokens", "lanes")) for case in cases],
                             [(clients, tokens, lanes) for lanes in (1, 2) for tokens in (20, 60) for clients in (1, 2)])
            with open(os.path.join(out, "sweep.csv"), encoding="utf-8", newline="") as file:
                rows = list(csv.DictReader(file))
            self.assertEqual([int(row["batches"]) for row in rows], [3] * 8)
            self.assertEqual([int(row["lanes"]) for row in rows], [1] * 4 + [2] * 4)
            with open(os.path.join(out, "sweep.md"), encoding="utf-8") as file:
                self.assertEqual(sum(line.startswith("|") for line in file), 2 + 8)

    def test_sweep_over_transports(self):
        with tempfile.TemporaryDirectory() as folder:
            done = perf("sweep", *OWN, "--vocab=500", "--hidden=32", "--batches=2", "--clients=1", "--tokens=20",
                        "--transport=tcp,uds,tls,shm", "--lanes=1,2", "--no_plot", f"--out={folder}")
            self.assertEqual(done.returncode, OK, done)
            with open(os.path.join(folder, "sweep.csv"), encoding="utf-8", newline="") as file:
                cases = [(row["transport"], row["lanes"]) for row in csv.DictReader(file)]
            with open(os.path.join(folder, "sweep.json"), encoding="utf-8") as file:
                self.assertIn("--transport=tcp,uds,tls,shm", json.load(file)["command"])
            self.assertEqual(cases, [(transport, lanes) for transport in ("tcp", "uds", "tls", "shm") for lanes in ("1", "2")])

    def test_exit_codes(self):
        for bad in (["--tokens=0"], ["--rate=-1"], ["--target=x", "--device=cpu"], ["--target=x", "--devices=cpu,cpu"], ["--device=cpu", "--devices=cpu,cpu"], ["--rounds=2"], ["--metrics=x"], ["--dtype=int8"], ["nothing"],
                    ["--duration=1", "--batches=1"], ["--transport=carrier_pigeon"], ["--transport=tcp,tls"],
                    ["--tls_ca=x"], ["sweep"]):
            self.assertEqual(perf(*bad).returncode, USAGE, bad)
        unreachable = perf("--target=127.0.0.1:1", "--timeout=0.3")
        self.assertEqual(unreachable.returncode, UNREACHABLE, unreachable)
        no_device = perf("--device=cuda:99")
        self.assertEqual(no_device.returncode, UNREACHABLE, no_device)
        self.assertIn("its log ends", no_device.stderr)
        too_large = perf(*OWN, "--vocab=100000", "--hidden=1024", "--batches=1")
        self.assertEqual(too_large.returncode, FAILED, too_large)
        self.assertIn("RESOURCE_EXHAUSTED", too_large.stderr)
        self.assertIn("Examples", perf("--help").stdout)


if __name__ == "__main__":
    unittest.main(verbosity=2)
