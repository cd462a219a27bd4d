#!/usr/bin/python3
"""Several heads on one server: what each has is told, and adds up; and weights come from the server's own volume.

usage: lossctl_tenants_test.py LOSSD LOSSCTL WINDOW_FILLER
"""
import math
import os
import pty
import random
import re
import shutil
import struct
import subprocess
import tempfile
import unittest
import urllib.request

from lossctl_harness import (EXHAUSTED, INVALID, LOSSCTL, NOT_FOUND, REFUSED, SERVER_FLAGS, USAGE, LossctlTest,
                             read_safetensors, read_to_end, to_bfloat16, write_safetensors)
from programs import run

V, H = 257, 33
TENSOR = "lm_head.weight"
QUOTA = 32 << 20


def small_floats(seed, count=V * H):
    values = random.Random(seed)
    return struct.pack(f"<{count}f", *(values.gauss(0, 0.1) for _ in range(count)))


class LoadOnServer(LossctlTest):
    @classmethod
    def server_flags(cls):
        return [*SERVER_FLAGS, f"--weights_dir={cls.volume}"]

    @classmethod
    def setUpClass(cls):
        cls.volume = tempfile.mkdtemp()
        cls.addClassCleanup(shutil.rmtree, cls.volume)
        super().setUpClass()

    def create(self, name, dtype="float32"):
        self.succeed("head", "create", name, "--vocab", str(V), "--hidden", str(H), "--dtype", dtype)

    def write(self, name, tensors):
        write_safetensors(os.path.join(self.volume, name), tensors)

    def test_the_server_reads_the_file_itself(self):
        data = small_floats(1)
        self.write("in", {"x": ("I64", [1], bytes(8)), TENSOR: ("F32", [V, H], data)})
        self.create("served", "bfloat16")
        loaded = self.succeed_json("head", "load", "served", "in", "--on-server")
        self.assertEqual(loaded, {"head": "served", "file": "in", "tensor": TENSOR, "vocab_size": V, "hidden_size": H,
                                  "dtype": "bfloat16", "weight_version": 1, "on_server": True})
        self.succeed("head", "save", "served", "out")
        self.assertEqual(read_safetensors(self.path("out"))[0], {TENSOR: ("BF16", [V, H], to_bfloat16(data))})
        self.assertIn("weight version 2", self.succeed("head", "load", "served", "in", "--on-server"))

    def test_a_tied_embedding_is_found_by_its_shape(self):
        self.write("tied", {"model.embed_tokens.weight": ("F32", [V, H], small_floats(2))})
        self.create("tied")
        loaded = self.succeed_json("head", "load", "tied", "tied", "--on-server")
        self.assertEqual(loaded["tensor"], "model.embed_tokens.weight")

    def test_a_terminal_sees_how_far_the_server_is(self):
        self.write("in", {TENSOR: ("F32", [V, H], small_floats(1))})
        self.create("watched")
        master, slave = pty.openpty()
        run(LOSSCTL, "head", "load", "watched", "in", "--on-server", capture_output=False, stdout=subprocess.DEVNULL, stderr=slave,
            check=True, env=self.environment(TERM="xterm"))
        os.close(slave)
        self.assertIn(b"100 %", read_to_end(master))

    def test_what_cannot_be_loaded_is_said_and_changes_nothing(self):
        self.write("turned", {TENSOR: ("F32", [H, V], small_floats(1))})
        self.write("in", {TENSOR: ("F32", [V, H], small_floats(1))})
        self.create("safe")
        self.succeed("head", "load", "safe", "in", "--on-server")
        self.assertIn("absent", self.error_of(NOT_FOUND, "head", "load", "safe", "absent", "--on-server"))
        self.assertIn("[33, 257]", self.error_of(INVALID, "head", "load", "safe", "turned", "--on-server"))
        self.assertIn("relative", self.error_of(INVALID, "head", "load", "safe", "../x", "--on-server"))
        self.assertIn("nobody", self.error_of(NOT_FOUND, "head", "load", "nobody", "in", "--on-server"))
        self.assertIn("--create", self.error_of(USAGE, "head", "load", "x", "in", "--on-server", "--create"))
        self.assertEqual(self.head("safe")["weight_version"], 1)

    def test_a_load_that_failed_is_in_nobodys_way(self):
        self.write("in", {TENSOR: ("F32", [V, H], small_floats(1))})
        write_safetensors(self.path("nan"), {TENSOR: ("F32", [V, H], bytes(V * H * 4 - 4) + struct.pack("<f", math.nan))})
        self.create("tried")
        for version, options in ((1, ["in", "--on-server"]), (2, [os.path.join(self.volume, "in")])):
            with self.subTest(options=options):
                self.error_of(INVALID, "head", "load", "tried", "nan")
                self.assertEqual(self.succeed_json("head", "load", "tried", *options)["weight_version"], version)

    def test_the_log_says_what_was_loaded(self):
        self.write("logged", {TENSOR: ("F32", [V, H], small_floats(1))})
        self.create("logged")
        self.succeed("head", "load", "logged", "logged", "--on-server")
        self.server.await_log('loaded weights head="logged" path="logged" tensor="lm_head.weight"')


class NoVolume(LossctlTest):
    def test_a_server_without_a_volume_says_which_flag_is_missing(self):
        self.succeed("head", "create", "h", "--vocab", "4", "--hidden", "4")
        self.assertIn("--weights_dir", self.error_of(REFUSED, "head", "load", "h", "in", "--on-server"))


class Tenants(LossctlTest):
    @classmethod
    def server_flags(cls):
        return [*SERVER_FLAGS, f"--head_quota_bytes={QUOTA}"]

    def metrics(self):
        with urllib.request.urlopen(self.server.metrics_url) as response:
            return response.read().decode()

    def test_memory_of_heads_and_what_they_share_is_what_is_reserved(self):
        self.succeed("head", "create", "one", "--vocab", "4096", "--hidden", "64", "--bias")
        self.succeed("head", "create", "two", "--vocab", "100", "--hidden", "64")
        memory = self.succeed_json("memory")
        self.assertEqual(memory["reserved_bytes"],
                         sum(sum(items.values()) for items in [*memory["heads"].values(), memory["shared"]]))
        self.assertEqual(memory["head_quota_bytes"], QUOTA)
        self.assertGreater(memory["device_total_bytes"], memory["device_free_bytes"])
        self.assertGreater(memory["device_free_bytes"], 0)
        text = self.succeed("memory")
        self.assertIn("32.0 MiB a head", text)
        self.assertRegex(text, r"device +\S+ +[\d.]+ .iB of [\d.]+ .iB")
        # The metrics say the same.
        metrics = self.metrics()
        by_head = {}
        for head, purpose, value in re.findall(
                r'lossd_head_memory_reserved_bytes{head="(\w+)",purpose="(\w+)",place="host"} (\S+)', metrics):
            by_head.setdefault(head, {})[purpose] = int(float(value))
        self.assertEqual(by_head, memory["heads"])
        total = sum(float(value) for value in re.findall(r'\nlossd_memory_reserved_bytes{purpose="\w+",place="\w+"} (\S+)', metrics))
        self.assertEqual(total, memory["reserved_bytes"])
        self.assertIn('lossd_device_memory_bytes{kind="total"}', metrics)
        self.succeed("head", "delete", "one")
        self.assertNotIn('head="one"', self.metrics())

    def test_a_head_over_its_quota_is_refused_with_a_table(self):
        error = self.error_of(EXHAUSTED, "head", "create", "large", "--vocab", "131072", "--hidden", "64")
        for word in ("weights", "gradient", "asked for", "quota of a head", str(QUOTA), "--head_quota_bytes"):
            self.assertIn(word, error)
        self.assertNotIn("large", self.succeed_json("memory")["heads"])


if __name__ == "__main__":
    unittest.main()
